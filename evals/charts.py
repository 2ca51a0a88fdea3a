"""Charts that compare caches: a row for each cache, a column for each measure, a dot and its interval in each."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfkvq.measure.records import BASELINE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Colours of Okabe and Ito, which the colour-blind can tell apart.
BLUE, ORANGE, GREEN, RED, PINK = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7"
GREY, BLACK = "#999999", "#222222"

BITS = "total bits per element"
KLD = f"KLD from {BASELINE}, nats"


def new_figure(width: float, height: float, columns: int = 1, rows: int = 1, **options: Any) -> tuple[Figure, Any]:
    """A figure in inches, and its axes as an array.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("charts: matplotlib is not installed; pip install matplotlib.") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False, **options)
    for axes in grid.flat:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, grid


def is_own(name: str) -> bool:
    """True for hfkvq's own presets, which stand out among published methods."""
    return name.startswith(("best-", "trellis-"))


def save_figure(figure: Figure, path: Path) -> None:
    """Writes a figure; an SVG of the same figures is the same bytes, and its words are text."""
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "hfkvq", "font.sans-serif": ["DejaVu Sans", "Arial"]}):
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


@dataclass(frozen=True)
class Mark:
    """A measured value, and the ends of its interval if it has one."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Column:
    """One measure of all caches.

    Attributes:
        title: with the unit.
        marks: by name of the cache; those without one have an empty cell.
        logarithmic: whether the axis is. Values that are not positive then have no dot.
        line: where to draw a dashed line to compare with.
        form: format of the numbers beside the dots.
    """

    title: str
    marks: Mapping[str, Mark]
    logarithmic: bool = False
    line: float | None = None
    form: str = "{:,.3g}"


def share(right: float, total: int) -> Mark:
    """Right answers in per cent with their 95 % interval (Wilson, 1927), which stays within 0 and 100.

    Args:
        right: how many.
        total: of how many, at least one.
    """
    z = 1.959964
    rate, spread = right / total, z * z / total
    middle = (rate + spread / 2) / (1 + spread)
    half = z * math.sqrt(rate * (1 - rate) / total + spread / (4 * total)) / (1 + spread)
    return Mark(100 * rate, 100 * max(0.0, middle - half), 100 * min(1.0, middle + half))


def save_chart(
    names: Sequence[str],
    columns: Sequence[Column],
    title: str,
    path: Path,
    grey: Collection[str] = (BASELINE,),
) -> bool:
    """Draws the chart; False if no column has anything to show.

    Args:
        names: of the caches, from top to bottom.
        columns: those without marks are left out.
        title: of the picture.
        path: of the file.
        grey: names of the caches that the others are compared with.

    Raises:
        ImportError: matplotlib is not installed.
    """
    shown = [column for column in columns if any(name in column.marks for name in names)]
    if not shown:
        return False
    left = 0.5 + 0.075 * max(map(len, names))
    figure, grid = new_figure(left + 2.3 * len(shown), 1.3 + 0.24 * len(names), len(shown), sharey=True)
    for column, axes in zip(shown, grid[0], strict=True):
        _draw(axes, names, column, grey)
    grid[0][0].set_yticks(range(len(names)), names, fontsize=9)
    for label, name in zip(grid[0][0].get_yticklabels(), names, strict=True):
        if is_own(name):
            label.set(color=RED, fontweight="bold")
    grid[0][0].set_ylim(len(names) - 0.4, -0.6)
    figure.suptitle(title, fontsize=11)
    save_figure(figure, path)
    return True


def _draw(axes: Any, names: Sequence[str], column: Column, grey: Collection[str]) -> None:
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    found = {at: column.marks[name] for at, name in enumerate(names) if name in column.marks}
    if column.logarithmic:
        found = {at: mark for at, mark in found.items() if mark.value > 0}
    values = [mark.value for mark in found.values()] or [1.0]
    highest = max(*values, *(mark.high or mark.value for mark in found.values())) if found else 1.0
    # Logarithmic axes over so small a range have no round number to write.
    if column.logarithmic and len(found) > 1 and highest < 2 * min(values):
        axes.xaxis.set_major_locator(MaxNLocator(3))
    elif column.logarithmic:
        axes.set_xscale("log")
        if highest < 100 * min(values):
            # Ticks at 1, 2 and 5: powers of ten alone would leave an axis with one number.
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:,g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(4))
    least = min((mark.value for mark in found.values()), default=0.0)
    for at, mark in found.items():
        color = GREY if names[at] in grey else RED if is_own(names[at]) else BLUE
        axes.plot(mark.value, at, "o", color=color, markersize=5.5, zorder=3)
        if mark.low is not None and mark.high is not None:
            # Bars down to 0 go on to the edge of a logarithmic axis.
            low = max(mark.low, least / 10) if column.logarithmic else mark.low
            axes.plot((low, mark.high), (at, at), color=color, linewidth=1.6, alpha=0.55)
    if column.line is not None:
        axes.axvline(column.line, color="black", linewidth=0.8, linestyle="--")
        if not column.logarithmic:
            axes.set_xlim(left=0)
    axes.set_xlabel(column.title, fontsize=9)
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    # Numbers stand right of the axes, beside the dots.
    for at, mark in found.items():
        where = axes.get_yaxis_transform()
        axes.text(1.02, at, column.form.format(mark.value), transform=where, va="center", fontsize=8, color="0.3")
