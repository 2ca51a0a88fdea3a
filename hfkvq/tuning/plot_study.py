"""Pictures of a study: its Pareto front, what the knobs matter, and how it got better."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hfkvq.caches.scheme import list_schemes
from hfkvq.measure.drawing import BLACK, BLUE, GREEN, GREY, ORANGE, RED, legend_beside, new_figure

from .plot_figure import cost_of, cost_title, cost_unit, draw_scores, scale_values, value_title, write_scores
from .score import Score

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .trials import Point, TuningStudy


def presets_of(study: TuningStudy) -> dict[str, tuple[Score, Score | None]]:
    """Scores, and held-out ones, of trials that are presets, by name, and of what `TuningStudy.refer` measured."""
    found: dict[str, tuple[Score, Score | None]] = {}
    names = {scheme: name for name, scheme in reversed(list_schemes().items())}
    for point in study.points():
        name = names.get(point.preset.scheme)
        if name is not None and not point.preset.layers:
            found.setdefault(name, (point.score, point.held_out))
    return study.references() | found


def pareto_front(study: TuningStudy, picked: Point | None = None, limit: float | None = None) -> Figure:
    """Value against cost of all trials, with the front, the presets, the point picked and held-out scores.

    Args:
        study: with one trial at least.
        picked: the point that was chosen, from `TuningStudy.pick`.
        limit: on the cost, in its own unit (bits, bytes or milliseconds).

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: the study has no trial.
    """
    points = _points(study, 1)
    figure, grid = new_figure(7.6, 4.8)
    axes, cost = grid[0, 0], study.cost
    front, presets = study.pareto(), presets_of(study)
    # Bars of all trials would hide everything.
    draw_scores(
        axes,
        [replace(point.score, low=None, high=None) for point in points],
        cost,
        fmt="o",
        markersize=4,
        color=GREY,
        alpha=0.7,
        label="trials",
    )
    steps = [(cost_of(point.score, cost), point.score.value) for point in front]
    axes.step(*zip(*steps, strict=True), where="post", color=BLUE, linewidth=1.2)
    draw_scores(
        axes, [p.score for p in front], cost, fmt="o", markersize=5, color=BLUE, label="front, with 95 % intervals"
    )
    if presets:
        scores = [score for score, _ in presets.values()]
        draw_scores(axes, scores, cost, fmt="s", markersize=6, color=ORANGE, label="presets")
    others = [*(point.held_out for point in points), *(other for _, other in study.references().values())]
    if scores := [score for score in others if score is not None]:
        draw_scores(
            axes, scores, cost, fmt="D", markersize=6, color=GREEN, markerfacecolor="none", label="on held-out samples"
        )
    if picked is not None:
        at = (cost_of(picked.score, cost), picked.score.value)
        axes.plot(*at, marker="o", markersize=13, markerfacecolor="none", color=RED, linestyle="none", label="picked")
    if limit is not None:
        axes.axvline(limit / cost_unit(cost), color=BLACK, linestyle="--", linewidth=0.9, label="limit")
    axes.set_xlabel(cost_title(cost))
    axes.set_ylabel(value_title(study.objective, study.direction))
    shown = [*(p for p, _ in presets.values()), *(point.score for point in front), *scores]
    shown += [replace(point.score, low=None, high=None) for point in points]
    scale_values(axes, shown, study.direction)
    axes.margins(x=0.08)
    figure.suptitle(f"{study.preset.scheme.name}: {len(points)} trials", fontsize=11)
    legend_beside(axes)
    write_scores(axes, [(name, (cost_of(score, cost), score.value), BLACK) for name, (score, _) in presets.items()])
    return figure


def knob_importance(study: TuningStudy) -> Figure:
    """How much of the value's spread, and of the cost's, each knob explains (Optuna's PED-ANOVA).

    Drawn here because Optuna's picture puts value and cost beside each other without saying which is which.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: the study has fewer than four trials.
    """
    import optuna

    from .trials import SCORE

    points = _points(study, 4)
    figure, grid = new_figure(8.4, 1.4 + 0.4 * len(study.space), columns=2, sharey=True)
    for axes, name, color in zip(grid[0], (None, study.cost), (BLUE, ORANGE), strict=True):

        def target(trial: optuna.trial.FrozenTrial, name: Any = name) -> float:
            score = Score.from_dict(trial.user_attrs[SCORE])
            return score.value if name is None else score.cost(name)

        spread = {target(trial) for trial in study.optuna.get_trials(states=(optuna.trial.TrialState.COMPLETE,))}
        with warnings.catch_warnings():
            # Says what the docstring above says.
            warnings.simplefilter("ignore")
            shares = (
                optuna.importance.get_param_importances(study.optuna, target=target, normalize=True)
                if len(spread) > 1
                else dict.fromkeys(study.space, 0.0)
            )
        knobs = list(reversed(study.space))
        shown = [100 * shares.get(knob, 0.0) for knob in knobs]
        bars = axes.barh(knobs, shown, color=color, height=0.6)
        axes.bar_label(bars, [f"{share:.0f}" for share in shown], padding=3, fontsize=9)
        axes.set_xlim(0, 112)
        axes.set_xticks([0, 25, 50, 75, 100])
        axes.set_xlabel("importance, %")
        axes.set_title(study.objective if name is None else name.replace("_", " "), fontsize=10)
    figure.suptitle(f"{study.preset.scheme.name}: importance of the knobs, {len(points)} trials", fontsize=11)
    return figure


def hypervolume(study: TuningStudy) -> Figure:
    """What part of the plane of value and cost the front covers, trial by trial (Optuna's own picture).

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: the study has fewer than two trials, or but one objective.
    """
    points = _points(study, 2)
    if len(study.optuna.directions) < 2:
        raise ValueError("study: it searched only for the value, so there is no front; see pareto_front.")
    # Says which extra is missing, before Optuna does in its own words.
    new_figure(1, 1)
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator
    from optuna.visualization.matplotlib import plot_hypervolume_history

    sign = 1 if study.direction == "minimize" else -1
    worst = max(sign * point.score.value for point in points)
    reference = [sign * (worst + 0.05 * abs(worst)), 1.05 * max(point.score.cost(study.cost) for point in points)]
    with warnings.catch_warnings(), pyplot.rc_context():
        warnings.simplefilter("ignore")
        axes = plot_hypervolume_history(study.optuna, reference)
        figure: Any = axes.get_figure()
        # It stays as it is; pyplot forgets it.
        pyplot.close(figure)
    figure.set_size_inches(7.0, 4.2)
    figure.set_layout_engine("constrained")
    for line in axes.get_lines():
        line.set_color(BLUE)
    axes.set_title(
        f"{study.preset.scheme.name}: front of {study.objective} and {study.cost.replace('_', ' ')}", fontsize=11
    )
    axes.set_facecolor("white")
    axes.grid(color=BLACK, alpha=0.15)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("hypervolume, larger is better")
    axes.set_xlabel("trial")
    return figure


def _points(study: TuningStudy, least: int) -> list[Point]:
    points = study.points()
    if len(points) < least:
        raise ValueError(f"study: it has {len(points)} measured trials, and this picture needs {least}.")
    return points
