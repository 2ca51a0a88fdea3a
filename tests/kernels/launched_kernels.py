"""What runs of presets compile, and what is compiled ahead of them, for a GPU that need not be there.

``python -m tests.kernels.launched_kernels PRESET,... FOLDER``, without TRITON_INTERPRET and with an empty
TRITON_CACHE_DIR, prints JSON, of each function in `JOBS`. Each has a process of its own, forked since imports take most
of the time; so has Triton's front end, whose log for the GPU 9.0 goes to FOLDER (see `compile_kernels`).
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import pkgutil
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction

from hfkvq import kernels
from hfkvq.caches.attention import interface
from hfkvq.caches.compile import LayerShape, layer_plan
from hfkvq.caches.layers import KVLayer, PaddingReader
from hfkvq.caches.layers.build import group_layers, scheme_for_window
from hfkvq.caches.schemes.base import Scheme, get_scheme
from hfkvq.caches.steps import step_buffer
from hfkvq.kernels import triton as launchers
from hfkvq.kernels.compile import SEVERAL, normal
from hfkvq.kernels.triton.compile import GPUS, Wanted, compile_all, leave_gpu_alone, settle_name
from hfkvq.kernels.triton.hadamard import hadamard_wanted
from hfkvq.kernels.triton.place import place_kernel
from hfkvq.vllm.pages import PAGE, LayerPages, Prompts, bytes_of_page
from hfkvq.vllm.windows import WindowPages, WindowPrompts
from tests.kernels.compile_kernels import BF16, FrontEnd, Idle, in_turn, name_of, pretend, tensor

HEADS, KV_HEADS, DIM = 32, 8, 128

I32 = torch.int32

ENGINE = {"saw-int4": (0,), "best-3.4": (0, 15, 22), "kvarn-k4v2": (0,)}
"""Presets, and layers of different formats."""

SIZES = (2, 3, 5, 8, 9, 13, 16)
"""Tokens of steps, where there are several."""

RUNS = ((1, 1024, 4096), (3, 417, 600), (7, 130, 1000))
"""Rows, tokens of the prompt and capacity."""


class Notes(FrontEnd):
    """Notes what would be compiled, and compiles nothing."""

    def __init__(self) -> None:
        super().__init__("9.0", Path(os.devnull))
        self.found: dict[tuple[str, str], None] = {}

    def compile(self, src: Any, target: Any, options: dict[str, Any], **_: Any) -> Idle:
        parsed = make_backend(target).parse_options(dict(options))
        self.found[name_of(src.fn), src.hash() + parsed.hash()] = None
        return Idle()


class Attention(torch.nn.Module):
    is_causal = True


def scheme_of(preset: str) -> tuple[Scheme, int]:
    """A preset's scheme, and the window behind its name, as in ``full@128``."""
    name, _, window = preset.partition("@")
    scheme = get_scheme(name)
    return scheme_for_window(scheme, int(window), (DIM, DIM)) if window else scheme, int(window or 0)


