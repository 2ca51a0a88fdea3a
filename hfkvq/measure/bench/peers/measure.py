"""Peers are held against the reference before they are timed; a wrong one is not timed, and the others go on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..baselines import SEARCH_REPLAYS
from ..cases import Shape
from ..checks import error_of
from ..rows import Row, row_of
from ..timing import Timing, cache_size, copies_for, first_line, time_calls, time_launches
from .peer import Peer, Prepared

CONTEXT = 4096
"""Tokens that peers are checked at, of two rows: splits of theirs have to be merged."""

MOST_QUERIES = 64
"""Queries that they are checked with at most: the reference's logits are in memory."""

UNGRAPHED = "launched one by one, not in a graph"

Data = tuple[Tensor, Tensor, Tensor]
Findings = Mapping[str, Mapping[str, float | str]]
"""By peer and variant: the error, or why it is not timed."""

# Packages of others raise what they like; a peer that fails must not end the others' run.
FAILURES = (Exception,)


def plain(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """PyTorch's attention (B, Hq, Q, D), causal and aligned to the newest."""
    queries, columns = query.shape[2], keys.shape[2]
    seen = torch.ones(queries, columns, dtype=torch.bool, device=query.device).tril(columns - queries)
    mask = None if queries == 1 else seen
    return F.scaled_dot_product_attention(query, keys, values, mask, scale=scaling, enable_gqa=True)


def reference(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """Attention in fp32: (B, Hq, Q, D)."""
    return plain(query.float(), keys.float(), values.float(), scaling)


def allowed_of(peer: Peer, shape: Shape, data: Data) -> float:
    """The error that a peer may have: its own bound, or twice that of PyTorch's attention in the query's dtype."""
    if peer.tolerance is not None:
        return peer.tolerance
    return 2 * error_of(plain(*data, shape.scaling), reference(*data, shape.scaling))


def taking(peers: Iterable[Peer], shape: Shape) -> list[Peer]:
    """Those that take as many queries of a row as the shape has."""
    return [peer for peer in peers if shape.queries == 1 or peer.several]


def check_variant(peer: Peer, shape: Shape, data: Data, variant: str) -> float | str:
    """The variant's error against the reference, or why it is not to be timed."""
    query = data[0]
    try:
        prepared = peer.prepare(shape, *data, variant)
        got = prepared.attend(*prepared.cache).reshape(query.shape)
        error = error_of(got, reference(query, *prepared.exact(), shape.scaling))
    except FAILURES as failure:
        return first_line(failure)
    allowed = allowed_of(peer, shape, data)
    return error if error <= allowed else f"wrong: off by {error:.3g} of the output, allowed {allowed:.3g}"


def check_peers(
    peers: Iterable[Peer], shapes: Iterable[Shape], device: torch.device
) -> dict[str, dict[str, float | str]]:
    """Holds every variant of the peers against the reference, on two rows of 4,096 tokens with the shapes' heads."""
    found: dict[str, dict[str, float | str]] = {}
    small = {"batch": 2, "context": CONTEXT}
    for shape in {dataclasses.replace(x, **small, queries=min(x.queries, MOST_QUERIES)): None for x in shapes}:
        data = shape.data(device)
        for peer in taking(peers, shape):
            own = found.setdefault(peer.name, {})
            for variant in peer.variants(shape):
                before, now = own.get(variant), check_variant(peer, shape, data, variant)
                words = [x for x in (before, now) if isinstance(x, str)]
                own[variant] = words[0] if words else max(x for x in (before, now) if isinstance(x, float))
    return found


def _calls(prepared: Prepared, query: Tensor) -> list[Any]:
    """Calls on as many copies of the cache as keep the L2 cache cold."""
    count = copies_for(prepared.read + 2 * query.nbytes, cache_size(query.device))
    copies = [prepared.cache, *(tuple(x.clone() for x in prepared.cache) for _ in range(count - 1))]
    return [partial(prepared.attend, *own) for own in copies]


def measure_peer(
    peer: Peer,
    shape: Shape,
    data: Data,
    replays: int,
    copied: float | None,
    checked: Mapping[str, float | str],
) -> Row:
    """The fastest right variant of a peer at one shape.

    Args:
        peer: it.
        shape: the shape.
        data: query (B, Hq, Q, D), keys and values (B, H, T, D).
        replays: replays of a graph.
        copied: bandwidth of a copy, bytes a second.
        checked: what `check_peers` found of its variants.
    """
    right = [variant for variant in peer.variants(shape) if isinstance(checked.get(variant), float)]
    wrong = [words for words in checked.values() if isinstance(words, str)]
    best: tuple[float, str] | None = None
    failed: list[str] = []
    measured: Timing | str = ""
    read = 0
    for variant in right:
        try:
            timing, read = _time(peer, shape, data, variant, SEARCH_REPLAYS if len(right) > 1 else replays)
        except FAILURES as failure:
            failed.append(first_line(failure))
            continue
        measured = timing
        best = min(best or (timing.p50, variant), (timing.p50, variant))
    if best is None:
        measured = (failed + wrong or ["it has no variant for this shape"])[0]
    elif len(right) > 1:
        try:
            measured, read = _time(peer, shape, data, best[1], replays)
        except FAILURES as failure:
            measured = first_line(failure)
    remark = "" if best is None else "; ".join([best[1], *([] if peer.graph else [UNGRAPHED])])
    row = row_of(shape, peer.name, "peer", measured, read + 2 * data[0].nbytes, copied, remark=remark)
    values = data[1].numel() + data[2].numel()
    bits = {"code": sum(peer.code_bits) / 2, "total": 8 * read / values if read else None}
    return {**row, "quantized": peer.quantized, "graph": peer.graph, "bits": bits}


def _time(peer: Peer, shape: Shape, data: Data, variant: str, replays: int) -> tuple[Timing, int]:
    prepared = peer.prepare(shape, *data, variant)
    timed = time_calls if peer.graph else time_launches
    try:
        return timed(_calls(prepared, data[0]), replays), prepared.read
    finally:
        del prepared
        torch.cuda.empty_cache()
