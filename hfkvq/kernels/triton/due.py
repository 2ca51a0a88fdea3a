"""What has left the windows, counted on the GPU: one row a program."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..decode import LENGTH, RUNS
from ._lib import power
from .launch import Launch

I_LENGTH, I_RUNS = tl.constexpr(LENGTH), tl.constexpr(RUNS)


@triton.jit
def due_of(i_rest, i_total, LOCAL, UNIT):
    """Tokens that a side is to seal of ``i_rest`` behind the sink, of which it has sealed ``i_total``."""
    return tl.maximum(tl.maximum(i_rest - LOCAL, 0) // UNIT * UNIT - i_total, 0)


@triton.jit
def store_index(index, i_b, i_total, W, M, BM: tl.constexpr):
    """Slots of the tail that hold the oldest M tokens of a side."""
    o_j = tl.arange(0, BM)
    tl.store(index + i_b * M + o_j, (i_total + o_j) % W, mask=o_j < M)


@triton.jit(do_not_specialize=["S", "WK", "WV", "LOCAL_K", "LOCAL_V", "UNIT_K", "UNIT_V", "MK", "MV", "B"])
def due_kernel(
    counters, new, index_k, index_v, S, WK, WV, LOCAL_K, LOCAL_V, UNIT_K, UNIT_V, MK, MV, B,
    BMK: tl.constexpr, BMV: tl.constexpr,
):  # fmt: skip
    """One row of B."""
    i_b = tl.program_id(0).to(tl.int64)
    p_count = counters + i_b
    i_rest = tl.maximum(tl.load(p_count + I_LENGTH * B) - S, 0)
    i_k = tl.load(p_count + I_RUNS * B)
    i_v = tl.load(p_count + (I_RUNS + 1) * B)
    tl.store(new + i_b, due_of(i_rest, i_k, LOCAL_K, UNIT_K))
    tl.store(new + B + i_b, due_of(i_rest, i_v, LOCAL_V, UNIT_V))
    store_index(index_k, i_b, i_k, WK, MK, BMK)
    store_index(index_v, i_b, i_v, WV, MV, BMV)


@lru_cache(maxsize=1024)
def _launch(
    batch: int,
    sink: int,
    tails: tuple[int, ...],
    local: tuple[int, ...],
    unit: tuple[int, ...],
    most: tuple[int, ...],
    device: torch.device,
) -> Launch:
    numbers = (sink, *(max(tail, 1) for tail in tails), *local, *unit, *most, batch)
    # At least a step's most tokens: one variant for all of them.
    constants = {"BMK": max(16, power(most[0])), "BMV": max(16, power(most[1])), "num_warps": 1}
    return Launch(due_kernel, (batch,), numbers, constants, device)


def due_triton(
    counters: Tensor, sink: int, tails: Sequence[int], local: Sequence[int], unit: Sequence[int], most: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Launcher of `hfkvq.kernels.due`."""
    assert counters.is_contiguous(), "rows of counters are read by their stride"
    batch = counters.shape[1]
    new, *index = (counters.new_empty(shape) for shape in ((2, batch), (batch, most[0]), (batch, most[1])))
    launch = _launch(batch, sink, tuple(tails), tuple(local), tuple(unit), tuple(most), counters.device)
    launch(counters, new, *index)
    return new, index[0], index[1]
