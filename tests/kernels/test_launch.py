"""Launches that are remembered: the variant of the kernel that Triton would choose, with the tensors of the call."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import pkgutil
import random
import re
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from triton import knobs

from hfkvq.kernels import PageFormat, RunView, StoreFormat, append, decode_attention, due, seal, use_interpreter
from hfkvq.kernels import triton as launchers
from hfkvq.kernels.decode import LENGTH, RUNS
from hfkvq.kernels.dispatch import _enabled, reference
from hfkvq.kernels.seal import range_rule
from hfkvq.kernels.step import StepPlan, advance, buffer_bytes, observe, seal_due, settle, views_of_buffer
from hfkvq.kernels.triton import append as append_module
from hfkvq.kernels.triton import configs
from hfkvq.kernels.triton import decode as decode_module
from hfkvq.kernels.triton import launch as launch_module
from hfkvq.kernels.triton import merge as merge_module
from hfkvq.kernels.triton import step as step_module
from hfkvq.kernels.triton.launch import Launch
from hfkvq.kernels.triton.limits import LIMITS, programs_that_fit
from tests.kernels import test_append, test_due, test_seal, test_step
from tests.kernels.stores import Case, assert_as_good_as_torch, attend, build, launch_parameters

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
CPU = torch.device("cpu")


# A launch by itself.


class Kernel:
    """Stands in for a `triton.jit` function: notes what goes through Triton, and what goes past it to which stream."""

    def __init__(self, names: str, interpreted: bool = False) -> None:
        self.arg_names, self.interpreted = names.split(), interpreted
        self.through: list[tuple[Any, ...]] = []
        self.past: list[tuple[Any, ...]] = []
        self.streams: list[str] = []

    def __getitem__(self, grid):
        def launch(*args, **constants):
            self.through.append((grid, args, constants))
            return None if self.interpreted else Compiled(self, len(self.through) - 1)

        return launch


class Compiled:
    """What a `Kernel` compiles to; variants are numbered in the order in which they went through Triton."""

    name, function, packed_metadata = "kernel", "function", "metadata"

    def _init_handles(self):
        """Nothing has to be loaded."""

    def __init__(self, kernel: Kernel, variant: int) -> None:
        self.kernel, self.variant = kernel, variant

    def note(self, grid, args, stream):
        self.kernel.past.append((self.variant, grid, args))
        self.kernel.streams.append(stream)

    def __getitem__(self, grid):
        """As it is called where somebody is to be told."""
        return lambda *args: self.note(grid, args, "any")

    def run(self, *args):
        """As it is called by itself: grid, stream, function, what is known of it, nothing for hooks, arguments."""
        assert args[4:9] == ("function", "metadata", None, None, None)
        self.note(args[:3], args[9:], args[3])


@pytest.fixture
def streams(monkeypatch):
    """Names for the current streams of devices, of which there may be none."""
    active = SimpleNamespace(get_current_stream=lambda index: f"stream of {index}")
    monkeypatch.setattr(launch_module, "driver", SimpleNamespace(active=active))


MEMORY = torch.zeros(64)


def floats(first: int) -> Tensor:
    """Four numbers that begin so many elements behind a multiple of 16 bytes."""
    assert MEMORY.data_ptr() % 16 == 0
    return MEMORY[first : first + 4]


def test_the_first_launch_goes_through_triton_and_later_ones_past_it(streams):
    kernel = Kernel("a b n factor SIZE WIDE")
    # Constants come in any order, and options of the launch among them.
    constants = {"num_warps": 4, "WIDE": True, "SIZE": 16, "maxnreg": 9}
    launch = Launch(kernel, (3, 2), {"factor": 0.5, "n": 7}, constants, CPU)
    first = (floats(0), floats(4))
    launch(*first)
    ((grid, args, given),) = kernel.through
    assert grid == (3, 2, 1)
    assert args[0] is first[0]
    assert args[1] is first[1]
    assert args[2:] == (7, 0.5)
    assert given == constants
    assert not kernel.past
    for own in ((floats(8), floats(0)), first, (floats(12), floats(12))):
        launch(*own)
        assert kernel.past.pop() == (0, (3, 2, 1), (own[0].data_ptr(), own[1].data_ptr(), 7, 0.5, 16, True))
    assert len(kernel.through) == 1


def test_every_alignment_has_a_variant(streams):
    """As many as there are choices of the tensors that begin at a multiple of 16 bytes."""
    kernel = Kernel("a b c n SIZE")
    launch = Launch(kernel, (1,), {"n": 5}, {"SIZE": 2}, CPU)
    choices = list(itertools.product((0, 1), repeat=3))
    for choice in choices:
        launch(*map(floats, choice))
    assert len(kernel.through) == len(choices)
    assert not kernel.past
    for variant, choice in reversed(list(enumerate(choices))):
        # Elsewhere, but as well aligned, or as badly.
        for aligned, odd in ((4, 2), (8, 7)):
            own = [floats(odd if bad else aligned) for bad in choice]
            launch(*own)
            assert kernel.past.pop() == (variant, (1, 1, 1), (*(x.data_ptr() for x in own), 5, 2))
    assert len(kernel.through) == len(choices)


def test_tensors_without_elements_are_aligned(streams):
    """Their address is 0, to Triton as well."""
    kernel = Kernel("a")
    launch = Launch(kernel, (1,), {}, {}, CPU)
    for x in (floats(0), floats(1)[:0], torch.zeros(0)):
        launch(x)
    assert len(kernel.through) == 1
    assert kernel.past == [(0, (1, 1, 1), (0,))] * 2


def test_nests_are_made_of_tensors_and_of_addresses(streams):
    kernel = Kernel("pair none last n SIZE")

    def nest(given):
        return (given[2], given[0]), None, given[1]

    launch = Launch(kernel, (1,), {"n": 7}, {"SIZE": 2}, CPU, nest)
    own = [floats(0), floats(1), floats(2)]
    launch(*own)
    ((_, (pair, none, last, number), _),) = kernel.through
    assert pair[0] is own[2]
    assert pair[1] is own[0]
    assert none is None
    assert last is own[1]
    assert number == 7
    other = [floats(4), floats(5), floats(6)]
    launch(*other)
    a, b, c = (x.data_ptr() for x in other)
    # Three names are the nest's, one is the number's: the constant's is the last.
    assert kernel.past == [(0, (1, 1, 1), ((c, a), None, b, 7, 2))]


def test_the_interpreter_is_asked_every_time():
    kernel = Kernel("a n SIZE", interpreted=True)
    launch = Launch(kernel, (2,), {"n": 3}, {"SIZE": 4}, CPU)
    own = [floats(0), floats(0), floats(4)]
    for x in own:
        launch(x)
    for x, (grid, args, constants) in zip(own, kernel.through, strict=True):
        assert (grid, args[1:], constants) == ((2, 1, 1), (3,), {"SIZE": 4})
        assert args[0] is x
    assert not kernel.past


class Sized(Kernel):
    """Compiles to itself: so many registers and bytes of shared memory. Notes what launches are told of it."""

    name, function = "kernel", "function"

    def __init__(self, registers: int, shared: int) -> None:
        super().__init__("a")
        self.n_regs, self.metadata, self.told = registers, SimpleNamespace(num_warps=1, shared=shared), []
        self.packed_metadata = (1, 1, shared)

    def _init_handles(self):
        """Nothing has to be loaded."""

    def __getitem__(self, grid):
        return lambda *args, **constants: self

    def run(self, *args):
        self.told.append(args[5])


@pytest.mark.parametrize(
    ("gpu", "registers", "shared", "most", "told"),
    [
        # Registers let in twelve.
        ((9, 0), 168, 16384, 8, 28160),
        ((9, 0), 168, 16384, 12, 16384),
        ((9, 0), 168, 16384, 0, 16384),
        # Or eight, or shared memory does.
        ((9, 0), 209, 16384, 8, 16384),
        ((9, 0), 168, 28160, 8, 28160),
        # No more than a launch may have unasked.
        ((9, 0), 168, 16384, 2, 48 << 10),
        # Of a GPU that nothing is known of.
        ((99, 0), 168, 16384, 8, 16384),
    ],
)
def test_programs_beyond_those_planned_are_kept_out(monkeypatch, streams, gpu, registers, shared, most, told):
    monkeypatch.setattr(launch_module, "capability", lambda device: gpu)
    kernel = Sized(registers, shared)
    launch = Launch(kernel, (1,), {}, {}, CPU, most=most)
    for _ in range(2):
        launch(floats(0))
    assert kernel.told == [(1, 1, told)]
    if told > shared and most > 2:
        limits = LIMITS[gpu]
        assert programs_that_fit(limits, registers, 1, told) == most


@pytest.mark.parametrize("when", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_are_told_of_every_launch(monkeypatch, streams, when):
    """Triton's own way tells them, and takes its time for it where there are none."""
    kernel, hooks = Kernel("a"), knobs.HookChain()
    launch = Launch(kernel, (1,), {}, {}, CPU)
    launch(floats(0))
    monkeypatch.setattr(knobs.runtime, when, hooks)
    launch(floats(0))
    hooks.add(print)
    launch(floats(0))
    hooks.remove(print)
    launch(floats(0))
    for hook in (print, None):
        monkeypatch.setattr(knobs.runtime, when, hook)
        launch(floats(0))
    assert kernel.streams == ["stream of None", "any", "stream of None", "any", "stream of None"]
    assert len({repr(past) for past in kernel.past}) == 1


