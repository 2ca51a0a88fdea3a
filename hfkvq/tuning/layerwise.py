"""`tune_layers`: which layers deserve more bits, and which can do with fewer, found greedily by measurement.

Not from a paper. A table says what the objective makes of the base with one layer changed. Steps are then taken by gain
per bit (or byte). Layers influence each other, so gains are measured again in the state that earlier steps have led to,
but only those of the most promising changes ("lazy greedy", which is exact where gains only shrink).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import hfkvq
from hfkvq.caches.preset import Preset, get_preset
from hfkvq.caches.scheme import Scheme, get_scheme, list_schemes
from hfkvq.measure.records import now

from .layer_plan import Compared, LayerCell, LayerPlan, LayerStep, override
from .layer_search import Search, Trial, by_gain, by_ratio, by_saving, run
from .score import Cost, Objective

EDGES = 2
"""Layers at either end that the naive rule keeps whole."""

Candidates = Sequence[Preset | Scheme | str] | Mapping[str, Preset | Scheme | str]


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
    Where a change does not fit, another layer may pay for it with a cheaper candidate. Where one candidate for all
    layers fits and would be better than what the steps have led to, they go on from there. A base over the budget is
    first lowered to it, at the least loss per bit.

    An objective that reports at least four parts (`TextKLD(..., parts=4)`) is compared part by part, on the same
    samples: a gain counts if its 95 % interval is above zero. Otherwise it must exceed half the interval of the better
    score, which is far stricter, since some samples are harder than others.

    Args:
        base: of every layer; it may have layers of its own.
        candidates: what a layer may get instead; names of presets, schemes, or these by names of your own.
        objective: measures presets, e.g. `hfkvq.tuning.objectives.TextKLD`.
        layers: of the decoder.
        max_total_bits: most bits per element, every byte counted, at the length that the objective measures.
        max_bytes: instead, most bytes of the cache, there.
        compressed: layers that a cache compresses (`hfkvq.measure.capture.compressed_layers`); others, such as sliding
            windows, are skipped. None takes all.
        noise: what a gain must exceed, in place of the objective's intervals.
        top: changes that are measured again before one of them is made.
        held_out: the same objective on other samples, to compare the result on.
        compare: measure the naive rule as well: the first and the last layers whole, two of each, and more of them
            until it has at least the bits of the plan.
        on_step: told each cell of the table, then each step.

    Raises:
        ValueError: no candidate, a layer that is not there, a budget that the candidates cannot reach (the message has
            the least possible), two budgets, or an objective that returns NaN.
    """
    start = get_preset(base)
    own = start.by_layer(_positive("layers", layers))
    places = _places(compressed, layers)
    named = _named(candidates)
    if max_total_bits is not None and max_bytes is not None:
        raise ValueError("max_total_bits, max_bytes: got both; choose one.")
    if noise is not None and not noise >= 0:
        raise ValueError(f"noise: got {noise}, allowed 0 or more.")
    cost: Cost = "total_bits" if max_bytes is None else "cache_bytes"
    limit = max_total_bits if max_bytes is None else max_bytes
    options = {layer: [own[layer], *named.values()] for layer in places}
    if all(own[layer] == scheme for layer in places for scheme in named.values()):
        raise ValueError("candidates: got only the base's own scheme; name others, e.g. 'full' or 'kitty-pro'.")
    search = Search(
        start,
        own,
        options,
        ["", *named],
        objective,
        cost,
        math.inf if limit is None else limit,
        noise,
        _positive("top", top),
    )
    first = search.measure().score
    if limit is not None and first.cost(cost) > limit and len({own[layer] for layer in places}) == 1:
        # Told before the table is measured, where that can be known.
        whole = [search.measure(tuple((layer, k + 1) for layer in places)).score.cost(cost) for k in range(len(named))]
        if min(whole) > limit:
            raise _unreachable(cost, limit, first.cost(cost), min(*whole, first.cost(cost)))
    table = []
    for layer in places:
        for k, name in enumerate(named, 1):
            if options[layer][k] == own[layer]:
                continue
            cell = LayerCell(layer, name, search.attempt(((layer, k),)).score)
            table.append(cell)
            if on_step is not None:
                on_step(cell)
    steps: list[LayerStep] = []

    def take(trial: Trial, reason: str) -> None:
        search.accept(trial)
        changes = tuple((layer, search.names[k] or "base") for layer, k in trial.move)
        steps.append(LayerStep(changes, trial.gain, trial.noise, trial.score, reason))
        if on_step is not None:
            on_step(steps[-1])

    while search.room < 0:
        saving = [move for move in search.singles() if search.expected(move)[1] < 0]
        trial = search.best(saving, by_saving, free=True)
        if trial is None or trial.cost >= 0:
            least = search.measure().score.cost(cost)
            raise _unreachable(cost, search.limit, first.cost(cost), least)
        take(trial, "lower")
    while True:
        if trial := search.best(search.singles(), by_ratio) or search.best(search.singles(), by_gain):
            # Noise may hide the cheap changes; what gains most is asked before the search ends.
            take(trial, "raise")
        elif trial := search.best(search.exchanges(), by_gain):
            take(trial, "exchange")
        elif trial := search.uniform():
            take(trial, "uniform")
        else:
            break
    stopped, chosen, score = _stopped(search), search.preset(), search.measure().score
    compared, again = [Compared("plan", chosen, score), Compared("base", start, first)], 0
    if compare:
        compared += _naive(search, places)
    if held_out is not None:
        again = len(compared)
        compared = [
            Compared(each.name, each.preset, each.score, run(held_out, each.preset, each.name, cost).score)
            for each in compared
        ]
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
        Preset(chosen.scheme, chosen.layers, origin),
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
        len(search.known),
        again,
        origin,
    )


