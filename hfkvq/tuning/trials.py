"""`TuningStudy`: trials of a search, their Pareto front, and the choice of a point on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from hfkvq.caches.schemes.preset import Preset, get_preset

from .score import Cost, Objective, Score
from .space import Space

SETUP, SCORE, HELD_OUT = "hfkvq:setup", "hfkvq:score", "hfkvq:held_out"
REFERENCE = "hfkvq:reference"

FITTED = "hfkvq:fitted"
"""Preset that was measured in place of the one of a trial's knobs, completed by the model."""

FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)
"""States of trials that count: measured, or stopped early by the pruner."""

BUDGET = "budget"
"""Knob that stands for a table of bits by tag, where TriAxialKV's tables are searched."""


@dataclass(frozen=True)
class Point:
    """A trial that was measured.

    Attributes:
        number: of the trial.
        knobs: values of the searched knobs.
        preset: whole preset.
        score: on the samples that the search used.
        held_out: on others, if it was confirmed.
    """

    number: int
    knobs: Mapping[str, Any]
    preset: Preset
    score: Score
    held_out: Score | None = None

    @property
    def best_known(self) -> Score:
        """Held-out score, by which the search has not chosen, or else the search's."""
        return self.held_out or self.score


class TuningStudy:
    """A finished search, or one that is still running.

    Attributes:
        optuna: Optuna's study, for its plots and dashboards.
        preset: knobs that are not searched.
        space: Optuna's distributions by knob.
        cost: the second objective, or the constraint's.
        direction: of the first objective.
        objective: its name.
        config: of the model, if the objective has one; `pick` counts bytes by it.
    """

    def __init__(self, study: optuna.Study, preset: Preset, space: Space, setup: Mapping[str, Any]) -> None:
        self.optuna, self.preset, self.space = study, preset, space
        self.cost: Cost = setup["cost"]
        self.direction, self.objective = setup["direction"], setup["objective"]
        self.config: Any = None
        self._tables: Mapping[str, Mapping[str, int]] = setup.get("tables") or {}

    def preset_of(self, knobs: Mapping[str, Any]) -> Preset:
        """The preset that these values of the searched knobs make."""
        values = dict(knobs)
        if self._tables and BUDGET in values:
            values["table"] = self._tables[str(values.pop(BUDGET))]
        return get_preset(self.preset, **values)

    def refer(self, presets: Mapping[str, Preset], objective: Objective, held_out: Objective | None = None) -> None:
        """Measures presets that are not part of the search, to compare it with; results are kept in the study."""
        known = self.references()
        for name, preset in presets.items():
            score, other = known.get(name, (None, None))
            score = score or objective(preset)
            if other is None and held_out is not None:
                other = held_out(preset)
            pair = [score.to_dict(), None if other is None else other.to_dict()]
            self.optuna.set_user_attr(f"{REFERENCE}:{name}", pair)

    def references(self) -> dict[str, tuple[Score, Score | None]]:
        """Scores, and held-out ones, of the presets that `refer` measured."""
        found = {}
        for key, pair in self.optuna.user_attrs.items():
            if key.startswith(f"{REFERENCE}:"):
                score, other = (None if each is None else Score.from_dict(each) for each in pair)
                assert score is not None
                found[key.removeprefix(f"{REFERENCE}:")] = (score, other)
        return found

    def finished(self) -> list[FrozenTrial]:
        """Optuna's trials that were measured or stopped early."""
        return self.optuna.get_trials(deepcopy=False, states=FINISHED)

    def points(self) -> list[Point]:
        """Every measured trial, oldest first."""
        trials = self.optuna.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        return [self.point_of(trial) for trial in trials]

    def point_of(self, trial: FrozenTrial) -> Point:
        """A finished trial of Optuna's as a point."""
        held_out = self.optuna.user_attrs.get(f"{HELD_OUT}:{trial.number}")
        fitted = trial.user_attrs.get(FITTED)
        return Point(
            trial.number,
            trial.params,
            self.preset_of(trial.params) if fitted is None else get_preset(fitted),
            Score.from_dict(trial.user_attrs[SCORE]),
            None if held_out is None else Score.from_dict(held_out),
        )

    def better(self, one: float, other: float) -> bool:
        """True if a value is better than another."""
        return one < other if self.direction == "minimize" else one > other

    def pareto(self) -> list[Point]:
        """Points that no other point beats in both value and cost, cheapest first."""
        front: list[Point] = []
        key = (lambda x: x) if self.direction == "minimize" else (lambda x: -x)
        for point in sorted(self.points(), key=lambda p: (p.score.cost(self.cost), key(p.score.value), p.number)):
            if not front or self.better(point.score.value, front[-1].score.value):
                front.append(point)
        return front

    def confirm(self, objective: Objective, most: int = 5, limits: Mapping[Cost, float] | None = None) -> list[Point]:
        """Measures the best candidates again, on samples that the search has not seen; results are kept in the study.

        Args:
            objective: of the same kind, on other samples.
            most: candidates at most; of a longer front those that are best under the limits.
            limits: most of a cost, by its name.

        Returns:
            The candidates, best held-out value first.
        """
        front = [point for point in self.pareto() if is_within(point.score, limits or {})]
        # Values get better along a front with the cost: the last ones are the best.
        confirmed = []
        for point in front[-most:]:
            if point.held_out is None:
                score = objective(point.preset)
                check_score(score, point.knobs)
                self.optuna.set_user_attr(f"{HELD_OUT}:{point.number}", score.to_dict())
                point = replace(point, held_out=score)
            confirmed.append(point)
        return sorted(confirmed, key=lambda p: p.best_known.value, reverse=self.direction == "maximize")

    def pick(
        self,
        *,
        max_total_bits: float | None = None,
        max_milliseconds: float | None = None,
        max_key_bits: float | None = None,
        max_bytes: str | int | None = None,
        context: int | None = None,
        batch: int = 1,
        config: Any = None,
        accept: Callable[[Preset], bool] | None = None,
    ) -> Point:
        """The best point under a limit (the paper's rule for MixKVQ: the best accuracy under a ceiling of bits).

        Points that were confirmed on held-out samples are preferred to those that were not, and compared by these.

        Args:
            max_total_bits: most bits per element, every byte counted.
            max_milliseconds: most of a step, where it was measured.
            max_key_bits: most of the keys' mean width, MixKVQ's effective bits.
            max_bytes: most bytes of the whole cache, ``"2GiB"`` or a number, at ``context`` tokens of ``batch`` rows.
            context: see ``max_bytes``.
            batch: see ``max_bytes``.
            config: of the model that the bytes are counted for; the one that was tuned on by default.
            accept: any other condition.

        Raises:
            ValueError: no point is under the limit; the message has the closest.
        """
        names: tuple[Cost, ...] = ("total_bits", "milliseconds", "key_bits")
        asked = (max_total_bits, max_milliseconds, max_key_bits)
        limits: dict[Cost, float] = {name: limit for name, limit in zip(names, asked, strict=True) if limit is not None}
        conditions = [] if accept is None else [accept]
        if max_bytes is not None:
            conditions.append(self._fits(max_bytes, context, batch, config))
        points = self.points()
        if not points:
            raise ValueError("pick: no trial has been measured yet; run `hfkvq tune` again on the same storage.")
        feasible = [
            point
            for point in points
            if is_within(point.score, limits) and all(condition(point.preset) for condition in conditions)
        ]
        if not feasible:
            words = [f"{name} <= {limit:g}" for name, limit in limits.items()]
            if max_bytes is not None:
                words.append(f"{max_bytes} at {context} tokens and batch {batch}")
            wanted = ", ".join(words) or "what was asked for"
            near: Cost = next(iter(limits)) if limits else "total_bits"
            closest = min(points, key=lambda p: p.score.cost(near))
            raise ValueError(
                f"pick: none of {len(points)} trials is within {wanted}; the closest is trial {closest.number} with "
                f"{near} {closest.score.cost(near):.4g} ({words_of(closest.knobs)}). Raise the limit, or widen the "
                "space."
            )
        known = [point for point in feasible if point.held_out is not None] or feasible
        sign = 1 if self.direction == "minimize" else -1
        return min(known, key=lambda p: (sign * p.best_known.value, p.score.cost(self.cost), p.number))

    def _fits(self, most: str | int, context: int | None, batch: int, config: Any) -> Callable[[Preset], bool]:
        from .fit import fits

        config = self.config if config is None else config
        if context is None or config is None:
            missing = "context" if context is None else "config"
            raise ValueError(f"{missing}: got None, but max_bytes counts the bytes of a model's cache at a context.")
        return fits(config, most, context, batch)


def is_within(score: Score, limits: Mapping[Cost, float]) -> bool:
    """True if a score exceeds none of the limits."""
    return all(score.cost(name) <= limit for name, limit in limits.items())


def words_of(knobs: Mapping[str, Any]) -> str:
    """Values of knobs to read: ``boost_ratio=0.125, page_size=64``."""
    return ", ".join(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in knobs.items()
    )


def check_score(score: Score, knobs: Mapping[str, Any]) -> None:
    """Raises ValueError if a measurement is no number."""
    if math.isnan(score.value) or math.isnan(score.total_bits):
        raise ValueError(
            f"objective: got {score.value} at {score.total_bits} total bits for {words_of(knobs)}, allowed numbers; "
            "this trial is marked as failed, all others are kept."
        )
