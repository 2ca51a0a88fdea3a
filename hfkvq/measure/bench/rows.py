"""What a measured line holds, and what all lines of a shape are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .cases import Shape, as_dict
from .timing import Timing

Row = dict[str, Any]
"""One measured line, as it stands in the JSON; see `row_of`."""


def row_of(
    shape: Shape,
    name: str,
    kind: str,
    measured: Timing | str,
    nbytes: int,
    copied: float | None,
    *,
    spec: str = "",
    remark: str = "",
) -> Row:
    """A line of the report.

    Args:
        shape: the shape.
        name: of the format or baseline.
        kind: "format", "baseline", "peer", or "bound", which is faster than any right result of its kernel.
        measured: the time, or what went wrong.
        nbytes: bytes that have to be read or written.
        copied: bandwidth of the copy, bytes a second.
        spec: the store's format.
        remark: what else there is to know.
    """
    row: Row = {**as_dict(shape), "name": name, "kind": kind, "spec": spec, "remark": remark, "bytes": nbytes}
    if isinstance(measured, str):
        return {**row, "error": measured}
    rate = nbytes / (measured.p50 * 1e-6)
    return {
        **row,
        "us": {"p20": measured.p20, "p50": measured.p50, "p80": measured.p80},
        "calls": measured.calls,
        "copies": measured.copies,
        "replays": measured.replays,
        "tb_per_s": rate / 1e12,
        "share_of_copy": rate / copied if copied else None,
    }


def unquantized(row: Row) -> bool:
    """Whether formats are compared with it: a baseline, or another package's kernel over 16-bit keys and values."""
    return row["kind"] == "baseline" or (row["kind"] == "peer" and not row["quantized"])


def add_speedups(rows: Sequence[Row]) -> None:
    """Puts the speed-up against the fastest unquantized kernel of the same shape into each line of one shape."""
    times = {row["name"]: row["us"]["p50"] for row in rows if unquantized(row) and "us" in row}
    if not times:
        return
    fastest = min(times, key=lambda name: times[name])
    for row in rows:
        if "us" in row:
            row |= {"speedup": times[fastest] / row["us"]["p50"], "against": fastest}
