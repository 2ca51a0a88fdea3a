"""Compiles ahead, in processes side by side, what a benchmark is going to launch."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures import TimeoutError as Late
from concurrent.futures.process import BrokenProcessPool
from types import MappingProxyType
from typing import Any

import torch

from hfkvq.caches.make import LayerShape, layer_plan
from hfkvq.kernels.pages import SIDES
from hfkvq.kernels.triton import configs
from hfkvq.kernels.triton._lib import Gpu, properties
from hfkvq.kernels.triton.ahead import Wanted, compile_one
from hfkvq.kernels.triton.decode import decode_wanted
from hfkvq.kernels.triton.gather import gather_wanted
from hfkvq.kernels.triton.latent import latent_wanted
from hfkvq.kernels.triton.warm import wanted
from hfkvq.kernels.triton.worker import leave_gpu_alone
from hfkvq.kernels.warm import normal

from .cases import DTYPES, Shape, layout_of, scheme_of

WORKERS = 14
"""Most processes that compile side by side; none of them uses the GPU."""

LENGTH = 1024
"""Tokens of what is compiled for."""

Variant = tuple[str, str]
"""A kernel, and the variant of it, see `configs.key_of`."""


def kernels_of(name: str, shape: Shape, device: torch.device) -> Iterator[Wanted]:
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


def compile_attention(name: str, shape: Shape) -> None:
    """Compiles what attending to a format takes into Triton's cache."""
    for each in kernels_of(name, shape, torch.device("cuda", 0)):
        compile_one(each)


def compile_store(name: str, shape: Shape) -> None:
    """Compiles what storing a format takes."""
    if not shape.rope_dim:
        scheme = scheme_of(name, shape.head_dim)
        plan = layer_plan(scheme, LayerShape(shape.heads, shape.kv_heads, shape.head_dim), DTYPES[shape.dtype])
        for each in wanted(normal(plan), shape.heads, scheme.channel_rule, (1,), torch.device("cuda", 0)):
            compile_one(each)


def compile_candidate(name: str, shape: Shape, kernel: str, key: str, knobs: configs.Knobs) -> None:
    """Compiles what attending to a format takes with these launch parameters."""
    configs.try_out(kernel, key, knobs)
    try:
        compile_attention(name, shape)
    finally:
        configs.try_out(kernel, key, None)


def plain(knobs: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """Knobs as a key."""
    return tuple(sorted(knobs.items()))


class Compiler:
    """Processes that compile side by side, while this one measures: a candidate takes seconds, and there are a hundred.

    Args:
        shapes: heads, dims, dtype and queries; the first one's candidates.
        device: whose kernels they are.
        end: when there is no time left, by `time.monotonic`.
    """

    def __init__(self, shapes: Sequence[Shape], device: torch.device, end: float = math.inf) -> None:
        # Kernels take rows and contexts of any length.
        self._shapes = list({dataclasses.replace(x, batch=1, context=LENGTH): None for x in shapes})
        self._device, self._end = device, end
        self._jobs: dict[tuple[Any, ...], list[Future[None]]] = {}
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def begin(
        self,
        formats: Sequence[str],
        candidates: Mapping[Variant, Sequence[Mapping[str, int]]] = MappingProxyType({}),
        uses: Mapping[Variant, Sequence[str]] = MappingProxyType({}),
    ) -> None:
        """Has everything compiled, in the order in which it is measured; returns at once.

        Args:
            formats: names.
            candidates: launch parameters of variants of kernels.
            uses: the formats that are timed with them.
        """
        workers = min(WORKERS, (os.cpu_count() or 1) - 1)
        if self._device.type != "cuda" or workers < 1:
            return
        found = properties(self._device)
        gpu = Gpu(*(getattr(found, field) for field in Gpu._fields))
        # The GPU has been used in this process, so a copy of it could not; what is imported once serves all.
        # Children launch nothing, so that nobody's times are disturbed.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._pool = ProcessPoolExecutor(workers, context, leave_gpu_alone, (gpu,))
        with contextlib.suppress(BrokenProcessPool):
            for name in formats:
                own = self._jobs.setdefault((name,), [])
                own.append(self._pool.submit(compile_store, name, self._shapes[0]))
                own += [self._pool.submit(compile_attention, name, shape) for shape in self._shapes]
            for (kernel, key), tried in candidates.items():
                for knobs in tried:
                    for name in uses[kernel, key]:
                        job = self._pool.submit(compile_candidate, name, self._shapes[0], kernel, key, knobs)
                        self._jobs[name, kernel, key, plain(knobs)] = [job]

    def wait(self, what: tuple[Any, ...]) -> bool:
        """Waits for a format (name,) or a candidate (name, kernel, key, knobs); False if there is no time left.

        What was not asked for is compiled where it is launched, and so is what failed: it says why there.
        """
        if self._end <= time.monotonic():
            return False
        for job in self._jobs.get(what, ()):
            try:
                job.exception(None if math.isinf(self._end) else max(0.0, self._end - time.monotonic()))
            except (Late, TimeoutError):
                return False
        return True
