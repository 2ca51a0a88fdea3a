"""Takes every kernel through Triton's front end, from syntax tree to verified IR, for GPUs that need not be there.

``python -m tests.kernels.compile_kernels FOLDER MOST 9.0 ...``, without TRITON_INTERPRET, writes a log for each GPU to
FOLDER, see `FrontEnd.log`. MOST is how many variants of a kernel are built, 0 for all. Tensors on the CPU say here that
they are on a GPU, so launchers choose the types, tiles and constants that they choose there, and hand them to a Triton
that stops before its first pass and launches nothing.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import multiprocessing
import pkgutil
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.errors import TritonError
from triton.runtime.jit import JITFunction

import hfkvq
from evals.kernel_cases import FORMATS, scheme_of
from evals.kernel_tuning import GRID
from evals.other_kernels import split_kv
from hfkvq import kernels
from hfkvq.caches.schemes.base import Layout, Scheme, SideLayout
from hfkvq.caches.store import SIDES, KVStore
from hfkvq.kernels import fused
from hfkvq.kernels import triton as launchers
from hfkvq.kernels.arguments import AttentionArguments
from hfkvq.kernels.decode import run_count
from hfkvq.kernels.norms import BALANCE
from hfkvq.kernels.pages import RunView, StoreFormat
from hfkvq.kernels.seal import RULES, range_rule
from hfkvq.kernels.step import (
    StepPlan,
    StepState,
    advance,
    attend_and_seal,
    buffer_bytes,
    observe,
    seal_due,
    views_of_buffer,
)
from tests.kernels.stores import launch_parameters

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

GPUS = {"8.0": ("A100", 108, 164 << 10), "9.0": ("H200", 132, 228 << 10), "10.0": ("B200", 148, 228 << 10)}
"""Name, multiprocessors and their shared memory, by compute capability."""


class Idle:
    """A compiled kernel that does nothing."""

    name, function, packed_metadata = "idle", "function", (1, 1, 0)
    n_regs, metadata = 255, SimpleNamespace(num_warps=1, shared=0)

    def _init_handles(self) -> None:
        """Nothing has to be loaded."""

    def run(self, *_: Any) -> None:
        return None

    launch_metadata = run

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self.run


class FrontEnd:
    """A GPU as torch and Triton's launches see it; notes what it builds and what fails, instead of raising.

    ``most`` is how many variants of a kernel are built, 0 for all.
    """

    def __init__(self, capability: str, file: Path, most: int = 0) -> None:
        self.major, self.minor = map(int, capability.split("."))
        self.name, self.multi_processor_count, self.shared_memory_per_multiprocessor = GPUS[capability]
        self.file, self.doing, self.most = file, "", most
        self.built: Counter[str] = Counter()

    def log(self, event: str, *what: str) -> None:
        """Notes ``building`` (kernel, case), ``failed`` (where, case, error) or ``done``."""
        # At once, since a compiler may take the process with it.
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps([event, *what]) + "\n")

    @contextlib.contextmanager
    def case(self, name: str) -> Iterator[None]:
        """Names what is done now. What fails in a launcher does not keep the next case from being tried."""
        self.doing = name
        try:
            yield
        except Exception as error:
            own = (__file__, str(Path(hfkvq.__file__).parent))
            frame = [x for x in traceback.extract_tb(error.__traceback__) if x.filename.startswith(own)][-1]
            where = f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}"
            self.log("failed", where, self.doing, f"{type(error).__name__}: {error}")

    # What Triton asks its driver.

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 10 * self.major + self.minor, 32)

    # What Triton calls to compile.

    def compile(self, src: Any, target: GPUTarget, options: dict[str, Any], **_: Any) -> Idle:
        """The first steps of `triton.compile`, then a kernel that does nothing."""
        name = name_of(src.fn)
        self.built[name] += 1
        if 0 < self.most < self.built[name]:
            return Idle()
        self.log("building", name, self.doing)
        backend = make_backend(target)
        parsed = backend.parse_options(options | src.parse_options())
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        try:
            # The key of Triton's cache looks at everything that a kernel refers to, and refuses some of it.
            src.hash()
            functions, modules = backend.get_codegen_implementation(parsed), backend.get_module_map()
            if not src.make_ir(target, parsed, functions, modules, context).verify():
                raise RuntimeError("the IR is not valid.")
        except Exception as error:
            self.log("failed", name, self.doing, told(error))
        return Idle()


def told(error: BaseException) -> str:
    """The innermost error that shows a place in a kernel, and the calls that led there: Triton has one for each."""
    calls = []
    while isinstance(error.__cause__, TritonError):
        calls.append(str(error).splitlines()[-2].strip())
        error = error.__cause__
    return "\n".join([f"{type(error).__name__}: {error}", *(f"called by: {line}" for line in reversed(calls))])


def name_of(kernel: JITFunction) -> str:
    """E.g. ``token.seal_token_kernel``."""
    return f"{kernel.module.rpartition('.')[2]}.{kernel.__name__}"


def all_kernels() -> set[str]:
    """Names of the kernels that there are: what is launched, not what that calls."""
    names = [module.name for module in pkgutil.walk_packages(launchers.__path__, f"{launchers.__name__}.")]
    return {
        name_of(x)
        for module in (*map(importlib.import_module, names), split_kv)
        for x in vars(module).values()
        if isinstance(x, JITFunction) and x.module == module.__name__ and x.__name__.endswith("_kernel")
    }


def pretend(front: FrontEnd) -> None:
    """Makes tensors on the CPU pass for tensors on the GPU, for torch and for Triton, until the process ends."""
    triton.runtime.driver.set_active(front)
    # Kernels look for it when they are first launched on a device.
    triton.compiler.compile = front.compile
    # What a kernel calls is looked at once, not at every call; nobody changes the tree.
    JITFunction.parse = functools.lru_cache(maxsize=None)(JITFunction.parse)
    torch.Tensor.is_cuda = property(lambda x: True)
    torch.Tensor.device = property(lambda x: torch.device("cuda", 0))
    torch.Tensor.get_device = lambda x: 0
    torch.cuda.device = lambda device: contextlib.nullcontext()
    torch.cuda.current_device = lambda: 0
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.get_device_properties = lambda device: front
    torch.cuda.get_device_capability = lambda device: (front.major, front.minor)

    def on_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, device=None, **kwargs: make(*args, **kwargs)

    for name in ("arange", "empty", "full", "ones", "zeros"):
        setattr(torch, name, on_cpu(getattr(torch, name)))
    # What kernels would write, the reference may read.
    torch.Tensor.new_empty = torch.Tensor.new_zeros


@dataclass(frozen=True, kw_only=True)
class Pages(Scheme):
    """Any store by its name (see `StoreFormat.spec`); widths of tokens take turns, channels are raised by a rule."""

    store: str
    rule: str | None = None

    @property
    def channel_rule(self) -> str | None:
        return self.rule

    def layout(self, key_dim: int, value_dim: int) -> Layout:
        form = StoreFormat.parse(self.store)
        keys, values = zip(*form.runs, strict=True)
        unit = keys[0].page_size
        return Layout(
            SideLayout(keys, unit=unit, rotate=form.rotate_keys),
            SideLayout(values, unit=unit, rotate=form.rotate_values),
            form.sink,
            form.latent,
            form.window,
        )

    def token_bits(self, keys: Tensor, values: Tensor, position: Tensor, tags: Tensor | None = None) -> Tensor:
        widths = torch.tensor([fmt.bits for fmt, _ in StoreFormat.parse(self.store).runs], dtype=torch.uint8)
        return widths[position.long() % len(widths)]


class Tokens(Pages):
    """The same, by the token."""

    def layout(self, key_dim: int, value_dim: int) -> Layout:
        layout = super().layout(key_dim, value_dim)
        return replace(layout, keys=replace(layout.keys, unit=1), values=replace(layout.values, unit=1))


def tensor(rows: int, heads: int, tokens: int, dim: int, dtype: torch.dtype) -> Tensor:
    """(B, H, T, D) as attention hands it over: (B, T, H, D) in memory."""
    return torch.zeros(rows, tokens, heads, dim, dtype=dtype).transpose(1, 2)


def fill(
    scheme: Scheme, key_dim: int = 128, value_dim: int = 128, dtype: torch.dtype = BF16, rows: int = 2, heads: int = 2,
    tokens: int = 400, q_abs: bool = False,
) -> KVStore:  # fmt: skip
    """A store after a prompt and a step."""

    def new(count: int) -> tuple[Tensor, Tensor]:
        return tensor(rows, heads, count, key_dim, dtype), tensor(rows, heads, count, value_dim, dtype)

    store = KVStore(scheme.layout(key_dim, value_dim), scheme, *new(1))
    weight = torch.ones(rows, heads, key_dim) if q_abs else None
    store.extend(*new(tokens), q_abs=weight)
    store.push(*new(1))
    return store


def attend(
    store: KVStore, queries: int = 1, share: int = 4, mask: str = "", softcap: float = 0.0, sinks: bool = False
) -> None:
    """Decode attention; masks by name."""
    heads, columns = store.heads * share, store.longest + 3
    made = {
        "": None,
        "bool": torch.ones(store.batch, 1, queries, columns, dtype=torch.bool),
        "float": torch.zeros(store.batch, heads, queries, columns, dtype=store.dtype),
        "row": torch.zeros(1, 1, 1, columns),
    }
    dim = sum(store.dims.values()) if store.format.latent else store.dims["keys"]
    query = tensor(store.batch, heads, queries, dim, store.dtype)
    logits = torch.zeros(heads, dtype=store.dtype) if sinks else None
    store.attend(query, AttentionArguments(0.1, made[mask], softcap, logits))


def gather(store: KVStore) -> None:
    """Dense keys and values."""
    for side in SIDES:
        store.dense(side, store.longest + 5)


def unpack(store: KVStore) -> None:
    """Tokens of pages by themselves."""
    for i, (view, (keys, _)) in enumerate(zip(store.runs, store.format.runs, strict=True)):
        kernels.run_pages(view.table, run_count(store.counters, i, "keys"), view.keys, keys, "keys", store.dims["keys"])


def step(form: StoreFormat, rule: str, query: str, dtype: torch.dtype, tokens: int, dim: int = 128) -> None:
    """A step without the host, but for its attention: into empty pages of the last run."""
    rows, heads, capacity = 2, 2, 512
    blocks = tuple(capacity // keys.page_size for keys, _ in form.runs)
    unit = form.runs[-1][0].page_size
    plan = StepPlan(
        form.spec, rows, heads, dim, dim, str(dtype), blocks, (2 * unit, 2 * unit), (0, 0), (unit, unit), capacity,
        rule, query,
    )  # fmt: skip
    state = views_of_buffer(torch.zeros(buffer_bytes(plan), dtype=torch.uint8), plan)
    advance(tensor(rows, heads, tokens, dim, dtype), tensor(rows, heads, tokens, dim, dtype), state, plan)
    if plan.sums_queries:
        query_states = tensor(rows, 4 * heads, tokens, dim, dtype)
        observe(query_states, state.sums, state.counts, state.sealed, state.weight)
        observe(query_states, state.sums, state.counts)
    seal_due(state, plan, tokens)


def step_in_slots(form: StoreFormat, rule: str, query: str, dtype: torch.dtype, dim: int) -> None:
    """A step of rows whose windows are other rows of larger ones, all of it."""
    rows, heads, slots, unit = 2, 2, 5, form.runs[0][0].page_size
    plan = StepPlan(
        form.spec, rows, heads, dim, dim, str(dtype), (3,), (2 * unit, unit), (unit, 0), (unit, unit), 0, rule, query
    )
    sides = zip(form.runs[0], SIDES, strict=True)
    parts = [fmt.allocate(side, 6, heads, dim, dtype, torch.device("cpu")) for fmt, side in sides]
    windows = [torch.zeros(slots, heads, length, dim, dtype=dtype) for length in (form.sink, form.sink, *plan.tails)]
    numbers, sums = torch.zeros(4, rows, dtype=torch.int32), torch.zeros(slots, heads, dim, dtype=torch.float64)
    state = StepState(
        numbers, windows, [RunView(torch.zeros(rows, 3, dtype=torch.int32), None, *parts)], numbers[:2], numbers[0],
        (numbers.new_zeros(rows * unit), numbers.new_zeros(rows * unit)), numbers, sums,
        numbers.new_zeros(heads, slots), torch.zeros(rows, heads, dim), numbers, numbers[0] + 3,
    )  # fmt: skip
    new, asked = tensor(rows, heads, 1, dim, dtype), tensor(rows, 4 * heads, 1, dim, dtype)
    kernels.append(new, new, numbers, windows, form, state.rows)
    attend_and_seal(asked, asked, 1, AttentionArguments(0.1), state, plan)
    pages = [torch.zeros(slots, heads, unit, dim, dtype=dtype) for _ in SIDES]
    kernels.restore(numbers[0], numbers[0], numbers[0], pages, state.flat_runs, form)
    table, lengths = state.runs[0].table, numbers[0]
    if rule or any(fmt.whole for fmt in form.runs[0]):
        claimed = kernels.claim(table, lengths, kernels.new_slots(slots, numbers.device), unit, rows)
        windows = [torch.zeros(2 * slots + 2, heads, unit, dim, dtype=dtype) for _ in SIDES]
        summed = [sums.new_zeros(slots + 1, heads, dim), numbers.new_zeros(heads, slots + 1)] if query else []
        own, balance = replace(form, sink=unit), (BALANCE, BALANCE)
        kernels.take_page(asked, new, new, claimed, windows, parts, table, summed, own, rule, balance, True)
        kernels.claim(table, lengths, kernels.new_slots(300, numbers.device), unit, 1, lengths, lengths)
    else:
        tails = [torch.zeros(slots, heads, 16, dim, dtype=dtype) for _ in SIDES]
        kernels.take_token(new, new, lengths, tails, parts, table, replace(form, sink=0))
    # Prompts of an engine, with windows and without.
    new, asked = (torch.zeros(7, count * heads, dim, dtype=dtype) for count in (1, 4))
    units, requests = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(8, rows, dtype=torch.int32)
    for held in ((numbers[:2].contiguous(), *pages), ()):
        kernels.gather_requests(new, new, units, requests[:4], state.flat_runs, held, 9, form)
    kernels.place(new, new, pages, numbers[0], requests[:3])
    kernels.page_weights(asked, requests, numbers[0], sums, state.counts, 1, unit)


IN_SLOTS = (
    ("s4;k0;v0;2c128p128+4x32/2t128p128", "k_abs", "", BF16, 128),
    ("s4;k0;v128;2c64p128f4+4x32/2t128p128f4", "error", "sum", BF16, 128),
    ("s0;k0;v0;2c32p128+4x32+16x8/2t32p128", range_rule(), "total", F16, 128),
    ("s4;k128;v128;4c128p128n/2t128p128n", "", "", BF16, 128),
    ("s4;k128;v128;4t128p128/4t128p128", "", "", BF16, 128),
    ("s4;k0;v128;2c128p128f4+4x32/2t128p128t", "error", "sum", BF16, 128),
    # For `dequantized`.
    ("s4;k0;v0;2c8p32/4t16p32", "", "", BF16, 80),
)
"""Steps of rows whose windows are others': store, rule, what of the queries is kept, dtype, head dim."""