@pytest.mark.parametrize("grid", [(5,), (5, 2), (5, 2, 3)])
def test_grids_have_three_axes(streams, grid):
    kernel = Kernel("a")
    launch = Launch(kernel, grid, {}, {}, CPU)
    for _ in range(2):
        launch(floats(0))
    assert kernel.through[0][0] == kernel.past[0][1] == (*grid, 1, 1)[:3]


@pytest.mark.parametrize(("index", "entered"), [(0, []), (1, [1, "left"]), (None, [])])
def test_launches_are_on_the_device_of_the_tensors(monkeypatch, streams, index, entered):
    """Another device becomes the current one for a launch: for the first one and for those that are remembered."""
    seen = []

    @contextlib.contextmanager
    def enter(device):
        seen.append(device)
        yield
        seen.append("left")

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", enter)
    kernel = Kernel("a")
    launch = Launch(kernel, (1,), {}, {}, torch.device("cuda", index))
    for _ in range(2):
        launch(floats(0))
        assert seen == entered
        seen.clear()
    assert (len(kernel.through), len(kernel.past)) == (1, 1)
    assert kernel.streams == [f"stream of {index or 0}"]


# Launchers and their plans: nothing runs, but all that would is noted.

MODULES = [import_module(x.name) for x in pkgutil.walk_packages(launchers.__path__, f"{launchers.__name__}.")]


