"""The greedy search behind `tune_layers`: what was measured, what a change promises, and which one is best."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hfkvq.caches.preset import Preset
from hfkvq.caches.scheme import Scheme
from hfkvq.measure.divergence.intervals import mean_interval

from .layer_plan import check_number, override
from .score import Cost, Objective, Score

PAIRED = 4
"""Least parts that an objective must report for gains to be judged part by part."""

Move = tuple[tuple[int, int], ...]
"""(layer, option) pairs that are changed together; option 0 is the base's own scheme, option k the k-th candidate."""

Rank = Callable[[float, float], tuple[float, float]]
"""What a change is worth, by its gain and its cost."""


def by_ratio(gain: float, cost: float) -> tuple[float, float]:
    """Gain per cost; what costs nothing goes first."""
    return (gain / cost if cost > 0 else math.inf, gain)


def by_gain(gain: float, cost: float) -> tuple[float, float]:
    """Gain; of equal ones the cheaper."""
    return (gain, -cost)


def by_saving(gain: float, cost: float) -> tuple[float, float]:
    """Least loss per cost saved."""
    return (gain / -cost, -cost)


@dataclass(frozen=True)
class Measurement:
    """A score, and the value of each part of the samples, as far as the objective reported them."""

    score: Score
    parts: tuple[float, ...]


@dataclass(frozen=True)
class Trial:
    """A change that was measured in the state it would change."""

    move: Move
    gain: float
    cost: float
    noise: float
    score: Score


def run(objective: Objective, preset: Preset, what: str, cost: Cost) -> Measurement:
    """Measures a preset; raises ValueError if what comes is no number."""
    means: list[float] = []
    score = objective(preset, lambda step, mean: means.append(mean))
    check_number(score, what, cost)
    # Reports are means of all parts so far; parts are of equal size, or nearly.
    parts = [n * mean - (n - 1) * before for n, mean, before in zip(itertools.count(1), means, [0.0, *means])]
    return Measurement(score, tuple(parts))


