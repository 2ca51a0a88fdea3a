"""`tune`: searches a scheme's knobs for the best caches at each cost, and `TuningStudy.pick` chooses one."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import optuna
from numpy.random import SeedSequence
from optuna.distributions import CategoricalDistribution
from optuna.pruners import MedianPruner
from optuna.samplers import TPESampler
from optuna.trial import FrozenTrial, Trial, TrialState

from hfkvq.caches.preset import Preset, get_preset
from hfkvq.caches.scheme import Scheme

from .score import COSTS, Cost, Objective, Score
from .space import Space, describe, published, space_of
from .storage import open_storage
from .workers import work

logger = logging.getLogger(__name__)

SETUP, SCORE, HELD_OUT = "hfkvq:setup", "hfkvq:score", "hfkvq:held_out"
REFERENCE = "hfkvq:reference"

BUDGET = "budget"
"""Knob that stands for a table of bits by tag, where TriAxialKV's tables are searched."""

STARTUP = 10
"""Trials before the sampler learns from them, presets included (of 30)."""


@dataclass(frozen=True)
class Point:
    """A trial that was measured.

    Attributes:
        number: of the trial.
        knobs: what was searched.
        preset: the whole of it.
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
        """StepTensors-out figures where there are any: those the search has not chosen by."""
        return self.held_out or self.score


class TuningStudy:
    """A search that was made, or is being made by others.

    Attributes:
        optuna: Optuna's study, for its plots and dashboards.
        preset: what is not searched.
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
        """Scores, and held-out ones, of what `refer` measured."""
        found = {}
        for key, pair in self.optuna.user_attrs.items():
            if key.startswith(f"{REFERENCE}:"):
                score, other = (None if each is None else Score.from_dict(each) for each in pair)
                assert score is not None
                found[key.removeprefix(f"{REFERENCE}:")] = (score, other)
        return found

    def points(self) -> list[Point]:
        """Every measured trial, oldest first."""
        trials = self.optuna.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        return [self._point(trial) for trial in trials]

    def _point(self, trial: FrozenTrial) -> Point:
        held_out = self.optuna.user_attrs.get(f"{HELD_OUT}:{trial.number}")
        return Point(
            trial.number,
            trial.params,
            self.preset_of(trial.params),
            Score.from_dict(trial.user_attrs[SCORE]),
            None if held_out is None else Score.from_dict(held_out),
        )

    def better(self, one: float, other: float) -> bool:
        """Whether a value is better than another."""
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
        front = [point for point in self.pareto() if _within(point.score, limits or {})]
        # Along a front the value gets better with the cost: the last ones are the best.
        confirmed = []
        for point in front[-most:]:
            if point.held_out is None:
                score = objective(point.preset)
                _check(score, point.knobs)
                self.optuna.set_user_attr(f"{HELD_OUT}:{point.number}", score.to_dict())
                point = replace(point, held_out=score)
            confirmed.append(point)
        return sorted(confirmed, key=lambda p: p.best_known.value, reverse=self.direction == "maximize")

    def pick(
        self,
        *,
        max_total_bits: float | None = None,
        max_milliseconds: float | None = None,
        max_bytes: str | int | None = None,
        context: int | None = None,
        batch: int = 1,
        config: Any = None,
        accept: Callable[[Preset], bool] | None = None,
    ) -> Point:
        """The best point under a limit (the paper's rule for MixKVQ: the best accuracy under a ceiling of bits).

        Points that were confirmed on held-out samples are preferred to those that were not, and compared by these.

        Args:
            max_total_bits: most bits an element, every byte counted.
            max_milliseconds: most of a step, where it was measured.
            max_bytes: most bytes of the whole cache, ``"2GiB"`` or a number, at ``context`` tokens of ``batch`` rows.
            context: see ``max_bytes``.
            batch: see ``max_bytes``.
            config: of the model that the bytes are counted for; the one that was tuned on by default.
            accept: any other condition.

        Raises:
            ValueError: no point is under the limit; the message has the closest.
        """
        limits: dict[Cost, float] = {}
        if max_total_bits is not None:
            limits["total_bits"] = max_total_bits
        if max_milliseconds is not None:
            limits["milliseconds"] = max_milliseconds
        conditions = [] if accept is None else [accept]
        if max_bytes is not None:
            conditions.append(self._fits(max_bytes, context, batch, config))
        points = self.points()
        if not points:
            raise ValueError("pick: no trial has been measured yet; run `hfkvq tune` again on the same storage.")
        feasible = [
            point
            for point in points
            if _within(point.score, limits) and all(condition(point.preset) for condition in conditions)
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
                f"{near} {closest.score.cost(near):.4g} ({_words(closest.knobs)}). Raise the limit, or widen the space."
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


def _within(score: Score, limits: Mapping[Cost, float]) -> bool:
    return all(score.cost(name) <= limit for name, limit in limits.items())


def _words(knobs: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in knobs.items()
    )


def _check(score: Score, knobs: Mapping[str, Any]) -> None:
    if math.isnan(score.value) or math.isnan(score.total_bits):
        raise ValueError(
            f"objective: got {score.value} at {score.total_bits} total bits for {_words(knobs)}, allowed numbers; this "
            "trial is marked as failed, all others are kept."
        )


def tune(
    scheme: Preset | Scheme | str,
    objective: Objective,
    *,
    trials: int = 30,
    seed: int = 0,
    space: Mapping[str, Sequence[Any]] | None = None,
    cost: Cost = "total_bits",
    limits: Mapping[Cost, float] | None = None,
    single: bool = False,
    tables: Mapping[float, Mapping[str, int]] | None = None,
    measured_on: Mapping[str, Any] | None = None,
    storage: str | None = None,
    name: str | None = None,
    warm_start: bool = True,
    on_trial: Callable[[TuningStudy, Point | None], Any] | None = None,
    beat: float = 10.0,
    grace: float = 60.0,
) -> TuningStudy:
    """Searches a scheme's knobs with Optuna's TPE sampler.

    Two objectives by default: the best value, and the least cost. The presets of the scheme come first. Several workers
    may run the same call on one ``storage``: together they finish ``trials`` trials, and take up again what a worker
    that died has left. The call returns at once where the study has so many already, so it also loads one.

    Args:
        scheme: knobs that are not searched, and schemes of single layers, stay as it has them.
        objective: measures a preset.
        trials: finished ones wanted, of all workers and earlier calls together.
        seed: of the sampler, for the worker that creates the study.
        space: ranges by knob, in place of the knobs' own; see `space_of`.
        cost: the second objective.
        limits: most of a cost, by its name; trials beyond are measured and count as infeasible.
        single: the value alone, under ``limits``; unpromising trials are stopped early where the objective reports.
        tables: bits of tags by budget, for TriAxialKV (see `sweep`): the budget is searched beside the knobs.
        measured_on: model, samples and whatever else scores depend on, as JSON has it. A study keeps it, and refuses to
            go on with other: its trials could not be compared.
        storage: an SQLAlchemy URL (``sqlite:///tuning.db``), or the path of a journal file (``tuning.log``) on a file
            system that the workers share. None keeps the study in memory.
        name: of the study in the storage; the scheme's by default.
        warm_start: begin with what presets say.
        on_trial: told the study when it begins, with None, and after each trial of this worker.
        beat: seconds between a worker's signs of life.
        grace: seconds without one after which its trial is taken up by others.

    Raises:
        ValueError: nothing to search, a study of another scheme, space, objective or model under this name, storage
            that cannot be reached, or an objective that returns NaN (finished trials are kept).
    """
    preset = get_preset(scheme)
    distributions = space_of(preset.scheme, space, optional=bool(tables))
    if tables:
        distributions[BUDGET] = CategoricalDistribution(sorted(tables))
    if trials < 1:
        raise ValueError(f"trials: got {trials}, allowed 1 or more.")
    if cost not in COSTS:
        raise ValueError(f"cost: got {cost!r}, allowed {', '.join(COSTS)}.")
    for limit in limits or {}:
        if limit not in COSTS:
            raise ValueError(f"limits: got {limit!r}, allowed {', '.join(COSTS)}.")
    fixed = {key: value for key, value in preset.to_dict().items() if key not in distributions}
    setup = {
        "space": describe(distributions),
        "scheme": fixed,
        "objective": objective.name,
        "direction": objective.direction,
        "cost": cost,
        "single": single,
        "measured_on": dict(measured_on or {}),
        "tables": None if tables is None else {str(budget): dict(table) for budget, table in tables.items()},
    }
    # As JSON has it, which is what comes back from a storage.
    setup = json.loads(json.dumps(setup))
    study, created = _open(storage, name or preset.scheme.name, setup)
    # Workers that search alike would find alike.
    seed_here = seed if created else int(SeedSequence().generate_state(1)[0])
    study.sampler = TPESampler(n_startup_trials=min(STARTUP, max(trials // 3, 1)), seed=seed_here)
    study.pruner = MedianPruner(n_startup_trials=5)
    found = TuningStudy(study, preset, distributions, setup)
    found.config = getattr(getattr(objective, "model", None), "config", None)
    if created and warm_start:
        knobs = {knob: distribution for knob, distribution in distributions.items() if knob != BUDGET}
        for values in published(preset.scheme, knobs)[:trials]:
            study.enqueue_trial(values, skip_if_exists=True)
    if on_trial is not None:
        on_trial(found, None)

    def run(trial: Trial) -> None:
        _run(found, trial, objective, limits or {}, single)
        if on_trial is not None:
            done = study.get_trials(deepcopy=False)[trial.number]
            on_trial(found, found._point(done) if done.state is TrialState.COMPLETE else None)

    work(study, trials, lambda: study.ask(distributions), run, beat=beat, grace=grace)
    return found


def _open(storage: str | None, name: str, setup: Mapping[str, Any]) -> tuple[optuna.Study, bool]:
    """The study, and whether it is new."""
    opened = open_storage(storage)
    directions = [setup["direction"]] if setup["single"] else [setup["direction"], "minimize"]
    try:
        study = optuna.create_study(study_name=name, storage=opened, directions=directions)
        study.set_user_attr(SETUP, dict(setup))
        with warnings.catch_warnings():
            # Experimental since 3.2; its plots and dashboard show the names.
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study.set_metric_names([setup["objective"]] if setup["single"] else [setup["objective"], setup["cost"]])
        return study, True
    except optuna.exceptions.DuplicatedStudyError:
        pass
    assert opened is not None
    study = optuna.load_study(study_name=name, storage=opened)
    known = study.user_attrs.get(SETUP)
    for _ in range(20):
        # Another worker may be about to write it.
        if known is not None or study.get_trials(deepcopy=False):
            break
        time.sleep(0.2)
        known = study.user_attrs.get(SETUP)
    if known is None:
        raise ValueError(
            f"storage: the study {name!r} in {storage} was not made by hfkvq; choose another name with --name."
        )
    for what, now in setup.items():
        if known.get(what) != now:
            raise ValueError(
                f"storage: the study {name!r} in {storage} is one of another {what} (there {known.get(what)!r}, here "
                f"{now!r}); choose another --name or another --storage."
            )
    return study, False


def load_study(storage: str, name: str) -> TuningStudy:
    """A study that was made, without running anything.

    Raises:
        ValueError: the storage cannot be reached, or has no such study of hfkvq's.
    """
    opened = open_storage(storage)
    assert opened is not None
    try:
        study = optuna.load_study(study_name=name, storage=opened)
    except KeyError:
        have = ", ".join(optuna.get_all_study_names(opened))
        raise ValueError(f"storage: {storage} has no study {name!r}; it has {have or 'none'}.") from None
    setup = study.user_attrs.get(SETUP)
    if setup is None:
        raise ValueError(f"storage: the study {name!r} in {storage} was not made by hfkvq.")
    space = {knob: optuna.distributions.json_to_distribution(json.dumps(text)) for knob, text in setup["space"].items()}
    described = dict(setup["scheme"])
    layers = described.pop("layers", None)
    preset = get_preset(Scheme.from_dict(described), layers)
    return TuningStudy(study, preset, space, setup)


def _run(study: TuningStudy, trial: Trial, objective: Objective, limits: Mapping[Cost, float], single: bool) -> None:
    """Measures a trial, and tells the study what came of it."""

    def report(step: int, value: float) -> None:
        if single:
            trial.report(value, step)
            if trial.should_prune():
                raise optuna.TrialPruned

    try:
        try:
            preset = study.preset_of(trial.params)
        except ValueError as error:
            # Each value is legal, together they are not.
            trial.set_user_attr("hfkvq:refused", str(error))
            raise optuna.TrialPruned from None
        score = _recorded(study, trial) or objective(preset, report)
        _check(score, trial.params)
        trial.set_user_attr(SCORE, score.to_dict())
        for name, limit in limits.items():
            trial.set_constraint(name, score.cost(name) - limit)
        values = [score.value] if single else [score.value, score.cost(study.cost)]
        study.optuna.tell(trial, values)
    except optuna.TrialPruned:
        study.optuna.tell(trial, state=TrialState.PRUNED)
    except optuna.exceptions.UpdateFinishedTrialError:
        logger.warning(
            "trial %d was taken for dead and is run by another worker; this result is left out", trial.number
        )
    except BaseException:
        with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):
            study.optuna.tell(trial, state=TrialState.FAIL)
        raise


def _recorded(study: TuningStudy, trial: Trial) -> Score | None:
    """The score of an earlier trial with the same knobs: measuring again would find the same."""
    for other in study.points():
        if other.knobs == trial.params:
            return other.score
    return None
