"""The end of every decode attention: splits joined by their maxima and sums, and rotated back."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..hadamard import factor_of
from ._lib import cdiv, overlap, power
from .fields import LOG2E
from .hadamard import butterflies
from .launch import Launch

SPLITS = (32, 128, 256)
"""Splits that are merged at a time, where channels leave room for so many."""


@triton.jit(do_not_specialize=["SPLITS", "QUERIES"])
def merge_kernel(
    part, part_top, part_sum, sinks, out, SPLITS, norm, QUERIES,
    SINKS: tl.constexpr, SHARE: tl.constexpr, SEVERAL: tl.constexpr, DV: tl.constexpr, BS: tl.constexpr,
    BD: tl.constexpr, ROTATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BD channels of one query: splits weighted by 2^(top - common top), over the sum of weights and the sink logit.

    SHARE query heads share a head, of QUERIES tokens each if those are SEVERAL. The sum is rotated back by
    ROTATE (0: not at all); then BD holds whole blocks.
    """
    i_m, i_bh, i_d = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    n_q = QUERIES if SEVERAL else 1
    n_rows = SHARE * n_q
    i_row = i_bh * SPLITS * n_rows + i_m
    o_s = tl.arange(0, BS)
    o_d = i_d * BD + tl.arange(0, BD)
    if PDL:
        tl.extra.cuda.gdc_wait()
    b_acc = tl.zeros([BD], tl.float32)
    b_sum = tl.zeros([1], tl.float32)
    b_top = tl.full([1], float("-inf"), tl.float32)
    if sinks is not None:
        i_hq = i_bh * SHARE % SINKS + i_m // n_q
        b_top = tl.zeros([1], tl.float32) + tl.load(sinks + i_hq).to(tl.float32) * LOG2E
        b_sum += 1.0
    for i_s in range(0, SPLITS, BS):
        p_s = i_row + (i_s + o_s) * n_rows
        b_tops = tl.load(part_top + p_s, mask=i_s + o_s < SPLITS, other=float("-inf"))
        # The load does not wait for the maxima. [BS, BD]
        m_part = (i_s + o_s < SPLITS)[:, None] & (o_d < DV)[None, :]
        b_part = tl.load(part + p_s[:, None] * DV + o_d[None, :], mask=m_part, other=0.0)
        # A split without tokens stores a top of -inf and nothing else.
        m_s = b_tops > float("-inf")
        b_new = tl.maximum(b_top, tl.max(b_tops, 0))
        b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_shrink = tl.where(b_top == float("-inf"), 0.0, tl.exp2(b_top - b_safe))
        # [BS]
        b_weight = tl.where(m_s, tl.exp2(b_tops - b_safe), 0.0)
        b_sums = tl.where(m_s, tl.load(part_sum + p_s, mask=i_s + o_s < SPLITS, other=0.0), 0.0)
        b_sum = b_sum * b_shrink + tl.sum(b_weight * b_sums, 0)
        b_acc = b_acc * b_shrink + tl.sum(tl.where(m_s[:, None], b_weight[:, None] * b_part, 0.0), 0)
        b_top = b_new
    b_acc = b_acc / tl.maximum(b_sum, 1e-30)
    if ROTATE > 0:
        b_acc = tl.reshape(b_acc, (BD // ROTATE, ROTATE))
        b_acc = tl.reshape(butterflies(b_acc, ROTATE, BD // ROTATE), (BD,)) * norm
    p_out = out + (i_bh * n_rows + i_m) * DV + o_d
    tl.store(p_out, b_acc.to(out.dtype.element_ty), mask=o_d < DV)


@lru_cache(maxsize=1024)
def merge_launch(
    part: tuple[int, ...],
    queries: int,
    sinks: int | None,
    rotate: int,
    device: torch.device,
) -> Launch:
    """A launch that merges splits: it takes part, part_top, part_sum, the sinks if there are any, and out.

    They are f32 (B * H, splits, rows, D), weighted sums of values of each split; f32 (B * H, splits, rows), the largest
    logit of each split in units of ln 2, -inf for an empty one; f32 (B * H, splits, rows), sums of probabilities; (Hq,)
    logits that join the denominator, or (n * Hq,) where rows take turns; (B, Hq, Q, D), written.

    Args:
        part: shape of the first.
        sinks: how many there are; None for none.
        rotate: rotation of the values, 0 for none.
    """
    programs, splits, rows, value_dim = part
    # Where splits are many and rows few, channels share the work; a rotation needs those of its blocks.
    width = power(value_dim) if splits <= 32 else min(32, power(value_dim))
    if rotate:
        width = max(rotate, min(128, power(value_dim)))
    # All splits at once, since rounds wait for each other; but every size is a variant to compile, so there are three.
    size = next((most for most in SPLITS if splits <= most), SPLITS[-1])
    large = rotate > 0 and splits > 32
    # Few warps find room beside the programs that they wait for, as long as registers hold so much.
    beside = large and size * width <= 16384
    constants = {
        "SINKS": sinks or 1,
        "SHARE": rows // queries,
        "SEVERAL": queries > 1,
        "DV": value_dim,
        "BS": max(16, min(size, (32768 if large else 8192) // width)),
        "BD": width,
        "ROTATE": rotate,
        "PDL": bool(overlap(device)),
        "num_warps": 4 if splits <= 32 or beside else 16 if large else 8,
        **overlap(device),
    }
    grid = (rows, programs, cdiv(value_dim, width))
    numbers = {"SPLITS": splits, "norm": factor_of(rotate), "QUERIES": queries}
    nest = None if sinks else lambda given: (*given[:3], None, given[3])
    return Launch(merge_kernel, grid, numbers, constants, device, nest)


def mask_words(mask: Tensor) -> Tensor:
    """The mask in a dtype that kernels know."""
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask
