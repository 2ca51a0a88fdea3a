"""What all pictures of searches share: colours, titles of axes, scores with their intervals, and files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfkvq.measure.drawing import write_names

from .score import Cost, Score

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COSTS: dict[Cost, tuple[str, float]] = {
    "total_bits": ("total bits per element, everything counted", 1.0),
    "cache_bytes": ("cache of a sample, MiB", 2.0**20),
    "milliseconds": ("a step of generation, ms", 1.0),
}
_VALUES = {"KLD": "mean KL divergence to DynamicCache, nats"}


def save(figure: Figure, path: str | Path) -> None:
    """Writes a picture as PNG.

    Raises:
        ValueError: the folder does not exist.
    """
    if not Path(path).absolute().parent.is_dir():
        raise ValueError(f"path: got {path}, but its folder does not exist.")
    figure.savefig(path, dpi=150, format="png")


def cost_of(score: Score, cost: Cost) -> float:
    """A cost in the unit of its axis."""
    return score.cost(cost) / _COSTS[cost][1]


def cost_unit(cost: Cost) -> float:
    """How many of a cost's own units one of its axis is."""
    return _COSTS[cost][1]


def cost_title(cost: Cost) -> str:
    """Title of a cost's axis."""
    return _COSTS[cost][0]


def value_title(objective: str, direction: str) -> str:
    """Title of a value's axis."""
    return f"{_VALUES.get(objective, objective)} ({'lower' if direction == 'minimize' else 'higher'} is better)"


def _ends(score: Score) -> tuple[float, float]:
    """A score's interval; the value alone where there is none."""
    if score.low is None or score.high is None:
        return score.value, score.value
    return min(score.low, score.value), max(score.high, score.value)


def draw_scores(axes: Axes, scores: Sequence[Score], cost: Cost, color: str, **look: Any) -> None:
    """Marks scores, with the intervals of those that have one."""
    from matplotlib.colors import to_rgba

    x, y = [cost_of(score, cost) for score in scores], [score.value for score in scores]
    ends = [_ends(score) for score in scores]
    bars = [[score.value - low, high - score.value] for score, (low, high) in zip(scores, ends, strict=True)]
    lengths = [list(side) for side in zip(*bars, strict=True)] if any(map(any, bars)) else None
    # Pale, since intervals of neighbours overlap.
    pale = to_rgba(color, 0.45)
    axes.errorbar(x, y, yerr=lengths, color=color, ecolor=pale, elinewidth=1.0, capsize=2, linestyle="none", **look)


def scale_values(axes: Axes, scores: Sequence[Score], direction: str) -> None:
    """A logarithmic axis for losses that differ by much, and a grid."""
    values = [score.value for score in scores]
    if direction == "minimize" and min(values) > 0 and max(values) / min(values) > 8:
        axes.set_yscale("log")
        # Bars may reach down to nothing, and would take the axis with them.
        low, high = math.log10(min(values)), math.log10(max(_ends(score)[1] for score in scores))
        room = 0.12 * (high - low)
        axes.set_ylim(10 ** (low - 2 * room), 10 ** (high + room))
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)


def write_scores(axes: Axes, names: Sequence[tuple[str, tuple[float, float], str]]) -> None:
    """Writes names (name, point, colour) beside their points, where there is room."""
    write_names([(axes, [(name, at) for name, at, _ in names])], {name: color for name, _, color in names})
