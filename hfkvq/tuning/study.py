"""`tune` searches a scheme's knobs for the best caches at each cost; `load_study` reads an earlier search."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import optuna
from numpy.random import SeedSequence
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
    distribution_to_json,
)
from optuna.exceptions import ExperimentalWarning, OptunaError
from optuna.samplers import TPESampler
from optuna.storages import BaseStorage, RDBStorage, RetryHeartbeatStaleTrialCallback
from optuna.study import MaxTrialsCallback
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError, IntegrityError, OperationalError, ProgrammingError, SQLAlchemyError

from hfkvq.bounded import DAMAGE
from hfkvq.caches.schemes.base import Scheme, get_scheme, list_schemes, nearest
from hfkvq.caches.schemes.preset import Preset, get_preset

from .objectives import COSTS, Cost, Objective, Score

SETUP, SCORE, HELD_OUT = "hfkvq:setup", "hfkvq:score", "hfkvq:held_out"
REFERENCE = "hfkvq:reference"

FITTED = "hfkvq:fitted"
"""Preset that was measured in place of the one of a trial's knobs, completed by the model."""

FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)
"""States of trials that count: measured, or stopped early by the pruner."""


@dataclass(frozen=True)
class Point:
    """A trial that was measured.

    Attributes:
        knobs: values of the searched knobs.
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
        cost: the second objective, or the constraint's.
    """

    def __init__(self, study: optuna.Study, preset: Preset, space: Space, setup: Mapping[str, Any]) -> None:
        self.optuna, self.preset, self.space = study, preset, space
        self.cost: Cost = setup["cost"]
        self.direction, self.objective = setup["direction"], setup["objective"]

    def refer(self, presets: Mapping[str, Preset], objective: Objective, held_out: Objective | None = None) -> None:
        """Measures presets that are not part of the search, to compare it with; results are kept in the study."""
        known = self.references()
        for name, preset in presets.items():
            score, other = known.get(name, (None, None))
            score = score or objective(preset)
            if other is None and held_out is not None:
                other = held_out(preset)
            pair = [asdict(score), None if other is None else asdict(other)]
            self.optuna.set_user_attr(f"{REFERENCE}:{name}", pair)

    def references(self) -> dict[str, tuple[Score, Score | None]]:
        """Scores, and held-out ones, of the presets that `refer` measured."""
        found = {}
        for key, pair in self.optuna.user_attrs.items():
            if key.startswith(f"{REFERENCE}:"):
                score, other = (None if each is None else Score(**each) for each in pair)
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
            get_preset(self.preset, **trial.params) if fitted is None else get_preset(fitted),
            Score(**trial.user_attrs[SCORE]),
            None if held_out is None else Score(**held_out),
        )

    def pareto(self) -> list[Point]:
        """Points that no other point beats in both value and cost, cheapest first."""
        front: list[Point] = []
        sign = 1 if self.direction == "minimize" else -1
        for point in sorted(self.points(), key=lambda p: (p.score.cost(self.cost), sign * p.score.value, p.number)):
            if not front or sign * point.score.value < sign * front[-1].score.value:
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
                self.optuna.set_user_attr(f"{HELD_OUT}:{point.number}", asdict(score))
                point = replace(point, held_out=score)
            confirmed.append(point)
        return sorted(confirmed, key=lambda p: p.best_known.value, reverse=self.direction == "maximize")

    def pick(self, limits: Mapping[Cost, float] | None = None) -> Point:
        """The best point under limits, see `tune`: by the paper, MixKVQ's best accuracy under a ceiling of bits.

        Points that were confirmed on held-out samples are preferred to those that were not, and compared by these.

        Raises:
            ValueError: no point is under the limits; the message has the closest.
        """
        limits = limits or {}
        points = self.points()
        if not points:
            raise ValueError("pick: no trial has been measured yet; run `hfkvq tune` again on the same storage.")
        feasible = [point for point in points if is_within(point.score, limits)]
        if not feasible:
            wanted = ", ".join(f"{name} <= {limit:g}" for name, limit in limits.items())
            near: Cost = next(iter(limits))
            closest = min(points, key=lambda p: p.score.cost(near))
            raise ValueError(
                f"pick: none of {len(points)} trials is within {wanted}; the closest is trial {closest.number} with "
                f"{near} {closest.score.cost(near):.4g} ({words_of(closest.knobs)}). Raise the limit, or widen the "
                "space."
            )
        known = [point for point in feasible if point.held_out is not None] or feasible
        sign = 1 if self.direction == "minimize" else -1
        return min(known, key=lambda p: (sign * p.best_known.value, p.score.cost(self.cost), p.number))


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


Space = dict[str, BaseDistribution]


