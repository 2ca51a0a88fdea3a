"""Scales that are fitted to their groups: `hfkvq.kernels.groups` in registers."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ... import groups
from ...pages import PageFormat
from .._lib import F16_MAX, cdiv
from .arithmetic import affine_scale, divide_levels, rounded_product

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


@triton.jit(do_not_specialize=["new", "index", "M"])
def fit_channels_kernel(
    fits, errors, new, source, index, given, s_b, s_h, s_l, s_d, H, M,
    D: tl.constexpr, LEVELS: tl.constexpr, FIT: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Scale and zero of a group of C channels at one of N widths, and what the first width would lose.

    A lane has a channel of its own, with all tokens of a group of up to 64 in its registers: little is exchanged, and
    what is one value a group is computed once or twice. `seal_channel_kernel`, which needs whole pages to rank
    channels, would deal one group out to 16 warps.
    """
    i_g, i_bh, i_c = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2) // N
    i_n = tl.program_id(2) % N
    i_b, i_h = i_bh // H, i_bh % H
    i_j = i_g * GROUP
    if i_j >= tl.minimum(tl.load(new + i_b), M):
        return
    o_t = tl.arange(0, GROUP)
    b_column = tl.load(index + i_b * M + i_j + o_t)
    # Neighbours are not neighbours in memory, or the compiler would load several at a time and leave lanes to tokens.
    o_i = tl.arange(0, C)
    o_c = i_c * C + o_i // 2 + o_i % 2 * (C // 2)
    m_c = (o_c < D)[None, :]
    p_x = source + i_b * s_b + i_h * s_h + (b_column.to(tl.int64) * s_l)[:, None] + (o_c * s_d)[None, :]
    b_x = tl.load(p_x, mask=m_c, other=0.0).to(tl.float32)
    if given is not None:
        b_norm = tl.load(given + i_bh * M + i_j + o_t)
        b_x = b_x * tl.math.div_rn(tl.full([GROUP], 1.0, tl.float32), b_norm.to(tl.float32))[:, None]
    m_x = tl.abs(b_x) <= F16_MAX
    b_low = tl.min(tl.where(m_x, b_x, float("inf")), 0, keep_dims=True)
    b_high = tl.max(tl.where(m_x, b_x, float("-inf")), 0, keep_dims=True)
    m_high = (b_low != b_low) | (i_n > 0) | (LEVELS == 15)
    b_scale, b_zero = affine_scale(b_low, b_high, m_high)
    b_units, b_low, b_step, b_per_step = in_steps(b_x, m_x, b_low, b_high, m_high)
    b_scale, b_zero = fit_scale(b_units, b_scale, b_zero, b_low, b_step, b_per_step, m_high, FIT, GROUP, 0, None)
    o_group = (i_bh * (M // GROUP) + i_g) * D + o_c[None, :]
    p_fit = fits + (i_bh * (M // GROUP) + i_g) * (2 * N * D) + i_n * (2 * D) + o_c[None, :]
    tl.store(p_fit, b_scale, mask=m_c)
    tl.store(p_fit + D, b_zero, mask=m_c)
    if errors is not None:
        if i_n == 0:
            b_lost = squared_errors(b_units, b_scale, b_zero, b_low, b_step, b_per_step, LEVELS * 1.0, GROUP, 0, None)
            tl.store(errors + o_group, b_lost, mask=m_c)


APART = 4
"""Pages of a call from which on scales are fitted by `fit_channels_kernel`: prompts, but no step, which would launch it
in vain most of the time."""

FIT_CHANNELS, FIT_TOKENS = 32, 64
"""Channels of a program, a lane each, and tokens of a lane."""


def fit_widths(form: PageFormat) -> int:
    """At how many widths channels are fitted: that of the page, and 4 bits where some are raised to them."""
    return 2 if form.raised_count(4) else 1


def fit_constants(form: PageFormat, head_dim: int) -> tuple[int, dict[str, Any]]:
    """Slices of channels times widths, and what `fit_channels_kernel` takes by name."""
    widths = fit_widths(form)
    constants = {
        "D": head_dim,
        "LEVELS": 2**form.bits - 1,
        "FIT": form.fit,
        "GROUP": form.group_size,
        "C": FIT_CHANNELS,
        "N": widths,
        "num_warps": max(1, form.group_size // FIT_TOKENS),
        "enable_fp_fusion": False,
    }
    return cdiv(head_dim, FIT_CHANNELS) * widths, constants
