"""Tokens that have left the windows, counted on the GPU: one row a program."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..decode import RUNS
from ..windows import Sealing
from ._lib import power
from .launch import Launch
from .windows import I_LENGTH, I_RUNS, store_slots, tokens_due, window_numbers, without_last


@triton.jit(do_not_specialize=["S", "WK", "WV", "LOCAL_K", "LOCAL_V", "UNIT_K", "UNIT_V", "MK", "MV", "B", "N"])
def due_kernel(
    counters, found, pos, S, WK, WV, LOCAL_K, LOCAL_V, UNIT_K, UNIT_V, MK, MV, B, N,
    R: tl.constexpr, BMK: tl.constexpr, BMV: tl.constexpr,
):  # fmt: skip
    """One row of B; of R runs the last takes what is sealed."""
    i_b = tl.program_id(0).to(tl.int64)
    p_count = counters + i_b
    p_last = p_count + (I_RUNS + 2 * R - 2) * B
    i_rest = tl.maximum(tl.load(p_count + I_LENGTH * B) - S, 0)
    i_k = tl.load(p_last)
    i_v = tl.load(p_last + B)
    i_tk = i_k
    i_tv = i_v
    for i in tl.static_range(R - 1):
        i_tk += tl.load(p_count + (I_RUNS + 2 * i) * B)
        i_tv += tl.load(p_count + (I_RUNS + 2 * i + 1) * B)
    i_newk = tokens_due(i_rest, i_tk, LOCAL_K, UNIT_K)
    i_newv = tokens_due(i_rest, i_tv, LOCAL_V, UNIT_V)
    tl.store(found + i_b, i_k)
    tl.store(found + B + i_b, i_v)
    tl.store(found + 2 * B + i_b, i_newk)
    tl.store(found + 3 * B + i_b, i_newv)
    store_slots(found + 4 * B, i_b, i_tk, WK, MK, BMK)
    store_slots(found + 4 * B + B * MK, i_b, i_tv, WV, MV, BMV)
    if pos is not None:
        o_j = tl.arange(0, BMK)
        tl.store(pos + i_b * N + i_k + o_j, S + i_tk + o_j, mask=o_j < i_newk)
    # The program's one warp has read them.
    tl.store(p_last, i_k + i_newk)
    tl.store(p_last + B, i_v + i_newv)


@lru_cache(maxsize=1024)
def due_launch(
    batch: int,
    sink: int,
    tails: tuple[int, ...],
    sealing: Sealing,
    device: torch.device,
    runs: int = 1,
    positions: int | None = None,
) -> Launch:
    """Takes counters, what is found, and ``positions`` a row of the last run if it has any."""
    numbers = {"S": sink, "WK": max(tails[0], 1), "WV": max(tails[1], 1), "B": batch, "N": positions or 0}
    # At least a step's most tokens: one variant for all of them.
    blocks = [max(16, power(most)) for most in sealing.most]
    constants = {"R": runs, "BMK": blocks[0], "BMV": blocks[1], "num_warps": 1}
    nest = without_last if positions is None else None
    return Launch(due_kernel, (batch,), numbers | window_numbers(sealing), constants, device, nest)


def due_triton(
    counters: Tensor,
    found: Tensor,
    sink: int,
    tails: Sequence[int],
    local: Sequence[int],
    unit: Sequence[int],
    most: Sequence[int],
    pos: Tensor | None = None,
) -> None:
    """Launcher of `hfkvq.kernels.due`."""
    assert counters.is_contiguous(), "rows of counters are read by their stride"
    assert pos is None or pos.is_contiguous(), "likewise"
    sealing = Sealing(tuple(local), tuple(unit), tuple(most))
    runs, positions = (counters.shape[0] - RUNS) // 2, None if pos is None else pos.shape[1]
    launch = due_launch(counters.shape[1], sink, tuple(tails), sealing, counters.device, runs, positions)
    launch(counters, found, *([] if pos is None else [pos]))
