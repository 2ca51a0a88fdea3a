"""Time on the GPU: calls captured in a CUDA graph, cold caches, quantiles over replays."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

REPLAYS = 30
AIM_US = 5000.0
"""Length of one replay: long beside the gap between two of them and the resolution of events."""

COLD = 4
"""Bytes that pass between two reads of the same byte, in sizes of the L2 cache.

Were eviction random, 2 % of the reads would still hit: h = exp(-4 (1 - h)).
"""

MOST_COPIES = 512

METHOD = (
    "Time of one call, from the launch to the merged output, on the GPU. Calls are captured in a CUDA graph, which is "
    f"replayed back to back; a replay lasts some {AIM_US / 1000:g} ms and is divided by its calls. Quantiles are over "
    f"replays; the first is dropped. Caches are cold: successive calls read different copies of keys and values (or "
    f"store), as many as make {COLD} times the L2 cache; the query is one and the same. Formats and baselines alike."
)


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of a call.

    Attributes:
        p20: a fifth of the replays were faster.
        p50: median.
        p80: a fifth of the replays were slower.
        calls: calls in a graph.
        copies: copies of the data that they took turns with.
        replays: replays that the quantiles are over.
    """

    p20: float
    p50: float
    p80: float
    calls: int
    copies: int
    replays: int


def copies_for(nbytes: int, cache: int) -> int:
    """Copies of data of ``nbytes`` that an L2 cache of ``cache`` bytes does not keep."""
    return max(1, min(MOST_COPIES, math.ceil(COLD * cache / max(nbytes, 1))))


def cache_size(device: torch.device) -> int:
    """Bytes of the L2 cache."""
    return torch.cuda.get_device_properties(device).L2_cache_size


def quantiles(times: Sequence[float]) -> tuple[float, float, float]:
    """20 %, 50 % and 80 %."""
    if len(times) == 1:
        return times[0], times[0], times[0]
    tenths = statistics.quantiles(times, n=10, method="inclusive")
    return tenths[1], tenths[4], tenths[7]


def _capture(calls: Sequence[Callable[[], object]], rounds: int, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(rounds):
            for call in calls:
                call()
    return graph


def _replays(graph: torch.cuda.CUDAGraph, count: int, stream: torch.cuda.Stream) -> list[float]:
    """Microseconds of each of ``count`` replays, after one to warm up."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    with torch.cuda.stream(stream):
        # No call waits for the GPU in between, so launching a replay hides behind the one before.
        for event in events:
            graph.replay()
            event.record()
    stream.synchronize()
    return [1e3 * before.elapsed_time(after) for before, after in pairwise(events)]


def time_calls(calls: Sequence[Callable[[], object]], replays: int = REPLAYS, aim: float = AIM_US) -> Timing:
    """Times calls that do the same on different copies of the data."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # Compiles, and lets libraries plan, outside the graph.
        for call in calls:
            call()
    stream.synchronize()
    graph, rounds = _capture(calls, 1, stream), 1
    more = math.ceil(aim / max(statistics.median(_replays(graph, 3, stream)), 1.0))
    if more > 1:
        graph.reset()
        graph, rounds = _capture(calls, more, stream), more
    count = rounds * len(calls)
    p20, p50, p80 = (time / count for time in quantiles(_replays(graph, replays, stream)))
    graph.reset()
    return Timing(p20, p50, p80, count, len(calls), replays)


def copy_bandwidth(device: torch.device) -> tuple[int, Timing]:
    """Bytes (read and written) and time of a device-to-device copy too large for any cache."""
    free, _ = torch.cuda.mem_get_info(device)
    # `copy_` of bytes, in a graph, reached two thirds of this on an H200.
    source = torch.zeros(min(2**31, free // 4) // 4, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes, time_calls([lambda: torch.bitwise_not(source, out=target)])


def first_line(error: BaseException) -> str:
    """Error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]
