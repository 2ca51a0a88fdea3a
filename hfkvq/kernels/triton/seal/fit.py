"""Scales that are fitted to their groups: `hfkvq.kernels.groups` in registers.

All of an element that stays there is its distance from the lowest of its group, a whole number of fractions of a step,
which f32 holds. What counts for nothing has 0 like the lowest, and is taken out of the sums in the end: each element of
a fit is looked at nine times, and a mask would be, too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ... import groups
from .._lib import F16_MAX
from ..tiles import INTERPRETED
from .arithmetic import affine_scale, divide_levels, rounded_product

F16_TINY = tl.constexpr(groups.F16_TINY)
CUT2, CUT4 = tl.constexpr(groups.CUT2), tl.constexpr(groups.CUT4)
RATIOS, ROUNDS = tl.constexpr(groups.RATIOS), tl.constexpr(groups.ROUNDS)
UNIT, UNITS = tl.constexpr(2.0**-groups.FRACTION), tl.constexpr(2.0**groups.FRACTION)
FAR = tl.constexpr(groups.FAR * 2.0**groups.FRACTION)
WHOLE = tl.constexpr(2.0**23)
"""Added to a whole number below it, f32 has that number in its lowest bits."""
WHOLE_BITS = tl.constexpr(0x4B000000)

FIT_THREAD = 32
"""Elements of a thread: registers hold them."""


@triton.jit
def floor_below(b_x):
    """Floor of f32 from 0 to 2^22, f32.

    Conversions to integers and back go through a unit with a quarter of the lanes.
    """
    if INTERPRETED:
        return b_x.to(tl.int32).to(tl.float32)
    else:
        b_x = tl.inline_asm_elementwise(
            asm="add.rm.f32 $0, $1, 0f4B000000;", constraints="=f,f", args=[b_x], dtype=tl.float32, is_pure=True, pack=1
        )
        return b_x - WHOLE


@triton.jit
def whole_product(b_x, b_y):
    """Product of whole numbers (f32) as i32, where it is below 2^23."""
    return tl.fma(b_x, b_y, WHOLE).to(tl.int32, bitcast=True) - WHOLE_BITS


@triton.jit
def total(b_x, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """Sum over one axis or two, which stay as axes of one element."""
    b_x = tl.sum(b_x, FIRST, keep_dims=True)
    if SECOND is not None:
        b_x = tl.sum(b_x, SECOND, keep_dims=True)
    return b_x


@triton.jit
def totals(b_0, b_1, b_2, b_3, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """Four sums as `total` has them, for which warps wait once."""
    b_x = total(tl.join(tl.join(b_0, b_1), tl.join(b_2, b_3)), FIRST, SECOND)
    b_even, b_odd = tl.split(b_x)
    # The last axis of the inner joins tells the members of a pair apart.
    b_0, b_1 = tl.split(b_even)
    b_2, b_3 = tl.split(b_odd)
    return b_0, b_1, b_2, b_3


@triton.jit
def in_steps(b_x, m_x, LEVELS: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """Elements in fractions of a step above the lowest of their group, and what is known of each group.

    Returns:
        f32, multiples of ``UNIT``; scale and zero (f16) of the range; the lowest element, a step, one over it; how many
        elements count, and their sum in fractions (i32). What is told of groups has one element along each axis that is
        summed.
    """
    m_x = m_x & (tl.abs(b_x) <= F16_MAX)
    b_low, b_high = tl.where(m_x, b_x, float("inf")), tl.where(m_x, b_x, float("-inf"))
    b_low, b_high = tl.min(b_low, FIRST, keep_dims=True), tl.max(b_high, FIRST, keep_dims=True)
    if SECOND is not None:
        b_low, b_high = tl.min(b_low, SECOND, keep_dims=True), tl.max(b_high, SECOND, keep_dims=True)
    m_any, m_high = b_low <= b_high, LEVELS == 15
    b_scale, b_zero = affine_scale(b_low, b_high, m_high)
    b_low = tl.where(m_any, b_low, 0.0)
    b_step = tl.maximum(divide_levels(tl.where(m_any, b_high, 0.0) - b_low, m_high), F16_TINY)
    b_per_step = tl.math.div_rn(tl.full(b_step.shape, 1.0, tl.float32), b_step)
    b_units = tl.where(m_x, rounded_product(b_x - b_low, b_per_step) * UNITS + 0.5, 0.0)
    b_units = floor_below(b_units)
    b_count, b_sum = total(m_x.to(tl.int32), FIRST, SECOND), total(b_units.to(tl.int32), FIRST, SECOND)
    return b_units, b_scale, b_zero, b_low, b_step, b_per_step, b_count, b_sum


@triton.jit
def to_stored(b_slope, b_base, b_low, b_step):
    """Scale and zero (f16) of a slope and a base in steps."""
    b_scale = tl.minimum(rounded_product(b_slope, b_step), F16_MAX)
    b_zero = tl.minimum(tl.maximum(b_low + rounded_product(b_base, b_step), -F16_MAX), F16_MAX)
    return b_scale.to(tl.float16), b_zero.to(tl.float16)


@triton.jit
def from_stored(b_scale, b_zero, b_low, b_per_step):
    """Slope and base in steps of scale and zero (f16)."""
    b_slope = rounded_product(b_scale.to(tl.float32), b_per_step)
    return b_slope, rounded_product(b_zero.to(tl.float32) - b_low, b_per_step)


@triton.jit
def codes_and_errors(
    b_units, b_slope, b_base, b_inverse, LEVELS: tl.constexpr, POWER: tl.constexpr, BITS: tl.constexpr
):
    """Codes (f32) of elements, and |error|^POWER (i32); slope, base and inverse are in fractions as elements are.

    See `hfkvq.kernels.groups.error_bits`.
    """
    b_code = rounded_product(b_units - b_base, b_inverse) + 0.5
    b_code = floor_below(tl.minimum(tl.maximum(b_code, 0.0), LEVELS * 1.0))
    b_error = tl.minimum(tl.abs(rounded_product(b_code, b_slope) + b_base - b_units), FAR)
    b_raised = b_error * b_error
    if POWER == 3:
        b_raised = b_raised * b_error
    if POWER == 4:
        b_raised = b_raised * b_raised
    # A power of two times what errors in steps would have: rounded alike.
    return b_code, (b_raised * (2.0 ** (BITS - 12 * POWER))).to(tl.int32)


@triton.jit
def judged(
    b_units, b_slope, b_base, b_count, LEVELS: tl.constexpr, POWER: tl.constexpr, SIZE: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Sum of |error|^POWER of every group; with SUMS also of codes, of their squares, and of codes times elements."""
    BITS: tl.constexpr = 30 - (SIZE - 1).bit_length() - 2 * POWER
    b_inverse = tl.math.div_rn(tl.full(b_slope.shape, 1.0, tl.float32), tl.maximum(b_slope, F16_TINY))
    b_inverse = tl.where(b_slope > 0.0, b_inverse, 0.0) * UNIT
    b_slope, b_base = b_slope * UNITS, b_base * UNITS
    b_code, b_lost = codes_and_errors(b_units, b_slope, b_base, b_inverse, LEVELS, POWER, BITS)
    # Code and error of elements that count for nothing, and the number of these.
    b_none, b_more = codes_and_errors(tl.zeros_like(b_slope), b_slope, b_base, b_inverse, LEVELS, POWER, BITS)
    ALL: tl.constexpr = b_units.shape[FIRST] * (1 if SECOND is None else b_units.shape[SECOND])
    b_rest = ALL - b_count
    if SUMS:
        b_c, b_cc = whole_product(b_code, 1.0), whole_product(b_code, b_code)
        b_cu = whole_product(b_code, b_units)
        b_lost, b_c, b_cc, b_cu = totals(b_lost, b_c, b_cc, b_cu, FIRST, SECOND)
        b_none = b_none.to(tl.int32)
        return b_lost - b_rest * b_more, b_c - b_rest * b_none, b_cc - b_rest * b_none * b_none, b_cu
    else:
        b_lost = total(b_lost, FIRST, SECOND) - b_rest * b_more
        return b_lost, b_lost, b_lost, b_lost


