"""Tables in one look, for terminals and Markdown, and the numbers in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.table import Table

NOTHING = "–"
"""Cell without a number."""


def narrow_table(**options: Any) -> Table:
    """An empty table that leaves little room between columns."""
    look = {"box": box.SIMPLE_HEAD, "pad_edge": False, "padding": (0, 1, 0, 0), "collapse_padding": True}
    return Table(**{**look, **options})


def new_table(title: str, columns: Sequence[str] = ()) -> Table:
    """An empty table with a title."""
    view = narrow_table(
        title=title, title_justify="left", title_style="bold", padding=(0, 2, 0, 0), collapse_padding=False
    )
    for column in columns:
        # Remarks and errors, which have no title, give way to figures.
        view.add_column(column, justify="left" if column in ("name", "shape", "") else "right", no_wrap=column != "")
    return view


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table as GitHub has it."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of plain text, whose columns stand under each other."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def number(value: float | None, digits: int, unit: str = "") -> str:
    """So many digits behind the point."""
    return NOTHING if value is None else f"{value:,.{digits}f}{unit}"


def small_number(value: float) -> str:
    """Four digits behind the point; what rounds to nothing is said to be less than that."""
    return "<0.0001" if 0 < value < 5e-5 else f"{value:.4f}"
