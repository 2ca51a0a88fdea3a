"""`tune_layers`: which layers deserve more bits, and which can do with fewer, found greedily by measurement.

Not from a paper. A table has the score of the base with one layer changed. Steps are then taken by gain per bit (or
byte). Layers influence each other, so gains are measured again in the state that earlier steps have led to, but only
those of the most promising changes ("lazy greedy", which is exact where gains only shrink).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import hfkvq
from hfkvq.caches.schemes.base import Scheme, get_scheme, list_schemes
from hfkvq.caches.schemes.preset import Preset, get_preset
from hfkvq.measure.divergence.intervals import mean_interval
from hfkvq.measure.records import now

from .score import Cost, Objective, Score

EDGES = 2
"""Layers at either end that the naive rule keeps whole."""

PAIRED = 4
"""Least parts that an objective must report for gains to be judged part by part."""

Candidates = Sequence[Preset | Scheme | str] | Mapping[str, Preset | Scheme | str]

Move = tuple[tuple[int, int], ...]
"""(layer, option) pairs that are changed together; option 0 is the base's own scheme, option k the k-th candidate."""


@dataclass(frozen=True)
class LayerCell:
    """A cell of the sensitivity table: the base with one layer changed.

    Attributes:
        candidate: name of the layer's scheme in this cell.
    """

    layer: int
    candidate: str
    score: Score


@dataclass(frozen=True)
class LayerStep:
    """A change that was accepted.

    Attributes:
        changes: (layer, candidate) pair.
        gain: how much better the value became, measured at this step; negative where bits had to be saved.
        noise: bound that a gain had to exceed.
        reason: "raise", or "lower" where the base was over the budget.
    """

    changes: tuple[tuple[int, str], ...]
    gain: float
    noise: float
    score: Score
    reason: str


@dataclass(frozen=True)
class Compared:
    """A cache that the plan is held against, and the plan itself.

    Attributes:
        name: "plan", "base", or "first and last N full".
        score: on the samples that the search used.
        held_out: on others, or None.
    """

    name: str
    preset: Preset
    score: Score
    held_out: Score | None = None


@dataclass(frozen=True)
class LayerPlan:
    """A scheme for each layer, chosen by measured sensitivity.

    Attributes:
        preset: the choice, for `MixedKVCache`, the command line and lm-eval.
        base: start of the search.
        layers: layers of the decoder, those included that are not compressed.
        candidates: schemes that layers could get, by name.
        objective: name of the value.
        cost: limited by the budget.
        limit: the budget, or None.
        table: the base with one layer changed, for each layer and candidate.
        steps: accepted changes, in order.
        stopped: reason why no further step was made.
        compared: the plan, the base and the naive rule.
    """

    preset: Preset
    base: Preset
    layers: int
    candidates: Mapping[str, Scheme]
    objective: str
    direction: str
    cost: Cost
    limit: float | None
    start: Score
    table: tuple[LayerCell, ...]
    steps: tuple[LayerStep, ...]
    stopped: str
    compared: tuple[Compared, ...] = ()

    @property
    def score(self) -> Score:
        """Score of the choice, on the samples that the search used."""
        return self.steps[-1].score if self.steps else self.start

    def cell(self, layer: int, candidate: str) -> Score | None:
        """Score of the base with one layer changed; None where the layer has that scheme anyway."""
        return next((x.score for x in self.table if (x.layer, x.candidate) == (layer, candidate)), None)

    def gain(self, score: Score) -> float:
        """Gain of a score over the base's, positive if it is better."""
        difference = score.value - self.start.value
        return -difference if self.direction == "minimize" else difference

    def candidate_of(self, layer: int) -> str | None:
        """Name of the candidate that a layer got; None if it stayed as it was."""
        chosen = self.preset.by_layer(self.layers)[layer]
        if chosen == self.base.by_layer(self.layers)[layer]:
            return None
        return next(name for name, scheme in self.candidates.items() if scheme == chosen)


def override(base: Preset, own: Sequence[Scheme]) -> Preset:
    """The preset whose layers have the schemes ``own``; neighbours with the same scheme are named together."""
    pairs, first = [], 0
    for scheme, group in itertools.groupby(own):
        last = first + len(list(group)) - 1
        if scheme != base.scheme:
            pairs.append((str(first) if first == last else f"{first}-{last}", scheme))
        first = last + 1
    return Preset(base.scheme, tuple(pairs), base.origin)


@dataclass(frozen=True)
class _Trial:
    """A change that was measured in the state it would change."""

    move: Move
    gain: float
    cost: float
    noise: float
    score: Score


Rank = Callable[[float, float], tuple[float, float]]
"""Worth of a change, by its gain and its cost."""

