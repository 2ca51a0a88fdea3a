"""`tune` searches a scheme's knobs for the best caches at each cost; `load_study` reads an earlier search."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optuna
from numpy.random import SeedSequence
from optuna.distributions import CategoricalDistribution
from optuna.samplers import TPESampler
from optuna.study import MaxTrialsCallback
from optuna.trial import FrozenTrial, Trial, TrialState

from hfkvq.bounded import DAMAGE
from hfkvq.caches.schemes.base import Scheme
from hfkvq.caches.schemes.preset import Preset, get_preset

from .score import COSTS, Cost, Objective
from .space import describe, published, space_of, suggest
from .storage import hidden, open_storage
from .trials import BUDGET, FINISHED, FITTED, SCORE, SETUP, Point, TuningStudy, check_score

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
    tables: Mapping[float, Mapping[str, int]] | None = None,
    fit: Callable[[Preset], Preset] | None = None,
    measured_on: Mapping[str, Any] | None = None,
    storage: str | None = None,
    name: str | None = None,
    warm_start: bool = True,
    on_trial: Callable[[TuningStudy, Point | None], Any] | None = None,
) -> TuningStudy:
    """Searches a scheme's knobs with Optuna's TPE sampler.

    Two objectives by default: the best value, and the least cost. The presets of the scheme come first. Several
    processes may run the same call on one ``storage``: each starts trials until the study has ``trials`` finished ones,
    so each may finish one more. A database gives the trial of a process that died to another one. The call returns at
    once where the study has so many already, so it also loads one.

    Args:
        scheme: knobs that are not searched, and schemes of single layers, stay as it has them.
        objective: measures a preset.
        trials: finished ones wanted, of all processes and earlier calls together.
        seed: of the sampler, for the process that creates the study.
        space: ranges by knob, in place of the knobs' own; see `space_of`.
        cost: the second objective.
        limits: most of a cost, by its name; trials beyond are measured and count as infeasible.
        tables: bits of tags by budget, for TriAxialKV (see `sweep`): the budget is searched beside the knobs.
        fit: completes a trial's preset by the model before it is measured and kept: MixKVQ's room by its thresholds
            (`hfkvq.tuning.fit_room`).
        measured_on: model, samples and other conditions of the scores, as JSON has them. A study keeps them, and
            refuses others, whose trials could not be compared.
        storage: an SQLAlchemy URL (``sqlite:///tuning.db``), or the path of a journal file (``tuning.log``) on a file
            system that the processes share. None keeps the study in memory.
        name: of the study in the storage; the scheme's by default.
        warm_start: begin with the presets' knobs.
        on_trial: told the study when it begins, with None, and after each trial of this process.

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
        "measured_on": dict(measured_on or {}),
        "tables": None if tables is None else {str(budget): dict(table) for budget, table in tables.items()},
    }
    # Tuples and keys become those that a storage gives back.
    setup = json.loads(json.dumps(setup))
    study, created = _open(storage, name or preset.scheme.name, setup)
    # Processes with the same seed would ask for the same trials.
    seed_here = seed if created else int(SeedSequence().generate_state(1)[0])
    study.sampler = TPESampler(n_startup_trials=min(STARTUP, max(trials // 3, 1)), seed=seed_here)
    found = TuningStudy(study, preset, distributions, setup)
    found.config = getattr(getattr(objective, "model", None), "config", None)
    _check(found, storage, study.study_name)
    if created and warm_start:
        knobs = {knob: distribution for knob, distribution in distributions.items() if knob != BUDGET}
        for values in published(preset.scheme, knobs)[:trials]:
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


def _open(storage: str | None, name: str, setup: Mapping[str, Any]) -> tuple[optuna.Study, bool]:
    """Study, and True if it is new."""
    opened = open_storage(storage)
    try:
        study = optuna.create_study(study_name=name, storage=opened, directions=[setup["direction"], "minimize"])
        study.set_user_attr(SETUP, dict(setup))
        with warnings.catch_warnings():
            # Names of metrics, which plots and dashboards show, are experimental since 3.2.
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
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
    try:
        study = optuna.load_study(study_name=name, storage=opened)
    except KeyError:
        have = ", ".join(map(str, optuna.get_all_study_names(opened)))
        raise ValueError(f"storage: {hidden(storage)} has no study {name!r}; it has {have or 'none'}.") from None
    setup = study.user_attrs.get(SETUP)
    if setup is None:
        raise ValueError(f"storage: the study {name!r} in {hidden(storage)} was not made by hfkvq.")
    try:
        read = optuna.distributions.json_to_distribution
        space = {knob: read(json.dumps(text)) for knob, text in setup["space"].items()}
        described = dict(setup["scheme"])
        layers = described.pop("layers", None)
        preset = get_preset(Scheme.from_dict(described), layers)
        found = TuningStudy(study, preset, space, setup)
    except DAMAGE as error:
        raise ValueError(f"storage: the study {name!r} in {hidden(storage)} is damaged ({error!r}).") from None
    _check(found, storage, name)
    return found


def _check(study: TuningStudy, storage: str | None, name: str) -> None:
    """Reads everything that a study holds, so that damage is told before anything is measured."""
    if storage is None:
        return
    try:
        study.points()
        study.references()
        for trial in study.optuna.get_trials(deepcopy=False):
            asked = [*trial.system_attrs.get("fixed_params", {}).items(), *trial.params.items()]
            kinds = (CategoricalDistribution, type(None))
            numbers = [(knob, value) for knob, value in asked if not isinstance(study.space.get(knob), kinds)]
            numbers += [("values", value) for value in trial.values or ()]
            for what, value in numbers:
                if isinstance(value, bool) or not isinstance(value, (int, float)):
                    raise ValueError(f"trial {trial.number}: {what}: got {value!r}, allowed a number")
            if len(study.optuna.directions) != 2 or len(trial.values or ()) not in (0, 2):
                raise ValueError(f"trial {trial.number}: got values {trial.values}, allowed 2")
    except DAMAGE as error:
        raise ValueError(
            f"storage: the study {name!r} in {hidden(storage)} is damaged ({type(error).__name__}: {error}); choose "
            "another name or another storage."
        ) from None


def _run(
    study: TuningStudy,
    trial: Trial,
    objective: Objective,
    limits: Mapping[Cost, float],
    fit: Callable[[Preset], Preset] | None,
) -> list[float]:
    """Measures a trial: value and cost. Ctrl-C puts its knobs back into the queue."""
    for knob, distribution in study.space.items():
        suggest(trial, knob, distribution)
    try:
        preset = study.preset_of(trial.params)
    except ValueError as error:
        # Knobs may be legal each, and not together.
        trial.set_user_attr("hfkvq:refused", str(error))
        raise optuna.TrialPruned from None
    known = _recorded(study, trial)
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
    trial.set_user_attr(SCORE, score.to_dict())
    for name, limit in limits.items():
        trial.set_constraint(name, score.cost(name) - limit)
    return [score.value, score.cost(study.cost)]


def _recorded(study: TuningStudy, trial: Trial) -> Point | None:
    """Earlier trial with the same knobs, whose score holds for this one."""
    return next((other for other in study.points() if other.knobs == trial.params), None)