STEPS = (
    ("s4;k0;v0;2c128p128+4x16/2t128p128", "k_abs", "", BF16, 1),
    ("s4;k0;v0;2c32p128+4x32+16x8/2t32p128", range_rule(), "sum", BF16, 1),
    ("s0;k0;v0;2c32p128+4x32+16x8/2t32p128", range_rule(2.0, 1.0, 1.7), "sum", F32, 5),
    ("s4;k128;v128;4c128p128n/2t128p128n", "", "", F16, 3),
    ("s0;k0;v0;2c32p32/2t32p32|4t32p32/4t32p32", "", "", BF16, 1),
    ("w128;s0;k0;v0;16t1p32/16t1p32", "", "", BF16, 1),
    ("s4;k0;v128;2c128p128f4+4x32/2t128p128t", "error", "sum", BF16, 1),
    ("s4;k0;v128;2c128p128f4+4x32/2t128p128f4", "error", "sum", BF16, 1),
    ("s4;k0;v128;2c128p128f4+4x32/1t128p128t", "error", "sum", BF16, 1),
    ("s4;k0;v128;1c128p128t+3x32/1t128p128t", "error", "sum", BF16, 1),
)
"""Steps without the host: store, rule, what of the queries is kept, dtype, tokens."""

STORES = (
    # With tiles in `decode`: head dims, dtype, store, what is asked.
    (64, 64, F16, "s0;k0;v0;2c64p256+16x8/2t64p256", {"queries": 5, "mask": "float"}),
    (64, 64, F16, "s0;k0;v0;4t64p128/4t64p128|8t64p128/8t64p128|16t64p128/16t64p128", {"mask": "bool"}),
    (80, 80, F16, "s4;k16;v16;4t40p128/4t40p128", {"sinks": True}),
    (80, 80, BF16, "s4;k0;v0;16t80p128/8t80p128", {"mask": "bool", "softcap": 5.0}),
    (96, 96, F16, "s5;k32;v32;8t96p128/8t96p128", {"mask": "row"}),
    (192, 128, BF16, "s4;k0;v0;2c128p128+4x24/2t128p128", {"queries": 2}),
    (256, 256, F16, "s0;k256;v256;2t256p128/2t64p128", {}),
    (128, 128, BF16, "s0;k0;v0;2c32p32/2t32p32|4t32p32/4t32p32", {}),
    (128, 128, BF16, "s4;k128;v128;4c128p128n/2t128p128n", {"queries": 2}),
    (128, 128, BF16, "s4;k0;v0;2c32p128n/4t128p128n", {"mask": "float"}),
    (128, 128, BF16, "w200;s0;k0;v0;2c64p128+4x64/2t128p128", {"queries": 2}),
    (64, 64, BF16, "w128;s0;k0;v0;16t1p32/16t1p32", {"sinks": True, "mask": "bool"}),
    (256, 256, BF16, "w200;s0;k128;v0;4t256p128/4t256p128", {"softcap": 5.0}),
    (96, 96, F16, "s4;k0;v32;2c64p128+4x32/2t96p128t", {"queries": 2, "mask": "bool"}),
    # Pages whose parts are no multiples of 16 bytes.
    (100, 100, F16, "s4;k0;v0;4c128p128/4t25p128", {}),
    # For `dequantized`.
    (128, 80, F32, "s4;k0;v16;2c128p128+4x32/2t80p128t", {}),
    (64, 64, F32, "w100;s0;k0;v0;16t1p32/16t1p32", {"mask": "bool"}),
    (64, 64, BF16, "s0;k0;v0;8t32p32/8t16p32", {"mask": "row"}),
    (72, 48, F32, "s4;k0;v0;2c16p32/4t24p32", {"mask": "bool", "softcap": 5.0}),
    (80, 80, BF16, "s4;k0;v0;2c8p32+16x5+4x3/4t16p32", {"queries": 5}),
    (96, 96, BF16, "s4;k32;v32;2c8p32n/4t16p32n", {}),
    (96, 80, F32, "s4;k32;v16;2c32p32+4x8/2t80p32", {"mask": "float", "sinks": True}),
    (320, 320, BF16, "s4;k0;v0;2c32p64+4x8+16x8/2t320p64", {}),
    (80, 80, BF16, "s4;k0;v16;4c8p32nf2/2t16p32f4", {}),
    (128, 128, BF16, "s4;k0;v0;4t128p32f2/4t32p32f3", {}),
)
"""Stores beyond the benchmark's."""

