"""What runs of presets compile, and what is compiled ahead of them, for a GPU that need not be there.

``python -m tests.kernels.launched_kernels PRESET,...``, without TRITON_INTERPRET, prints JSON: by preset, the variants
of each run and those that `hfkvq.kernels.compile` would have compiled, as [kernel, key] pairs.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from triton.compiler import make_backend

from hfkvq import kernels
from hfkvq.caches.attention import interface
from hfkvq.caches.compile import LayerShape, layer_plan
from hfkvq.caches.layers import KVLayer, PaddingReader
from hfkvq.caches.layers.build import group_layers, scheme_for_window
from hfkvq.caches.schemes.base import Scheme, get_scheme
from hfkvq.caches.steps import device_steps
from hfkvq.kernels.compile import SEVERAL, normal
from tests.kernels.compile_kernels import BF16, FrontEnd, Idle, name_of, pretend, tensor

HEADS, KV_HEADS, DIM = 32, 8, 128

SIZES = (2, 3, 5, 8, 9, 13, 16)
"""Tokens of steps, where there are several."""

RUNS = ((1, 1024, 4096), (4, 1400, 8192), (3, 417, 600), (7, 130, 1000))
"""Rows, tokens of the prompt and capacity."""


class Notes(FrontEnd):
    """Notes what would be compiled, and compiles nothing."""

    def __init__(self) -> None:
        super().__init__("9.0", Path(os.devnull), {})
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
            if isinstance(x, triton.runtime.jit.JITFunction):
                x.device_caches.clear()
            elif hasattr(x, "cache_clear"):
                x.cache_clear()


def main() -> None:
    notes = Notes()
    pretend(notes)
    triton.compiler.compile = notes.compile
    torch.cuda.is_current_stream_capturing = lambda: False
    to, step = torch.Tensor.to, device_steps.run_step
    # What kernels would write decides what is sealed; none of them runs.
    torch.empty, torch.empty_like, torch.Tensor.new_empty = torch.zeros, torch.zeros_like, torch.Tensor.new_zeros
    # There is no other device.
    torch.Tensor.to = lambda self, *args, **kwargs: (
        self if args and isinstance(args[0], torch.device) else to(self, *args, **kwargs)
    )
    # As graphs record steps: whatever is due.
    device_steps.run_step = lambda *args: step(*args[:6], True)
    interface.dense_attention = lambda module, query, key, value, *_, **__: (query.transpose(1, 2).clone(), None)
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
    print(json.dumps(found))


if __name__ == "__main__":
    main()
