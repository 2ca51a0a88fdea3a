"""What `tune_layers` found: a scheme for each layer, the table and the steps that led there, and what it is against."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from hfkvq.bounded import DAMAGE
from hfkvq.caches.bit_table import read_json
from hfkvq.caches.preset import Preset, get_preset
from hfkvq.caches.scheme import Scheme

from .score import Cost, Score

KIND = "hfkvq layer plan"


@dataclass(frozen=True)
class LayerCell:
    """A cell of the sensitivity table: the base with one layer changed.

    Attributes:
        layer: of the decoder.
        candidate: name of what the layer was changed to.
        score: of the whole cache.
    """

    layer: int
    candidate: str
    score: Score


@dataclass(frozen=True)
class LayerStep:
    """A change that was accepted.

    Attributes:
        changes: (layer, candidate) pairs: one, two where one layer pays for another, or those of all layers.
        gain: how much better the value became, measured at this step; negative where bits had to be saved.
        noise: what a gain had to exceed.
        score: after the step.
        reason: "raise", "exchange", "uniform", or "lower" where the base was over the budget.
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
        preset: the whole of it.
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
        base: what it began with.
        layers: layers of the decoder, those included that are not compressed.
        candidates: schemes that layers could get, by name.
        objective: name of the value.
        direction: of the value.
        cost: what the budget limits.
        limit: the budget, or None.
        start: score of the base.
        table: the base with one layer changed, for each layer and candidate.
        steps: what was accepted, in order.
        stopped: why no further step was made.
        compared: the plan, the base and the naive rule.
        evaluations: runs of the objective.
        held_out_evaluations: runs of the held-out objective.
        origin: versions, date and the like.
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
    evaluations: int = 0
    held_out_evaluations: int = 0
    origin: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def score(self) -> Score:
        """Of the choice, on the samples that the search used."""
        return self.steps[-1].score if self.steps else self.start

    @property
    def measured_layers(self) -> list[int]:
        """Layers of the table, from the first to the last."""
        return sorted({cell.layer for cell in self.table})

    def cell(self, layer: int, candidate: str) -> Score | None:
        """Score of the base with one layer changed; None where the layer has that scheme anyway."""
        for found in self.table:
            if (found.layer, found.candidate) == (layer, candidate):
                return found.score
        return None

    def gain(self, score: Score) -> float:
        """How much better than the base a score is."""
        difference = score.value - self.start.value
        return -difference if self.direction == "minimize" else difference

    def candidate_of(self, layer: int) -> str | None:
        """Name of the candidate that a layer got; None if it stayed as it was."""
        chosen = self.preset.by_layer(self.layers)[layer]
        if chosen == self.base.by_layer(self.layers)[layer]:
            return None
        return next(name for name, scheme in self.candidates.items() if scheme == chosen)

    def save(self, path: str | Path) -> None:
        """Writes everything as JSON; ``preset.save`` writes the choice alone, as caches take it."""
        values = {"kind": KIND, **_plain(self)}
        Path(path).write_text(json.dumps(values, indent=2, allow_nan=False) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> LayerPlan:
        """Reads what `save` wrote.

        Raises:
            ValueError: there is no such file, or it holds something else.
        """
        values = read_json(path, KIND, "plan", "LayerPlan.save")
        try:
            read = {name: value for name, value in values.items() if name != "kind"}
            read["preset"] = get_preset(values["preset"], origin=values["origin"])
            read["base"] = get_preset(values["base"])
            read["candidates"] = {name: Scheme.from_dict(each) for name, each in values["candidates"].items()}
            read["start"] = Score.from_dict(values["start"])
            read["table"] = tuple(
                LayerCell(**{**cell, "score": Score.from_dict(cell["score"])}) for cell in values["table"]
            )
            read["steps"] = tuple(
                LayerStep(**{**step, "changes": _pairs(step["changes"]), "score": Score.from_dict(step["score"])})
                for step in values["steps"]
            )
            read["compared"] = tuple(_compared(other) for other in values["compared"])
            return LayerPlan(**read)
        except DAMAGE as error:
            raise ValueError(f"plan: {path} is damaged ({error!r}); make it again with tune_layers.") from None


def _plain(thing: Any) -> Any:
    """As JSON has it."""
    if isinstance(thing, (Preset, Scheme, Score)):
        return thing.to_dict()
    if is_dataclass(thing):
        return {each.name: _plain(getattr(thing, each.name)) for each in fields(thing)}
    if isinstance(thing, Mapping):
        return {key: _plain(value) for key, value in thing.items()}
    return [_plain(each) for each in thing] if isinstance(thing, tuple) else thing


def _pairs(changes: list[list[Any]]) -> tuple[tuple[int, str], ...]:
    return tuple((int(layer), str(name)) for layer, name in changes)


def _compared(other: Mapping[str, Any]) -> Compared:
    held_out = None if other["held_out"] is None else Score.from_dict(other["held_out"])
    return Compared(other["name"], get_preset(other["preset"]), Score.from_dict(other["score"]), held_out)


def override(base: Preset, own: list[Scheme], origin: Mapping[str, Any] | None = None) -> Preset:
    """The preset whose layers have the schemes ``own``; neighbours with the same scheme are named together."""
    pairs: list[tuple[str, Scheme]] = []
    first = 0
    for layer in range(1, len(own) + 1):
        if layer < len(own) and own[layer] == own[first]:
            continue
        if own[first] != base.scheme:
            pairs.append((str(first) if layer - first == 1 else f"{first}-{layer - 1}", own[first]))
        first = layer
    return Preset(base.scheme, tuple(pairs), base.origin if origin is None else origin)


def check_number(score: Score, what: str, cost: Cost) -> None:
    """Raises ValueError if a measurement is no number."""
    if not (math.isfinite(score.value) and math.isfinite(score.cost(cost))):
        raise ValueError(
            f"objective: got {score.value} at {score.cost(cost)} {cost} for {what}, allowed numbers; leave this "
            "candidate out, or fix the objective."
        )