def run(preset: str, rows: int, tokens: int, capacity: int, sizes: Sequence[int] = (1, 1)) -> None:
    """A prompt, and steps as graphs record them, of so many tokens."""
    scheme, window = scheme_of(preset)
    layer = KVLayer(scheme, PaddingReader(), capacity, recordable=True, window=window)
    group_layers([layer], HEADS // KV_HEADS)
    module = Attention()
    for count in (tokens, *sizes):
        query, key, value = (tensor(rows, heads, count, DIM, BF16) for heads in (HEADS, KV_HEADS, KV_HEADS))
        handles = layer.update(key, value)
        interface.hfkvq_attention(module, query, *handles, None, scaling=DIM**-0.5)


def forget() -> None:
    """Lets all kernels be compiled anew."""
    for module in [x for name, x in sys.modules.items() if name.startswith("hfkvq.kernels.triton")]:
        for x in vars(module).values():
            if isinstance(x, JITFunction):
                x.device_caches.clear()
            elif hasattr(x, "cache_clear"):
                x.cache_clear()


def noting() -> Notes:
    """From now on launches of this process are noted."""
    notes = Notes()
    pretend(notes)
    triton.compiler.compile = notes.compile
    torch.cuda.is_current_stream_capturing = lambda: False
    to, step = torch.Tensor.to, step_buffer.run_step
    # What kernels would write decides what is sealed; none of them runs.
    torch.empty, torch.empty_like, torch.Tensor.new_empty = torch.zeros, torch.zeros_like, torch.Tensor.new_zeros
    # There is no other device.
    torch.Tensor.to = lambda self, *args, **kwargs: (
        self if args and isinstance(args[0], torch.device) else to(self, *args, **kwargs)
    )
    make = torch.tensor
    torch.tensor = lambda *args, pin_memory=False, **kwargs: make(*args, **kwargs)
    # As graphs record steps: whatever is due.
    step_buffer.run_step = lambda *args: step(*args[:6], True)
    interface.dense_attention = lambda module, query, key, value, *_, **__: (query.transpose(1, 2).clone(), None)
    return notes


def run_engine(preset: str, layer: int) -> tuple[Any, ...]:
    """Prompts of an engine: some that are new, some behind others, one of which ends a page that was being filled.

    Returns:
        What `hfkvq.kernels.compile.compile_prompts` is given for them.
    """
    scheme = get_scheme(preset).in_layer(layer, 36).shared
    layout = scheme.layout(DIM, DIM)
    form = replace(layout.store, sink=PAGE) if layout.windowed else layout.store
    rule, asked = step_buffer.sealing_rules(scheme, layout, DIM) if layout.windowed else ("", "")
    balances = layout.keys.balance, layout.values.balance
    held, counts, slots = [0, 130, 256], [300, 200, 40], 4
    total = sum(counts)
    whole = torch.zeros(total, HEADS + 2 * KV_HEADS, DIM, dtype=BF16)
    query, key, value = whole.split([HEADS, KV_HEADS, KV_HEADS], 1)
    data = torch.zeros(8 * bytes_of_page(form, KV_HEADS, DIM), dtype=torch.uint8)
    rows = Prompts.of(torch.zeros(3, 5, dtype=torch.int32), held, counts, whole=layout.windowed)
    sums = torch.zeros(slots + 1, KV_HEADS, DIM, dtype=torch.float64), torch.zeros(KV_HEADS, slots + 1, dtype=I32)
    if layout.windowed:
        windows = [torch.zeros(2 * slots + 2, KV_HEADS, PAGE, DIM, dtype=BF16) for _ in range(2)]
        given = form, KV_HEADS, DIM, data, (windows[0], windows[1])
        pages = WindowPages(*given, rule, balances, sums if asked else None)
        table, known, past = (torch.zeros(size, dtype=I32) for size in ((3, 5), 3, 3))
        for sealed in (None, torch.zeros(2, dtype=I32)):
            claimed = kernels.claim(table, known, kernels.new_slots(slots, torch.device("cpu")), PAGE, 1, past, sealed)
        # Nothing that is launched here runs.
        claimed.found.zero_()
        pages.take_prompts(query, key, value, WindowPrompts.of(rows, KV_HEADS, slots).placed(claimed.found[0]))
        pages.restore(table, claimed)
    else:
        tails = torch.zeros(3, KV_HEADS, 16, DIM, dtype=BF16)
        pages = LayerPages(form, KV_HEADS, DIM, data, (tails, tails))
        pages.store_prompts(key, value, rows)
    pages.attend_prompts(query, key, value, rows, 1.0, lambda *_: None, torch.zeros_like(query))
    if layout.windowed:
        pages.finish_prompts()
    return form, (HEADS, KV_HEADS, DIM), BF16, torch.device("cuda", 0), rule, bool(asked), balances, slots


def engine() -> dict[str, list[list[Any]]]:
    """Variants of prompts of an engine by preset and layer, and those that are compiled ahead."""
    from hfkvq.kernels.triton.variants import prompts_wanted

    notes, found = noting(), {}
    with kernels.use_interpreter():
        for preset, layers in ENGINE.items():
            for layer in layers:
                forget()
                notes.found = {}
                given = run_engine(preset, layer)
                own = list(notes.found)
                forget()
                notes.found = {}
                for each in prompts_wanted(*given):
                    each.kernel.warmup(*each.arguments, grid=(1,), **each.constants)
                found[f"{preset}, layer {layer}"] = [own, list(notes.found)]
    return found


def launched() -> dict[str, dict[str, list[Any]]]:
    """Variants of each run by preset, and those that `hfkvq.kernels.compile` would compile, as [kernel, key] pairs."""
    notes = noting()
    found: dict[str, dict[str, list[Any]]] = {}
    with kernels.use_interpreter():
        for preset in sys.argv[1].split(","):
            found[preset] = own = {}
            for case in RUNS:
                forget()
                notes.found = {}
                run(preset, *case)
                own[f"{case[0]} x {case[1]}"] = list(notes.found)
            forget()
            notes.found = {}
            from hfkvq.kernels.triton.variants import wanted

            scheme, window = scheme_of(preset)
            if not scheme.evicts and "tags" not in scheme.needs:
                # Of these, steps of several tokens are the host's.
                run(preset, 1, 1000, 4096, sizes=SIZES)
                own["several"] = list(notes.found)
            plan = normal(layer_plan(scheme, LayerShape(HEADS, KV_HEADS, DIM, window), BF16))
            for name, sizes in (("ahead", (1,)), ("several ahead", SEVERAL)):
                forget()
                notes.found = {}
                for each in wanted(plan, HEADS, plan.rule or None, sizes, torch.device("cuda", 0)):
                    each.kernel.warmup(*each.arguments, grid=(1,), **each.constants)
                own[name] = list(notes.found)
    return found


def names(backward: bool = False) -> dict[str, str]:
    """Cache keys of all our functions, by name; with ``backward`` callers are asked before their callees."""
    found = {}
    for module in pkgutil.walk_packages(launchers.__path__, f"{launchers.__name__}."):
        for x in vars(importlib.import_module(module.name)).values():
            if isinstance(x, JITFunction) and x.fn.__module__.startswith(launchers.__name__):
                found[f"{x.fn.__module__}.{x.fn.__name__}"] = x
    for name in reversed(found) if backward else found:
        settle_name(found[name])
    return {name: function.cache_key for name, function in found.items()}


def names_backward() -> dict[str, str]:
    """The same in the other order."""
    return names(backward=True)


def compiled() -> dict[str, Any]:
    """Variants compiled side by side, and found again."""

    def cached() -> int:
        return len(list(Path(triton.knobs.cache.dir).glob("*/*.cubin")))

    leave_gpu_alone(GPUS[90])
    every = [hadamard_wanted(torch.bfloat16, 64), hadamard_wanted(torch.float16, 64)]
    # One twice, and one whose arguments are missing.
    every += [hadamard_wanted(torch.bfloat16, 64), Wanted(place_kernel, (), {})]
    said = []
    for _ in range(2):
        done = compile_all(every, None)
        said.append({"done": [[name, bool(error)] for name, error in done], "compiled": cached()})
        for each in every:
            assert isinstance(each.kernel, JITFunction)
            each.kernel.device_caches.clear()
    return {"said": said, "again": compile_all(every[:1], None), "compiled": cached()}


JOBS: tuple[Callable[[], Any], ...] = (launched, engine, names, names_backward, compiled)


if __name__ == "__main__":
    # Two variants of each kernel. A process that ends before its time says so in the log.
    in_turn(["9.0"], Path(sys.argv[2]), 2)
    found = {}
    for job in JOBS:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
            found[job.__name__] = pool.submit(job).result()
    print(json.dumps(found))
