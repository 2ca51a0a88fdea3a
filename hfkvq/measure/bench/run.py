"""The run: every shape, its baselines, other packages' kernels, then its formats."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from hfkvq.caches.store import KVStore
from hfkvq.kernels.arguments import AttentionArguments

from .baselines import measure_baselines
from .cases import Shape, bytes_read, fill
from .peers import Peer
from .peers.measure import Findings, measure_peer, taking
from .rows import Row, row_of
from .several import OPEN, measure_prompt
from .split_kv import FAILURES
from .timing import REPLAYS, Timing, cache_size, copies_for, first_line, time_calls


def _attend(store: KVStore, query: Tensor, scaling: float) -> Callable[[], Tensor]:
    return lambda: store.attend(query, AttentionArguments(scaling))


def store_calls(store: KVStore, query: Tensor, scaling: float, cache: int) -> list[Callable[[], Tensor]]:
    """Attention over as many copies of a store as keep an L2 cache of ``cache`` bytes cold."""
    count = copies_for(bytes_read(store, query), cache)
    stores = [store, *(copy.deepcopy(store) for _ in range(count - 1))]
    return [_attend(own, query, scaling) for own in stores]


def measure_format(
    shape: Shape, name: str, data: tuple[Tensor, Tensor, Tensor], replays: int, copied: float | None
) -> Iterator[Row]:
    """Measures one format at one shape; what goes wrong is noted in the line and does not stop the others."""
    query, keys, values = data
    spec, nbytes = "", 0
    try:
        if shape.is_prompt:
            for title, timing, read, spec, remark in measure_prompt(shape, name, data, replays):
                yield row_of(shape, title, "format", timing, read, copied, spec=spec, remark=remark)
            return
        store = fill(name, keys, values)
        spec, nbytes = store.format.spec, bytes_read(store, query)
        measured: Timing | str = time_calls(store_calls(store, query, shape.scaling, cache_size(query.device)), replays)
    except FAILURES as error:
        measured = first_line(error)
    yield row_of(shape, name, "format", measured, nbytes, copied, spec=spec)


def measure_shape(
    shape: Shape,
    formats: Sequence[str],
    device: torch.device,
    copied: float | None,
    replays: int = REPLAYS,
    progress: Callable[[str], None] = lambda name: None,
    peers: Sequence[Peer] = (),
    checked: Findings | None = None,
    baselines: bool = True,
) -> Iterator[Row]:
    """The lines of a shape as they are measured: baselines, other packages' kernels, formats.

    Args:
        shape: the shape.
        formats: names.
        device: a CUDA device.
        copied: bandwidth of a copy, bytes a second.
        replays: replays of each graph.
        progress: is told the name of what comes next.
        peers: other packages' kernels.
        checked: what `check_peers` found of them.
        baselines: whether PyTorch's attention and the plain kernel are measured, too.
    """
    checked = checked or {}
    if baselines:
        progress("baselines")
    try:
        data = query, keys, values = shape.data(device)
        dense = keys.nbytes + values.nbytes
        copies = [(keys, values)]
        more = copies_for(dense, cache_size(device)) - 1 if baselines else 0
        copies += [(keys.clone(), values.clone()) for _ in range(more)]
    except torch.OutOfMemoryError as error:
        yield from (row_of(shape, name, "format", first_line(error), 0, copied) for name in formats)
        return
    for name, measured, remark in measure_baselines(shape, query, copies, replays) if baselines else ():
        kind = "bound" if remark == OPEN else "baseline"
        yield row_of(shape, name, kind, measured, dense + 2 * query.nbytes, copied, remark=remark)
    del copies
    for peer in taking(peers, shape):
        progress(peer.name)
        yield measure_peer(peer, shape, data, replays, copied, checked.get(peer.name, {}))
    for name in formats:
        progress(name)
        yield from measure_format(shape, name, data, replays, copied)
        # Stores of many shapes leave holes that the next large one may not fit in.
        torch.cuda.empty_cache()
