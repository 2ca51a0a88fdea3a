"""Steps of `hfkvq tune`: load a model, divide the samples, search, confirm, and pick."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from rich.table import Table

from hfkvq.caches import Preset, get_preset, list_schemes
from hfkvq.measure.divergence.intervals import check_scipy
from hfkvq.measure.divergence.measurement import check_prompt
from hfkvq.measure.divergence.run import check_context, check_schemes, find_checkpoint
from hfkvq.measure.divergence.windows import cut, find_texts
from hfkvq.measure.models import load_model
from hfkvq.measure.tables import new_table
from hfkvq.version import __version__

from .objectives import Cost, LmEvalTasks, Objective, Score, TextKLD
from .room import COVERAGE, fit_room, raises_by_threshold
from .study import Point, TuningStudy, open_storage, space_of, tune, words_of


@dataclass(frozen=True)
class Plan:
    """A search: a scheme, and objectives on samples.

    Attributes:
        preset: knobs that are not searched.
        objective: on the samples of the search.
        held_out: on other samples.
        model: name of the model, for the record.
        fit: gives MixKVQ the room that its thresholds need, or None.
    """

    preset: Preset
    objective: Objective
    held_out: Objective
    model: str
    about: Mapping[str, Any]
    cost: Cost
    fit: Callable[[Preset], Preset] | None = None


def make_plan(
    scheme: str,
    *,
    model: str | None,
    objective: Literal["kld", "tasks"],
    tasks: Sequence[str],
    samples: int,
    held_out: int,
    text: Sequence[Path] | None,
    dataset: str | None,
    context: int,
    prefill: int | None,
    chunk: int,
    batch_size: int,
    cost: Cost,
    seed: int,
    device: Any,
    dtype: str,
    coverage: float = COVERAGE,
    space: Mapping[str, Sequence[Any]] | None = None,
    storage: str | None = None,
) -> Plan:
    """Checks the arguments of the command, and loads the model.

    Raises:
        ValueError: arguments that are not allowed, or do not go together.
    """
    check_scipy()
    preset = get_preset(scheme)
    if objective == "tasks" and not tasks:
        raise ValueError("tasks: got none; name lm-eval's tasks with --tasks, e.g. --tasks gsm8k.")
    if objective == "kld" and tasks:
        raise ValueError(f"tasks: got {','.join(tasks)}, allowed none with the objective kld; give --objective tasks.")
    thresholds = raises_by_threshold(preset)
    if (text or dataset) and objective != "kld" and not thresholds:
        raise ValueError(f"text: got text, but the objective {objective!r} does not use it; leave it out.")
    space_of(preset.scheme, space)
    kind = None if dtype == "auto" else getattr(torch, dtype)
    checkpoint = find_checkpoint(model)
    check_schemes(checkpoint, {"": preset})
    texts = find_texts(text, dataset, "test", "text", checkpoint.source.reference, seed)
    about: dict[str, Any] = {
        "objective": objective,
        "samples": samples,
        "held_out": held_out,
        "seed": seed,
        "dtype": dtype,
    }
    tokens = None
    if objective == "kld":
        prompt = check_prompt(context, context * 3 // 4 if prefill is None else prefill)
        check_context(checkpoint, context)
        windows = cut(texts, checkpoint.tokenizer, context, samples + held_out)
        if len(windows.tokens) < samples + held_out:
            raise ValueError(
                f"text: it makes {len(windows.tokens)} windows of {context} tokens, but --samples {samples} and "
                f"--held-out {held_out} need {samples + held_out}; give more text, or fewer or smaller windows."
            )
        # Opened anew by `run`; before the weights are read it tells whether it can be.
        open_storage(storage)
        loaded = load_model(checkpoint.source, device, kind)
        shared = {"prefill": prompt, "chunk": chunk, "batch_size": batch_size, "tokenizer": checkpoint.tokenizer}
        one: Objective = TextKLD(loaded, windows.tokens[:samples], **shared)
        other: Objective = TextKLD(loaded, windows.tokens[samples:], **shared)
        about |= {"context": context, "prefill": prompt, "chunk": chunk, "tokens_sha256": windows.sha256}
        tokens = windows.tokens[:samples]
    else:
        from lm_eval.tasks import TaskManager

        from hfkvq.lm_eval.model import HFKVQ

        manager = TaskManager(metadata={"pretrained": checkpoint.source.path})
        for name in (task.partition(":")[0] for task in tasks):
            if name not in manager.all_tasks:
                raise ValueError(f"tasks: got {name!r}, which lm-eval does not know; `lm-eval ls tasks` lists them.")
        open_storage(storage)
        make: Any = HFKVQ
        lm = make(pretrained=checkpoint.source.path, device=str(device), dtype=dtype, batch_size=batch_size)
        loaded, numbers = lm.model, list(range(samples + held_out))
        one = LmEvalTasks(lm, tasks, numbers[:samples], task_manager=manager)
        other = LmEvalTasks(lm, tasks, numbers[samples:], task_manager=manager)
        about["tasks"] = list(tasks)
    if thresholds and tokens is None and (text or dataset):
        found = cut(texts, checkpoint.tokenizer, context, samples)
        tokens, about["tokens_sha256"] = found.tokens, found.sha256
    fit = None
    if thresholds and tokens is not None:
        about["coverage"] = coverage
        fit = partial(fit_room, loaded, tokens=tokens, coverage=coverage, batch_size=batch_size)
    return Plan(preset, one, other, checkpoint.source.name, about, cost, fit)


def run(plan: Plan, on_progress: Callable[[int, str], Any], name: str | None = None, **options: Any) -> TuningStudy:
    """Searches; ``on_progress`` is told the number of finished trials, and words on the last one.

    Args:
        plan: of `make_plan`.
        name: of the study; None takes the scheme, the model and the objective.
        **options: of `tune`.

    Raises:
        ValueError: see `tune`.
    """

    def show(study: TuningStudy, point: Point | None) -> None:
        best = ""
        if point is not None:
            best = f"trial {point.number}: {plan.objective.name} {point.score.value:.4g}"
            best += f", {plan.cost} {point.score.cost(plan.cost):.4g}"
        on_progress(len(study.finished()), best)

    return tune(
        plan.preset,
        plan.objective,
        cost=plan.cost,
        fit=plan.fit,
        # The seed is no condition of the scores: what it chooses, text and trials, is compared by itself.
        measured_on={"model": plan.model, **{name: x for name, x in plan.about.items() if name != "seed"}},
        name=name or "-".join((plan.preset.scheme.name, plan.model.replace(" ", "-"), plan.objective.name)),
        on_trial=show,
        **options,
    )


def beside(plan: Plan) -> dict[str, Preset]:
    """Presets of the same scheme, one for each that differs, fitted as the trials are: to compare a search with."""
    found: dict[Any, str] = {}
    for name, scheme in list_schemes().items():
        if type(scheme) is type(plan.preset.scheme):
            # Later names of a scheme say more.
            found[scheme] = name
    presets = {name: get_preset(scheme) for scheme, name in found.items()}
    if plan.fit is None:
        return presets
    return {name: plan.fit(each) if raises_by_threshold(each) else each for name, each in presets.items()}


def save(plan: Plan, study: TuningStudy, picked: Point, path: Path) -> None:
    """Writes the preset with its origin."""
    score = picked.held_out
    origin = {
        "by": f"hfkvq tune, hfkvq {__version__}",
        "model": plan.model,
        **plan.about,
        "trial": picked.number,
        "trials": len(study.finished()),
        "searched": dict(picked.knobs),
        "score": dataclasses.asdict(picked.score),
        "held_out_score": None if score is None else dataclasses.asdict(score),
        "versions": {name: version(name) for name in ("torch", "transformers", "optuna")},
    }
    dataclasses.replace(picked.preset, origin=origin).save(path)


def _value(score: Score | None) -> str:
    if score is None:
        return "–"
    text = f"{score.value:.4g}"
    if score.low is not None and score.high is not None:
        text += f" ({score.low:.3g}–{score.high:.3g})"
    return text


def table(study: TuningStudy, picked: Point) -> Table:
    """Points that nothing beats, and the published presets; the recommended one is marked."""
    grid = new_table(f"{study.preset.scheme.name}: {study.objective} against {study.cost}")
    grid.add_column("trial", justify="right")
    grid.add_column(f"{study.objective} (95 %)", justify="right")
    grid.add_column("held out", justify="right")
    if study.cost != "total_bits":
        grid.add_column(study.cost, justify="right")
    grid.add_column("total bits", justify="right")
    grid.add_column("knobs")
    front = study.pareto()
    if picked.number not in {point.number for point in front}:
        front.append(picked)

    def row(name: str, score: Score, held_out: Score | None, knobs: str, style: str | None = None) -> None:
        cost = [] if study.cost == "total_bits" else [f"{score.cost(study.cost):.4g}"]
        grid.add_row(name, _value(score), _value(held_out), *cost, f"{score.total_bits:.2f}", knobs, style=style)

    for point in front:
        mine = point.number == picked.number
        row(
            f"{point.number}{' *' if mine else ''}",
            point.score,
            point.held_out,
            words_of(point.knobs),
            "bold" if mine else None,
        )
    grid.add_section()
    for name, (score, held_out) in study.references().items():
        row("preset", score, held_out, name, "dim")
    return grid


def notes(plan: Plan, study: TuningStudy, picked: Point) -> Iterator[str]:
    """Notes on the table's figures."""
    score = picked.score
    yield (
        f"{plan.model}: {len(study.points())} trials measured on {score.samples} samples each, the best ones on "
        f"{picked.held_out.samples if picked.held_out else 0} others. * is recommended, by the held-out value."
    )
    if picked.held_out is not None and picked.held_out.low is not None and picked.held_out.high is not None:
        low, high = picked.held_out.low, picked.held_out.high
        rivals = [
            name
            for name, (_, held_out) in study.references().items()
            if held_out is not None and low <= held_out.value <= high
        ]
        if rivals:
            yield f"These samples do not distinguish it from presets within its interval: {', '.join(rivals)}."
