"""Launches that are remembered: those that would be made afresh, with the tensors of the call."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton import knobs

from hfkvq.kernels import PageFormat, append, decode_attention, seal_side, use_interpreter
from hfkvq.kernels.decode import LENGTH
from hfkvq.kernels.dispatch import _enabled
from hfkvq.kernels.triton import configs
from hfkvq.kernels.triton import launch as launch_module
from hfkvq.kernels.triton.launch import Launch, is_watched
from tests.kernels import test_append, test_seal
from tests.kernels.stores import Case, assert_as_good_as_torch, attend, build

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
CPU = torch.device("cpu")


class Kernel:
    """Stands in for a kernel and its variants, by number: notes what Triton was given, and what went past it."""

    arg_names = ("new", "stays", "again", "pair", "n")

    def __init__(self) -> None:
        self.through: list[Any] = []
        self.past: list[Any] = []

    def __getitem__(self, grid):
        def launch(*args, **constants):
            self.through.append(args)
            variant = type("Variant", (), {"packed_metadata": (), "function": len(self.through) - 1})()
            variant.run = lambda *args: self.past.append((args[4], args[9:]))
            return variant

        return launch


def stand_in(monkeypatch) -> Kernel:
    """A kernel without a GPU, and nothing around it."""
    active = SimpleNamespace(get_current_stream=lambda index: 0)
    for name, other in (("driver", SimpleNamespace(active=active)), ("load", id), ("settle_name", id)):
        monkeypatch.setattr(launch_module, name, other)
    return Kernel()


def test_each_dtype_has_a_variant_of_its_own(monkeypatch):
    """Of a launch that is kept for several, and of a bound one: a variant would write past tensors of another dtype."""
    kernel = stand_in(monkeypatch)
    launch = Launch(kernel, (2,), {"n": 7}, {}, CPU, lambda given: (*given, *given[:1], ()))
    kinds = (F32, BF16, F16)
    held = torch.zeros(16)
    bound = launch.bound(None, held)
    for again in range(2):
        for at, kind in enumerate(kinds):
            launch(torch.zeros(16, dtype=kind), held)
            bound(torch.zeros(16, dtype=kind))
            assert len(kernel.through) == (len(kinds) if again else at + 1)
            # The second of a kind goes past Triton, with the variant of the first.
            assert [variant for variant, _ in kernel.past] == [at] * (1 + again)
            kernel.past.clear()


@pytest.mark.parametrize("first", [0, 1])
def test_bound_launches_ask_the_tensors_that_come_alone(monkeypatch, first):
    """Beside one of any alignment; newcomers that are not aligned to 16 bytes have a variant of their own."""
    memory, kernel = torch.zeros(64), stand_in(monkeypatch)
    assert memory.data_ptr() % 16 == 0
    launch = Launch(kernel, (2,), {"n": 7}, {}, CPU, lambda given: (given[0], given[1], given[0], (given[2], given[1])))
    held = memory[first:], memory[8:]
    bound = launch.bound(None, *held)
    stays, other = (x.data_ptr() for x in held)
    for at, variant, seen in ((12, None, 1), (4, 0, 1), (2, None, 2), (6, 1, 2), (8, 0, 2)):
        bound(memory[at:])
        assert len(kernel.through) == seen
        address = memory[at:].data_ptr()
        past = [] if variant is None else [(variant, (address, stays, address, (other, stays), 7))]
        assert kernel.past == past
        kernel.past.clear()
    assert all(args[1] is held[0] for args in kernel.through)


@pytest.mark.parametrize("when", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_are_noticed(monkeypatch, when):
    """Profilers set them; without one, launches take the short way."""
    hooks = knobs.HookChain()
    assert not is_watched()
    monkeypatch.setattr(knobs.runtime, when, hooks)
    assert not is_watched()
    hooks.add(print)
    assert is_watched()
    monkeypatch.setattr(knobs.runtime, when, print)
    assert is_watched()
    monkeypatch.setattr(knobs.runtime, when, None)
    assert not is_watched()


# Plans of launches: lru_cache keeps them by all that their functions are given.


@pytest.fixture
def noted(monkeypatch):
    """Launches as they are made, and as they run, without effect: kernel, grid and constants."""
    made, ran, init = [], [], Launch.__init__

    def making(self, *args, **options):
        made.append(self)
        init(self, *args, **options)

    def running(self, *tensors):
        ran.append((self._kernel.__name__, self.grid, {name: repr(x) for name, x in self.constants.items()}))

    monkeypatch.setattr(Launch, "__init__", making)
    monkeypatch.setattr(Launch, "__call__", running)
    # Plans of this test alone, since they launch nothing.
    configs.renew()
    with use_interpreter():
        yield made, ran
    configs.renew()


def seal_some(pool, seed):
    """Seals pages of new tensors, in pools of another size."""
    fmt = PageFormat.parse("2c8p16+4x8+16x8")
    parts, table, count, new, *rest, widths = test_seal.arguments(fmt.spec, "keys", 32, torch.float16)
    parts = [torch.cat([x, *[x[:1]] * pool]) for x in parts]
    seal_side(parts, table, count, new, rest[0] + seed, rest[1], fmt, "keys", widths=widths)


def test_calls_that_are_alike_share_a_plan(noted):
    """Plans do not depend on tensors, alignments and pools, so a store that grows makes none in its steps."""
    made, ran = noted
    for again in range(4):
        work = Work(CPU, F16, again % 2, again)
        if again == 3:
            # Channels that do not lie side by side: queries are copied.
            work.memory[7] = work.memory[7].repeat_interleave(2, -1)[..., ::2]
        work.do()
        seal_some(again, again)
        assert again == 0 or not made
        made.clear()
    assert {"append_kernel", "decode_kernel", "seal_channel_kernel"} <= {name for name, *_ in ran}


# Kernels, several times over: tensors are new each time.

KINDS = ((BF16, 0), (F16, 0), (BF16, 1), (F16, 1))
"""Dtype of the model, and elements by which tensors miss a multiple of 16 bytes."""


@pytest.fixture
def prepared(monkeypatch):
    """Launches that have gone through Triton."""
    note, seen = Launch._note, []

    def noting(self, *args):
        seen.append(self)
        note(self, *args)

    monkeypatch.setattr(Launch, "_note", noting)
    return seen


def placed(x: Tensor, device: torch.device, shift: int = 0) -> Tensor:
    """A copy that begins so many elements into its memory."""
    plain = x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
    memory = torch.zeros(x.numel() + shift, dtype=plain.dtype, device=device)
    return memory[shift:].view(x.shape).copy_(plain).view(x.dtype)


class Work:
    """New tokens and attention to others, in memory that is filled anew time after time."""

    def __init__(self, device, dtype=BF16, shift=0, seed=0):
        self.case, self.store = dataclasses.replace(CASE, dtype=dtype), test_append.store_of(4, 64, 16)
        self.device, self.dtype = device, dtype
        tensors = self.tensors(seed)
        # Pages are aligned in their pools: kernels read their codes by words.
        first = len(tensors) - len(self.layer.runs)
        self.memory = [placed(x, device, shift if at < first else 0) for at, x in enumerate(tensors)]

    def tensors(self, seed):
        self.layer = build(self.case, seed)
        new, counters, windows = test_append.arguments(3, 4, dtype=self.dtype)
        for x in new:
            x.normal_()
        counters[LENGTH] += seed
        self.expected = [counters.clone(), *(x.clone() for x in windows)]
        with _enabled("cpu", enabled=False):
            append(*new, self.expected[0], self.expected[1:], self.store)
        return [*new, counters, *windows, self.layer.q, self.layer.counters, *self.layer.windows, *self.layer.runs]

    def stage(self, seed):
        return [x.to(self.device) for x in self.tensors(seed)]

    def fill(self, staged):
        for own, new in zip(self.memory, staged, strict=True):
            own.copy_(new)

    def do(self):
        keys, values, counters, *rest = self.memory
        append(keys, values, counters, rest[:4], self.store)
        q, counters, *rest = rest[4:]
        return decode_attention(q, counters, rest[:4], rest[4:], None, None, 0.125, 0.0, self.case.store)

    def check(self, out):
        for a, b in zip(self.memory[2:], self.expected, strict=False):
            assert torch.equal(test_append.bits(a.cpu()), test_append.bits(b))
        exact, plain = (attend(self.layer, kind, 0.125) for kind in (torch.float64, self.dtype))
        assert_as_good_as_torch(out, exact, plain)


CASE = Case(
    runs="2c32p32/2t64p32", heads=1, pages=2, tail=(40, 40), lengths=[4 + 32 + 17, 7], keys=[[32], [0]],
    values=[[40], [0]],
)  # fmt: skip


def test_every_alignment_and_dtype_has_a_variant(triton_backend, prepared):
    """Launches of all kinds take turns; from the second turn on each finds its variant, but under the interpreter."""
    for seed, kind in enumerate(KINDS * 3 if triton_backend.type == "cuda" else KINDS[::3]):
        prepared.clear()
        work = Work(triton_backend, *kind, seed)
        work.check(work.do())
        assert seed < len(KINDS) or not prepared


@pytest.fixture
def cuda():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda")


@pytest.mark.gpu
def test_graphs_record_what_is_remembered(cuda, prepared):
    work = Work(cuda)
    work.check(work.do())
    prepared.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = work.do()
    for seed in (1, 2, 0):
        work.fill(work.stage(seed))
        graph.replay()
        work.check(out)
    assert not prepared


@pytest.mark.gpu
def test_launches_are_on_the_current_stream(cuda, prepared):
    """What comes before them there takes its time."""
    work, stream = Work(cuda), torch.cuda.Stream()
    work.check(work.do())
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        # So that its memory is there: to ask for more may mean to wait.
        work.do()
    prepared.clear()
    for seed in (1, 2):
        staged = work.stage(seed)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)
            work.fill(staged)
            out = work.do()
            assert not stream.query()
        stream.synchronize()
        work.check(out)
    assert not prepared


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
def test_launches_are_on_the_gpu_of_the_tensors(cuda, prepared):
    """Whichever is the current one: each has its own plans."""
    works = [Work(torch.device("cuda", at)) for at in (0, 1)]
    for seed in (1, 2, 3):
        prepared.clear()
        for work in works:
            with torch.cuda.device(seed % 2):
                work.fill(work.stage(seed))
                work.check(work.do())
    assert not prepared