def space_of(scheme: Scheme, ranges: Mapping[str, Sequence[Any]] | None = None) -> Space:
    """Search space of a scheme: each knob that names a range to search (``knob(..., search=...)``).

    Args:
        scheme: its other knobs stay as they are.
        ranges: in place of the knobs' own, by knob: ``(low, high)`` of numbers, or a list of choices. If given, these
            knobs alone are searched.

    Returns:
        Distributions by knob, in the order of the scheme's fields.

    Raises:
        ValueError: an unknown knob, an empty or reversed range, values that the knob does not allow, or a scheme none
            of whose knobs is searched.
    """
    fields = {field.name: field for field in dataclasses.fields(scheme)}
    for name in ranges or {}:
        if name not in fields:
            raise ValueError(f"space: {scheme.name} has no knob {name!r}; {nearest(name, list(fields))}")
    chosen = dict(ranges or scheme.searched())
    if not chosen:
        raise ValueError(
            f"space: {scheme.name!r} has no knob that is searched by default; name ranges, e.g. "
            "{'sink_length': [0, 32, 64]}."
        )
    space = {name: _distribution(name, chosen[name], fields[name]) for name in fields if name in chosen}
    for name, distribution in space.items():
        for value in _ends(distribution):
            # Schemes check their own knobs.
            try:
                get_scheme(scheme, **{name: value})
            except ValueError as error:
                raise ValueError(f"space: {error}") from None
    return space


def _distribution(name: str, search: Sequence[Any], field: dataclasses.Field[Any]) -> BaseDistribution:
    if isinstance(search, Sequence) and not isinstance(search, (str, tuple)) and search:
        return CategoricalDistribution(list(search))
    ends = search if isinstance(search, tuple) else ()
    if len(ends) != 2 or not all(isinstance(end, (int, float)) and not isinstance(end, bool) for end in ends):
        raise ValueError(f"space: {name}: got {search!r}, allowed (low, high) or a list of choices.")
    low, high = ends
    if low > high:
        raise ValueError(f"space: {name}: got {low} to {high}, allowed low <= high.")
    if isinstance(field.default, int) and not isinstance(field.default, bool):
        return IntDistribution(int(low), int(high))
    return FloatDistribution(float(low), float(high))


def _ends(distribution: BaseDistribution) -> Sequence[Any]:
    if isinstance(distribution, CategoricalDistribution):
        return distribution.choices
    assert isinstance(distribution, (FloatDistribution, IntDistribution))
    return (distribution.low, distribution.high)


def published(scheme: Scheme, space: Space) -> list[dict[str, Any]]:
    """Values of the searched knobs in the scheme and its presets: the first trials of a search.

    Presets that differ in other knobs as well, or lie outside the space, are left out.
    """

    def fits(name: str, value: Any) -> bool:
        ends = _ends(space[name])
        if isinstance(space[name], CategoricalDistribution):
            return value in ends
        return isinstance(value, (int, float)) and ends[0] <= value <= ends[1]

    found = []
    for other in (scheme, *list_schemes().values()):
        values = {name: getattr(other, name) for name in space} if type(other) is type(scheme) else {}
        alone = values and get_scheme(scheme, **values) == other
        if alone and all(fits(*each) for each in values.items()) and values not in found:
            found.append(values)
    return found


HEARTBEAT, GRACE = 20, 60
"""Seconds between a process's heartbeats in a database, and without one after which its trial is run again."""

RETRIES = 2
"""Times that a trial is run again after its process died: it may be the trial that kills them."""


def open_storage(where: str | None) -> BaseStorage | None:
    """Opens, or creates, a storage.

    Args:
        where: an SQLAlchemy URL (``sqlite:///tuning.db``, ``postgresql://...``, ``mysql://...``). None is memory.

    Raises:
        ValueError: no URL, a driver that is missing, or a database that cannot be reached.
    """
    if where is None:
        return None
    if "://" not in where:
        raise ValueError(f"storage: got {where!r}, allowed a URL (sqlite:///tuning.db, postgresql://...).")
    try:
        # SQLAlchemy takes the usual prefixes of PostgreSQL for an old driver.
        scheme, _, rest = where.partition("://")
        old = scheme not in ("postgres", "postgresql") or importlib.util.find_spec("psycopg2") is not None
        return _database(where if old else f"postgresql+psycopg://{rest}")
    except ImportError as error:
        hint = " pip install 'hfkvq[postgres]' brings one." if where.startswith("postgres") else ""
        raise ValueError(f"storage: {hidden(where)!r} needs a driver that is not installed: {error}.{hint}") from None
    except Exception as error:
        # Errors of SQLAlchemy have many types, and chains of causes.
        reason = str(error.__cause__ or error).splitlines()[0]
        raise ValueError(f"storage: {hidden(where)!r} cannot be reached: {reason}") from None


def hidden(where: str) -> str:
    """Storage's name without its password."""
    try:
        return make_url(where).render_as_string(hide_password=True) if "://" in where else where
    except ArgumentError:
        return where