@triton.jit
def squared_errors(
    b_units, b_scale, b_zero, b_low, b_step, b_per_step, b_count, LEVELS: tl.constexpr, SIZE: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """Sum of squared errors of every group, f32; an error counts as `hfkvq.kernels.groups.FAR` steps at most."""
    b_slope, b_base = from_stored(b_scale, b_zero, b_low, b_per_step)
    b_lost, _, _, _ = judged(b_units, b_slope, b_base, b_count, LEVELS, 2, SIZE, FIRST, SECOND, False)
    BITS: tl.constexpr = 26 - (SIZE - 1).bit_length()
    return b_lost.to(tl.float32) * (1.0 / (1 << BITS)) * (b_step * b_step)


@triton.jit
def fit_scale(
    b_units, b_scale, b_zero, b_low, b_step, b_per_step, b_count, b_sum, LEVELS: tl.constexpr,
    FIT: tl.constexpr, SIZE: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """Scale and zero (f16) of the least sum of |error|^FIT; see `hfkvq.kernels.groups.Groups.scales`.

    Args:
        b_units: this and what follows as `in_steps` returns them.
        LEVELS: greatest code, 3 or 15.
        FIT: 2, 3 or 4.
        SIZE: elements of a group.
        FIRST: axis that is summed.
        SECOND: another, or None.
    """
    CUT: tl.constexpr = CUT4 if LEVELS == 15 else CUT2
    b_least = tl.full(b_count.shape, 0x7FFFFFFF, tl.int32)
    b_best, b_first = b_scale, b_zero
    for i_ratio in range(RATIOS):
        for _ in range(ROUNDS - 1):
            b_slope, b_base = from_stored(b_scale, b_zero, b_low, b_per_step)
            b_lost, b_c, b_cc, b_cu = judged(
                b_units, b_slope, b_base, b_count, LEVELS, FIT, SIZE, FIRST, SECOND, True
            )  # fmt: skip
            m_less = b_lost < b_least
            b_least = tl.where(m_less, b_lost, b_least)
            b_best, b_first = tl.where(m_less, b_scale, b_best), tl.where(m_less, b_zero, b_first)
            # Least squares of these codes.
            b_spread = b_count * b_cc - b_c * b_c
            b_over = b_count.to(tl.int64) * b_cu - b_c.to(tl.int64) * b_sum
            b_fitted = tl.math.div_rn(b_over.to(tl.float32), tl.maximum(b_spread, 1).to(tl.float32)) * UNIT
            b_slope = tl.where(b_spread > 0, b_fitted, b_slope)
            b_base = b_sum.to(tl.float32) * UNIT - rounded_product(b_slope, b_c.to(tl.float32))
            b_base = tl.math.div_rn(b_base, tl.maximum(b_count, 1).to(tl.float32))
            b_scale, b_zero = to_stored(b_slope, b_base, b_low, b_step)
        # The last round only judges: its new scale is not used.
        b_slope, b_base = from_stored(b_scale, b_zero, b_low, b_per_step)
        b_lost, _, _, _ = judged(b_units, b_slope, b_base, b_count, LEVELS, FIT, SIZE, FIRST, SECOND, False)
        m_less = b_lost < b_least
        b_least = tl.where(m_less, b_lost, b_least)
        b_best, b_first = tl.where(m_less, b_scale, b_best), tl.where(m_less, b_zero, b_first)
        b_ratio = (i_ratio + 1) * CUT + tl.zeros_like(b_slope)
        b_scale, b_zero = to_stored(1.0 - b_ratio, LEVELS * (0.5 * b_ratio), b_low, b_step)
    return b_best, b_first


@triton.jit
def fitted(
    b_x, m_x, LEVELS: tl.constexpr, FIT: tl.constexpr, SIZE: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr
):
    """Scale and zero (f16) of groups of elements, of which those of ``m_x`` count; see `fit_scale`."""
    b_units, b_scale, b_zero, b_low, b_step, b_per_step, b_count, b_sum = in_steps(b_x, m_x, LEVELS, FIRST, SECOND)
    return fit_scale(
        b_units, b_scale, b_zero, b_low, b_step, b_per_step, b_count, b_sum, LEVELS, FIT, SIZE, FIRST, SECOND
    )  # fmt: skip
