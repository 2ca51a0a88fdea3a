"""What quantized attention is held against: the fastest of PyTorch's attention and a plain Triton kernel, dense."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hfkvq.kernels.arguments import AttentionArguments

from .cases import Shape, fill
from .several import measure_several
from .split_kv import FAILURES, GRID, Tuning, split_kv
from .timing import Timing, first_line, time_calls

SDPA = {"cuDNN SDPA": SDPBackend.CUDNN_ATTENTION, "flash SDPA": SDPBackend.FLASH_ATTENTION}
PLAIN = "plain Triton"

SEARCH_REPLAYS = 5


def _sdpa(backend: SDPBackend, query: Tensor, keys: Tensor, values: Tensor) -> Callable[[], Tensor]:
    def attend() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, keys, values, enable_gqa=True)

    return attend


def _plain(tuning: Tuning, scaling: float, query: Tensor, keys: Tensor, values: Tensor) -> Callable[[], Tensor]:
    return lambda: split_kv(query, keys, values, scaling, tuning)


def measure_baselines(
    shape: Shape, query: Tensor, copies: Sequence[tuple[Tensor, Tensor]], replays: int
) -> Iterator[tuple[str, Timing | str, str]]:
    """Name, time (or what went wrong) and a remark of each baseline.

    Args:
        shape: the shape.
        query: (B, Hq, Q, D).
        copies: keys and values (B, H, T, D), several times.
        replays: see `time_calls`.
    """
    if shape.rope_dim:
        yield from _measure_latents(shape, query, copies, replays)
        return
    if shape.queries > 1:
        yield from measure_several(shape, query, copies, replays)
        return
    for name, backend in SDPA.items():
        try:
            yield name, time_calls([_sdpa(backend, query, *copy) for copy in copies], replays), ""
        except RuntimeError as error:
            # Not every GPU and build has both.
            yield name, first_line(error), ""
    best: tuple[float, Tuning] | None = None
    for tuning in GRID:
        calls = [_plain(tuning, shape.scaling, query, *copy) for copy in copies]
        try:
            time = time_calls(calls, SEARCH_REPLAYS).p50
        except FAILURES:
            # More loads in flight than this GPU's shared memory holds.
            continue
        best = min(best or (time, tuning), (time, tuning))
    if best is None:
        yield PLAIN, "no variant of the kernel runs on this GPU", ""
        return
    tuning = best[1]
    remark = f"{tuning.programs_per_sm} programs a multiprocessor, {tuning.stages} stages, {tuning.warps} warps"
    yield PLAIN, time_calls([_plain(tuning, shape.scaling, query, *copy) for copy in copies], replays), remark


def _absorbed(scaling: float, query: Tensor, both: Tensor, dim: int) -> Callable[[], Tensor]:
    def attend() -> Tensor:
        return torch.softmax(query @ both.mT * scaling, -1) @ both[..., :dim]

    return attend


def _measure_latents(
    shape: Shape, query: Tensor, copies: Sequence[tuple[Tensor, Tensor]], replays: int
) -> Iterator[tuple[str, Timing | str, str]]:
    """What latents are held against: this library's own kernel on latents in 16 bits, and PyTorch's products."""
    stores = [fill("full", *copy) for copy in copies]
    calls = [partial(store.attend, query, AttentionArguments(shape.scaling)) for store in stores]
    try:
        yield "16-bit latents", time_calls(calls, replays), "own kernel"
    except FAILURES as error:
        yield "16-bit latents", first_line(error), ""
    del stores, calls
    both = [torch.cat(copy, -1)[:, 0] for copy in copies]
    plain = [_absorbed(shape.scaling, query[:, :, 0], each, shape.head_dim) for each in both]
    try:
        yield "matmul", time_calls(plain, replays), "softmax between two products"
    except RuntimeError as error:
        yield "matmul", first_line(error), ""