_RANKS: Mapping[str, Rank] = {
    # Changes without cost come first.
    "ratio": lambda gain, cost: (gain / cost if cost > 0 else math.inf, gain),
    "gain": lambda gain, cost: (gain, -cost),
    # Loss per cost saved, the least first.
    "saving": lambda gain, cost: (gain / -cost, -cost),
}


@dataclass
class _Search:
    """A scheme for each layer of ``base``, changed step by step; the arguments are those of `tune_layers`."""

    base: Preset
    own: Sequence[Scheme]
    candidates: Mapping[str, Scheme]
    places: Sequence[int]
    objective: Objective
    cost: Cost
    limit: float
    noise: float | None
    top: int

    def __post_init__(self) -> None:
        self.sign = -1 if self.objective.direction == "minimize" else 1
        self.options = {layer: [self.own[layer], *self.candidates.values()] for layer in self.places}
        self.state = dict.fromkeys(self.places, 0)
        # Scores, and the values of parts of the samples as far as the objective reported them.
        self.known: dict[Preset, tuple[Score, list[float]]] = {}
        # Best change that was refused since the last accepted one.
        self.refused: _Trial | None = None
        # Gain and cost of each option of a layer, as last measured. Costs add up over layers; gains need not.
        self.brings = {layer: [(0.0, 0.0)] * len(schemes) for layer, schemes in self.options.items()}

    def preset(self, move: Move = ()) -> Preset:
        """The present state with a change."""
        own = list(self.own)
        for layer, option in (self.state | dict(move)).items():
            own[layer] = self.options[layer][option]
        return override(self.base, own)

    def run(self, objective: Objective, preset: Preset, what: str) -> tuple[Score, list[float]]:
        """Measures a preset; raises ValueError if a measurement is no number."""
        means = [0.0]
        score = objective(preset, lambda step, mean: means.append(mean))
        if not (math.isfinite(score.value) and math.isfinite(score.cost(self.cost))):
            raise ValueError(
                f"objective: got {score.value} at {score.cost(self.cost)} {self.cost} for {what}, allowed numbers; "
                "leave this candidate out, or fix the objective."
            )
        # Reports are means of all parts so far; parts are of equal size, or nearly.
        return score, [n * means[n] - (n - 1) * means[n - 1] for n in range(1, len(means))]

    def measure(self, move: Move = ()) -> tuple[Score, list[float]]:
        """Score and parts of the present state with a change, measured once."""
        preset = self.preset(move)
        if preset not in self.known:
            names = ["", *self.candidates]
            changed = [f"{names[k]} in layer {layer}" for layer, k in (self.state | dict(move)).items() if k]
            self.known[preset] = self.run(self.objective, preset, ", ".join(changed) or "the base")
        return self.known[preset]

    def spent(self) -> float:
        """Cost of the present state."""
        return self.measure()[0].cost(self.cost)

    @property
    def room(self) -> float:
        """Rest of the budget. Costs are sums, and an exact budget must not fail by rounding."""
        return self.limit * (1 + 1e-9) - self.spent()

    def expected(self, move: Move) -> tuple[float, float]:
        """Gain and cost of a change, by its layers' last measurements."""
        pairs = [(self.brings[layer][option], self.brings[layer][self.state[layer]]) for layer, option in move]
        return sum(new[0] - old[0] for new, old in pairs), sum(new[1] - old[1] for new, old in pairs)

    def attempt(self, move: Move) -> _Trial:
        """Measures a change in the present state."""
        (before, old), (after, new) = self.measure(), self.measure(move)
        gain = self.sign * (after.value - before.value)
        cost = after.cost(self.cost) - before.cost(self.cost)
        if len(move) == 1:
            layer, option = move[0]
            now_gain, now_cost = self.brings[layer][self.state[layer]]
            self.brings[layer][option] = (now_gain + gain, now_cost + cost)
        noise = self.noise
        if noise is None and len(old) == len(new) >= PAIRED:
            # Differences between samples cancel: both measurements are of the same ones.
            gains = [self.sign * (b - a) for a, b in zip(old, new, strict=True)]
            interval = mean_interval(gains)
            noise = None if interval is None else max(0.0, math.fsum(gains) / len(gains) - interval[0])
        if noise is None:
            ends = [(score.low, score.high) for score in (before, after)]
            widths = [high - low for low, high in ends if low is not None and high is not None]
            noise = min(widths) / 2 if len(widths) == 2 else 0.0
        return _Trial(move, gain, cost, noise, after)

    def singles(self) -> list[Move]:
        """Every change of one layer."""
        return [
            ((layer, option),)
            for layer, schemes in self.options.items()
            for option, scheme in enumerate(schemes)
            if scheme != schemes[self.state[layer]]
        ]

    def best(self, moves: Sequence[Move], by: str) -> _Trial | None:
        """The best of the changes; those that promise most are measured again, `top` at the most.

        By "saving", a change may lose, and still be over the budget.
        """
        rank, free = _RANKS[by], by == "saving"
        room, promised = self.room, [(move, *self.expected(move)) for move in moves]
        ranks = {move: rank(gain, cost) for move, gain, cost in promised if free or (gain > 0 and cost <= room)}
        found: _Trial | None = None
        for move in sorted(ranks, key=lambda move: ranks[move], reverse=True)[: self.top]:
            if found is not None and rank(found.gain, found.cost) >= ranks[move]:
                # Other changes promise less than this one has gained.
                break
            tried = self.attempt(move)
            if not free and (tried.gain <= tried.noise or tried.cost > room):
                if self.refused is None or tried.gain > self.refused.gain:
                    self.refused = tried
            elif found is None or rank(tried.gain, tried.cost) > rank(found.gain, found.cost):
                found = tried
        return found

    def next(self) -> _Trial | None:
        """The next change; None if nothing more is changed."""
        singles = self.singles()
        # Noise may hide the gains of cheap changes, so those of greatest gain are tried before the search ends.
        return self.best(singles, "ratio") or self.best(singles, "gain")

    def stopped(self) -> str:
        """Why nothing more is changed."""
        room = max(0.0, round(self.room, 6))
        if (trial := self.refused) is not None:
            if trial.cost > self.room:
                return f"budget: what would still gain costs {trial.cost:.3g}, and {room:.3g} is left"
            return f"noise: the best change left gains {trial.gain:.3g}, which is within {trial.noise:.3g}"
        if any(gain > 0 and cost > self.room for gain, cost in map(self.expected, self.singles())):
            return f"budget: nothing that would still gain fits into the {room:.3g} left"
        return "done: no change gains anything"

    def naive(self) -> list[Compared]:
        """First and last layers in 16 bits: as many as cost at least as much as the search's choice."""
        full, found = get_scheme("full"), []
        for count in range(1, (len(self.places) + 1) // 2 + 1):
            own = list(self.own)
            for layer in {*self.places[:count], *self.places[-count:]}:
                own[layer] = full
            preset, name = override(self.base, own), f"first and last {count} full"
            if preset not in self.known:
                self.known[preset] = self.run(self.objective, preset, name)
            found.append(Compared(name, preset, self.known[preset][0]))
            if count >= EDGES and found[-1].score.cost(self.cost) >= self.spent():
                break
        return found


def tune_layers(
    base: Preset | Scheme | str,
    candidates: Candidates,
    objective: Objective,
    layers: int,
    *,
    max_total_bits: float | None = None,
    max_bytes: float | None = None,
    compressed: Sequence[int] | None = None,
    noise: float | None = None,
    top: int = 4,
    held_out: Objective | None = None,
    compare: bool = True,
    on_step: Callable[[LayerCell | LayerStep], Any] | None = None,
) -> LayerPlan:
    """Chooses a scheme for each layer.

    The base is measured, then the base with each layer changed to each candidate, one at a time. From there the change
    of greatest gain per bit is made, again and again, until nothing more fits into the budget or gains more than noise.
    A base over the budget is first lowered to it, at the least loss per bit.

    An objective that reports at least four parts (`TextKLD(..., parts=4)`) is compared part by part, on the same
    samples: a gain counts if its 95 % interval is above zero. Otherwise it must exceed half the interval of the better
    score, which is far stricter, since some samples are harder than others.

    Args:
        base: of every layer; it may have layers of its own.
        candidates: alternatives of a layer: names of presets, schemes, or these by names of your own.
        objective: measures presets, e.g. `hfkvq.tuning.objectives.TextKLD`.
        max_total_bits: most bits per element, every byte counted, at the length that the objective measures.
        max_bytes: instead, most bytes of the cache, there.
        compressed: layers that a cache compresses (`hfkvq.measure.capture.compressed_layers`); others, such as sliding
            windows, are skipped. None takes all.
        noise: bound that a gain must exceed, in place of the objective's intervals.
        top: changes that are measured again before one of them is made.
        held_out: the same objective on other samples, to compare the result on.
        compare: measure the naive rule as well: the first and the last layers whole, two of each, and more of them
            until it has at least the bits of the plan.
        on_step: told each cell of the table, then each step.

    Raises:
        ValueError: no candidate, a layer that is not there, a budget that the candidates cannot reach (the message has
            the least possible), two budgets, or an objective that returns NaN.
    """
    for name, value in (("layers", layers), ("top", top)):
        # Booleans are ints, but no numbers of layers.
        if type(value) is not int or value < 1:
            raise ValueError(f"{name}: got {value!r}, allowed 1 or more.")
    if max_total_bits is not None and max_bytes is not None:
        raise ValueError("max_total_bits, max_bytes: got both; choose one.")
    if noise is not None and not noise >= 0:
        raise ValueError(f"noise: got {noise}, allowed 0 or more.")
    places = list(range(layers)) if compressed is None else sorted(set(compressed))
    wrong = [layer for layer in places if not 0 <= layer < layers]
    if wrong or not places:
        raise ValueError(f"compressed: got {wrong or 'no layer'}, allowed layers 0 to {layers - 1}.")
    start, named = get_preset(base), _named(candidates)
    own = start.by_layer(layers)
    if all(own[layer] == scheme for layer in places for scheme in named.values()):
        raise ValueError("candidates: got only the base's own scheme; name others, e.g. 'full' or 'kitty-pro'.")
    cost: Cost = "total_bits" if max_bytes is None else "cache_bytes"
    limit = max_total_bits if max_bytes is None else max_bytes
    most = math.inf if limit is None else limit
    search = _Search(start, own, named, places, objective, cost, most, noise, top)
    first = search.measure()[0]

    def unreachable(least: float) -> ValueError:
        option, digits = ("max_bytes", ",.0f") if cost == "cache_bytes" else ("max_total_bits", ".4g")
        return ValueError(
            f"{option}: got {most:{digits}}, but the base has {first.cost(cost):{digits}} and the least possible with "
            f"these candidates is {least:{digits}}; raise the limit, or give cheaper candidates."
        )

    if first.cost(cost) > most and len({own[layer] for layer in places}) == 1:
        # Errors that can be known come before the table is measured.
        whole = [tuple((layer, k) for layer in places) for k in range(1, len(named) + 1)]
        least = min(first.cost(cost), *(search.measure(move)[0].cost(cost) for move in whole))
        if least > most:
            raise unreachable(least)
    tell = on_step or (lambda _: None)
    table, steps = [], []
    for layer, (k, name) in itertools.product(places, enumerate(named, 1)):
        if named[name] != own[layer]:
            table.append(LayerCell(layer, name, search.attempt(((layer, k),)).score))
            tell(table[-1])
    while True:
        if search.room < 0:
            saving = [move for move in search.singles() if search.expected(move)[1] < 0]
            trial, reason = search.best(saving, "saving"), "lower"
            if trial is None or trial.cost >= 0:
                raise unreachable(search.spent())
        else:
            trial, reason = search.next(), "raise"
            if trial is None:
                break
        search.state.update(dict(trial.move))
        search.refused = None
        changes = tuple((layer, ["base", *named][k]) for layer, k in trial.move)
        steps.append(LayerStep(changes, trial.gain, trial.noise, trial.score, reason))
        tell(steps[-1])
    # Reason of the stop, taken before the naive rule is measured.
    stopped, chosen, score = search.stopped(), search.preset(), search.measure()[0]
    compared = [Compared("plan", chosen, score), Compared("base", start, first)]
    if compare:
        compared += search.naive()
    if held_out is not None:
        compared = [replace(x, held_out=search.run(held_out, x.preset, x.name)[0]) for x in compared]
    origin = {
        "made_by": "tune_layers",
        "base": start.to_dict(),
        "objective": objective.name,
        "value": score.value,
        "samples": score.samples,
        "held_out_value": compared[0].held_out.value if compared[0].held_out else None,
        "cost": cost,
        "limit": limit,
        cost: score.cost(cost),
        "date": now(),
        "versions": {"hfkvq": hfkvq.__version__, **{name: version(name) for name in ("torch", "transformers")}},
    }
    return LayerPlan(
        replace(chosen, origin=origin),
        start,
        layers,
        named,
        objective.name,
        objective.direction,
        cost,
        limit,
        first,
        tuple(table),
        tuple(steps),
        stopped,
        tuple(compared),
    )


def _named(candidates: Candidates) -> dict[str, Scheme]:
    """Schemes by name; the same scheme once."""
    if isinstance(candidates, str) or not candidates:
        raise ValueError(f"candidates: got {candidates!r}, allowed one or more presets, e.g. ['full', 'kitty-pro'].")
    given = candidates.items() if isinstance(candidates, Mapping) else [(None, what) for what in candidates]
    known = {scheme: name for name, scheme in reversed(list_schemes().items())}
    found: dict[str, Scheme] = {}
    for name, what in given:
        preset = get_preset(what)
        if preset.layers:
            raise ValueError(f"candidates: {name or what!r} differs by layer, but a candidate is for one layer.")
        scheme = preset.scheme
        if scheme not in found.values():
            found[name or (what if isinstance(what, str) else known.get(scheme, repr(scheme)))] = scheme
    return found
