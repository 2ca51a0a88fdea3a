"""What all pictures share: colours, an empty figure without pyplot's state, names beside points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's, which the colour-blind can tell apart.
BLUE, ORANGE, GREEN, RED, SKY, PINK = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7"
GREY, BLACK = "#999999", "#222222"

Point = tuple[float, float]


def new_figure(width: float, height: float, columns: int = 1, rows: int = 1, **options: Any) -> tuple[Figure, Any]:
    """A figure in inches, and its axes as an array.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots: matplotlib is not installed; pip install 'hfkvq[plot]'.") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False, **options)
    for axes in grid.flat:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, grid


def legend_beside(axes: Any, *entries: Any) -> None:
    """A legend right of the axes: within, it would lie on points."""
    axes.legend(*entries, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, frameon=False)


def write_names(panels: Sequence[tuple[Any, Sequence[tuple[str, Point]]]], colors: Mapping[str, str]) -> None:
    """Writes names beside their points in the finished panels of a figure, in colours by name.

    Args:
        panels: axes, and their names and points.
        colors: by name.
    """
    if panels:
        # Positions are known only after a layout.
        panels[0][0].get_figure().canvas.draw()
    for axes, points in panels:
        _write_names(axes, points, colors)


def _write_names(axes: Any, points: Sequence[tuple[str, Point]], colors: Mapping[str, str]) -> None:
    """Writes each name at the first place near its point that is still free: of points, error bars and the legend."""
    from matplotlib.collections import LineCollection
    from matplotlib.text import Text

    renderer = axes.get_figure().canvas.get_renderer()
    taken = []
    for _, at in points:
        x, y = axes.transData.transform(at)
        taken.append((x - 5, y - 5, x + 5, y + 5))
    for lines in axes.collections:
        for ends in lines.get_segments() if isinstance(lines, LineCollection) else ():
            bar = axes.transData.transform(ends)
            taken.append((*(bar.min(0) - 3), *(bar.max(0) + 3)))
    legend = axes.get_legend()
    if legend is not None:
        taken.append(legend.get_window_extent(renderer).extents)
    frame = axes.get_window_extent()
    steps = [(8, 0), (-8, 0), (0, 8), (0, -8)]
    steps += [(dx, sign * 13 * k) for k in range(1, 11) for sign in (1, -1) for dx in (10, -10, 40, -40)]
    for name, at in sorted(points, key=lambda point: point[1]):
        best = None
        for dx, dy in steps:
            text = axes.annotate(
                name,
                at,
                xytext=(dx, dy),
                textcoords="offset points",
                fontsize=8.5,
                color=colors[name],
                ha="center" if dx == 0 else "left" if dx > 0 else "right",
                va="center" if dx else "bottom" if dy > 0 else "top",
                # A line to the point, where the name had to move away.
                arrowprops={"arrowstyle": "-", "lw": 0.6, "color": "0.5"} if abs(dy) > 12 else None,
            )
            # Of the words alone: an annotation's own extent takes in its line.
            text.update_positions(renderer)
            window = Text.get_window_extent(text, renderer)
            box = (window.x0, window.y0, window.x1, window.y1)
            inside = frame.x0 <= box[0] and box[2] <= frame.x1 and frame.y0 <= box[1] and box[3] <= frame.y1
            free = all(box[2] < a or c < box[0] or box[3] < b or d < box[1] for a, b, c, d in taken)
            if inside and free:
                best = box
                break
            text.remove()
        if best is None:
            # Nothing is free: better over others than not at all.
            axes.annotate(name, at, xytext=(8, 0), textcoords="offset points", fontsize=8.5, color=colors[name])
        else:
            taken.append(best)
