"""Decode kernels of other packages beside this library's, each in its own layout and with its own best settings.

    PYTHONPATH=. python -m evals.other_kernels --json FILE [--sizes 32x32k,1x8k] [--peers vllm-fa3,flashinfer]

Packages that are not installed are named and left out. Every variant of a peer is first held against an fp32 reference
over the keys and values that its cache stands for; a wrong one is not timed, and the others go on. Of the right ones
the fastest counts. The file has the rows of `evals/kernel_bench.py --json` with further baselines (plain Triton, the
best of a few settings) and peers; `evals/docs.py --write` puts its tables into the documents.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from evals import kernel_bench as kernels
from evals.kernel_bench import (
    AIM_US,
    REPLAYS,
    Row,
    Timing,
    add_speedups,
    cache_size,
    copies_for,
    error_of,
    first_line,
    measure_shape,
    quantiles,
    row_of,
    rows_at,
    time_calls,
)
from evals.kernel_cases import DEFAULT_SHAPES, FORMATS, Shape, check, parse_size
from evals.other_kernels.bitdecoding import BitDecoding2, BitDecoding4
from evals.other_kernels.flash import FlashAttention2, FlashAttention3, FlashAttention3FP8
from evals.other_kernels.flashinfer import FlashInfer, FlashInferFP8
from evals.other_kernels.kitty import Kitty, KittyPro
from evals.other_kernels.kivi import Kivi2, Kivi4
from evals.other_kernels.peer import Peer, Prepared
from evals.other_kernels.split_kv import FAILURES, GRID, Tuning, split_kv
from evals.other_kernels.turboquant import TurboQuant3, TurboQuant4, TurboQuantK8V4
from hfkvq.terminal import make_console

PEERS: dict[str, type[Peer]] = {
    kind.name: kind
    for kind in (
        FlashAttention3,
        FlashAttention2,
        FlashInfer,
        FlashAttention3FP8,
        FlashInferFP8,
        TurboQuantK8V4,
        TurboQuant4,
        TurboQuant3,
        BitDecoding4,
        BitDecoding2,
        Kivi4,
        Kivi2,
        KittyPro,
        Kitty,
    )
}
"""Peers by name; unquantized ones first."""

SEARCH_REPLAYS = 5

CONTEXT = 4096
"""Tokens that peers are checked at, of two rows: splits of theirs have to be merged."""

MOST_QUERIES = 64
"""Queries that they are checked with at most: the reference's logits are in memory."""

Data = tuple[Tensor, Tensor, Tensor]
Findings = Mapping[str, Mapping[str, float | str]]
"""Checks by peer and variant: the error, or why it is not timed."""


def present(names: Iterable[str]) -> list[Peer]:
    """Peers that can be loaded; prints why others cannot."""
    found = []
    for name in names:
        peer = PEERS[name]()
        if reason := peer.missing():
            print(f"{name}: {reason}")
        else:
            found.append(peer)
    return found


def time_launches(calls: Sequence[Callable[[], object]], replays: int = REPLAYS) -> Timing:
    """Times calls that cannot be captured in a graph: launched one by one on the default stream, back to back.

    Where the GPU is done sooner than the next call is launched, this is the time of launching.
    """
    for call in calls:
        call()

    def timed(rounds: int, count: int) -> list[float]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            for _ in range(rounds):
                for call in calls:
                    call()
            event.record()
        events[-1].synchronize()
        return [1e3 * before.elapsed_time(after) for before, after in pairwise(events)]

    rounds = max(1, math.ceil(AIM_US / max(statistics.median(timed(1, 3)), 1.0)))
    count = rounds * len(calls)
    p20, p50, p80 = (time / count for time in quantiles(timed(rounds, replays)))
    return Timing(p20, p50, p80, count, len(calls), replays)