def keeps_launches(x: Any) -> bool:
    """Whether this is a function that remembers what it returns, which is launches."""
    return hasattr(x, "cache_info") and bool(re.search("Launch|Plan", str(x.__wrapped__.__annotations__["return"])))


PLANS = [(module, name) for module in MODULES for name, x in vars(module).items() if keeps_launches(x)]
"""Functions that remember launches, wherever they are called."""


def test_launchers_remember_launches():
    """Or what follows would not see them."""
    found = {module.__name__.removeprefix(f"{launchers.__name__}.") for module, _ in PLANS}
    assert found >= {"append", "decode", "due", "merge", "seal.launch", "step"}


class Ran(NamedTuple):
    """What a GPU would have run.

    Attributes:
        kernel: its name.
        grid: programs.
        kinds: dtype and alignment of its tensors: with numbers and constants, what chooses the variant.
        places: of its tensors among those that the launch was given.
        numbers: as they are written, since 1, 1.0 and True are equal, but not to Triton.
        constants: likewise, by name; options of the launch as well.
    """

    kernel: str
    grid: tuple[int, ...]
    kinds: Any
    places: Any
    numbers: str
    constants: dict[str, str]


def each(x, do):
    """Nested tuples with something else in the place of all but None."""
    return tuple(each(y, do) for y in x) if isinstance(x, tuple) else None if x is None else do(x)


class Noted(Launch):
    """A launch of a kernel that does nothing but note what it is given."""

    ran: list[Ran]
    remembered: list[Ran]

    def __init__(self, kernel, grid, numbers, constants, device, nest=None, most=0):
        self.real, self.arg_names, self.given = kernel, kernel.arg_names, ()
        self.written = {name: repr(value) for name, value in constants.items()}
        super().__init__(self, grid, numbers, constants, device, nest, most)

    def __call__(self, *tensors):
        self.given = tensors
        super().__call__(*tensors)

    def __getitem__(self, grid):
        """As the kernel."""

        def launch(*args, **constants):
            assert {name: repr(value) for name, value in constants.items()} == self.written
            count = len(self.arg_names) - len(set(self.arg_names) & set(constants))
            assert len(args) == count
            own, numbers = args[: count - len(self.numbers)], args[count - len(self.numbers) :]
            kinds = each(own, lambda x: (x.dtype, x.data_ptr() % 16 == 0))
            self.ran.append(self._ran(grid, kinds, each(own, Tensor.data_ptr), numbers))
            return NotedVariant(self, kinds)

        return launch

    def _ran(self, grid, kinds, addresses, numbers):
        # The first of several that begin at one place.
        place = {x.data_ptr(): at for at, x in reversed(list(enumerate(self.given)))}
        return Ran(self.real.__name__, grid, kinds, each(addresses, place.get), repr(numbers), self.written)


class NotedVariant:
    """What the kernel of a `Noted` compiles to."""

    def __init__(self, launch, kinds):
        self.launch, self.kinds = launch, kinds

    name, function, packed_metadata = "noted", "function", None

    def _init_handles(self):
        """Nothing has to be loaded."""

    def run(self, *args):
        self[args[:3]](*args[9:])

    def __getitem__(self, grid):
        def launch(*args):
            count, known = len(self.kinds), self.launch.written
            end = count + len(self.launch.numbers)
            assert [*map(repr, args[end:])] == [known[name] for name in self.launch.arg_names[end:]]
            ran = self.launch._ran(grid, self.kinds, args[:count], args[count:end])
            self.launch.ran.append(ran)
            self.launch.remembered.append(ran)

        return launch


@pytest.fixture
def noted(monkeypatch, streams):
    """`Noted` launches; its lists are of this test alone, and so are the plans."""
    forget()
    for module in MODULES:
        if hasattr(module, "Launch"):
            monkeypatch.setattr(module, "Launch", Noted)
    # What the interpreter cannot do, or would take its time for.
    for module in (append_module, step_module):
        monkeypatch.setattr(module, "is_misrounded", lambda *_: False)
    monkeypatch.setattr(decode_module, "hadamard", reference("hadamard"))
    monkeypatch.setattr(Noted, "ran", [], raising=False)
    monkeypatch.setattr(Noted, "remembered", [], raising=False)
    with use_interpreter():
        yield Noted
    forget()


def forget() -> None:
    """Forgets all plans."""
    for plan in PLANS:
        getattr(*plan).cache_clear()


def made() -> int:
    """Plans that have been made so far."""
    return sum({getattr(*plan): getattr(*plan).cache_info().misses for plan in PLANS}.values())


def what_runs(call, **asked):
    """What a call launches."""
    before = len(Noted.ran)
    call(**asked)
    return Noted.ran[before:]


