"""Kernels of a benchmark, compiled side by side before they are launched."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch

from hfkvq.caches.compile import LayerShape, layer_plan
from hfkvq.kernels.compile import normal
from hfkvq.kernels.pages import SIDES
from hfkvq.kernels.triton import configs
from hfkvq.kernels.triton.compile import Wanted, compile_all
from hfkvq.kernels.triton.decode import decode_wanted
from hfkvq.kernels.triton.gather import gather_wanted
from hfkvq.kernels.triton.latent import latent_wanted
from hfkvq.kernels.triton.variants import wanted

from .cases import DTYPES, Shape, layout_of, scheme_of

LENGTH = 1024
"""Tokens that are compiled for: kernels take rows and contexts of any length."""


def attending(name: str, shape: Shape, device: torch.device) -> Iterator[Wanted]:
    """The variants that attend to a format at such shapes, with the launch parameters in force."""
    form, dtype = layout_of(name, shape.head_dim, shape.rope_dim).store, DTYPES[shape.dtype]
    if shape.is_prompt:
        # Pages are dequantized for them.
        for side in SIDES:
            yield from gather_wanted(form, side, shape.kv_heads, shape.head_dim, dtype)
    elif form.latent:
        yield from latent_wanted(form, shape.heads, shape.head_dim, shape.rope_dim, dtype, device, shape.queries)
    else:
        dims = shape.kv_heads, shape.heads, shape.head_dim, shape.head_dim
        yield from decode_wanted(form, *dims, dtype, device, shape.queries)


def storing(name: str, shape: Shape, device: torch.device) -> Iterator[Wanted]:
    """The variants that store a format."""
    if not shape.rope_dim:
        scheme = scheme_of(name, shape.head_dim)
        plan = layer_plan(scheme, LayerShape(shape.heads, shape.kv_heads, shape.head_dim), DTYPES[shape.dtype])
        yield from wanted(normal(plan), shape.heads, plan.rule or None, (1,), device)


def compile_formats(names: Sequence[str], shapes: Sequence[Shape], device: torch.device) -> None:
    """Compiles all that storing formats, and attending to them at these shapes, launches on a GPU."""
    alike = list({dataclasses.replace(shape, batch=1, context=LENGTH): None for shape in shapes})
    if device.type == "cuda":
        every = [each for name in names for each in storing(name, alike[0], device)]
        every += [each for name in names for shape in alike for each in attending(name, shape, device)]
        compile_all(every, device)


def compile_candidates(
    kernel: str, key: str, tried: Sequence[Mapping[str, int]], names: Sequence[str], shape: Shape, device: torch.device
) -> None:
    """Compiles what attending to formats launches on a GPU with each of these launch parameters of one kernel."""
    every: list[Wanted] = []
    for knobs in tried if device.type == "cuda" else ():
        configs.try_out(kernel, key, knobs)
        every += [each for name in names for each in attending(name, shape, device)]
    configs.try_out(kernel, key, None)
    compile_all(every, device)
