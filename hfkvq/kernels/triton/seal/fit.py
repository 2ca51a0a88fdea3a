"""Scales that are fitted to their groups: `hfkvq.kernels.groups` in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from ... import groups
from .._lib import F16_MAX
from .arithmetic import divide_levels, rounded_product

F16_TINY = tl.constexpr(groups.F16_TINY)
CUT2, CUT4 = tl.constexpr(groups.CUT2), tl.constexpr(groups.CUT4)
RATIOS, ROUNDS = tl.constexpr(groups.RATIOS), tl.constexpr(groups.ROUNDS)
UNIT, UNITS = tl.constexpr(2.0**-groups.FRACTION), tl.constexpr(2.0**groups.FRACTION)
FAR = tl.constexpr(groups.FAR)

FIT_THREAD = 32
"""Elements of a thread: registers hold them, and what they are in steps."""


@triton.jit
def divide(b_x, b_y):
    """``x / y``, correctly rounded."""
    return tl.math.div_rn(b_x, b_y)


@triton.jit
def total(b_x, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """Sum of integers over one axis or two, which stay as axes of one element."""
    b_x = tl.sum(b_x, FIRST, keep_dims=True)
    if SECOND is not None:
        b_x = tl.sum(b_x, SECOND, keep_dims=True)
    return b_x


@triton.jit
def in_steps(b_x, m_x, b_low, b_high, m_high):
    """Elements in steps above the lowest of their group, then the lowest, a step, and one over it.

    Elements are i32, multiples of ``UNIT``, and -1 where they count for nothing.
    """
    m_any = b_low <= b_high
    b_low = tl.where(m_any, b_low, 0.0)
    b_step = tl.maximum(divide_levels(tl.where(m_any, b_high, 0.0) - b_low, m_high), F16_TINY)
    b_per_step = divide(tl.full(b_step.shape, 1.0, tl.float32), b_step)
    b_units = rounded_product(b_x - b_low, b_per_step) * UNITS + 0.5
    b_units = tl.where(m_x & (tl.abs(b_x) <= F16_MAX), b_units, -1.0)
    return b_units.to(tl.int32), b_low, b_step, b_per_step


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
def codes_and_errors(b_units, b_slope, b_base, b_levels, POWER: tl.constexpr, SIZE: tl.constexpr):
    """Codes (i32) of elements in steps, and |error|^POWER (i32), both 0 where nothing counts.

    See `hfkvq.kernels.groups.error_bits`.
    """
    BITS: tl.constexpr = 30 - (SIZE - 1).bit_length() - 2 * POWER
    m_x = b_units >= 0
    b_u = b_units.to(tl.float32) * UNIT
    b_inverse = divide(tl.full(b_slope.shape, 1.0, tl.float32), tl.maximum(b_slope, F16_TINY))
    b_code = rounded_product(b_u - b_base, tl.where(b_slope > 0.0, b_inverse, 0.0)) + 0.5
    b_code = tl.where(m_x, tl.minimum(tl.maximum(b_code, 0.0), b_levels), 0.0).to(tl.int32)
    b_error = rounded_product(b_code.to(tl.float32), b_slope) + b_base
    b_error = tl.minimum(tl.abs(b_error - b_u), FAR)
    b_raised = b_error * b_error
    if POWER == 3:
        b_raised = b_raised * b_error
    if POWER == 4:
        b_raised = b_raised * b_raised
    return b_code, tl.where(m_x, b_raised * (1 << BITS), 0.0).to(tl.int32)


@triton.jit
def squared_errors(
    b_units, b_scale, b_zero, b_low, b_step, b_per_step, b_levels,
    SIZE: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """Sum of squared errors of every group, f32; an error counts as `FAR` steps at most."""
    b_slope, b_base = from_stored(b_scale, b_zero, b_low, b_per_step)
    _, b_lost = codes_and_errors(b_units, b_slope, b_base, b_levels, 2, SIZE)
    BITS: tl.constexpr = 26 - (SIZE - 1).bit_length()
    return total(b_lost, FIRST, SECOND).to(tl.float32) * (1.0 / (1 << BITS)) * (b_step * b_step)


@triton.jit
def fit_scale(
    b_units, b_scale, b_zero, b_low, b_step, b_per_step, m_high,
    FIT: tl.constexpr, SIZE: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """Scale and zero (f16) of the least sum of |error|^FIT; see `hfkvq.kernels.groups.Groups.scales`.

    Args:
        b_units: see `in_steps`.
        b_scale: of the whole range, as all that is told of groups, with one element along each axis that is summed.
        b_zero: likewise.
        b_low: see `in_steps`.
        b_step: likewise.
        b_per_step: likewise.
        m_high: groups of 15 levels, others have 3.
        FIT: 2, 3 or 4.
        SIZE: elements of a group.
        FIRST: axis that is summed.
        SECOND: another, or None.
    """
    b_levels = tl.where(m_high, 15.0, 3.0)
    b_cut = tl.where(m_high, CUT4, CUT2)
    b_ratio = b_cut
    m_x = b_units >= 0
    b_count = total(m_x.to(tl.int32), FIRST, SECOND)
    b_sum = total(tl.where(m_x, b_units, 0), FIRST, SECOND)
    b_least = tl.full(b_count.shape, 0x7FFFFFFF, tl.int32)
    b_best, b_first = b_scale, b_zero
    for _ in range(RATIOS):
        for _ in range(ROUNDS):
            b_slope, b_base = from_stored(b_scale, b_zero, b_low, b_per_step)
            b_code, b_lost = codes_and_errors(b_units, b_slope, b_base, b_levels, FIT, SIZE)
            b_lost = total(b_lost, FIRST, SECOND)
            m_less = b_lost < b_least
            b_least = tl.where(m_less, b_lost, b_least)
            b_best, b_first = tl.where(m_less, b_scale, b_best), tl.where(m_less, b_zero, b_first)
            # Least squares of these codes, which are 0 where nothing counts.
            b_c, b_cc = total(b_code, FIRST, SECOND), total(b_code * b_code, FIRST, SECOND)
            b_cu = total(b_code * b_units, FIRST, SECOND)
            b_spread = b_count * b_cc - b_c * b_c
            b_over = b_count.to(tl.int64) * b_cu - b_c.to(tl.int64) * b_sum
            b_fitted = divide(b_over.to(tl.float32), tl.maximum(b_spread, 1).to(tl.float32)) * UNIT
            b_slope = tl.where(b_spread > 0, b_fitted, b_slope)
            b_base = b_sum.to(tl.float32) * UNIT - rounded_product(b_slope, b_c.to(tl.float32))
            b_base = divide(b_base, tl.maximum(b_count, 1).to(tl.float32))
            b_scale, b_zero = to_stored(b_slope, b_base, b_low, b_step)
        b_scale, b_zero = to_stored(1.0 - b_ratio, b_levels * (0.5 * b_ratio), b_low, b_step)
        b_ratio += b_cut
    return b_best, b_first