def what_runs_afresh(call, **asked):
    """What a call launches where nothing is remembered."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in PLANS:
            patch.setattr(module, name, getattr(module, name).__wrapped__)
        return what_runs(call, **asked)


ORDERS: dict[str, tuple[int, ...]] = {
    "slice": (1 << 18, 1 << 14, 1 << 8, 1),
    "other rows": (1 << 17, 1 << 14, 1 << 8, 1),
    "other heads": (1 << 18, 1 << 13, 1 << 8, 1),
    "other tokens": (1 << 18, 1 << 14, 1 << 9, 1),
    "other channels": (1 << 18, 1 << 14, 1 << 8, 2),
    "contiguous": (),
}
"""Strides of (B, H, T, D). Those of a slice tell nothing of its shape: a plan cannot know that by them."""


def blank(*shape: int, dtype: torch.dtype = F32, order: str = "contiguous", shift: int = 0) -> Tensor:
    """Memory of some strides, that begins so many elements behind a multiple of 16 bytes."""
    plain = torch.uint8 if dtype == torch.float8_e4m3fn else dtype
    strides = ORDERS[order] or torch.empty(shape, device="meta").stride()
    size = 1 + sum(max(size - 1, 0) * stride for size, stride in zip(shape, strides, strict=True))
    return torch.empty(size + shift, dtype=plain).as_strided(shape, strides, shift).view(dtype)


def call_append(batch, heads, tokens, dims, dtype, other, held, sink, tails, rotate, keys, values, shift=0):
    new = [
        blank(batch, heads, tokens, dim, dtype=own or dtype, order=order, shift=shift)
        for dim, own, order in zip(dims, (None, other), (keys, values), strict=True)
    ]
    windows = [
        blank(batch, heads, size, dim, dtype=held, shift=shift)
        for size, dim in zip((sink, sink, *tails), (*dims, *dims), strict=True)
    ]
    counters = blank(RUNS + 2, batch, dtype=torch.int32, shift=shift)
    append(*new, counters, windows, test_append.store_of(sink, *rotate))


def call_due(batch, sink, tails, local, unit, most, shift=0):
    due(blank(RUNS + 2, batch, dtype=torch.int32, shift=shift), sink, tails, local, unit, most)


def call_seal(batch, heads, spec, dim, dtype, held, columns, order, blocks, pages, given, shift=0, pool=9):
    side, rule, *names = given.split(", ")
    fmt = PageFormat.parse(spec)
    page, tokens = fmt.page_size, pages * fmt.page_size
    shapes = fmt.shapes(side, heads, dim).values()
    factors = {"norm": F16, "norm of f32": F32}
    norm = next((factors[name] for name in names if name in factors), None)
    seal(
        [blank(pool, *shape, dtype=own or held, shift=shift) for shape, own in shapes],
        blank(batch, blocks, dtype=torch.int32, shift=shift),
        *(blank(batch, dtype=torch.int32, shift=shift) for _ in range(2)),
        blank(batch, heads, columns, dim, dtype=dtype, order=order, shift=shift),
        blank(batch, tokens, dtype=torch.int32, shift=shift),
        blank(batch, heads, pages, dim, dtype=torch.uint8, shift=shift) if "widths" in names else None,
        fmt,
        side,
        rule if rule != "none" else None,
        blank(batch, heads, dim, shift=shift) if "weights" in names else None,
        blank(batch, heads, pages, page if fmt.axis == "channel" else dim, dtype=norm, shift=shift) if norm else None,
    )


def call_advance(
    batch, heads, tokens, dims, dtype, other, held, runs, sink, rotate, blocks, tails, local, unit, capacity, keys,
    values, shift=0,
):  # fmt: skip
    pairs = tuple(tuple(map(PageFormat.parse, pair.split("/"))) for pair in runs.split("|"))
    store = StoreFormat(pairs, sink, *rotate).spec
    plan = StepPlan(store, batch, heads, *dims, str(held), (blocks,) * len(pairs), tails, local, unit, capacity)
    # What a plan asks of its buffer is that all dtypes fit.
    state = views_of_buffer(blank(buffer_bytes(plan) + 8, dtype=torch.uint8)[8 * shift :], plan)
    new = [
        blank(batch, heads, tokens, dim, dtype=own or dtype, order=order, shift=shift)
        for dim, own, order in zip(dims, (None, other), (keys, values), strict=True)
    ]
    advance(*new, state, plan)


def call_observe(batch, heads, share, tokens, dim, dtype, order, given, shift=0):
    observe(
        blank(batch, heads * share, tokens, dim, dtype=dtype, order=order, shift=shift),
        blank(batch, heads, dim, dtype=torch.float64, shift=shift),
        blank(heads, batch, dtype=torch.int32, shift=shift),
        blank(batch, dtype=torch.int32, shift=shift) if "sealed" in given else None,
        blank(batch, heads, dim, shift=shift) if "weight" in given else None,
    )


def mask_of(name: str, batch: int, heads: int, queries: int, shift: int) -> Tensor | None:
    """Masks by name, over 50 columns."""
    kind, *traits = name.split(", ")
    if kind == "none":
        return None
    shape = [
        1 if "of all rows" in traits or "expanded" in traits else batch,
        heads if "by head" in traits else 1,
        1 if "of all queries" in traits else queries,
        57 if "longer" in traits else 50,
    ]
    order = next((trait for trait in traits if trait in ORDERS), "slice")
    mask = blank(*shape, dtype=getattr(torch, kind), order=order, shift=shift)
    return mask.expand(batch, -1, -1, -1) if "expanded" in traits else mask


def call_decode(
    batch, heads, share, queries, form, sink, rotate, blocks, tails, dtype, held, order, mask, sinks, scaling, softcap,
    early, shift=0, pool=5,
):  # fmt: skip
    runs, *dims = form.split(", ")
    dims = [int(dim) for dim in dims]
    pairs = tuple(tuple(map(PageFormat.parse, pair.split("/"))) for pair in runs.split("|"))
    store = StoreFormat(pairs, sink, *rotate)
    assert decode_module.is_served(store.spec, *dims, dtype)
    windows = [
        blank(batch, heads, size, dim, dtype=held, shift=shift)
        for size, dim in zip((sink, sink, *tails), (*dims, *dims), strict=True)
    ]
    views = []
    for formats in store.runs:
        parts = [
            [blank(pool, *shape, dtype=own or held) for shape, own in fmt.shapes(side, heads, dim).values()]
            for side, fmt, dim in zip(("keys", "values"), formats, dims, strict=True)
        ]
        pos = None if store.ordered else blank(batch, blocks * formats[0].page_size, dtype=torch.int32, shift=shift)
        views.append(RunView(blank(batch, blocks, dtype=torch.int32, shift=shift), pos, *parts))
    lists, kind = sinks
    decode_attention(
        blank(batch, heads * share, queries, dims[0], dtype=dtype, order=order, shift=shift),
        blank(RUNS + 2 * len(views), batch, dtype=torch.int32, shift=shift),
        windows,
        [x for view in views for x in view.flat()],
        mask_of(mask, batch, heads * share, queries, shift),
        blank(lists * heads * share, dtype=kind, shift=shift) if lists else None,
        scaling,
        softcap,
        store,
        early,
    )


def call_merge(batch, splits, share, queries, dim, sinks, rotate, dependent, dtype, shift=0):
    part = blank(batch, splits, share * queries, dim, shift=shift)
    top, total = (blank(*part.shape[:3], shift=shift) for _ in range(2))
    lists, kind = sinks
    own = blank(lists * share, dtype=kind, shift=shift) if lists else None
    known = merge_module.sinks_kind(own)
    launch = merge_module.merge_launch(part.shape, queries, known, rotate, dependent, CPU, dtype)
    out = blank(batch, share, queries, dim, dtype=dtype, shift=shift)
    launch(part, top, total, *([] if own is None else [own]), out)


NEW: dict[str, tuple[Any, ...]] = {
    "batch": (2, 1),
    "heads": (2, 1),
    "tokens": (1, 3),
    "dims": ((32, 32), (32, 16), (16, 32)),
    "dtype": (F16, BF16, F32),
    # Of values, if they differ.
    "other": (None, F32, BF16),
    "held": (F16, BF16, F32),
    "sink": (4, 0, 5),
    "tails": ((40, 40), (40, 41), (41, 40)),
    "rotate": ((0, 0), (16, 0), (0, 16), (16, 8)),
    "keys": (*ORDERS,),
    "values": (*ORDERS,),
}
SEALED: dict[str, tuple[Any, ...]] = {
    "batch": (2, 1),
    "heads": (2, 1),
    "dim": (32, 16),
    "dtype": (F16, F32),
    "held": (F16, F32),
    "columns": (40, 41),
    "order": (*ORDERS,),
    "blocks": (4, 5),
    "pages": (1, 2),
}
SINKS = ((0, F32), (1, F16), (1, BF16), (1, F32), (2, F16))
DECODED: dict[str, tuple[Any, ...]] = {
    "batch": (2, 1),
    "heads": (2, 1),
    "share": (2, 4, 8),
    "queries": (2, 1, 3),
    "form": (
        "2c32p32/2t32p32, 64, 64", "2c32p32/2t32p32, 64, 32", "2c32p32/2t32p32, 128, 64", "4t32p32/2t32p32, 64, 64",
        "8t64p32/8t64p32, 64, 64", "16t64p32/16t64p32, 64, 64", "2c32p64/2t32p64, 64, 64", "4c32p32n/2t64p32n, 64, 64",
        "2c32p32/2t32p32|4c32p32/4t32p32, 64, 64", "2t32p32/2t32p32|4t32p32/4t32p32|16t32p32/16t32p32, 64, 64",
        "8t96p32/8t96p32, 96, 96",
    ),
    "sink": (4, 0, 33),
    "rotate": ((0, 0), (32, 0), (0, 32), (16, 16)),
    "blocks": (3, 0, 4, 9),
    "tails": ((40, 40), (40, 70), (70, 40)),
    "dtype": (F16, BF16),
    "held": (F16, BF16),
    # Where channels do not lie side by side, queries are copied: those plans are shared.
    "order": tuple(order for order in ORDERS if order != "other channels"),
    "mask": (
        "none", "bool", "int8", "int64", "float32", "float16", "bool, by head", "bool, of all rows",
        "bool, of all queries", "bool, of all rows, of all queries", "bool, longer", "bool, other rows",
        "bool, other tokens", "bool, other channels", "bool, contiguous", "float32, by head", "float32, of all rows",
    ),
    "sinks": SINKS,
    "scaling": (0.125, 0.5),
    "softcap": (0.0, 5.0, 30.0),
    "early": (False, True),
}  # fmt: skip
RANGE = range_rule()


def usually(options: dict[str, tuple[Any, ...]], **first: Any) -> dict[str, tuple[Any, ...]]:
    """The options with other first answers."""
    return options | {name: (x, *(y for y in options[name] if y != x)) for name, x in first.items()}


# Of each call what it may be asked, the usual answer first.
CALLS: dict[str, tuple[Any, dict[str, tuple[Any, ...]]]] = {
    "append": (call_append, NEW),
    "due": (
        call_due,
        {
            "batch": (2, 1, 3),
            "sink": (4, 0),
            "tails": ((20, 20), (20, 21), (21, 20), (0, 20), (1, 20)),
            "local": ((0, 0), (0, 5), (5, 0)),
            "unit": ((1, 1), (1, 8), (8, 1)),
            "most": ((3, 3), (3, 2), (2, 3), (3, 20), (3, 0)),
        },
    ),
    "seal channels": (
        call_seal,
        SEALED
        | {
            "spec": ("2c8p16+4x8+16x8", "2c16p16+4x8+16x8", "2c8p16+4x8", "2c8p16", "4c8p16+16x3", "2c8p16n+4x8+16x8"),
            "given": ("keys, none", "keys, none, widths", "keys, k_abs"),
        },
    ),
    "seal channels by a rule": (
        call_seal,
        SEALED
        | {
            "spec": ("2c8p16+4x8+16x8", "2c8p16+4x8"),
            "given": (
                f"keys, {RANGE}", f"keys, {range_rule(2.0, 1.0, 1.7)}", f"keys, {RANGE}, weights", "keys, k_abs",
                "keys, variance", "keys, none",
            ),
        },
    ),
    "seal normed channels": (
        call_seal,
        SEALED
        | {
            "spec": ("4c8p16n+16x8", "2c8p16n+16x8"),
            "given": (
                "keys, none, norm", "keys, none", "keys, none, norm of f32", "keys, none, widths, norm",
                "keys, k_abs, norm", "keys, k_abs, weights, norm", "keys, k_abs, weights",
            ),
        },
    ),
    "seal tokens": (
        call_seal,
        SEALED
        | {
            "spec": ("4t16p16n", "4t8p16n", "2t16p16n"),
            "given": ("keys, none, norm", "values, none, norm", "keys, none", "keys, none, norm of f32"),
        },
    ),
    "seal plain": (call_seal, SEALED | {"spec": ("16t16p16", "8t16p16", "8t8p16"), "given": ("keys, none",)}),
    "advance": (
        call_advance,
        NEW
        | {
            "runs": ("2c8p16/2t8p16", "2c8p16/2t8p16|4t8p16/4t8p16", "2c8p16/2t8p16|4t8p16/4t8p16|8t8p16/8t8p16"),
            "blocks": (4, 5),
            "local": ((0, 0), (0, 8), (8, 0)),
            "unit": ((8, 8), (8, 1), (1, 8), (4, 8), (8, 4)),
            "capacity": (64, 65),
        },
    ),
    "observe": (
        call_observe,
        {
            "batch": (2, 1),
            "heads": (2, 1),
            "share": (2, 1, 4),
            "tokens": (1, 3),
            "dim": (32, 40),
            "dtype": (F16, BF16, F32),
            "order": (*ORDERS,),
            "given": ("sealed and weight", "nothing", "sealed", "weight"),
        },
    ),
    "decode": (call_decode, DECODED),
    "decode with masks": (call_decode, usually(DECODED, mask="bool")),
    "decode with sinks": (call_decode, usually(DECODED, sinks=(1, F16))),
    "decode with runs": (call_decode, usually(DECODED, form="2c32p32/2t32p32|4c32p32/4t32p32, 64, 64", blocks=9)),
    # Not in the kernel, which then gets queries of f32.
    "decode rotated": (call_decode, usually(DECODED, form="8t96p32/8t96p32, 96, 96", rotate=(32, 0))),
    "merge": (
        call_merge,
        {
            "batch": (4, 2, 1),
            "splits": (3, 4, 40),
            "share": (2, 4),
            "queries": (2, 1),
            "dim": (64, 32),
            "sinks": SINKS,
            "rotate": (0, 16, 32),
            "dependent": (False, True),
            "dtype": (F32, F16, BF16),
        },
    ),
}  # fmt: skip


def usual(name: str) -> dict[str, Any]:
    return {option: values[0] for option, values in CALLS[name][1].items()}


def not_shared(name, one, other):
    """Checks that the plans of one call serve itself, and not the other one."""
    call, asked = CALLS[name][0], usual(name)
    call(**asked | one)
    before = made()
    assert before > 0
    call(**asked | one)
    assert made() == before
    ran = what_runs(call, **asked | other)
    assert made() > before
    assert ran == what_runs_afresh(call, **asked | other)
    assert ran != what_runs(call, **asked | one)


# What answers have in common with the usual ones, or have only been asked for.
ALIKE = {
    # Codes of integers are of one dtype.
    ("seal tokens", "held"),
    # What has been rotated lies in a row.
    ("decode rotated", "order"),
    # How many there are, where an index says which.
    *((name, "columns") for name in CALLS if name.startswith("seal")),
    # Nothing to launch early on a CPU.
    *((name, "early") for name in CALLS if name.startswith("decode")),
}


@pytest.mark.parametrize(
    ("name", "option"),
    [(name, option) for name, (_, options) in CALLS.items() for option in options if (name, option) not in ALIKE],
)
def test_calls_that_differ_share_no_plan(noted, name, option):
    for value in CALLS[name][1][option][1:]:
        not_shared(name, {}, {option: value})
        forget()


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("seal channels", {"given": "keys, k_abs"}, {"given": "keys, k_abs, weights"}),
        ("decode", {"heads": 1, "share": 4}, {"heads": 2, "share": 2}),
        ("observe", {"heads": 1, "share": 4}, {"heads": 2, "share": 2}),
        ("merge", {"share": 4, "queries": 1}, {"share": 2, "queries": 2}),
        ("merge", {"sinks": (1, F16)}, {"sinks": (1, F32)}),
        ("merge", {"sinks": (1, F16)}, {"sinks": (2, F16)}),
        # As many may be due of either.
        ("advance", {"tokens": 5, "unit": (8, 8)}, {"tokens": 5, "unit": (4, 8)}),
        ("advance", {"tokens": 5, "unit": (8, 8)}, {"tokens": 5, "unit": (8, 4)}),
    ],
)
def test_calls_that_are_hard_to_tell_apart_share_no_plan(noted, name, one, other):
    """Of which most of what is known of tensors is the same."""
    not_shared(name, one, other)


@pytest.mark.parametrize("option", ["early"])
def test_what_changes_nothing_on_a_cpu_has_a_plan(noted, option):
    call, asked = CALLS["decode"]
    call(**usual("decode"))
    before = made()
    call(**usual("decode") | {option: asked[option][1]})
    assert made() > before


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        *((name, {"shift": 0}, {"shift": 1}) for name in CALLS),
        *((name, {"pool": 6}, {"pool": 7}) for name in CALLS if name.split()[0] in ("seal", "decode")),
        ("decode", {"mask": "bool, of all rows"}, {"mask": "bool, expanded"}),
        ("decode", {"order": "contiguous"}, {"order": "other channels"}),
        ("due", {"tails": (0, 20)}, {"tails": [0, 20]}),
    ],
)
def test_calls_that_are_alike_share_a_plan(noted, name, one, other):
    """Or every step of a store that grows would make plans."""
    call, asked = CALLS[name][0], usual(name)
    call(**asked | one)
    before = made()
    for own in (other, one, other):
        assert what_runs(call, **asked | own) == what_runs_afresh(call, **asked | own)
        assert made() == before


@pytest.mark.parametrize("name", CALLS)
def test_what_is_remembered_is_what_would_be_made_afresh(noted, name):
    """Calls that are much alike, in any order."""
    call, options = CALLS[name]
    draw = random.Random(name)
    for _ in range(300):
        asked = {
            option: draw.choice(values) if draw.random() < 0.12 else values[0] for option, values in options.items()
        }
        asked["shift"] = draw.choice((0, 0, 1))
        ran = what_runs(call, **asked)
        assert ran
        assert ran == what_runs_afresh(call, **asked)
    # Or nothing was tested.
    assert len(noted.remembered) > 100


# Launch parameters: plans that were made of other ones are not taken.


def decode_constants(**asked):
    """What the page loop is compiled with, as the usual call launches it."""
    ran = what_runs(call_decode, **usual("decode"), **asked)
    assert ran == what_runs_afresh(call_decode, **usual("decode"), **asked)
    (found,) = [one.constants for one in ran if one.kernel == "decode_kernel"]
    return found


def test_launch_parameters_are_in_force_at_once(noted):
    before = decode_constants()
    assert "maxnreg" not in before
    with launch_parameters("decode", max_registers=96):
        limited = decode_constants()
        assert limited == before | {"maxnreg": "96"}
        with launch_parameters("decode", step=32, stages=3):
            finer = decode_constants()
            assert finer["maxnreg"] == "96"
            assert finer["FORMATS"] != before["FORMATS"]
        assert decode_constants() == limited
    assert decode_constants() == before
    # Within one edition plans are kept.
    known = made()
    assert decode_constants() == before
    assert made() == known


def test_programs_are_as_many_as_launch_parameters_say(noted):
    asked = usual("decode") | {"blocks": 40}
    grids = []
    for programs in (1, 8, 1):
        with launch_parameters("decode", programs_per_sm=programs):
            grids.append(what_runs(call_decode, **asked)[0].grid)
    assert grids[0] == grids[2] != grids[1]


def test_plans_are_made_anew_after_a_reload(noted):
    call_decode(**usual("decode"))
    before = made()
    configs.reload()
    call_decode(**usual("decode"))
    assert made() > before


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


def rounds(device, prepared):
    """Seeds and `KINDS`, which take turns; from the second turn on everything has to be remembered."""
    # The interpreter remembers nothing: there the tests show that they can be passed.
    for seed, kind in enumerate(KINDS * 3 if device.type == "cuda" else KINDS[::3]):
        prepared.clear()
        yield seed, *kind
        if seed >= len(KINDS):
            assert not prepared


def placed(x: Tensor, device: torch.device, shift: int = 0) -> Tensor:
    """A copy of the same strides that begins so many elements into its memory."""
    size = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    plain = x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
    memory = torch.zeros(size + shift, dtype=plain.dtype, device=device)
    return memory.as_strided(x.shape, x.stride(), shift).copy_(plain).view(x.dtype)


def by_torch():
    """Within this context tensors on the CPU take the torch reference."""
    return _enabled("cpu", enabled=False)


@pytest.mark.parametrize("rotate", [(0, 0), (64, 16)], ids=["plain", "rotated"])
def test_append_again(triton_backend, prepared, rotate):
    store = test_append.store_of(4, *rotate)
    for seed, dtype, shift in rounds(triton_backend, prepared):
        new, counters, windows = test_append.arguments(3, 4, dtype=dtype)
        torch.manual_seed(seed)
        for x in new:
            x.normal_()
        counters[LENGTH] += seed
        given, count, *held = (placed(x, triton_backend, shift) for x in (new[0], counters, *windows))
        append(given, placed(new[1], triton_backend, shift), count, held, store)
        with by_torch():
            append(*new, counters, windows, store)
        for a, b in zip((count, *held), (counters, *windows), strict=True):
            assert torch.equal(test_append.bits(a.cpu()), test_append.bits(b))


def test_due_again(triton_backend, prepared):
    case = test_due.CASES["by the page"]
    knobs = [case[name] for name in ("sink", "tails", "local", "unit", "most")]
    for seed, _, shift in rounds(triton_backend, prepared):
        counters = test_due.counters_of(case["rows"])
        counters[LENGTH] += seed
        given = placed(counters, triton_backend, shift)
        got = due(given, *knobs)
        with by_torch():
            expected = due(counters, *knobs)
        assert torch.equal(given.cpu(), counters)
        for name in ("count", "new", "index"):
            for a, b in zip(getattr(got, name), getattr(expected, name), strict=True):
                assert torch.equal(a.cpu(), b)


@pytest.mark.parametrize(
    ("spec", "side", "rule"),
    [
        ("2c16p16+4x8+16x8", "keys", None),
        ("2c16p16+4x8+16x8", "keys", "k_abs"),
        ("4c16p16n", "keys", None),
        ("2t16p16", "values", None),
        ("8t32p16", "values", None),
        ("16t1p16", "keys", None),
    ],
)
def test_seal_again(triton_backend, prepared, spec, side, rule):
    fmt = PageFormat.parse(spec)
    for seed, dtype, shift in rounds(triton_backend, prepared):
        parts, *call = test_seal.arguments(spec, side, 32, dtype)
        torch.manual_seed(seed)
        call[3].normal_()
        weight = torch.rand(test_seal.ROWS, test_seal.HEADS, 32) if rule else None
        call[5] = None if rule else call[5]
        more = (fmt, side, rule, weight, test_seal.norms(call, spec))
        expected, got = [x.clone() for x in parts], [placed(x, triton_backend, shift) for x in parts]
        with by_torch():
            seal(expected, *call, *more)
        call, more = (
            [placed(x, triton_backend, shift) if isinstance(x, Tensor) else x for x in y] for y in (call, more)
        )
        seal(got, *call, *more)
        for name, a, b in zip(fmt.names, got, expected, strict=True):
            assert test_seal.same(a.cpu(), b), name


@pytest.mark.parametrize("name", ["mixed", "two runs"])
def test_steps_again(triton_backend, prepared, name):
    """A step but for its attention."""
    for seed, dtype, shift in rounds(triton_backend, prepared):
        plan = test_step.plan_of(name, dtype=dtype, rows=2)
        buffer, expected = test_step.make(plan, CPU, starts=(seed, 3))
        # Far enough for what has eight bytes.
        got = views_of_buffer(placed(buffer, triton_backend, 8 * shift), plan)

        def step(state, device, q, k, v, plan=plan, shift=shift):
            q, k, v = (placed(x, device, shift) for x in (q, k, v))
            advance(k, v, state, plan)
            if plan.query:
                observe(q, state.sums, state.counts, state.sealed, state.weight)
            seal_due(state, plan, k.shape[2])

        for at, count in enumerate((16, 3, 3)):
            new = test_step.tokens(10 * seed + at, count, plan, CPU, dtype)
            step(got, triton_backend, *new)
            with by_torch():
                step(expected, CPU, *new)
            names = ("new", "sealed", "flag")
            assert all(torch.equal(getattr(got, own).cpu(), getattr(expected, own)) for own in names)
            assert count == 16 or not expected.flag
        for state in (got, expected):
            settle(state, plan)
        assert expected.counters[RUNS:].any()
        test_step.compare(expected, got, plan)


CASES = {
    "a run": Case(
        runs="2c32p32/2t64p32", heads=1, pages=2, tail=(40, 40), lengths=[4 + 32 + 17, 7], keys=[[32], [0]],
        values=[[40], [0]],
    ),
    "two runs": Case(
        runs="8t64p32/8t64p32|16t64p32/16t64p32", heads=1, pages=2, lengths=[4 + 60 + 20, 4 + 32 + 3],
        keys=[[40, 20], [0, 32]], values=[[40, 20], [0, 32]],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_decode_again(triton_backend, prepared, name):
    """Without anything, with a mask, with sinks and with both."""
    for seed, dtype, shift in rounds(triton_backend, prepared):
        layer = build(dataclasses.replace(CASES[name], dtype=dtype), seed)
        q, counters, *windows = (placed(x, triton_backend, shift) for x in (layer.q, layer.counters, *layer.windows))
        runs = [x.to(triton_backend) for x in layer.runs]
        mask = torch.rand(2, 1, 1, 90) > 0.4
        sinks = torch.randn(q.shape[1]).mul(4).to(dtype)
        asked = [(mask, sinks), (None, None)]
        asked += [(mask, None), (None, sinks)] if triton_backend.type == "cuda" else []
        for own in asked:
            given = [None if x is None else placed(x, triton_backend, shift) for x in own]
            got = decode_attention(q, counters, windows, runs, *given, 0.125, 0.0, layer.case.store)
            assert got.dtype == dtype
            exact, plain = (attend(layer, kind, 0.125, *own) for kind in (torch.float64, dtype))
            assert_as_good_as_torch(got, exact, plain)


class Work:
    """New tokens and attention to others, in memory that is filled anew time after time."""

    def __init__(self, device):
        self.case, self.store = dataclasses.replace(CASES["a run"], dtype=BF16), test_append.store_of(4, 64, 16)
        self.device, self.memory = device, [placed(x, device) for x in self.tensors(0)]

    def tensors(self, seed):
        self.layer = build(self.case, seed)
        new, counters, windows = test_append.arguments(3, 4, dtype=BF16)
        for x in new:
            x.normal_()
        counters[LENGTH] += seed
        self.expected = [counters.clone(), *(x.clone() for x in windows)]
        with by_torch():
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
        exact, plain = (attend(self.layer, kind, 0.125) for kind in (torch.float64, BF16))
        assert_as_good_as_torch(out, exact, plain)


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
