"""The rule of `hfkvq.kernels.windows` for kernels, and the counters and slots that it is about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl

from .. import windows
from ..decode import LENGTH, RUNS
from ..windows import Sealing
from .tiles import INTERPRETED

I_LENGTH, I_RUNS = tl.constexpr(LENGTH), tl.constexpr(RUNS)

# Triton compiles `max` as its own `maximum`. The interpreter calls what is Python as it is.
tokens_due = windows.tokens_due if INTERPRETED.value else triton.jit(windows.tokens_due)


@triton.jit
def store_slots(index, i_b, i_total, W, M, BM: tl.constexpr):
    """Slots of the tail that hold the oldest M tokens of a side."""
    o_j = tl.arange(0, BM)
    tl.store(index + i_b * M + o_j, (i_total + o_j) % W, mask=o_j < M)


def window_numbers(sealing: Sealing) -> dict[str, int]:
    """Numbers of a sealing rule, by the names of the kernels' parameters."""
    names = ("LOCAL_K", "LOCAL_V", "UNIT_K", "UNIT_V", "MK", "MV")
    return dict(zip(names, (*sealing.local, *sealing.unit, *sealing.most), strict=True))


def without_last(given: Sequence[Any]) -> tuple[Any, ...]:
    """For kernels whose last tensor, row positions or a map of rows, may be missing: those that have none."""
    return (*given, None)
