"""The end of every decode attention: splits joined by their maxima and sums, and rotated back."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._lib import cdiv, power
from .fields import LOG2E
from .hadamard import butterflies


@triton.jit(do_not_specialize=["SPLITS"])
def merge_kernel(
    part, part_top, part_sum, sinks, out, SPLITS, norm,
    SINKS: tl.constexpr, ROWS: tl.constexpr, Q: tl.constexpr, DV: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr,
    ROTATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BD channels of one query: splits weighted by 2^(top - common top), over the sum of weights and the sink logit.

    The sum is rotated back in blocks of ROTATE channels (0: not at all); then BD holds them all.
    """
    i_m, i_bh, i_d = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    i_row = i_bh * SPLITS * ROWS + i_m
    o_s = tl.arange(0, BS)
    o_d = i_d * BD + tl.arange(0, BD)
    if PDL:
        tl.extra.cuda.gdc_wait()
    b_acc = tl.zeros([BD], tl.float32)
    b_sum = tl.zeros([1], tl.float32)
    b_top = tl.full([1], float("-inf"), tl.float32)
    if sinks is not None:
        i_hq = i_bh * (ROWS // Q) % SINKS + i_m // Q
        b_top = tl.zeros([1], tl.float32) + tl.load(sinks + i_hq).to(tl.float32) * LOG2E
        b_sum += 1.0
    for i_s in range(0, SPLITS, BS):
        p_s = i_row + (i_s + o_s) * ROWS
        b_tops = tl.load(part_top + p_s, mask=i_s + o_s < SPLITS, other=float("-inf"))
        # Asked for without waiting for the maxima. [BS, BD]
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
        b_acc = tl.reshape(butterflies(tl.reshape(b_acc, (BD // ROTATE, ROTATE)), ROTATE, BD // ROTATE), (BD,)) * norm
    p_out = out + (i_bh * ROWS + i_m) * DV + o_d
    tl.store(p_out, b_acc.to(out.dtype.element_ty), mask=o_d < DV)


def merge_splits(
    part: Tensor, part_top: Tensor, part_sum: Tensor, sinks: Tensor | None, out: Tensor, rotate: int, dependent: bool
) -> None:
    """Merges splits into ``out``.

    Args:
        part: f32 (B * H, splits, rows, D), weighted sums of values of each split.
        part_top: f32 (B * H, splits, rows), largest logit of each split in units of ln 2, -inf for an empty one.
        part_sum: f32 (B * H, splits, rows), sums of probabilities.
        sinks: (Hq,) logits that join the denominator, (n * Hq,) where rows take turns, or None.
        out: (B, Hq, Q, D), written.
        rotate: Hadamard block of the values, 0 for none.
        dependent: whether the launch before is the kernel that writes the splits, and says when this one may start.
    """
    programs, splits, rows, value_dim = part.shape
    # Where splits are many and rows few, channels share the work; a rotation needs all of them.
    width = power(value_dim) if rotate or splits <= 32 else min(32, power(value_dim))
    merge_kernel[(rows, programs, cdiv(value_dim, width))](
        part,
        part_top,
        part_sum,
        sinks,
        out,
        splits,
        rotate**-0.5 if rotate else 1.0,
        SINKS=1 if sinks is None else sinks.shape[0],
        ROWS=rows,
        Q=out.shape[2],
        DV=value_dim,
        BS=max(16, min(power(splits), 8192 // width)),
        BD=width,
        ROTATE=rotate,
        PDL=dependent,
        num_warps=4 if splits <= 32 else 8,
        **({"launch_pdl": True} if dependent else {}),
    )


def mask_arguments(mask: Tensor | None, q: Tensor) -> tuple[Tensor, list[int], int, int]:
    """The mask as kernels read it: tensor, four strides (0 where it broadcasts), length, kind."""
    if mask is None:
        return q, [0, 0, 0, 0], 1, 0
    kind = 2 if mask.is_floating_point() else 1
    strides = [stride if size > 1 else 0 for stride, size in zip(mask.stride(), mask.shape, strict=True)]
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask, strides, mask.shape[-1], kind