def _positive(name: str, value: int) -> int:
    # type(), because True is an int.
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}: got {value!r}, allowed 1 or more.")
    return value


def _places(compressed: Sequence[int] | None, layers: int) -> list[int]:
    """Layers that may be changed."""
    if compressed is None:
        return list(range(layers))
    wrong = [layer for layer in compressed if not 0 <= layer < layers]
    if wrong or not compressed:
        raise ValueError(f"compressed: got {wrong or 'no layer'}, allowed layers 0 to {layers - 1}.")
    return sorted(set(compressed))


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


def _unreachable(cost: Cost, limit: float, base: float, least: float) -> ValueError:
    option = "max_bytes" if cost == "cache_bytes" else "max_total_bits"
    digits = ",.0f" if cost == "cache_bytes" else ".4g"
    return ValueError(
        f"{option}: got {limit:{digits}}, but the base has {base:{digits}} and the least possible with these "
        f"candidates is {least:{digits}}; raise the limit, or give cheaper candidates."
    )


def _stopped(search: Search) -> str:
    """Why nothing more is changed."""
    room = max(0.0, round(search.room, 6))
    if (trial := search.refused) is not None:
        if trial.cost > search.room:
            return f"budget: what would still gain costs {trial.cost:.3g}, and {room:.3g} is left"
        return f"noise: the best change left gains {trial.gain:.3g}, which is within {trial.noise:.3g}"
    left = [search.expected(move) for move in search.singles()]
    if any(gain > 0 and cost > search.room for gain, cost in left):
        return f"budget: nothing that would still gain fits into the {room:.3g} left"
    return "done: no change gains anything"


def _naive(search: Search, places: Sequence[int]) -> list[Compared]:
    """The first and the last layers whole: as many as cost at least what the search has chosen."""
    full, found = get_scheme("full"), []
    plan = search.measure().score.cost(search.cost)
    for count in range(1, (len(places) + 1) // 2 + 1):
        own = list(search.own)
        for layer in {*places[:count], *places[-count:]}:
            own[layer] = full
        preset = override(search.base, own)
        name = f"first and last {count} full"
        if preset not in search.known:
            search.known[preset] = run(search.objective, preset, name, search.cost)
        found.append(Compared(name, preset, search.known[preset].score))
        if count >= EDGES and found[-1].score.cost(search.cost) >= plan:
            break
    return found