def plain_triton(shape: Shape, data: Data, replays: int, copied: float | None) -> Row:
    """Split-KV attention in plain Triton over dense keys and values, with the fastest of `GRID`."""
    query, keys, values = data
    nbytes = keys.nbytes + values.nbytes + 2 * query.nbytes
    copies = [(keys, values)]
    copies += [(keys.clone(), values.clone()) for _ in range(copies_for(nbytes, cache_size(query.device)) - 1)]

    def time(tuning: Tuning, replays: int) -> Timing:
        return time_calls([partial(split_kv, query, *each, shape.scaling, tuning) for each in copies], replays)

    best: tuple[float, Tuning] | None = None
    for tuning in GRID:
        try:
            found = time(tuning, SEARCH_REPLAYS).p50
        except FAILURES:
            # More loads in flight than this GPU's shared memory holds.
            continue
        best = min(best or (found, tuning), (found, tuning))
    if best is None:
        return row_of(shape, "plain Triton", "baseline", "no variant runs on this GPU", nbytes, copied)
    tuning = best[1]
    remark = f"{tuning.programs_per_sm} programs a multiprocessor, {tuning.stages} stages, {tuning.warps} warps"
    return row_of(shape, "plain Triton", "baseline", time(tuning, replays), nbytes, copied, remark=remark)


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
    """Peers that take as many queries of a row as the shape has."""
    return [peer for peer in peers if shape.queries == 1 or peer.several]


def check_variant(peer: Peer, shape: Shape, data: Data, variant: str) -> float | str:
    """The variant's error against the reference, or why it is not to be timed."""
    query = data[0]
    try:
        prepared = peer.prepare(shape, *data, variant)
        got = prepared.attend(*prepared.cache).reshape(query.shape)
        error = error_of(got, reference(query, *prepared.exact(), shape.scaling))
    except Exception as failure:
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
        except Exception as failure:
            failed.append(first_line(failure))
            continue
        measured = timing
        best = min(best or (timing.p50, variant), (timing.p50, variant))
    if best is None:
        measured = (failed + wrong or ["it has no variant for this shape"])[0]
    elif len(right) > 1:
        try:
            measured, read = _time(peer, shape, data, best[1], replays)
        except Exception as failure:
            measured = first_line(failure)
    remark = "" if best is None else best[1] if peer.graph else f"{best[1]}; launched one by one, not in a graph"
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


def main(given: Sequence[str] | None = None) -> dict[str, Any]:
    """Measures, prints tables, and returns the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=",".join(f"{rows}x{tokens}" for rows, tokens in DEFAULT_SHAPES))
    parser.add_argument("--formats", default=",".join(FORMATS), help="of this library")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--replays", type=int, default=REPLAYS)
    parser.add_argument("--json", type=Path, help="written again after each row")
    asked = parser.parse_args(given)
    heads = (asked.heads, asked.kv_heads, asked.head_dim)
    shapes = [Shape(*parse_size(size), *heads) for size in asked.sizes.split(",")]
    formats = tuple(name for name in asked.formats.split(",") if name)
    check(formats, shapes)
    device, peers = torch.device("cuda", 0), present(name for name in asked.peers.split(",") if name)
    checked = check_peers(peers, shapes, device)
    record = kernels.new_record(device, {"self_check": kernels.self_check(formats, shapes, device), "peers": checked})
    copied = record["copy"]["tb_per_s"] * 1e12

    def keep(row: Row, shape: Shape) -> None:
        record["rows"].append(row)
        add_speedups(rows_at(record, shape))
        if asked.json:
            kernels.save(record, asked.json)

    # Unquantized kernels and this library's formats come first: whenever the run ends, speed-ups are there.
    for quantized in (False, True):
        for shape in shapes:
            if not quantized:
                for row in measure_shape(shape, formats, device, copied, asked.replays):
                    keep(row, shape)
            data = shape.data(device)
            if not quantized:
                keep(plain_triton(shape, data, asked.replays, copied), shape)
            for peer in peers:
                if peer.quantized is quantized:
                    own = checked.get(peer.name, {})
                    keep(measure_peer(peer, shape, data, asked.replays, copied, own), shape)
            del data
    console = make_console()
    for shape in shapes:
        console.print(kernels.table(rows_at(record, shape)))
    return record


if __name__ == "__main__":
    main()