LATENTS = (
    (512, 64, BF16, "ls0;k512;v0;4t512p128/8t64p128", {"share": 16}),
    (512, 64, BF16, "ls0;k0;v0;8t512p128/16t1p128", {"share": 40, "mask": "bool"}),
    (512, 64, F16, "ls0;k0;v0;16t1p128/16t1p128", {"share": 16, "sinks": True}),
    (256, 32, BF16, "ls40;k128;v0;4t64p128/8t32p128", {"share": 5, "queries": 3, "mask": "float", "softcap": 5.0}),
)
"""Stores of latents: channels of latents and rotary parts, dtype, store, what is asked."""

RAISED = (
    (128, BF16, "s0;k0;v0;2c128p128+4x16/2t128p128"),
    (64, F16, "s0;k0;v0;2c16p32+4x5+16x9/2t64p32"),
    (80, F32, "s0;k0;v0;4c32p32+16x8/4t80p32"),
    # Fitted, and ranks of both widths in tiles of their own.
    (80, F32, "s0;k0;v0;2c32p64f4+4x20+16x5/2t80p64"),
    # More than a program can rank: its launcher does.
    (512, F16, "s0;k0;v0;2c64p128+4x50/2t512p128"),
)
"""Stores with raised channels: head dim, dtype, store."""


