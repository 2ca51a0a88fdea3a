"""How many rows fit: doubling until memory is full, then halving the gap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Row = dict[str, Any]


def search_batch(measure: Callable[[int], Row], first: int = 32, grain: int = 32, most: int = 4096) -> list[Row]:
    """Measures batches until the largest that fits is known, to ``grain`` rows or a quarter of itself.

    Args:
        measure: a batch's row; one that did not fit has "oom" true, one that failed otherwise an "error".
        first: batch to begin with.
        grain: a multiple of which is looked for once batches are large.
        most: no more rows than this.

    Returns:
        All rows in the order measured. Any other failure ends the search.
    """
    rows: list[Row] = []
    good, bad, batch = 0, 0, min(first, most)
    while batch not in (good, bad):
        row = measure(batch)
        rows.append(row)
        if row.get("oom"):
            bad = batch
        elif "error" in row:
            break
        else:
            good = batch
        if not bad:
            batch = min(2 * batch, most)
        elif not good:
            batch = bad // 2
        else:
            near = min(grain, max(good // 4, 1))
            middle = (good + bad) // 2 // near * near
            batch = middle if good < middle < bad else good
    return rows


def largest(rows: list[Row]) -> Row | None:
    """The largest batch that ran, and the best rate of any: None where none ran."""
    ran = [row for row in rows if "error" not in row]
    if not ran:
        return None
    best = max(ran, key=lambda row: row["tokens_per_s"])
    return {
        "largest": max(row["batch"] for row in ran),
        "best_batch": best["batch"],
        "tokens_per_s": best["tokens_per_s"],
        "full": any(row.get("oom") for row in rows),
    }
