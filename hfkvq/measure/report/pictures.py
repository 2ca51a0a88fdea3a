"""Plots of a report: quality against bits and bytes, speed against context."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..drawing import draw_line, legend_beside, new_figure, write_names
from ..records import BASELINE
from .leaderboard import Board, Row, speeds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Point = tuple[str, float, float]
"""Label, x, y."""

_BITS_TICKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_MIB = 2**20


def _points(rows: Sequence[Row], x: Callable[[Row], float | None], y: Callable[[Row], float | None]) -> list[Point]:
    found = ((row.label, x(row), y(row)) for row in rows)
    return [(label, a, b) for label, a, b in found if a is not None and b is not None and a > 0]


def _mean_kld(row: Row) -> float | None:
    # On a logarithmic axis there is no nothing.
    mean = None if row.divergence is None else row.divergence["kld"]["mean"]
    return mean if mean else None


def _panels(board: Board) -> list[list[tuple[str, str, list[Point], bool]]]:
    """Rows of panels: x title, y title, points, whether y is logarithmic. Panels without points are left out."""
    columns = board.compared
    tasks = columns[0][0] if len(columns) == 1 else f"mean of {len(columns)} tasks"

    def accuracy(row: Row) -> float | None:
        return row.accuracy(columns)

    bits, peak, held = "total bits an element, everything counted", "peak of the cache, MiB", "cache of a window, MiB"
    right, kld = f"right, {tasks}, %", f"mean KL divergence to {BASELINE}, nats"
    rows = board.rows
    grid = [
        [
            (bits, right, _points(rows, lambda row: board.bits(row, "total_bits"), accuracy), False),
            (peak, right, _points(rows, lambda row: row.peak_bytes, accuracy), False),
        ],
        [
            (bits, kld, _points(rows, lambda row: row.divergent("total_bits"), _mean_kld), True),
            (held, kld, _points(rows, lambda row: row.divergent("held_bytes"), _mean_kld), True),
        ],
    ]
    return [[panel for panel in line if panel[2]] for line in grid if any(panel[2] for panel in line)]


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers between the ends of a logarithmic axis, not too many."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 1.5, 2, 3, 4, 5, 6, 8), (1, 2, 3, 5), (1, 3), (1,)):
        found = [step * 10.0**decade for decade in decades for step in steps if low <= step * 10.0**decade <= high]
        if len(found) <= 8:
            break
    return found


def _label_x(axes: Axes, ticks: Sequence[float]) -> None:
    """Puts those ticks that lie on the axis, as plain numbers."""
    low, high = axes.get_xlim()
    shown = [tick for tick in ticks if low <= tick <= high]
    axes.set_xticks(shown, [f"{tick:,.6g}" for tick in shown])
    axes.minorticks_off()


def _draw(axes: Axes, panel: tuple[str, str, list[Point], bool], colors: dict[str, str]) -> list[Point]:
    """Draws a panel; returns its points as they lie on the axes."""
    x_title, y_title, points, logarithmic = panel
    in_bits = x_title.startswith("total bits")
    points = points if in_bits else [(label, x / _MIB, y) for label, x, y in points]
    for label, x, y in points:
        axes.scatter(x, y, s=42, color=colors[label], zorder=3)
    axes.set_xlabel(x_title)
    axes.set_ylabel(y_title)
    axes.grid(alpha=0.25)
    axes.set_xscale("log", base=2 if in_bits else 10)
    # Room for names beside the outermost points.
    low, high = min(point[1] for point in points) / 1.5, max(point[1] for point in points) * 1.5
    axes.set_xlim(low, high)
    _label_x(axes, _BITS_TICKS if in_bits else _ticks(low, high))
    values = [point[2] for point in points]
    if logarithmic:
        axes.set_yscale("log")
        axes.set_ylim(min(values) / 5, max(values) * 5)
    else:
        margin = max(6.0, 0.35 * (max(values) - min(values)))
        # Nothing is above 100, but names may be.
        axes.set_ylim(min(values) - margin, min(max(values) + margin, 100 + margin / 2))
        axes.set_yticks([tick for tick in axes.get_yticks() if 0 <= tick <= 100])
    return points


def save_quality(board: Board, path: Path) -> bool:
    """Accuracy and KLD against total bits and bytes, as a PNG; False if there is nothing to draw.

    Raises:
        ImportError: matplotlib is not installed.
    """
    panels = _panels(board)
    if not panels:
        return False
    columns, rows = max(map(len, panels)), len(panels)
    figure, grid = new_figure(5.4 * columns, 4.4 * rows + 0.3, columns, rows)
    colors = {row.label: f"C{number % 10}" for number, row in enumerate(board.rows)}
    drawn = []
    for line, axes_line in zip(panels, grid, strict=True):
        for axes in axes_line[len(line) :]:
            axes.set_axis_off()
        drawn += [(axes, _draw(axes, panel, colors)) for panel, axes in zip(line, axes_line, strict=False)]
    figure.suptitle(board.model, fontsize=11)
    write_names([(axes, [(label, (x, y)) for label, x, y in points]) for axes, points in drawn], colors)
    figure.savefig(path, dpi=150, format="png")
    return True


def save_speed(board: Board, path: Path) -> bool:
    """Tokens a second against tokens of context, a line a cache, as a PNG; False if there is nothing to draw.

    Raises:
        ImportError: matplotlib is not installed.
    """
    # Numbered as in the other picture, so that colours are the same.
    lines = [(number, row.label, speeds(row)) for number, row in enumerate(board.rows)]
    lines = [line for line in lines if line[2]]
    if not lines:
        return False
    figure, grid = new_figure(8, 4.8)
    axes = grid[0][0]
    for number, label, points in lines:
        draw_line(axes, number, points, label)
    axes.set_xscale("log")
    contexts = [x for _, _, points in lines for x, _ in points]
    low, high = min(contexts) / 1.2, max(contexts) * 1.2
    axes.set_xlim(low, high)
    _label_x(axes, _ticks(low, high))
    axes.set_xlabel("mean tokens of a prompt, a point for each task")
    axes.set_ylabel("generated tokens/s")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    legend_beside(axes)
    figure.suptitle(board.model, fontsize=11)
    figure.savefig(path, dpi=150, format="png")
    return True
