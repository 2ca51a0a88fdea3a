"""Block-diagonal Hadamard rotation by butterflies, in the reference's order of sums."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..hadamard import saturated as rounded
from ._lib import F16_MAX, cdiv, on_device
from .ahead import Wanted


@triton.jit
def butterflies(b_x, H: tl.constexpr, BR: tl.constexpr):
    """[BR, H] times the matrix of signs, without its factor: sums and differences of pairs that stand ever further."""
    for i in tl.static_range(H.bit_length() - 1):
        # [BR, H / 2s, s, 2]: pairs that stand s = 2^i apart
        b_pair = tl.permute(tl.reshape(b_x, (BR, H >> (i + 1), 2, 1 << i)), (0, 1, 3, 2))
        b_upper, b_lower = tl.split(b_pair)
        b_pair = tl.join(b_upper + b_lower, b_upper - b_lower)
        b_x = tl.reshape(tl.permute(b_pair, (0, 1, 3, 2)), (BR, H))
    return b_x


@triton.jit
def saturated(b_x, dtype: tl.constexpr):
    """f32 rounded to a dtype; see `hfkvq.kernels.hadamard.saturated`."""
    if dtype == tl.float16:
        b_x = tl.where(b_x > F16_MAX, F16_MAX, tl.where(b_x < -F16_MAX, -F16_MAX, b_x))
    return b_x.to(dtype)


@triton.jit(do_not_specialize=["ROWS"])
def hadamard_kernel(x, y, ROWS, scale, H: tl.constexpr, BR: tl.constexpr):
    """BR blocks of H channels each."""
    o_r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    # [BR, H]
    o_x = o_r[:, None] * H + tl.arange(0, H)[None, :]
    m_x = (o_r < ROWS)[:, None] & (tl.arange(0, H) < H)[None, :]
    b_x = tl.load(x + o_x, mask=m_x, other=0.0).to(tl.float32)
    tl.store(y + o_x, saturated(butterflies(b_x, H, BR) * scale, y.dtype.element_ty), mask=m_x)


def hadamard_triton(x: Tensor, block: int) -> Tensor:
    """Launcher of `hfkvq.kernels.hadamard`."""
    blocks = x.reshape(-1, block).contiguous()
    # Triton's interpreter truncates where bf16 should be rounded.
    out = torch.empty_like(blocks, dtype=x.dtype if x.is_cuda else torch.float32)
    rows = max(1, 2048 // block)
    if blocks.shape[0]:
        with on_device(x):
            grid = (cdiv(blocks.shape[0], rows),)
            hadamard_kernel[grid](x=blocks, y=out, ROWS=blocks.shape[0], scale=block**-0.5, H=block, BR=rows)
    return (out if x.is_cuda else rounded(out, x.dtype)).view(x.shape)


def hadamard_wanted(dtype: torch.dtype, block: int) -> Wanted:
    """The variant for tensors of a dtype."""
    return Wanted(hadamard_kernel, (dtype, dtype, 1, block**-0.5), {"H": block, "BR": max(1, 2048 // block)})
