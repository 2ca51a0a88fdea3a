"""What timing decides without a GPU, and one timing with one."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from hfkvq.measure.bench import timing
from hfkvq.measure.bench.timing import MOST_COPIES, copies_for, quantiles, time_calls


@pytest.mark.parametrize(("nbytes", "copies"), [(1000, 1), (400, 1), (399, 2), (100, 4), (1, 400), (0, 400)])
def test_copies_make_four_caches(nbytes, copies):
    assert copies_for(nbytes, 100) == copies


def test_copies_have_a_limit():
    assert copies_for(1, 10**9) == MOST_COPIES


def test_quantiles():
    assert quantiles([float(x) for x in range(11)]) == pytest.approx((2.0, 5.0, 8.0))
    assert quantiles([3.0]) == (3.0, 3.0, 3.0)


@pytest.fixture
def pretended_cuda(monkeypatch):
    """Graphs, streams and events over a clock of our own: a call says in ``clock.work`` how long it takes."""
    clock = SimpleNamespace(now=0.0, work=0.0, graphs=[])

    class Graph:
        def __init__(self):
            self.us, self.replays, self.live = 0.0, 0, True
            clock.graphs.append(self)

        def replay(self):
            assert self.live
            self.replays += 1
            # The first one is slow.
            clock.now += self.us * (10 if self.replays == 1 else 1)

        def reset(self):
            self.live = False

    @contextlib.contextmanager
    def capture(graph, stream):
        clock.work = 0.0
        yield
        graph.us = clock.work

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = clock.now

        def synchronize(self):
            pass

        def elapsed_time(self, after):
            return (after.at - self.at) / 1000

    stream = SimpleNamespace(wait_stream=lambda other: None, synchronize=lambda: None)
    for name, value in {
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "CUDAGraph": Graph,
        "graph": capture,
        "Event": Event,
        "mem_get_info": lambda device: (4000, 8000),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return clock


@pytest.mark.parametrize(("us", "copies", "calls"), [(10.0, 3, 501), (10.0, 1, 500), (8000.0, 1, 1), (4000.0, 2, 2)])
def test_a_replay_is_five_milliseconds_of_all_copies_in_turn(pretended_cuda, us, copies, calls):
    order = []

    def call(which):
        order.append(which)
        pretended_cuda.work += us

    timing = time_calls([lambda which=which: call(which) for which in range(copies)], 20)
    assert (timing.p20, timing.p50, timing.p80) == pytest.approx((us, us, us))
    assert (timing.calls, timing.copies, timing.replays) == (calls, copies, 20)
    assert order == [i % copies for i in range(len(order))]
    assert not any(graph.live for graph in pretended_cuda.graphs)


def test_copy_bandwidth_counts_reading_and_writing(pretended_cuda, monkeypatch):
    copy = torch.bitwise_not

    def timed(source, out):
        pretended_cuda.work += 10.0
        return copy(source, out=out)

    monkeypatch.setattr(torch, "bitwise_not", timed)
    nbytes, found = timing.copy_bandwidth(torch.device("cpu"))
    # A quarter of what is free.
    assert nbytes == 2 * 1000
    assert found.p50 == pytest.approx(10.0)


@pytest.mark.gpu
def test_a_call_of_twice_the_size_takes_twice_the_time():
    x = torch.zeros(2**28, dtype=torch.uint8, device="cuda")
    small, large = (time_calls([lambda part=x[:size]: part.add_(1)], 20) for size in (2**27, 2**28))
    assert small.p20 <= small.p50 <= small.p80
    # Wide bounds: others may use the GPU at the same time.
    assert 1.3 < large.p50 / small.p50 < 3.0
    assert small.calls > large.calls >= 1
