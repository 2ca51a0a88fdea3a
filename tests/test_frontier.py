"""Names in pictures stand beside what they name."""

from __future__ import annotations

import pytest

pytest.importorskip("matplotlib")

from matplotlib.text import Annotation

from evals.frontier import write_names
from hfkvq.measure.charts import new_figure


def test_names_keep_off_points_error_bars_and_the_legend():
    figure, grid = new_figure(4, 3)
    axes = grid[0][0]
    points = [("left", (1.0, 1.0)), ("right", (1.3, 1.0)), ("corner", (2.8, 2.9))]
    axes.set(xlim=(0, 3), ylim=(0, 3))
    bars = [axes.errorbar(*at, [[0.8], [0.05]], fmt="o", label="all of them") for _, at in points]
    legend = axes.legend(handles=bars[:1], loc="upper right")
    write_names(axes, points, dict.fromkeys(("left", "right", "corner"), "black"))
    renderer = figure.canvas.get_renderer()
    names = [child for child in axes.get_children() if isinstance(child, Annotation)]
    assert [name.get_text() for name in names] == ["left", "right", "corner"]
    for name in names:
        words = name.get_window_extent(renderer)
        if name.arrow_patch is None:
            assert not words.overlaps(legend.get_window_extent(renderer))
            for _, (x, y) in points:
                (at, low), (_, high) = axes.transData.transform([(x, y - 0.8), (x, y + 0.05)])
                assert not (words.x0 <= at <= words.x1 and words.y0 <= high and words.y1 >= low)
