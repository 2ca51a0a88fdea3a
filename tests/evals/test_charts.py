"""Charts: intervals of shares, and what a picture shows."""

import pytest

from evals.charts import Column, Mark, save_chart, share

# SciPy and matplotlib take seconds to import, which processes that collect tests do not need.


@pytest.mark.parametrize(("right", "total"), [(0, 8), (3, 8), (8, 8), (191, 192)])
def test_intervals_of_shares_are_those_of_scipy(right, total):
    from scipy.stats import binomtest

    expected = binomtest(right, total).proportion_ci(0.95, method="wilson")
    found = share(right, total)
    assert found.value == pytest.approx(100 * right / total)
    assert (found.low, found.high) == (pytest.approx(100 * expected.low), pytest.approx(100 * expected.high))


@pytest.mark.parametrize("logarithmic", [False, True])
def test_a_picture_has_a_dot_and_a_number_a_value(tmp_path, monkeypatch, logarithmic):
    drawn, figures = [], pytest.importorskip("matplotlib.figure")
    monkeypatch.setattr(figures.Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    marks = {"full": Mark(2.0, 0.0, 3.0), "kitty": Mark(40.0), "broken": Mark(0.0), "unknown": Mark(1.0)}
    empty = Column("nothing", {"unknown": Mark(1.0)})
    assert save_chart(["full", "kitty", "broken", "lost"], [Column("bits", marks, logarithmic), empty], "t", tmp_path)
    (figure,) = drawn
    (axes,) = figure.axes
    dots = [line.get_xdata()[0] for line in axes.lines if line.get_marker() == "o"]
    assert dots == ([2.0, 40.0] if logarithmic else [2.0, 40.0, 0.0])
    assert [text.get_text() for text in axes.texts] == [f"{dot:.3g}" for dot in dots]
    bars = [list(line.get_xdata()) for line in axes.lines if line.get_marker() != "o"]
    # A logarithmic axis has no place for nothing.
    assert bars == [[0.2 if logarithmic else 0.0, 3.0]]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["full", "kitty", "broken", "lost"]


def test_nothing_to_show_is_no_picture(tmp_path):
    assert not save_chart(["full"], [Column("bits", {})], "t", tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