class Search:
    """A scheme for each layer, changed step by step.

    Args:
        base: what it begins with.
        own: the base's scheme of each layer.
        options: schemes of each layer that may be changed, its own first.
        names: of the options, in the same order.
        objective: measures presets.
        cost: what is limited.
        limit: most of it.
        noise: what a gain must exceed, or None to ask the objective's own intervals.
        top: changes to be measured again before one is accepted.
    """

    def __init__(
        self,
        base: Preset,
        own: Sequence[Scheme],
        options: Mapping[int, list[Scheme]],
        names: Sequence[str],
        objective: Objective,
        cost: Cost,
        limit: float,
        noise: float | None,
        top: int,
    ) -> None:
        self.base, self.own, self.options, self.names = base, own, options, names
        self.objective, self.noise, self.top = objective, noise, top
        self.cost: Cost = cost
        # Costs are sums; what was asked for exactly is not to fail by rounding.
        self.limit = limit * (1 + 1e-9)
        self.sign = -1 if objective.direction == "minimize" else 1
        self.state = dict.fromkeys(options, 0)
        self.known: dict[Preset, Measurement] = {}
        # The best change that was turned down, since the last that was not.
        self.refused: Trial | None = None
        # What each option brings a layer, as last measured. Costs add up over layers; gains need not.
        self.gains = {layer: [0.0] * len(schemes) for layer, schemes in options.items()}
        self.costs = {layer: [0.0] * len(schemes) for layer, schemes in options.items()}

    def preset(self, move: Move = ()) -> Preset:
        """The present state with a change."""
        own = list(self.own)
        for layer, option in (self.state | dict(move)).items():
            own[layer] = self.options[layer][option]
        return override(self.base, own)

    def measure(self, move: Move = ()) -> Measurement:
        """Measures the present state with a change, once."""
        preset = self.preset(move)
        if preset not in self.known:
            changed = [f"{self.names[k]} in layer {layer}" for layer, k in (self.state | dict(move)).items() if k]
            self.known[preset] = run(self.objective, preset, ", ".join(changed) or "the base", self.cost)
        return self.known[preset]

    @property
    def room(self) -> float:
        """What is left of the budget."""
        return self.limit - self.measure().score.cost(self.cost)

    def expected(self, move: Move) -> tuple[float, float]:
        """Gain and cost of a change, by what was measured last."""
        found = []
        for brings in (self.gains, self.costs):
            found.append(sum(brings[layer][option] - brings[layer][self.state[layer]] for layer, option in move))
        return found[0], found[1]

    def attempt(self, move: Move) -> Trial:
        """Measures a change in the present state."""
        before, after = self.measure(), self.measure(move)
        gain = self.sign * (after.score.value - before.score.value)
        cost = after.score.cost(self.cost) - before.score.cost(self.cost)
        if len(move) == 1:
            layer, option = move[0]
            for brings, brought in ((self.gains, gain), (self.costs, cost)):
                brings[layer][option] = brings[layer][self.state[layer]] + brought
        return Trial(move, gain, cost, self._noise(before, after), after.score)

    def _noise(self, before: Measurement, after: Measurement) -> float:
        """What the gain of a change must exceed."""
        if self.noise is not None:
            return self.noise
        if len(before.parts) == len(after.parts) >= PAIRED:
            # The same samples both times: what makes one harder than another drops out.
            gains = [self.sign * (b - a) for a, b in zip(before.parts, after.parts, strict=True)]
            interval = mean_interval(gains)
            if interval is not None:
                return max(0.0, math.fsum(gains) / len(gains) - interval[0])
        widths = [
            score.high - score.low
            for score in (before.score, after.score)
            if score.low is not None and score.high is not None
        ]
        return min(widths) / 2 if len(widths) == 2 else 0.0

    def accept(self, trial: Trial) -> None:
        """Makes a change the present state."""
        self.state.update(dict(trial.move))
        self.refused = None

    def singles(self) -> list[Move]:
        """Every change of one layer."""
        return [
            ((layer, option),)
            for layer, schemes in self.options.items()
            for option in range(len(schemes))
            if schemes[option] != schemes[self.state[layer]]
        ]

    def exchanges(self) -> list[Move]:
        """Changes of two layers, one of which gives the room that the other takes and did not have."""
        expected = {move: self.expected(move) for move in self.singles()}
        gives = [(move, cost) for move, (_, cost) in expected.items() if cost < 0]
        takes = [(move, cost) for move, (gain, cost) in expected.items() if cost > self.room and gain > 0]
        return [
            give + take
            for (give, saved), (take, spent) in itertools.product(gives, takes)
            if give[0][0] != take[0][0] and saved + spent <= self.room
        ]

    def uniform(self) -> Trial | None:
        """The best candidate for all layers at once, if it gains more than noise.

        Single changes may gain nothing where errors of several layers hide each other.
        """
        moves = [tuple((layer, k) for layer in self.options) for k in range(1, len(self.names))]
        fitting = [move for move in moves if self.expected(move)[1] <= self.room]
        tried = [self.attempt(move) for move in fitting if self.preset(move) != self.preset()]
        sure = [trial for trial in tried if trial.gain > trial.noise and trial.cost <= self.room]
        return max(sure, key=lambda trial: by_gain(trial.gain, trial.cost), default=None)

    def best(self, moves: Sequence[Move], rank: Rank, free: bool = False) -> Trial | None:
        """The best of the changes; those that promise most are measured again, `top` at the most.

        Args:
            moves: changes to choose among.
            rank: by what.
            free: also accept what gains nothing, and what is still over the budget.
        """
        room = self.room
        promised = {move: self.expected(move) for move in moves}
        if not free:
            promised = {move: (gain, cost) for move, (gain, cost) in promised.items() if gain > 0 and cost <= room}
        ranks = {move: rank(*each) for move, each in promised.items()}
        found: Trial | None = None
        for move in sorted(ranks, key=lambda move: ranks[move], reverse=True)[: self.top]:
            if found is not None and rank(found.gain, found.cost) >= ranks[move]:
                # No other promises as much as this one has kept.
                break
            tried = self.attempt(move)
            if not free and (tried.gain <= tried.noise or tried.cost > room):
                if self.refused is None or tried.gain > self.refused.gain:
                    self.refused = tried
            elif found is None or rank(tried.gain, tried.cost) > rank(found.gain, found.cost):
                found = tried
        return found
