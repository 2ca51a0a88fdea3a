"""Launches that are remembered: those that would be made afresh, with the tensors of the call."""

from __future__ import annotations

import dataclasses
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

from hfkvq.kernels import PageFormat, RunView, StoreFormat, append, decode_attention, fused, seal, use_interpreter
from hfkvq.kernels import triton as launchers
from hfkvq.kernels.decode import LENGTH, RUNS
from hfkvq.kernels.dispatch import _enabled, reference
from hfkvq.kernels.seal import range_rule
from hfkvq.kernels.step import StepPlan, advance, buffer_bytes, observe, views_of_buffer
from hfkvq.kernels.triton import append as append_module
from hfkvq.kernels.triton import configs
from hfkvq.kernels.triton import decode as decode_module
from hfkvq.kernels.triton import launch as launch_module
from hfkvq.kernels.triton import merge as merge_module
from hfkvq.kernels.triton import step as step_module
from hfkvq.kernels.triton.launch import Launch, is_watched, room_of
from hfkvq.kernels.triton.limits import LIMITS, programs_that_fit
from tests.kernels import test_append
from tests.kernels.stores import Case, assert_as_good_as_torch, attend, build, launch_parameters

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("gpu", "registers", "shared", "most", "room"),
    [
        # Registers allow twelve programs.
        ((9, 0), 168, 16384, 8, 28160),
        ((9, 0), 168, 16384, 12, 0),
        # Registers allow eight, or shared memory does.
        ((9, 0), 209, 16384, 8, 0),
        ((9, 0), 168, 28160, 8, 0),
        # Shared memory is at most what a launch gets without opting in.
        ((9, 0), 168, 16384, 2, 48 << 10),
        # A GPU of unknown limits.
        ((99, 0), 168, 16384, 8, 0),
    ],
)
def test_programs_beyond_those_planned_are_kept_out(monkeypatch, gpu, registers, shared, most, room):
    monkeypatch.setattr(launch_module, "capability", lambda device: gpu)
    metadata = SimpleNamespace(num_warps=1, shared=shared)
    compiled = SimpleNamespace(n_regs=registers, metadata=metadata, packed_metadata=(1, 1, shared))
    assert room_of(compiled, CPU, most) == room
    if room and most > 2:
        assert programs_that_fit(LIMITS[gpu], registers, 1, room) == most


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
    assert found >= {"append", "decode", "merge", "seal.launch", "step"}