def do_all(case: Callable[[str], contextlib.AbstractContextManager[None]]) -> None:
    """Every case."""
    more = {
        "mixkvq-pages": {"queries": 5, "mask": "bool", "softcap": 5.0, "sinks": True},
        "saw-int4": {"queries": 5, "softcap": 5.0},
        "fp8+16": {"queries": 5},
    }
    for name in FORMATS:
        with case(name):
            store = fill(scheme_of(name, 128))
            # Seals of one token have tiles of one token.
            store.commit()
            attend(store)
            gather(store)
            unpack(store)
    for name, asked in more.items():
        for dtype in (BF16, F32):
            with case(f"{name}, {dtype}, {asked}"):
                attend(fill(scheme_of(name, 128), dtype=dtype), **asked)
    tuned = {knob: values[-1] for knob, values in GRID["decode"].items()}
    with case(f"kivi-2, tuned: {tuned}"), launch_parameters("decode", **tuned):
        attend(fill(scheme_of("kivi-2", 128)))
    # Integers that are 1 are constants to Triton. Many splits are merged in another shape than few.
    with case("kivi-4, one row, one head"):
        store = fill(scheme_of("kivi-4", 128), rows=1, heads=1, tokens=6000)
        attend(store, share=1)
        gather(store)
    for key_dim, value_dim, dtype, spec, asked in STORES:
        with case(f"{spec}, heads of {key_dim} and {value_dim}, {dtype}, {asked}"):
            store = fill(Pages(store=spec), key_dim, value_dim, dtype)
            attend(store, **asked)
            if store.format.runs[0][0].page_size < 128 or store.format.window:
                gather(store)
                unpack(store)
    for dim, rope_dim, dtype, spec, asked in LATENTS:
        with case(f"{spec}, latents of {dim} and {rope_dim}, {dtype}, {asked}"):
            attend(fill(Tokens(store=spec), dim, rope_dim, dtype, heads=1), **asked)
    for dim, dtype, spec in RAISED:
        for rule in RULES:
            with case(f"{spec}, heads of {dim}, {dtype}, channels by {rule}"):
                fill(Pages(store=spec, rule=rule), dim, dim, dtype, q_abs=rule == RULES[0])
    for spec, rule, query, dtype, tokens in STEPS:
        with case(f"step of {tokens}, {spec}, {dtype}, channels by {rule or 'none'}"):
            step(StoreFormat.parse(spec), rule, query, dtype, tokens)
    for spec, rule, query, dtype, dim in IN_SLOTS:
        with case(f"step in slots, {spec}, {dtype}, channels by {rule or 'none'}"):
            step_in_slots(StoreFormat.parse(spec), rule, query, dtype, dim)
    for dtype, dim in ((BF16, 128), (F16, 80)):
        with case(f"smooth, heads of {dim}, {dtype}"):
            kernels.smooth(*(torch.zeros(2, heads, 3, dim, dtype=dtype) for heads in (8, 2)), torch.zeros(3, 2, dim))
        with case(f"around attention, heads of {dim}, {dtype}"):
            q, k = (torch.zeros(2, heads, 1, dim, dtype=dtype) for heads in (8, 2))
            fused.rotary(q, k, *torch.zeros(2, 2, 1, dim, dtype=dtype))
            fused.rms_norm(q, torch.zeros(dim, dtype=dtype), 1e-6, 0)
            # More rows than a kernel's products take: what is around them alone.
            for rows in (1, 4, 100):
                x, weight = torch.zeros(rows, 8 * dim, dtype=dtype), torch.zeros(256, 8 * dim, dtype=dtype)
                for biases in ((), (weight[:, 0].contiguous(),)):
                    fused.linears(x, [weight], biases)
                fused.gated_linear(x, weight, weight, 0)
    for dtype, dim, tokens in ((BF16, 128, 1024), (F16, 80, 1000)):
        with case(f"split_kv, heads of {dim}, {dtype}"):
            query, keys = torch.zeros(2, 8, 1, dim, dtype=dtype), torch.zeros(2, 2, tokens, dim, dtype=dtype)
            split_kv.split_kv(query, keys, keys, 0.1)


def work(capability: str, folder: Path, most: int) -> None:
    """Does everything for one GPU."""
    # What has been imported is many objects, which need not be searched for cycles while IR is made.
    gc.freeze()
    front = FrontEnd(capability, folder / capability, most)
    pretend(front)
    # Nothing is interpreted: it is how tensors on the CPU get to the launchers.
    with kernels.use_interpreter():
        do_all(front.case)
    for name in sorted(all_kernels() - front.built.keys()):
        front.log("failed", name, "none was tried", "No case launches it: add one.")
    front.log("done")


def in_turn(gpus: list[str], folder: Path, most: int) -> None:
    """Does everything for some GPUs, each in a process with its own caches, which ends alone where it ends early.

    Processes are forked, since to import takes half as long as to build.
    """
    context = multiprocessing.get_context("fork")
    for name in gpus:
        process = context.Process(target=work, args=(name, folder, most))
        process.start()
        process.join()


if __name__ == "__main__":
    in_turn(sys.argv[3:], Path(sys.argv[1]), int(sys.argv[2]))
