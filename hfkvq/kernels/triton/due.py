"""What has left the windows, counted on the GPU: one row a program."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..decode import RUNS
from ._lib import power
from .launch import Launch
from .windows import I_LENGTH, I_RUNS, store_slots, tokens_due


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
    local: tuple[int, ...],
    unit: tuple[int, ...],
    most: tuple[int, ...],
    device: torch.device,
    runs: int = 1,
    positions: int | None = None,
) -> Launch:
    """Takes counters, what is found, and ``positions`` a row of the last run if it has any."""
    numbers = {"S": sink, "B": batch, "N": positions or 0}
    for name, both in (("W", [max(tail, 1) for tail in tails]), ("LOCAL_", local), ("UNIT_", unit), ("M", most)):
        numbers |= {f"{name}K": both[0], f"{name}V": both[1]}
    # At least a step's most tokens: one variant for all of them.
    constants = {"R": runs, "BMK": max(16, power(most[0])), "BMV": max(16, power(most[1])), "num_warps": 1}
    return Launch(due_kernel, (batch,), numbers, constants, device, _without_positions if positions is None else None)


def _without_positions(given: Sequence[Any]) -> tuple[Any, ...]:
    return (*given, None)


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
    launch = due_launch(
        counters.shape[1],
        sink,
        tuple(tails),
        tuple(local),
        tuple(unit),
        tuple(most),
        counters.device,
        (counters.shape[0] - RUNS) // 2,
        None if pos is None else pos.shape[1],
    )
    launch(counters, found, *([] if pos is None else [pos]))
