"""Plots of a report: quality against bits and bytes, speed against context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ..drawing import draw_line, legend_beside, new_figure
from ..panels import BITS, KLD, Panel, limit_x, save_panels
from .leaderboard import Board, Row, speeds

_MIB = 2**20


def _panel(
    x_title: str,
    y_title: str,
    rows: Sequence[Row],
    x: Callable[[Row], float | None],
    y: Callable[[Row], float | None],
    logarithmic: bool = False,
    interval: Callable[[Row], tuple[float, float] | None] = lambda row: None,
) -> Panel:
    unit = 1 if x_title == BITS else _MIB
    found = ((row.label, x(row), y(row)) for row in rows)
    points = [(label, a / unit, b) for label, a, b in found if a is not None and b is not None and a > 0]
    intervals = {row.label: ends for row in rows if (ends := interval(row)) is not None}
    return Panel(x_title, y_title, points, logarithmic, intervals)


def _mean_kld(row: Row) -> float | None:
    # On a logarithmic axis there is no nothing.
    mean = None if row.divergence is None else row.divergence["kld"]["mean"]
    return mean if mean else None


def _kld_interval(row: Row) -> tuple[float, float] | None:
    found = None if row.divergence is None else row.divergence["kld"]["interval"]
    return None if found is None else (found[0], found[1])


def save_quality(board: Board, path: Path) -> bool:
    """Accuracy and KLD against total bits and bytes, as a PNG; False if there is nothing to draw.

    Raises:
        ImportError: matplotlib is not installed.
    """
    columns, rows = board.compared, board.rows
    right = f"right, {columns[0][0] if len(columns) == 1 else f'mean of {len(columns)} tasks'}, %"

    def accuracy(row: Row) -> float | None:
        return row.accuracy(columns)

    def held(row: Row) -> float | None:
        return row.divergent("held_bytes")

    def spread(row: Row) -> tuple[float, float] | None:
        return row.accuracy_interval(columns)

    panels = [
        [
            _panel(BITS, right, rows, lambda row: board.bits(row, "total_bits"), accuracy, False, spread),
            _panel("peak of the cache, MiB", right, rows, lambda row: row.peak_bytes, accuracy, False, spread),
        ],
        [
            _panel(BITS, KLD, rows, lambda row: row.divergent("total_bits"), _mean_kld, True, _kld_interval),
            _panel(
                "cache of a window, MiB",
                KLD,
                rows,
                lambda row: row.divergent("held_bytes"),
                _mean_kld,
                True,
                _kld_interval,
            ),
        ],
    ]
    return save_panels(panels, [row.label for row in rows], board.model, path)


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
    limit_x(axes, min(contexts) / 1.2, max(contexts) * 1.2)
    axes.set_xlabel("mean tokens of a prompt, a point for each task")
    axes.set_ylabel("generated tokens/s")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    legend_beside(axes)
    figure.suptitle(board.model, fontsize=11)
    figure.savefig(path, dpi=150, format="png")
    return True
