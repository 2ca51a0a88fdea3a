"""Shared parts of kernels that seal: loads of tokens by field, and the arithmetic of scales and codes.

The source is read once. A tile has an axis for the fields of a word, so that packing is shifts and a sum over it, and
all of a group in few threads, so that ranges take few shuffles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._lib import F16_MAX, power
from ..tiles import INTERPRETED

F16_TINY = tl.constexpr(2.0**-24)


def warps_of(elements: int, per_thread: int) -> int:
    """Warps of a tile."""
    return max(1, min(16, power(elements // (32 * per_thread))))


@triton.jit
def load_field(p_x, m_x, o_c, s_d, FIRST: tl.constexpr, D: tl.constexpr, WHOLE: tl.constexpr):
    """The channels FIRST further on; 0 beyond the head."""
    if WHOLE:
        b_x = tl.load(p_x + FIRST * s_d)
    else:
        b_x = tl.load(p_x + FIRST * s_d, mask=m_x & (o_c + FIRST < D)[None, :], other=0.0)
    return b_x


@triton.jit
def load_fields(p_x, m_x, o_c, s_d, STEP: tl.constexpr, D: tl.constexpr, F: tl.constexpr, WHOLE: tl.constexpr):
    """[F, T, C]: field f is the tile of pointers [T, C] moved by ``f * STEP`` channels.

    A load for each field, not one of three axes: a thread then has all fields of a place, whichever way the compiler
    deals a tile out, and their addresses are one address and constants.
    """
    # The last axis of a join becomes the lowest bit of f.
    b_x = load_field(p_x, m_x, o_c, s_d, 0, D, WHOLE)
    if F >= 2:
        b_x = tl.join(b_x, load_field(p_x, m_x, o_c, s_d, F // 2 * STEP, D, WHOLE))
    if F >= 4:
        b_1 = load_field(p_x, m_x, o_c, s_d, F // 4 * STEP, D, WHOLE)
        b_3 = load_field(p_x, m_x, o_c, s_d, F // 4 * 3 * STEP, D, WHOLE)
        b_x = tl.join(b_x, tl.join(b_1, b_3))
    if F == 8:
        b_1 = load_field(p_x, m_x, o_c, s_d, STEP, D, WHOLE)
        b_3 = load_field(p_x, m_x, o_c, s_d, 3 * STEP, D, WHOLE)
        b_5 = load_field(p_x, m_x, o_c, s_d, 5 * STEP, D, WHOLE)
        b_7 = load_field(p_x, m_x, o_c, s_d, 7 * STEP, D, WHOLE)
        b_x = tl.join(b_x, tl.join(tl.join(b_1, b_5), tl.join(b_3, b_7)))
    # [T, C, f] or that with f in bits
    if F <= 2:
        b_x = tl.permute(tl.reshape(b_x, (p_x.shape[0], p_x.shape[1], F)), (2, 0, 1))
    elif F == 4:
        b_x = tl.permute(b_x, (2, 3, 0, 1))
    else:
        b_x = tl.permute(b_x, (2, 3, 4, 0, 1))
    return tl.reshape(b_x, (F, p_x.shape[0], p_x.shape[1]))


@triton.jit
def load_tokens(
    p_source, b_column, m_t, o_c, m_e, s_l, s_d,
    STEP: tl.constexpr, D: tl.constexpr, F: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """[F, T, C] of one head: columns ``b_column``, from channels ``o_c`` on."""
    p_x = (p_source + b_column.to(tl.int64) * s_l)[:, None] + (o_c * s_d)[None, :]
    return load_fields(p_x, m_t[:, None] & m_e[None, :], o_c, s_d, STEP, D, F, WHOLE)


@triton.jit
def rounded_product(b_x, b_y):
    """``x * y`` (0 for -0), rounded before anything is added, also where products and sums may be fused."""
    return tl.fma(b_x, b_y, 0.0)


@triton.jit
def divide_levels(b_x, m_high):
    """``x / 3``, or ``x / 15`` where ``m_high``, rounded as IEEE division rounds, without its slow path.

    The remainder ``x - levels * q`` is exact (each step is a difference of near neighbours), and a multiple of a
    third or a fifteenth of an ulp is never near enough to a tie for the last product's rounding to matter.
    """
    b_q = rounded_product(b_x, tl.where(m_high, 1.0 / 15.0, 1.0 / 3.0))
    b_rest = (b_x - tl.where(m_high, 16.0, 2.0) * b_q) + tl.where(m_high, b_q, -b_q)
    return b_q + b_rest * tl.where(m_high, 1.0 / 15.0, 1.0 / 3.0)


@triton.jit
def affine_scale(b_low, b_high, m_high):
    """Scale and zero (f16) of groups of this range; a group without a finite element (NaN) has 0 and 0."""
    m_any = b_low <= b_high
    b_low = tl.where(m_any, b_low, 0.0)
    b_high = tl.where(m_any, b_high, 0.0)
    # Correctly rounded, as torch divides: an ulp here can move a code.
    b_scale = divide_levels(b_high - b_low, m_high)
    return tl.minimum(b_scale, F16_MAX).to(tl.float16), b_low.to(tl.float16)


@triton.jit
def inverse_of(b_scale):
    """``1 / scale`` of a scale as stored (f32), 0 where that is 0."""
    # No positive f16 is below the bound, which only keeps the division from overflowing.
    b_inverse = tl.math.div_rn(tl.zeros_like(b_scale) + 1.0, tl.maximum(b_scale, F16_TINY))
    return tl.where(b_scale > 0.0, b_inverse, 0.0)


@triton.jit
def affine_codes(b_x, b_inverse, b_zero, levels):
    """``floor((x - zero) / scale + 1/2)`` as i32, clamped to [0, levels]; 0 for NaN."""
    b_code = rounded_product(b_x - b_zero, b_inverse) + 0.5
    if INTERPRETED:
        # GPUs drop NaN in a maximum; not every interpreter does.
        b_code = tl.where(b_code == b_code, b_code, 0.0)
    # Clamped first: then the conversion's truncation is the floor, and the maximum has dropped NaN.
    return tl.minimum(tl.maximum(b_code, 0.0), levels).to(tl.int32)


@triton.jit
def is_wide(b_low, b_high):
    """True where any group's range leaves f16 (scalar)."""
    m_wide = (b_low < -F16_MAX) | (b_high > F16_MAX)
    if INTERPRETED:
        # GPUs leave NaN out of a minimum, and so do some interpreters; others return it.
        m_wide = m_wide | (b_low != b_low) | (b_high != b_high)
    return tl.max(tl.ravel(m_wide.to(tl.int32)), 0) > 0
