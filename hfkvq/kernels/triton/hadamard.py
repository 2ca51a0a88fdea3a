"""Block-diagonal Hadamard rotation by butterflies, in the reference's order of sums."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..hadamard import factor_of
from ._lib import F16_MAX, cdiv, overlap
from .compile import Wanted
from .launch import Launch


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
def sign_matrix(N: tl.constexpr, H: tl.constexpr):
    """The matrix of signs f32 [N, N] of blocks of order H, or of one of order N where that is less."""
    o_n = tl.arange(0, N)
    o_bits = o_n[:, None] & o_n[None, :] & (H - 1)
    # The sign is the parity of the bits in common.
    o_bits = o_bits ^ (o_bits >> 4)
    o_bits = o_bits ^ (o_bits >> 2)
    o_bits = o_bits ^ (o_bits >> 1)
    b_turn = 1.0 - 2.0 * (o_bits & 1).to(tl.float32)
    if H < N:
        b_turn = tl.where(o_n[:, None] // H == o_n[None, :] // H, b_turn, 0.0)
    return b_turn


@triton.jit
def saturated(b_x, dtype: tl.constexpr):
    """f32 rounded to a dtype; see `hfkvq.kernels.hadamard.saturated`."""
    if dtype == tl.float16:
        b_x = tl.where(b_x > F16_MAX, F16_MAX, tl.where(b_x < -F16_MAX, -F16_MAX, b_x))
    return b_x.to(dtype)


@triton.jit(do_not_specialize=["ROWS", "INNER"])
def hadamard_kernel(x, y, ROWS, INNER, stride, scale, H: tl.constexpr, BR: tl.constexpr):
    """BR blocks of channels; INNER of them lie side by side in ``x``, and the next ones a stride further."""
    o_r = tl.program_id(0) * BR + tl.arange(0, BR)
    o_d = tl.arange(0, H)[None, :]
    # [BR, H]
    m_x = (o_r < ROWS)[:, None] & (o_d < H)
    p_x = x + (o_r // INNER).to(tl.int64) * stride + o_r % INNER * H
    b_x = tl.load(p_x[:, None] + o_d, mask=m_x, other=0.0).to(tl.float32)
    b_x = saturated(butterflies(b_x, H, BR) * scale, y.dtype.element_ty)
    tl.store(y + o_r.to(tl.int64)[:, None] * H + o_d, b_x, mask=m_x)


@triton.jit
def turn_back_kernel(x, y, norm, H: tl.constexpr, PDL: tl.constexpr):
    """One block of 256 channels or more, f32, rotated back by two products instead of butterflies.

    Of so long a block most pairs stand in different warps, and each of nine stages would go through shared memory.
    """
    o_x = tl.program_id(0).to(tl.int64) * H + tl.arange(0, H)
    if PDL:
        tl.extra.cuda.gdc_wait()
    b_x = tl.reshape(tl.load(x + o_x), (16, H // 16))
    b_x = tl.dot(b_x, sign_matrix(H // 16, H // 16), input_precision="ieee")
    b_x = tl.reshape(tl.dot(sign_matrix(16, 16), b_x, input_precision="ieee"), (H,))
    tl.store(y + o_x, saturated(b_x * norm, y.dtype.element_ty))


def turn_back_launch(blocks: int, rotate: int, device: torch.device) -> Launch:
    """A launch that rotates so many blocks, of 256 channels or more, back: it takes them in f32, and the result."""
    constants = {"H": rotate, "PDL": bool(overlap(device)), "num_warps": 4, **overlap(device)}
    return Launch(turn_back_kernel, (blocks,), {"norm": factor_of(rotate)}, constants, device)


@lru_cache(maxsize=256)
def _launch(rows: int, inner: int, stride: int, block: int, device: torch.device) -> Launch:
    """Takes what is rotated, and the result."""
    constants = {"H": block, "BR": max(1, 2048 // block)}
    numbers = {"ROWS": rows, "INNER": inner, "stride": stride, "scale": factor_of(block)}
    return Launch(hadamard_kernel, (cdiv(rows, constants["BR"]),), numbers, constants, device)


def hadamard_triton(x: Tensor, block: int) -> Tensor:
    """Launcher of `hfkvq.kernels.hadamard`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        # Tokens of a projection that is shared with queries lie apart, and are not copied for that.
        tokens = x.dim() > 1 and x.select(0, 0).is_contiguous()
        x = x if tokens else x.contiguous()
        inner, stride = (x[0].numel(), x.stride(0)) if tokens else (x.numel(), x.numel())
        _launch(x.numel() // block, inner // block, stride, block, x.device)(x, out)
    return out


def hadamard_wanted(dtype: torch.dtype, block: int) -> Wanted:
    """The variant for tensors of a dtype."""
    return _launch(1, 1, 16, block, torch.device("cpu")).wanted([dtype, dtype])
