"""`tune_layers`: a scheme for each layer within a budget of bits.

Not from a paper. A table has the score of the base with one layer changed. Changes are then made by gain per bit.
Layers influence each other, so each change is measured in the state that earlier ones have led to.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hfkvq.caches.schemes.base import Scheme, list_schemes
from hfkvq.caches.schemes.preset import Preset, get_preset
from hfkvq.measure.records import now, versions
from hfkvq.tuning.objectives import Objective, Score

Candidates = Sequence[Preset | Scheme | str] | Mapping[str, Preset | Scheme | str]


@dataclass(frozen=True)
class LayerPlan:
    """A scheme for each layer, chosen by measurement.

    Attributes:
        preset: the choice, for `MixedKVCache`, the command line and lm-eval.
        base: score of the start.
        score: of the choice, on the same samples.
        table: score of the base with one layer changed, by layer and candidate.
    """

    preset: Preset
    base: Score
    score: Score
    table: Mapping[tuple[int, str], Score]


def gain_of(objective: Objective, new: Score, old: Score) -> float:
    """Gain of a score over another, positive if it is better."""
    return new.value - old.value if objective.direction == "maximize" else old.value - new.value


def tune_layers(
    base: Preset | Scheme | str,
    candidates: Candidates,
    objective: Objective,
    layers: int,
    *,
    max_total_bits: float,
    compressed: Sequence[int] | None = None,
    on_score: Callable[[str, Score], Any] | None = None,
) -> LayerPlan:
    """Chooses a scheme for each layer.

    The base is measured, then the base with each layer changed to each candidate. From there the change of greatest
    gain per bit that fits is made and measured, and taken back if it does not gain, until none is left.

    Args:
        base: of every layer; it may have layers of its own.
        candidates: alternatives of a layer: names of presets, schemes, or these by names of your own.
        objective: measures presets, e.g. `hfkvq.tuning.objectives.TextKLD`.
        max_total_bits: most bits per element, every byte counted, at the length that the objective measures.
        compressed: layers that a cache compresses (`evals.capture.compressed_layers`); others, such as sliding
            windows, are skipped. None takes all.
        on_score: told each measurement: which change, and its score.

    Raises:
        ValueError: no candidate, a layer that is not there, a base over the budget, or an objective that returns NaN.
    """
    places = list(range(layers)) if compressed is None else sorted(set(compressed))
    wrong = [layer for layer in places if not 0 <= layer < layers]
    if wrong or not places:
        raise ValueError(f"compressed: got {wrong or 'no layer'}, allowed layers 0 to {layers - 1}.")
    start, named = get_preset(base), _named(candidates)
    own = start.by_layer(layers)
    if all(own[layer] == scheme for layer in places for scheme in named.values()):
        raise ValueError("candidates: got only the base's own scheme; name others, e.g. 'full' or 'kitty-pro'.")

    def measure(own: Sequence[Scheme], what: str) -> Score:
        score = objective(Preset.of_layers(start.scheme, own))
        if not (math.isfinite(score.value) and math.isfinite(score.total_bits)):
            raise ValueError(
                f"objective: got {score.value} at {score.total_bits} total bits for {what}, allowed numbers; leave "
                "this candidate out, or fix the objective."
            )
        if on_score is not None:
            on_score(what, score)
        return score

    def changed(layer: int, name: str) -> list[Scheme]:
        return [named[name] if i == layer else scheme for i, scheme in enumerate(own)]

    first = score = measure(own, "the base")
    if not first.total_bits <= max_total_bits:
        raise ValueError(
            f"max_total_bits: got {max_total_bits:.4g}, but the base has {first.total_bits:.4g}; raise the limit, or "
            "give a base of fewer bits."
        )
    table = {
        (layer, name): measure(changed(layer, name), f"{name} in layer {layer}")
        for layer, name in itertools.product(places, named)
        if named[name] != own[layer]
    }
    # Costs are sums, and an exact budget must not fail by rounding.
    limit, left, got = max_total_bits * (1 + 1e-9), list(table), dict[int, Score]()
    while True:
        worth = {}
        for layer, name in left:
            # A layer that was changed before is judged by its change.
            before, after = got.get(layer, first), table[layer, name]
            gain, cost = gain_of(objective, after, before), after.total_bits - before.total_bits
            if gain > 0 and score.total_bits + cost <= limit:
                worth[layer, name] = (gain / cost if cost > 0 else math.inf, gain)
        if not worth:
            break
        layer, name = best = max(worth, key=lambda change: worth[change])
        left.remove(best)
        tried = measure(changed(layer, name), f"{name} in layer {layer}, with the changes so far")
        if gain_of(objective, tried, score) > 0 and tried.total_bits <= limit:
            own, score, got[layer] = changed(layer, name), tried, table[best]
    origin = {
        "made_by": "tune_layers",
        "base": start.to_dict(),
        "objective": objective.name,
        "limit": max_total_bits,
        "score": asdict(score),
        "date": now(),
        "versions": versions("torch", "transformers"),
    }
    return LayerPlan(Preset.of_layers(start.scheme, own, origin), first, score, table)


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
