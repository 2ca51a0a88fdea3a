"""Pictures of how good caches are: a panel for each pair of a cost and a quality, a named point for each cache."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .drawing import new_figure, write_names
from .records import BASELINE

BITS = "total bits an element, everything counted"
KLD = f"mean KL divergence to {BASELINE}, nats"

_BITS_TICKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


@dataclass(frozen=True)
class Panel:
    """What a panel shows.

    Attributes:
        x_title: the cost, on a logarithmic axis; `BITS` has ticks of its own.
        y_title: the quality.
        points: (name, x, y) each.
        logarithmic: whether the quality's axis is.
        intervals: of the quality, by name, where they are known.
    """

    x_title: str
    y_title: str
    points: Sequence[tuple[str, float, float]]
    logarithmic: bool = False
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)


def round_numbers(low: float, high: float) -> list[float]:
    """Ticks between the ends of a logarithmic axis, not too many."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 1.5, 2, 3, 4, 5, 6, 8), (1, 2, 3, 5), (1, 3), (1,)):
        found = [step * 10.0**decade for decade in decades for step in steps if low <= step * 10.0**decade <= high]
        if len(found) <= 8:
            break
    return found


def limit_x(axes: Any, low: float, high: float, ticks: Sequence[float] | None = None) -> None:
    """Ends of a logarithmic axis, and those ticks that lie between them, as plain numbers."""
    axes.set_xlim(low, high)
    shown = [tick for tick in ticks or round_numbers(low, high) if low <= tick <= high]
    axes.set_xticks(shown, [f"{tick:,.6g}" for tick in shown])
    axes.minorticks_off()


def _draw(axes: Any, panel: Panel, colors: Mapping[str, str]) -> None:
    for name, x, y in panel.points:
        axes.scatter(x, y, s=42, color=colors[name], zorder=3)
        if name in panel.intervals:
            low, high = panel.intervals[name]
            axes.errorbar(
                x,
                y,
                [[max(y - low, 0)], [max(high - y, 0)]],
                color=colors[name],
                capsize=2,
                lw=0.9,
                alpha=0.6,
                zorder=2,
            )
    axes.set_xlabel(panel.x_title)
    axes.set_ylabel(panel.y_title)
    axes.grid(alpha=0.25)
    in_bits = panel.x_title == BITS
    axes.set_xscale("log", base=2 if in_bits else 10)
    costs, values = [x for _, x, _ in panel.points], [y for _, _, y in panel.points]
    values += [end for name, _, _ in panel.points for end in panel.intervals.get(name, ()) if end > 0]
    # Room for names beside the outermost points.
    limit_x(axes, min(costs) / 1.5, max(costs) * 1.5, _BITS_TICKS if in_bits else None)
    if panel.logarithmic:
        axes.set_yscale("log")
        axes.set_ylim(min(values) / 5, max(values) * 5)
    else:
        margin = max(6.0, 0.35 * (max(values) - min(values)))
        # Nothing is above 100, but names may be.
        axes.set_ylim(min(values) - margin, min(max(values) + margin, 100 + margin / 2))
        axes.set_yticks([tick for tick in axes.get_yticks() if 0 <= tick <= 100])


def save_panels(rows: Sequence[Sequence[Panel]], names: Sequence[str], title: str, path: Path) -> bool:
    """Draws rows of panels as a PNG; False if none of them has a point.

    Args:
        rows: panels without points are left out.
        names: of all caches, in the order of their colours.
        title: of the picture.
        path: of the file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    shown = [[panel for panel in row if panel.points] for row in rows if any(panel.points for panel in row)]
    if not shown:
        return False
    columns = max(map(len, shown))
    figure, grid = new_figure(5.4 * columns, 4.4 * len(shown) + 0.3, columns, len(shown))
    colors = {name: f"C{number % 10}" for number, name in enumerate(names)}
    drawn = []
    for row, axes_row in zip(shown, grid, strict=True):
        for axes in axes_row[len(row) :]:
            axes.set_axis_off()
        for panel, axes in zip(row, axes_row, strict=False):
            _draw(axes, panel, colors)
            drawn.append((axes, [(name, (x, y)) for name, x, y in panel.points]))
    figure.suptitle(title, fontsize=11)
    write_names(drawn, colors)
    figure.savefig(path, dpi=150, format="png")
    return True
