"""Output of `hfkvq tune`: the Pareto front, the published presets beside it, and the recommended point."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from hfkvq.measure.tables import new_table

from .score import Score
from .trials import Point, TuningStudy, words_of

if TYPE_CHECKING:
    from .search import Plan


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


def save_front(study: TuningStudy, picked: Point, path: Path) -> None:
    """Draws the Pareto front as Optuna does, with the presets."""
    from matplotlib import pyplot
    from optuna.exceptions import ExperimentalWarning
    from optuna.visualization import matplotlib as pictures

    cost = study.cost
    with pyplot.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        names = [cost, study.objective]
        axes = pictures.plot_pareto_front(study.optuna, targets=lambda t: t.values[::-1], target_names=names)
        for name, (score, _) in study.references().items():
            at = score.cost(cost), score.value
            axes.plot(*at, "s", color="black", markersize=5)
            axes.annotate(name, at, (5, 3), textcoords="offset points", fontsize=8)
        at = picked.score.cost(cost), picked.score.value
        axes.plot(*at, "o", color="black", markersize=13, markerfacecolor="none", label="recommended")
        axes.legend()
        if study.direction == "minimize" and min(point.score.value for point in study.points()) > 0:
            axes.set_yscale("log")
        figure: Any = axes.get_figure()
        figure.savefig(path, dpi=150, format="png", bbox_inches="tight")
        pyplot.close(figure)