class Ran(NamedTuple):
    """A launch: all that chooses the kernel's variant, and which tensors of the call it is given.

    Numbers and constants are as they are written, since 1, 1.0 and True are equal, but not to Triton.
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
    """A launch that does nothing but note what it is given."""

    ran: list[Ran]

    def __init__(self, kernel, grid, numbers, constants, device, nest=None, most=0):
        super().__init__(kernel, grid, numbers, constants, device, nest, most)
        self.name, self.nest = kernel.__name__, nest

    def __call__(self, *tensors):
        own = tensors if self.nest is None else self.nest(tensors)
        # The first of several that begin at one place.
        place = {x.data_ptr(): at for at, x in reversed(list(enumerate(tensors)))}
        kinds = each(own, lambda x: (x.dtype, x.data_ptr() % 16 == 0))
        written = {name: repr(value) for name, value in self.constants.items()}
        places = each(own, lambda x: place.get(x.data_ptr()))
        self.ran.append(Ran(self.name, self.grid, kinds, places, repr(self.numbers), written))


@pytest.fixture
def noted(monkeypatch):
    """`Noted` launches; the list is of this test alone, and so are the plans."""
    forget()
    for module in MODULES:
        if hasattr(module, "Launch"):
            monkeypatch.setattr(module, "Launch", Noted)
    # What the interpreter cannot do, or would take its time for.
    for module in (append_module, step_module):
        monkeypatch.setattr(module, "is_misrounded", lambda *_: False)
    monkeypatch.setattr(decode_module, "hadamard", reference("hadamard"))
    monkeypatch.setattr(Noted, "ran", [], raising=False)
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


def call_norm(batch, dim, form, dtype, shift=0):
    fused.rms_norm(blank(batch, 1, dim, dtype=dtype, shift=shift), blank(dim, dtype=dtype, shift=shift), 1e-6, form)


def call_linears(batch, width, sizes, biased, dtype, shift=0):
    x, *weights = (blank(n, width, dtype=dtype, shift=shift) for n in (batch, *sizes))
    fused.linears(x, weights, [blank(n, dtype=dtype, shift=shift) for n in sizes] if biased else [])


def call_gated(batch, width, size, activation, dtype, shift=0):
    x, *weights = (blank(n, width, dtype=dtype, shift=shift) for n in (batch, size, size))
    fused.gated_linear(x, *weights, activation)


def call_rotary(batch, heads, tokens, dim, angles, dtype, shift=0):
    q, k = (blank(batch, tokens, each, dim, dtype=dtype, shift=shift).transpose(1, 2) for each in (4, heads))
    cos, sin = (blank((angles and batch) or 1, tokens, dim, dtype=dtype, shift=shift) for _ in range(2))
    fused.rotary(q, k, cos, sin)


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
                "keys, none",
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
    "norm": (
        call_norm,
        {"batch": (2, 1), "dim": (64, 80), "form": (0, 1, 2), "dtype": (F16, F32)},
    ),
    "linears": (
        call_linears,
        {
            "batch": (2, 1, 3, 40),
            "width": (64, 200),
            "sizes": ((70, 24, 33), (70, 24), (70,), (24, 70, 33)),
            "biased": (False, True),
            "dtype": (F16,),
        },
    ),
    "gated": (
        call_gated,
        {"batch": (2, 1, 3, 40), "width": (64, 200), "size": (70, 24), "activation": (0, 1, 2), "dtype": (F16,)},
    ),
    "rotary": (
        call_rotary,
        {
            "batch": (2, 1),
            "heads": (2, 1),
            "tokens": (1, 3),
            "dim": (32, 64),
            "angles": (True, False),
            "dtype": (F16, F32),
        },
    ),
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


# Calls that are hard to tell apart: as many may be due of either units, and heads times their share are as many.
TWINS = {
    "seal channels": ({"given": "keys, k_abs"}, {"given": "keys, k_abs, weights"}),
    "decode": ({"heads": 1, "share": 4}, {"heads": 2, "share": 2}),
    "observe": ({"heads": 1, "share": 4}, {"heads": 2, "share": 2}),
    "merge": ({"share": 4, "queries": 1}, {"share": 2, "queries": 2}, *({"sinks": x} for x in SINKS[1:])),
    "advance": tuple({"tokens": 5, "unit": unit} for unit in ((8, 8), (4, 8), (8, 4))),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_remembered_is_what_would_be_made_afresh(noted, name):
    """The usual call, twins, and calls that differ from it in one answer or in a few."""
    call, options = CALLS[name]
    usual_one, draw = usual(name), random.Random(name)
    asked = [{option: value} for option, values in options.items() for value in values[1:]]
    asked += [
        {option: draw.choice(values) for option, values in options.items() if draw.random() < 0.12} for _ in range(15)
    ]
    for other in asked:
        call(**usual_one)
        other = usual_one | other | {"shift": draw.choice((0, 0, 1))}
        ran = what_runs(call, **other)
        assert ran
        assert ran == what_runs_afresh(call, **other)
    twins = [usual_one | other for other in TWINS.get(name, ())]
    found = [what_runs(call, **other) for other in twins]
    assert found == [what_runs_afresh(call, **other) for other in twins]
    assert all(ran not in found[:at] for at, ran in enumerate(found))


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        *((name, {"shift": 0}, {"shift": 1}) for name in CALLS),
        *((name, {"pool": 6}, {"pool": 7}) for name in CALLS if name.split()[0] in ("seal", "decode")),
        ("decode", {"mask": "bool, of all rows"}, {"mask": "bool, expanded"}),
        ("decode", {"order": "contiguous"}, {"order": "other channels"}),
    ],
)
def test_calls_that_are_alike_share_a_plan(noted, name, one, other):
    """Or every step of a store that grows would make plans."""
    call, asked = CALLS[name][0], usual(name)
    call(**asked | one)
    before = made()
    for own in (other, one, other):
        call(**asked | own)
        assert made() == before


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
            assert finer["SHAPE"] != before["SHAPE"]
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
    configs.renew()
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
