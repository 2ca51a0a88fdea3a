"""The run: every shape, its baselines, then its formats."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hfkvq.caches.store import KVStore
from hfkvq.kernels.arguments import AttentionArguments

from .baselines import measure_baselines
from .cases import Shape, as_dict, bytes_read, fill
from .several import OPEN, measure_prompt
from .split_kv import FAILURES
from .timing import REPLAYS, Timing, cache_size, copies_for, first_line, time_calls

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
        kind: "format", "baseline", or "bound", which is faster than any right result of its kernel.
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


def add_speedups(rows: Sequence[Row]) -> None:
    """Puts the speed-up against the fastest baseline of the same shape into each line of one shape."""
    times = {row["name"]: row["us"]["p50"] for row in rows if row["kind"] == "baseline" and "us" in row}
    if not times:
        return
    fastest = min(times, key=lambda name: times[name])
    for row in rows:
        if "us" in row:
            row |= {"speedup": times[fastest] / row["us"]["p50"], "against": fastest}


def _attend(store: KVStore, query: Tensor, scaling: float) -> Callable[[], Tensor]:
    return lambda: store.attend(query, AttentionArguments(scaling))


def store_calls(store: KVStore, query: Tensor, scaling: float, cache: int) -> list[Callable[[], Tensor]]:
    """Attention over as many copies of a store as keep an L2 cache of ``cache`` bytes cold."""
    count = copies_for(bytes_read(store, query), cache)
    stores = [store, *(copy.deepcopy(store) for _ in range(count - 1))]
    return [_attend(own, query, scaling) for own in stores]


def measure_format(
    shape: Shape, name: str, data: tuple[Tensor, Tensor, Tensor], replays: int, copied: float | None
) -> Row:
    """Measures one format at one shape; what goes wrong is noted in the line and does not stop the others."""
    query, keys, values = data
    spec, nbytes, remark = "", 0, ""
    try:
        if shape.is_prompt:
            found = measure_prompt(shape, name, data, replays)
            return row_of(shape, name, "format", *found[:2], copied, spec=found[2], remark=found[3])
        store = fill(name, keys, values)
        spec, nbytes = store.format.spec, bytes_read(store, query)
        measured: Timing | str = time_calls(store_calls(store, query, shape.scaling, cache_size(query.device)), replays)
    except FAILURES as error:
        measured = first_line(error)
    return row_of(shape, name, "format", measured, nbytes, copied, spec=spec, remark=remark)


def measure_shape(
    shape: Shape,
    formats: Sequence[str],
    device: torch.device,
    copied: float | None,
    replays: int = REPLAYS,
    progress: Callable[[str], None] = lambda name: None,
) -> list[Row]:
    """All lines of a shape, baselines first.

    Args:
        shape: the shape.
        formats: names.
        device: a CUDA device.
        copied: bandwidth of a copy, bytes a second.
        replays: replays of each graph.
        progress: is told the name of what comes next.
    """
    rows = list(_measure_shape(shape, formats, device, copied, replays, progress))
    add_speedups(rows)
    return rows


def _measure_shape(
    shape: Shape,
    formats: Sequence[str],
    device: torch.device,
    copied: float | None,
    replays: int,
    progress: Callable[[str], None],
) -> Iterator[Row]:
    progress("baselines")
    try:
        data = query, keys, values = shape.data(device)
        dense = keys.nbytes + values.nbytes
        copies = [(keys, values)]
        copies += [(keys.clone(), values.clone()) for _ in range(copies_for(dense, cache_size(device)) - 1)]
    except torch.OutOfMemoryError as error:
        yield from (row_of(shape, name, "format", first_line(error), 0, copied) for name in formats)
        return
    for name, measured, remark in measure_baselines(shape, query, copies, replays):
        kind = "bound" if remark == OPEN else "baseline"
        yield row_of(shape, name, kind, measured, dense + 2 * query.nbytes, copied, remark=remark)
    del copies
    for name in formats:
        progress(name)
        yield measure_format(shape, name, data, replays, copied)
        # Stores of many shapes leave holes that the next large one may not fit in.
        torch.cuda.empty_cache()