def _database(url: str) -> RDBStorage:
    for attempt in range(10):
        try:
            with warnings.catch_warnings():
                # Heartbeats are experimental in Optuna since 2.9.
                warnings.simplefilter("ignore", ExperimentalWarning)
                return RDBStorage(
                    url,
                    heartbeat_interval=HEARTBEAT,
                    grace_period=GRACE,
                    heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback(max_retry=RETRIES),
                )
        except (IntegrityError, OperationalError, ProgrammingError) as error:
            # Processes that start together all create the tables, and all but one find them there.
            if attempt == 9 or not any(words in str(error) for words in ("UNIQUE", "already exists", "Duplicate")):
                raise
            time.sleep(0.1 * (attempt + 1))
    raise AssertionError


STARTUP = 10
"""Trials before the sampler learns from them, presets included (of 30)."""


def tune(
    scheme: Preset | Scheme | str,
    objective: Objective,
    *,
    trials: int = 30,
    seed: int = 0,
    space: Mapping[str, Sequence[Any]] | None = None,
    cost: Cost = "total_bits",
    limits: Mapping[Cost, float] | None = None,
    fit: Callable[[Preset], Preset] | None = None,
    measured_on: Mapping[str, Any] | None = None,
    storage: str | None = None,
    name: str | None = None,
    on_trial: Callable[[TuningStudy, Point | None], Any] | None = None,
) -> TuningStudy:
    """Searches a scheme's knobs with Optuna's TPE sampler.

    Two objectives by default: the best value, and the least cost. The presets of the scheme come first. Several
    processes may run the same call on one ``storage``: each starts trials until the study has ``trials`` finished ones,
    so each may finish one more. A database gives the trial of a process that died to another one. The call returns at
    once where the study has so many already, so it also loads one.

    Args:
        scheme: knobs that are not searched, and schemes of single layers, stay as it has them.
        trials: finished ones wanted, of all processes and earlier calls together.
        seed: of the sampler, for the process that creates the study.
        space: ranges by knob, in place of the knobs' own; see `space_of`.
        limits: most of a cost, by its name; trials beyond are measured and count as infeasible.
        fit: completes a trial's preset by the model before it is measured and kept: MixKVQ's room by its thresholds
            (`hfkvq.tuning.fit_room`).
        measured_on: model, samples and other conditions of the scores, as JSON has them. A study keeps them, and
            refuses others, whose trials could not be compared.
        storage: an SQLAlchemy URL (``sqlite:///tuning.db``). None keeps the study in memory.
        name: of the study in the storage; the scheme's by default.
        on_trial: told the study when it begins, with None, and after each trial of this process.

    Raises:
        ValueError: nothing to search, a study of another scheme, space, objective or model under this name, storage
            that cannot be reached, or an objective that returns NaN (finished trials are kept).
    """
    preset = get_preset(scheme)
    distributions = space_of(preset.scheme, space)
    if trials < 1:
        raise ValueError(f"trials: got {trials}, allowed 1 or more.")
    if cost not in COSTS:
        raise ValueError(f"cost: got {cost!r}, allowed {', '.join(COSTS)}.")
    for limit in limits or {}:
        if limit not in COSTS:
            raise ValueError(f"limits: got {limit!r}, allowed {', '.join(COSTS)}.")
    fixed = {key: value for key, value in preset.to_dict().items() if key not in distributions}
    setup = {
        "space": {knob: json.loads(distribution_to_json(each)) for knob, each in distributions.items()},
        "scheme": fixed,
        "objective": objective.name,
        "direction": objective.direction,
        "cost": cost,
        "measured_on": dict(measured_on or {}),
    }
    # Tuples and keys become those that a storage gives back.
    setup = json.loads(json.dumps(setup))
    opened, called = open_storage(storage), name or preset.scheme.name
    with _naming(storage, called):
        study, created = _opened(opened, storage, called, setup)
    # Processes with the same seed would ask for the same trials.
    seed_here = seed if created else int(SeedSequence().generate_state(1)[0])
    study.sampler = TPESampler(n_startup_trials=min(STARTUP, max(trials // 3, 1)), seed=seed_here)
    found = TuningStudy(study, preset, distributions, setup)
    _check(found, storage, study.study_name)
    if created:
        for values in published(preset.scheme, distributions)[:trials]:
            study.enqueue_trial(values, skip_if_exists=True)
    if on_trial is not None:
        on_trial(found, None)

    def told(_: optuna.Study, trial: FrozenTrial) -> None:
        if on_trial is not None:
            on_trial(found, found.point_of(trial) if trial.state is TrialState.COMPLETE else None)

    if len(found.finished()) < trials:
        enough = MaxTrialsCallback(trials, states=FINISHED)
        study.optimize(lambda trial: _run(found, trial, objective, limits or {}, fit), callbacks=[told, enough])
    return found


@contextlib.contextmanager
def _naming(storage: str | None, name: str, *kinds: type[Exception]) -> Iterator[None]:
    """Lets errors of reading a study, Optuna's and those of other ``kinds``, name the study and where it is."""
    try:
        yield
    except (json.JSONDecodeError, TypeError, LookupError, OptunaError, SQLAlchemyError, *kinds) as error:
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(
            f"storage: the study {name!r} in {hidden(str(storage))} is damaged ({what}); choose another name or "
            "another storage."
        ) from None


def _opened(
    opened: BaseStorage | None, storage: str | None, name: str, setup: Mapping[str, Any]
) -> tuple[optuna.Study, bool]:
    """Study, and True if it is new."""
    try:
        study = optuna.create_study(study_name=name, storage=opened, directions=[setup["direction"], "minimize"])
        study.set_user_attr(SETUP, dict(setup))
        with warnings.catch_warnings():
            # Names of metrics, which plots and dashboards show, are experimental since 3.2.
            warnings.simplefilter("ignore", ExperimentalWarning)
            study.set_metric_names([setup["objective"], setup["cost"]])
        return study, True
    except optuna.exceptions.DuplicatedStudyError:
        pass
    assert opened is not None
    assert storage is not None
    shown = hidden(storage)
    study = optuna.load_study(study_name=name, storage=opened)
    known = study.user_attrs.get(SETUP)
    for _ in range(20):
        # Another process may be about to write it.
        if known is not None or study.get_trials(deepcopy=False):
            break
        time.sleep(0.2)
        known = study.user_attrs.get(SETUP)
    if not isinstance(known, dict):
        raise ValueError(
            f"storage: the study {name!r} in {shown} was not made by hfkvq; choose another name with --name."
        )
    for what, now in setup.items():
        if known.get(what) != now:
            raise ValueError(
                f"storage: the study {name!r} in {shown} is one of another {what} (there {known.get(what)!r}, here "
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
    with _naming(storage, name):
        try:
            study = optuna.load_study(study_name=name, storage=opened)
        except KeyError:
            have = ", ".join(map(str, optuna.get_all_study_names(opened)))
            raise ValueError(f"storage: {hidden(storage)} has no study {name!r}; it has {have or 'none'}.") from None
        setup = study.user_attrs.get(SETUP)
        if setup is None:
            raise ValueError(f"storage: the study {name!r} in {hidden(storage)} was not made by hfkvq.")
    with _naming(storage, name, *DAMAGE):
        read = optuna.distributions.json_to_distribution
        space = {knob: read(json.dumps(text)) for knob, text in setup["space"].items()}
        described = dict(setup["scheme"])
        layers = described.pop("layers", None)
        preset = get_preset(get_scheme(described), layers)
        found = TuningStudy(study, preset, space, setup)
    _check(found, storage, name)
    return found


def _check(study: TuningStudy, storage: str | None, name: str) -> None:
    """Reads everything that a study holds, so that damage is told before anything is measured."""
    if storage is None:
        return
    with _naming(storage, name, *DAMAGE):
        study.points()
        study.references()


def _run(
    study: TuningStudy,
    trial: Trial,
    objective: Objective,
    limits: Mapping[Cost, float],
    fit: Callable[[Preset], Preset] | None,
) -> list[float]:
    """Measures a trial: value and cost. Ctrl-C puts its knobs back into the queue."""
    for knob, distribution in study.space.items():
        if isinstance(distribution, CategoricalDistribution):
            trial.suggest_categorical(knob, distribution.choices)
        elif isinstance(distribution, IntDistribution):
            trial.suggest_int(knob, distribution.low, distribution.high)
        else:
            assert isinstance(distribution, FloatDistribution)
            trial.suggest_float(knob, distribution.low, distribution.high)
    try:
        preset = get_preset(study.preset, **trial.params)
    except ValueError as error:
        # Knobs may be legal each, and not together.
        trial.set_user_attr("hfkvq:refused", str(error))
        raise optuna.TrialPruned from None
    # The score of an earlier trial with the same knobs holds for this one.
    known = next((other for other in study.points() if other.knobs == trial.params), None)
    try:
        if known is not None:
            preset, score = known.preset, known.score
        else:
            preset = preset if fit is None else fit(preset)
            score = objective(preset)
    except KeyboardInterrupt:
        study.optuna.enqueue_trial(trial.params)
        raise
    if fit is not None:
        trial.set_user_attr(FITTED, preset.to_dict())
    check_score(score, trial.params)
    trial.set_user_attr(SCORE, asdict(score))
    for name, limit in limits.items():
        trial.set_constraint(name, score.cost(name) - limit)
    return [score.value, score.cost(study.cost)]
