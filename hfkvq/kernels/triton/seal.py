"""Seal on the GPU. Every program looks at its row's counters first and leaves at once if nothing is due.

The source is read once. A tile has an axis for the fields of a word, so that packing is shifts and a sum over it, and
all of a group in few threads, so that ranges take few shuffles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dispatch import reference
from ..pages import PageFormat
from ..seal import RULES, channel_widths, parse_rule
from ..seal import SCORE_MAX as MOST
from ._lib import F16_MAX, capability, cdiv, fields_of, power
from .ahead import Wanted
from .fields import INTERPRETED
from .launch import Launch

FP8_MAX = tl.constexpr(448.0)
SCORE_MAX = tl.constexpr(MOST)
F16_TINY = tl.constexpr(2.0**-24)

CHANNEL_TILE, CHANNEL_THREAD = 16384, 128
"""Most elements of a tile without a page's ranks, and elements of a thread, where scales are per channel."""

TOKEN_TILE, TOKEN_THREAD = 8192, 64
"""The same where scales are per token."""

MAX_TILE = 32768
"""Most elements of a page that one program ranks the channels of."""


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
    """Whether any group's range leaves f16 (scalar)."""
    m_wide = (b_low < -F16_MAX) | (b_high > F16_MAX)
    if INTERPRETED:
        # GPUs leave NaN out of a minimum, and so do some interpreters; others return it.
        m_wide = m_wide | (b_low != b_low) | (b_high != b_high)
    return tl.max(tl.ravel(m_wide.to(tl.int32)), 0) > 0


@triton.jit
def halving_sum(b_x, F: tl.constexpr, T: tl.constexpr, C: tl.constexpr):
    """Sum of [F, T, C] over T as ``x[i] + x[i + n/2]`` until one is left, [F, C]: the same bits on every device."""
    for i in tl.static_range(T.bit_length() - 1):
        b_x = tl.sum(tl.reshape(b_x, (F, 2, T >> (i + 1), C)), 1)
    return tl.reshape(b_x, (F, C))


@triton.jit
def rank_channels(
    b_x, p_weight, o_c, m_c, CHOOSE: tl.constexpr, D: tl.constexpr, F: tl.constexpr, T: tl.constexpr, C: tl.constexpr
):
    """Rank of every channel of a whole page, [F, C], 0 for the strongest; see `hfkvq.kernels.seal.channel_ranks`."""
    if CHOOSE == 2:
        b_mean = halving_sum(b_x, F, T, C) * (1.0 / T)
        b_x = b_x - b_mean[:, None, :]
        b_x = b_x * b_x
    else:
        b_x = tl.abs(b_x)
    b_score = halving_sum(b_x, F, T, C)
    if p_weight is not None:
        b_score *= tl.load(p_weight + o_c, mask=m_c, other=0.0)
    b_score = tl.where(b_score > 0.0, b_score, 0.0)
    LAST: tl.constexpr = (1 << (D - 1).bit_length()) - 1
    b_key = (b_score.to(tl.int32, bitcast=True) & ~LAST) | (LAST - o_c)
    b_key = tl.reshape(tl.where(m_c, b_key, -1), (F * C,))
    # [other, own]
    b_rank = tl.sum((b_key[:, None] > b_key[None, :]).to(tl.int32), 0)
    return tl.reshape(b_rank, (F, C))


@triton.jit
def choose_ranges(
    b_x, p_weight, o_c, m_c, OVER16: tl.constexpr, OVER4: tl.constexpr, DIVISOR: tl.constexpr,
    COUNT4: tl.constexpr, COUNT16: tl.constexpr, F: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Channels of a whole page [F, T, C] that get 4 and 16 bits, [F, C]; see `hfkvq.kernels.seal.range_rule`."""
    m_finite = tl.abs(b_x) <= F16_MAX
    b_low = tl.min(tl.where(m_finite, b_x, float("inf")), 1)
    b_high = tl.max(tl.where(m_finite, b_x, float("-inf")), 1)
    b_range = tl.where(b_low <= b_high, b_high - b_low, 0.0)
    b_score = divide_levels(b_range, b_range < 0.0)
    if p_weight is not None:
        b_score *= tl.load(p_weight + o_c, mask=m_c, other=0.0)
    b_score = tl.minimum(tl.where(b_score > 0.0, b_score, 0.0), SCORE_MAX)
    if DIVISOR != 1.0:
        b_score = tl.math.div_rn(b_score, tl.zeros_like(b_score) + DIVISOR)
    # Floats that are not negative are ordered as their bits are.
    b_key = tl.reshape(tl.where(m_c, b_score.to(tl.int32, bitcast=True), -1), (F * C,))
    b_own = tl.reshape(o_c, (F * C,))
    # [other, own]
    m_same = (b_key[:, None] == b_key[None, :]) & (b_own[:, None] < b_own[None, :])
    m_before = (b_key[:, None] > b_key[None, :]) | m_same
    b_rank = tl.reshape(tl.sum(m_before.to(tl.int32), 0), (F, C))
    m_16 = m_c & (b_score > OVER16) & (b_rank < COUNT16)
    i_full = tl.sum(tl.ravel(m_16.to(tl.int32)), 0)
    m_4 = m_c & (b_score > OVER4) & (b_rank < i_full + COUNT4) & ~m_16
    return m_4, m_16


@triton.jit
def place_chosen(m_chosen, F: tl.constexpr, C: tl.constexpr):
    """How many chosen channels stand before each, [F, C]; the flat order of the tile is the order of channels."""
    b_chosen = tl.reshape(m_chosen.to(tl.int32), (F * C,))
    return tl.reshape(tl.cumsum(b_chosen, 0) - b_chosen, (F, C))


@triton.jit
def place_width(
    p_widths, o_c, WIDTH: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, F: tl.constexpr, C: tl.constexpr
):
    """How many channels of this width stand before each, [F, C], and how many there are in all."""
    o_d = tl.arange(0, BD)
    m_all = tl.load(p_widths + o_d, mask=o_d < D, other=0).to(tl.int32) == WIDTH
    # [BD, F * C]
    m_before = m_all[:, None] & (o_d[:, None] < tl.reshape(o_c, (F * C,))[None, :])
    return tl.reshape(tl.sum(m_before.to(tl.int32), 0), (F, C)), tl.sum(m_all.to(tl.int32), 0)


@triton.jit(do_not_specialize=["count", "new", "index", "N", "M"])
def seal_channel_kernel(
    codes, scale, zero, norm, high, high_index, full, full_index, table, count, new, source, index, widths, weight,
    given, s_b, s_h, s_l, s_d, H, N, M,
    D: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, TOKEN_MAJOR: tl.constexpr,
    CHOOSE: tl.constexpr, OVER16: tl.constexpr, OVER4: tl.constexpr, DIVISOR: tl.constexpr,
    COUNT4: tl.constexpr, COUNT16: tl.constexpr, N4: tl.constexpr, N16: tl.constexpr, NG: tl.constexpr,
    BG: tl.constexpr, BE: tl.constexpr, BD: tl.constexpr, FL: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """NG groups of GROUP tokens times the FIELDS * BE channels of BE words.

    Channels of a tile are [FH, C] with C = FL * BE: FL fields and the words of a row lie along a warp, FH fields and
    all tokens in registers, so that ranges over tokens are cheap and a word is made with few shuffles.
    """
    i_g, i_bh, i_e = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    i_b, i_h = i_bh // H, i_bh % H
    i_j = i_g * (NG * GROUP)
    o_t = tl.arange(0, NG * BG)
    # Several groups, or raised channels: no group is padded.
    m_t = o_t >= 0 if BG == GROUP else o_t < GROUP
    # Three loads at once, before one of them may say that there is nothing to do.
    i_count = tl.load(count + i_b)
    p_column = index + i_b * M + i_j + o_t
    b_column = tl.load(p_column, mask=m_t, other=0)
    if i_j >= tl.minimum(tl.load(new + i_b), M):
        return
    FIELDS: tl.constexpr = 16 // BITS
    LEVELS: tl.constexpr = (1 << BITS) - 1
    E: tl.constexpr = (D + FIELDS - 1) // FIELDS
    BT: tl.constexpr = NG * BG
    FH: tl.constexpr = FIELDS // FL
    C: tl.constexpr = FL * BE
    EXACT: tl.constexpr = (BE * FIELDS == D) & (BG == GROUP)
    RAISES: tl.constexpr = (CHOOSE > 0) | (widths is not None)
    i_token = i_count + i_j
    i_head = tl.load(table + i_b * N + i_token // G).to(tl.int64) * H + i_h
    i_slot = i_token % G

    # What the compiler can see of C is contiguous by VEC, or it would load more at a time and leave lanes to tokens.
    o_i = tl.arange(0, C)
    o_v = o_i // VEC
    o_e = i_e * BE + o_v % (BE // VEC) * VEC + o_i % VEC
    o_l = o_v // (BE // VEC) * E + o_e
    p_source = source + i_b * s_b + i_h * s_h
    # [FH, BT, C]
    b_raw = load_tokens(p_source, b_column, m_t, o_l, o_e < E, s_l, s_d, FL * E, D, FH, EXACT)
    b_x = b_raw.to(tl.float32)
    # [FH, C]
    o_c = (tl.arange(0, FH) * (FL * E))[:, None] + o_l[None, :]
    m_c = (o_c < D) & (o_e < E)[None, :]
    m_4 = o_c < 0
    m_16 = m_4
    b_place4 = o_c
    b_place16 = o_c
    i_used4 = 0
    i_used16 = 0
    if CHOOSE == 3:
        p_weight = weight
        if weight is not None:
            p_weight = weight + i_bh * D
        m_4, m_16 = choose_ranges(b_x, p_weight, o_c, m_c, OVER16, OVER4, DIVISOR, COUNT4, COUNT16, FH, C)
        if COUNT16 > 0:
            b_place16 = place_chosen(m_16, FH, C)
            i_used16 = tl.sum(tl.ravel(m_16.to(tl.int32)), 0)
        if COUNT4 > 0:
            b_place4 = place_chosen(m_4, FH, C)
            i_used4 = tl.sum(tl.ravel(m_4.to(tl.int32)), 0)
    elif CHOOSE > 0:
        p_weight = weight
        if weight is not None:
            p_weight = weight + i_bh * D
        b_rank = rank_channels(b_x, p_weight, o_c, m_c, CHOOSE, D, FH, BT, C)
        if COUNT16 > 0:
            m_16 = b_rank < COUNT16
            b_place16 = place_chosen(m_16, FH, C)
            i_used16 = COUNT16
        if COUNT4 > 0:
            m_4 = (b_rank >= COUNT16) & (b_rank < COUNT16 + COUNT4)
            b_place4 = place_chosen(m_4, FH, C)
            i_used4 = COUNT4
    elif widths is not None:
        p_widths = widths + (i_bh * (M // G) + i_j // G) * D
        b_width = tl.load(p_widths + o_c, mask=m_c, other=0).to(tl.int32)
        if COUNT4 > 0:
            b_place4, i_used4 = place_width(p_widths, o_c, 4, D, BD, FH, C)
            m_4 = (b_width == 4) & (b_place4 < COUNT4)
            i_used4 = tl.minimum(i_used4, COUNT4)
        if COUNT16 > 0:
            b_place16, i_used16 = place_width(p_widths, o_c, 16, D, BD, FH, C)
            m_16 = (b_width == 16) & (b_place16 < COUNT16)
            i_used16 = tl.minimum(i_used16, COUNT16)

    if norm is not None:
        b_norm = tl.full([BT], 1.0, tl.float16)
        if given is not None:
            b_norm = tl.load(given + i_bh * M + i_j + o_t, mask=m_t, other=1.0)
        if i_e == 0:
            tl.store(norm + i_head * G + i_slot + o_t, b_norm, mask=m_t)
        b_share = tl.math.div_rn(tl.full([BT], 1.0, tl.float32), b_norm.to(tl.float32))
        b_x = b_x * b_share[None, :, None]
    # NaN does not count in a minimum. [FH, NG, C]
    b_own = b_x
    if BG != GROUP:
        b_own = tl.where(m_t[None, :, None], b_x, float("nan"))
    b_own = tl.reshape(b_own, (FH, NG, BG, C))
    b_low, b_high = tl.min(b_own, 2), tl.max(b_own, 2)
    if is_wide(b_low, b_high):
        # Loaded once more: hardly ever, and registers for it would cost every page.
        b_column = tl.load(p_column, mask=m_t, other=0)
        b_again = load_tokens(p_source, b_column, m_t, o_l, o_e < E, s_l, s_d, FL * E, D, FH, EXACT).to(tl.float32)
        if norm is not None:
            b_again = b_again * b_share[None, :, None]
        m_own = m_t[None, :, None] & (tl.abs(b_again) <= F16_MAX)
        b_low = tl.min(tl.reshape(tl.where(m_own, b_again, float("inf")), (FH, NG, BG, C)), 2)
        b_high = tl.max(tl.reshape(tl.where(m_own, b_again, float("-inf")), (FH, NG, BG, C)), 2)
    # [FH, 1, C]
    m_high = (m_4 | (LEVELS == 15))[:, None, :]
    b_scale, b_zero = affine_scale(b_low, b_high, m_high)
    if COUNT16 > 0 and RAISES:
        b_scale = tl.where(m_16[:, None, :], 0.0, b_scale).to(tl.float16)
        b_zero = tl.where(m_16[:, None, :], 0.0, b_zero).to(tl.float16)
    o_group = (tl.arange(0, NG) * D)[None, :, None] + o_c[:, None, :]
    p_group = (i_head * (G // GROUP) + i_slot // GROUP) * D + o_group
    m_group = tl.broadcast_to(m_c[:, None, :], (FH, NG, C))
    tl.store(scale + p_group, b_scale, mask=m_group)
    tl.store(zero + p_group, b_zero, mask=m_group)

    b_inverse = inverse_of(b_scale.to(tl.float32))[:, :, None, :]
    b_levels = tl.where(m_high, 15.0, LEVELS * 1.0)[:, :, None, :]
    # A channel that is kept whole has scale 0, hence code 0 without more ado.
    b_code = affine_codes(tl.reshape(b_x, (FH, NG, BG, C)), b_inverse, b_zero.to(tl.float32)[:, :, None, :], b_levels)
    b_word = tl.reshape(b_code, (FH, BT, FL, BE // VEC, VEC))
    if COUNT4 > 0 and RAISES:
        b_word = b_word & LEVELS
    # VEC words of a row share an i32 until they are whole: fewer shuffles. Shifts known in advance come first.
    b_word = tl.sum(b_word << (tl.arange(0, FH) * (FL * BITS))[:, None, None, None, None], 0)
    b_word = tl.sum(b_word << (tl.arange(0, VEC) * 16)[None, None, None, :], 3)
    b_word = tl.sum(b_word << (tl.arange(0, FL) * BITS)[None, :, None], 1)
    # [BT, BE]
    b_word = tl.reshape(b_word[:, :, None] >> (tl.arange(0, VEC) * 16)[None, None, :], (BT, BE)).to(tl.int16)
    o_e = i_e * BE + tl.arange(0, BE)
    if TOKEN_MAJOR:
        p_word = codes + i_head * (G * E) + (i_slot + o_t)[:, None] * E + o_e[None, :]
    else:
        p_word = codes + i_head * (G * E) + o_e[None, :] * G + (i_slot + o_t)[:, None]
    tl.store(p_word, b_word, mask=m_t[:, None] & (o_e < E)[None, :])

    if COUNT4 > 0:
        # The tile is a whole page.
        o_w = tl.arange(0, BT // 8)
        p_high = high + i_head * (G // 8 * N4) + o_w * N4
        if RAISES:
            # Eight tokens of a channel share a word. [FH, BT / 8, C]
            b_upper = tl.reshape(b_code, (FH, 8, BT // 8, C)) >> 2
            b_upper = tl.sum(b_upper << (tl.arange(0, 8) * 2)[None, :, None, None], 1).to(tl.int16)
            p_upper = p_high[None, :, None] + b_place4[:, None, :]
            tl.store(p_upper, b_upper, mask=m_4[:, None, :])
            tl.store(high_index + i_head * N4 + b_place4, o_c.to(high_index.dtype.element_ty), mask=m_4)
        if i_e == 0:
            # Ranks that no channel takes hold zeros.
            o_r = tl.arange(0, triton.next_power_of_2(N4))
            m_r = (o_r >= i_used4) & (o_r < N4)
            b_none = tl.zeros([BT // 8, triton.next_power_of_2(N4)], tl.int16)
            tl.store(p_high[:, None] + o_r[None, :], b_none, mask=m_r[None, :])
            tl.store(high_index + i_head * N4 + o_r, tl.zeros_like(o_r).to(high_index.dtype.element_ty), mask=m_r)
    if COUNT16 > 0:
        p_full = full + i_head * (G * N16) + (i_slot + o_t) * N16
        if RAISES:
            p_own = p_full[None, :, None] + b_place16[:, None, :]
            tl.store(p_own, b_raw, mask=m_t[None, :, None] & m_16[:, None, :])
            tl.store(full_index + i_head * N16 + b_place16, o_c.to(full_index.dtype.element_ty), mask=m_16)
        if i_e == 0:
            o_r = tl.arange(0, triton.next_power_of_2(N16))
            m_r = (o_r >= i_used16) & (o_r < N16)
            b_none = tl.zeros([BT, triton.next_power_of_2(N16)], full.dtype.element_ty)
            tl.store(p_full[:, None] + o_r[None, :], b_none, mask=m_t[:, None] & m_r[None, :])
            tl.store(full_index + i_head * N16 + o_r, tl.zeros_like(o_r).to(full_index.dtype.element_ty), mask=m_r)


@triton.jit
def due_tile(p_count, p_new, i_t, M, BT: tl.constexpr):
    """Of a row: the first slot of its i_t-th tile of BT that new tokens touch, tokens that are sealed, and new ones."""
    i_new = tl.minimum(tl.load(p_new), M)
    i_count = tl.load(p_count)
    return (i_count // BT + i_t) * BT, i_count, i_new


@triton.jit
def columns_of(index, o_index, o_token, m_t, SLOTS):
    """Columns of the source that hold tokens: what an index says, or where they stand in a tail."""
    if index is None:
        b_column = tl.where(m_t, o_token % SLOTS, 0)
    else:
        b_column = tl.load(index + o_index, mask=m_t, other=0)
    return b_column


@triton.jit
def seal_tokens(
    codes, scale, zero, norm, table, source, index, given, i_b, i_h, i_bh, i_first, i_count, i_new, s_b, s_h, s_l, s_d,
    H, N, M, SLOTS,
    D: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, TOKEN_MAJOR: tl.constexpr,
    BT: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Of BT slots of a page, which begin with token ``i_first``, those of the ``i_new`` from ``i_count`` on.

    The fields of a word lie in one thread.
    """
    FIELDS: tl.constexpr = 16 // BITS
    LEVELS: tl.constexpr = (1 << BITS) - 1
    E: tl.constexpr = (D + FIELDS - 1) // FIELDS
    EXACT: tl.constexpr = BE * FIELDS == D
    # Whole fields make a group, or a field holds whole groups.
    ALIGNED: tl.constexpr = (GROUP == D) or (EXACT and (GROUP % E == 0 or E % GROUP == 0))
    i_head = tl.load(table + i_b * N + i_first // G).to(tl.int64) * H + i_h
    i_slot = i_first % G
    o_j = i_first - i_count + tl.arange(0, BT)
    m_t = (o_j >= 0) & (o_j < i_new)
    o_slot = i_slot + tl.arange(0, BT)
    o_e = tl.arange(0, BE)
    p_source = source + i_b * s_b + i_h * s_h
    b_column = columns_of(index, i_b * M + o_j, i_count + o_j, m_t, SLOTS)
    # [FIELDS, BT, BE]
    b_x = load_tokens(p_source, b_column, m_t, o_e, o_e < E, s_l, s_d, E, D, FIELDS, False).to(tl.float32)
    # [FIELDS, 1, BE]
    o_c = (tl.arange(0, FIELDS) * E)[:, None, None] + o_e[None, None, :]
    m_c = (o_c < D) & (o_e < E)[None, None, :]
    if norm is not None:
        # Whole pages are new, so a tile lies within one of them.
        b_norm = tl.full([FIELDS, BT, BE], 1.0, tl.float16)
        if given is not None:
            p_given = given + (i_bh * (M // G) + (i_first - i_count) // G) * D + o_c
            # As many as there are elements: loaded where they are used, since to move them would cost more.
            b_norm = tl.load(tl.broadcast_to(p_given, (FIELDS, BT, BE)), mask=m_c, other=1.0)
        p_norm = tl.broadcast_to(norm + i_head * D + o_c, (FIELDS, BT, BE))
        tl.store(p_norm, b_norm, mask=m_c & (o_slot == 0)[None, :, None])
        b_share = tl.math.div_rn(tl.full([FIELDS, BT, BE], 1.0, tl.float32), b_norm.to(tl.float32))
        b_x = b_x * b_share

    m_high = LEVELS == 15
    if ALIGNED:
        # A groups of F fields, or of one field's K parts of W words.
        F: tl.constexpr = FIELDS if GROUP == D else (GROUP // E if GROUP > E else 1)
        A: tl.constexpr = FIELDS // F
        W: tl.constexpr = GROUP if GROUP < BE and GROUP != D else BE
        K: tl.constexpr = BE // W
        b_own = b_x
        if not EXACT:
            b_own = tl.where(m_c, b_x, float("nan"))
        # [A, BT, K]
        b_own = tl.reshape(b_own, (A, F, BT, K, W))
        b_low, b_high = tl.min(tl.min(b_own, 1), 3), tl.max(tl.max(b_own, 1), 3)
        if is_wide(b_low, b_high):
            # Loaded once more: hardly ever, and registers for it would cost every tile.
            b_column = columns_of(index, i_b * M + o_j, i_count + o_j, m_t, SLOTS)
            b_again = load_tokens(p_source, b_column, m_t, o_e, o_e < E, s_l, s_d, E, D, FIELDS, False).to(tl.float32)
            if norm is not None:
                b_again = b_again * b_share
            m_own = m_c & (tl.abs(b_again) <= F16_MAX)
            b_lows = tl.reshape(tl.where(m_own, b_again, float("inf")), (A, F, BT, K, W))
            b_highs = tl.reshape(tl.where(m_own, b_again, float("-inf")), (A, F, BT, K, W))
            b_low, b_high = tl.min(tl.min(b_lows, 1), 3), tl.max(tl.max(b_highs, 1), 3)
        b_scale, b_zero = affine_scale(b_low, b_high, m_high)
        o_n = (tl.arange(0, A) * K)[:, None, None] + tl.arange(0, K)[None, None, :]
        p_group = (i_head * (D // GROUP) + o_n) * G + o_slot[None, :, None]
        m_group = tl.broadcast_to(m_t[None, :, None], (A, BT, K))
        tl.store(scale + p_group, b_scale, mask=m_group)
        tl.store(zero + p_group, b_zero, mask=m_group)
        b_inverse = inverse_of(b_scale.to(tl.float32))[:, None, :, :, None]
        b_base = b_zero.to(tl.float32)[:, None, :, :, None]
        b_code = affine_codes(tl.reshape(b_x, (A, F, BT, K, W)), b_inverse, b_base, LEVELS * 1.0)
        b_code = tl.reshape(b_code, (FIELDS, BT, BE))
    else:
        # Groups cut across fields, as where the head dim is no power of two: each is a mask over the tile.
        b_inverse = tl.zeros([FIELDS, BT, BE], tl.float32)
        b_base = b_inverse
        for i_n in range(D // GROUP):
            m_n = (o_c // GROUP == i_n) & (o_e < E)[None, None, :]
            m_n = m_n & (tl.abs(b_x) <= F16_MAX)
            b_low = tl.min(tl.min(tl.where(m_n, b_x, float("inf")), 0), 1)
            b_high = tl.max(tl.max(tl.where(m_n, b_x, float("-inf")), 0), 1)
            b_scale, b_zero = affine_scale(b_low, b_high, m_high)
            m_n = (o_c // GROUP == i_n) & (o_e < E)[None, None, :]
            p_group = (i_head * (D // GROUP) + i_n) * G + o_slot
            tl.store(scale + p_group, b_scale, mask=m_t)
            tl.store(zero + p_group, b_zero, mask=m_t)
            b_inverse = tl.where(m_n, inverse_of(b_scale.to(tl.float32))[None, :, None], b_inverse)
            b_base = tl.where(m_n, b_zero.to(tl.float32)[None, :, None], b_base)
        b_code = affine_codes(b_x, b_inverse, b_base, LEVELS * 1.0)
    if not EXACT:
        b_code = tl.where(m_c, b_code, 0)
    # [BT, BE]
    b_word = tl.sum(b_code << (tl.arange(0, FIELDS) * BITS)[:, None, None], 0).to(tl.int16)
    if TOKEN_MAJOR:
        p_word = codes + i_head * (G * E) + o_slot[:, None] * E + o_e[None, :]
    else:
        p_word = codes + i_head * (G * E) + o_slot[:, None] + o_e[None, :] * G
    tl.store(p_word, b_word, mask=m_t[:, None] & (o_e < E)[None, :])


@triton.jit(do_not_specialize=["count", "new", "index", "N", "M"])
def seal_token_kernel(
    codes, scale, zero, norm, table, count, new, source, index, given, s_b, s_h, s_l, s_d, H, N, M,
    D: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, TOKEN_MAJOR: tl.constexpr,
    BT: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Those of BT slots of a page that are due."""
    i_t, i_bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    i_first, i_count, i_new = due_tile(count + i_b, new + i_b, i_t, M, BT)
    if i_first >= i_count + i_new or i_new <= 0:
        return
    seal_tokens(
        codes, scale, zero, norm, table, source, index, given, i_b, i_h, i_bh, i_first, i_count, i_new, s_b, s_h, s_l,
        s_d, H, N, M, 1, D, G, BITS, GROUP, TOKEN_MAJOR, BT, BE,
    )  # fmt: skip


@triton.jit
def to_fp8(b_x, NATIVE: tl.constexpr):
    """Bits (u8) of f32 as e4m3: rounded to nearest even, saturating; no NaN."""
    if NATIVE:
        b_code = b_x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        b_bits = tl.minimum(tl.maximum(b_x, -FP8_MAX), FP8_MAX).to(tl.int32, bitcast=True)
        b_sign = (b_bits >> 24) & 0x80
        b_bits = b_bits & 0x7FFFFFFF
        # Normal: the exponent's bias goes from 127 to 7, the mantissa from 23 bits to 3.
        b_normal = (b_bits - (120 << 23) + 0x7FFFF + ((b_bits >> 20) & 1)) >> 20
        # Subnormal: an ulp of 2^14 is 2^-9, the smallest e4m3, so the sum's last bits count those.
        b_tiny = (tl.abs(b_x) + 16384.0).to(tl.int32, bitcast=True) & 0xF
        b_code = (tl.where(b_bits < (121 << 23), b_tiny, b_normal) | b_sign).to(tl.uint8)
    return b_code


@triton.jit
def seal_plain(
    codes, scale, table, source, index, i_b, i_h, i_first, i_count, i_new, s_b, s_h, s_l, s_d, H, N, M, SLOTS,
    D: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, BT: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """As `seal_tokens`, in natural order: fp8 pages, and copies for 16 bits (no scale)."""
    i_head = tl.load(table + i_b * N + i_first // G).to(tl.int64) * H + i_h
    o_j = i_first - i_count + tl.arange(0, BT)
    m_t = (o_j >= 0) & (o_j < i_new)
    o_slot = i_first % G + tl.arange(0, BT)
    b_column = columns_of(index, i_b * M + o_j, i_count + o_j, m_t, SLOTS).to(tl.int64)
    o_n = tl.arange(0, BN)
    # [BT, BN * BC]
    o_i = tl.arange(0, BN * BC)
    o_c = o_i // BC * GROUP + o_i % BC
    m_x = m_t[:, None]
    if BN * BC != D:
        m_x = m_x & ((o_i // BC < D // GROUP) & (o_i % BC < GROUP))[None, :]
    p_x = (source + i_b * s_b + i_h * s_h + b_column * s_l)[:, None] + (o_c * s_d)[None, :]
    b_x = tl.load(p_x, mask=m_x, other=0.0)
    if scale is not None:
        b_x = tl.reshape(b_x.to(tl.float32), (BT, BN, BC))
        # [BT, BN]
        b_top = tl.max(tl.abs(b_x), 2)
        if is_wide(b_top, b_top):
            b_top = tl.max(tl.where(tl.abs(b_x) <= F16_MAX, tl.abs(b_x), 0.0), 2)
        b_top = tl.where(b_top == b_top, b_top, 0.0)
        b_scale = tl.math.div_rn(b_top, tl.zeros_like(b_top) + FP8_MAX).to(tl.float16)
        p_scale = (i_head * (D // GROUP) + o_n)[None, :] * G + o_slot[:, None]
        tl.store(scale + p_scale, b_scale, mask=m_t[:, None] & (o_n < D // GROUP)[None, :])
        b_x = tl.where(b_x != b_x, 0.0, tl.minimum(tl.maximum(b_x, -F16_MAX), F16_MAX))
        b_x *= inverse_of(b_scale.to(tl.float32))[:, :, None]
        b_x = to_fp8(tl.reshape(b_x, (BT, BN * BC)), NATIVE)
    p_code = codes + (i_head * G + o_slot)[:, None] * D + o_c[None, :]
    tl.store(p_code, b_x, mask=m_x)


@triton.jit(do_not_specialize=["count", "new", "index", "N", "M"])
def seal_plain_kernel(
    codes, scale, table, count, new, source, index, s_b, s_h, s_l, s_d, H, N, M,
    D: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, BT: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """Those of BT slots of a page that are due, of 8 or 16 bits."""
    i_t, i_bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    i_first, i_count, i_new = due_tile(count + i_b, new + i_b, i_t, M, BT)
    if i_first >= i_count + i_new or i_new <= 0:
        return
    seal_plain(
        codes, scale, table, source, index, i_b, i_h, i_first, i_count, i_new, s_b, s_h, s_l, s_d, H, N, M, 1,
        D, G, GROUP, BN, BC, BT, NATIVE,
    )  # fmt: skip


def seal_triton(
    parts: Sequence[Tensor],
    table: Tensor,
    count: Tensor,
    new: Tensor,
    source: Tensor,
    index: Tensor,
    widths: Tensor | None,
    fmt: str,
    side: str,
    choose: str,
    q_abs: Tensor | None,
    norm: Tensor | None = None,
) -> None:
    """Launcher of `hfkvq.kernels.seal`; bf16 rounding under the interpreter takes the reference."""
    form, at, odd = _facts(fmt)
    stored = source if at is None else parts[at]
    # Triton's interpreter truncates where bf16 should be rounded.
    if odd or (not source.is_cuda and stored.dtype == torch.bfloat16 != source.dtype):
        return reference("seal")(parts, table, count, new, source, index, widths, fmt, side, choose, q_abs, norm)
    assert all([part.is_contiguous() for part in parts]), "pages are contiguous: they are written in place"
    batch, heads, _, head_dim = source.shape
    tokens = index.shape[1]
    if not tokens or not batch:
        return None
    rule = choose if form.raised else ""
    if rule and not _ranks_in_kernel(form, head_dim):
        chosen = index.clamp(0, source.shape[2] - 1).long()[:, None, :, None]
        pages = source.gather(2, chosen.expand(-1, heads, -1, head_dim)).unflatten(2, (-1, form.page_size))
        widths, rule = channel_widths(pages, form, rule, q_abs), ""
    weight = q_abs.to(torch.float32) if q_abs is not None and rule else None
    given = [x.contiguous() for x in (widths if form.raised else None, weight, norm) if x is not None]
    launch = _launch(
        fmt,
        side,
        (batch, heads, head_dim),
        source.stride(),
        source.dtype,
        stored.dtype,
        source.device,
        table.shape[1],
        tokens,
        rule,
        (widths is not None and bool(form.raised), weight is not None, None if norm is None else norm.dtype),
    )
    launch(*parts, table.contiguous(), count.contiguous(), new.contiguous(), source, index.contiguous(), *given)
    return None


def seal_wanted(
    fmt: PageFormat,
    side: str,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    tokens: int,
    rule: str | None,
    weighed: bool,
) -> Iterator[Wanted]:
    """The variant for a source (B, H, D) of the model's dtype: raised by a rule, with weights or not, or by widths."""
    form, _, odd = _facts(fmt.spec)
    if odd:
        return
    if rule and not _ranks_in_kernel(form, shape[2]):
        rule = None
    weighed = weighed and bool(rule)
    given = (bool(form.raised) and not rule, weighed, torch.float16 if form.normed else None)
    made = _launch(fmt.spec, side, shape, stride, dtype, dtype, device, 1, tokens, rule or "", given)
    kinds = [kind or dtype for _, kind in form.shapes("keys" if side == "keys" else "values", *shape[1:]).values()]
    if form.bits == 8:
        kinds[form.names.index("codes")] = torch.uint8
    kinds += [torch.int32] * 3 + [dtype, torch.int32]
    kinds += [kind for kind, has in zip((torch.uint8, torch.float32, torch.float16), given, strict=True) if has]
    yield made.wanted(kinds)


@lru_cache(maxsize=512)
def _facts(fmt: str) -> tuple[PageFormat, int | None, bool]:
    """A format, which of its tensors is in the model's dtype, and whether it has no kernel."""
    form = PageFormat.parse(fmt)
    at = 0 if form.bits == 16 else form.names.index("full") if form.raised_count(16) else None
    odd = form.page_size != power(form.page_size) or form.group_size != power(form.group_size)
    # Tokens that share a word would lie in tiles of different shapes.
    return form, at, bool(form.raised_count(4)) and odd


def seal_launch(
    fmt: PageFormat,
    side: str,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    blocks: int,
    tokens: int,
    rule: str,
) -> Launch | None:
    """A launch that seals without widths, weights and factors, from a source in the model's dtype, if there is one.

    It takes a side's tensors, table, count, new, source and index.
    """
    form, _, odd = _facts(fmt.spec)
    if odd or (rule and not _ranks_in_kernel(form, shape[3])):
        return None
    shape = (shape[0], shape[1], shape[3])
    return _launch(fmt.spec, side, shape, stride, dtype, dtype, device, blocks, tokens, rule, (False, False, None))


def few_tokens(
    fmt: PageFormat, side: str, tokens: int, head_dim: int, device: torch.device
) -> tuple[tuple[int, ...], int]:
    """What a kernel that calls `seal_tokens` or `seal_plain` for a few tokens of a format has to know of them.

    Returns:
        Bits, group and slots of a tile, then BE, or BN, BC and NATIVE; and how many tiles there are.
    """
    if fmt.bits >= 8:
        _, grid, constants, _ = _plain(fmt, side == "keys", tokens, head_dim, device, "")
        names = ("GROUP", "BT", "BN", "BC", "NATIVE")
    else:
        _, grid, constants, _ = _token(fmt, side == "keys", tokens, head_dim, device, "")
        names = ("GROUP", "BT", "BE")
    return (fmt.bits, *(constants[name] for name in names)), grid[0]


def _ranks_in_kernel(form: PageFormat, head_dim: int) -> bool:
    """Whether one program can hold a page, in the order of the rule's sums."""
    tile = form.page_size * fields_of(form.bits) * power(form.words(head_dim))
    return form.page_size == power(form.page_size) and form.group_size == power(form.group_size) and tile <= MAX_TILE


def _slots(form: PageFormat, tokens: int, most: int) -> tuple[int, int]:
    """Slots of a tile, which lies within a page, and how many tiles new tokens can touch."""
    # Every size is a variant to compile, so there are two: steps of a token, and all else.
    block = 1 if tokens == 1 else min(form.page_size & -form.page_size, power(most))
    return block, (tokens + block - 2) // block + 1


def _warps(elements: int, per_thread: int) -> int:
    """Warps of a tile."""
    return max(1, min(16, power(elements // (32 * per_thread))))


@lru_cache(maxsize=1024)
def _launch(
    fmt: str,
    side: str,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    stored: torch.dtype,
    device: torch.device,
    blocks: int,
    tokens: int,
    rule: str,
    given: tuple[bool, bool, torch.dtype | None],
) -> Launch:
    """Takes a side's tensors, table, count, new, source, index, and what is given of widths, weights and factors.

    Args:
        fmt: name of the page format.
        side: "keys" or "values".
        shape: of the source, but for its tokens.
        stride: of the source.
        dtype: of the source.
        stored: of what pages hold unquantized.
        device: of everything.
        blocks: pages of a row.
        tokens: columns of the index.
        rule: by which the kernel chooses raised channels, or "".
        given: whether there are widths, whether there are weights, and the dtype of factors, None for none.
    """
    form, head_dim, rows = PageFormat.parse(fmt), shape[2], shape[0] * shape[1]
    make = _plain if form.bits >= 8 else _token if form.axis == "token" else _channel
    kernel, grid, constants, names = make(form, side == "keys", tokens, head_dim, device, rule)
    grid = (grid[0], rows, *grid[1:])
    at = [form.names.index(name) if name in form.names else None for name in names]
    end = len(form.names) + 5
    # Of what may be given, one tensor after the other.
    optional: list[int | None] = []
    for has in given:
        optional.append(end + sum(x is not None for x in optional) if has else None)
    # Which of them a kernel takes.
    optional = {_plain: [], _token: optional[2:], _channel: optional}[make]

    def nest(tensors: Sequence[Any]) -> tuple[Any, ...]:
        parts = [None if i is None else tensors[i] for i in at]
        if isinstance(parts[0], Tensor) and form.bits == 8:
            # Not every GPU that Triton knows has an fp8 type, but all have bytes.
            parts[0] = parts[0].view(torch.uint8)
        return *parts, *tensors[end - 5 : end], *[None if i is None else tensors[i] for i in optional]

    constants |= {"D": head_dim, "G": form.page_size, "enable_fp_fusion": False}
    return Launch(kernel, grid, (*stride, shape[1], blocks, tokens), constants, device, nest)


_Made = tuple[Any, tuple[int, ...], dict[str, Any], tuple[str, ...]]
"""Kernel, grid without its rows, constants, and the tensors of a side that it takes."""


def _plain(form: PageFormat, is_keys: bool, tokens: int, head_dim: int, device: torch.device, rule: str) -> _Made:
    group = form.group_size if form.bits == 8 else head_dim
    groups, width = power(head_dim // group), power(group)
    block, tiles = _slots(form, tokens, max(1, TOKEN_TILE // (groups * width)))
    native = torch.version.hip is None and capability(device) >= (8, 9)
    constants = {
        "GROUP": group,
        "BN": groups,
        "BC": width,
        "BT": block,
        "NATIVE": native,
        "num_warps": _warps(block * groups * width, TOKEN_THREAD),
    }
    return seal_plain_kernel, (tiles,), constants, ("codes", "scale")


def _token(form: PageFormat, is_keys: bool, tokens: int, head_dim: int, device: torch.device, rule: str) -> _Made:
    fields, words = fields_of(form.bits), power(form.words(head_dim))
    # Groups that cut across fields take masks, and those registers.
    share = 1 if head_dim in (form.group_size, fields * words) else 2
    block, tiles = _slots(form, tokens, max(1, TOKEN_TILE // share // (fields * words)))
    # A fused multiply-add would round once where the contract rounds twice, and move codes at ties.
    constants = {
        "BITS": form.bits,
        "GROUP": form.group_size,
        "TOKEN_MAJOR": is_keys,
        "BT": block,
        "BE": words,
        "num_warps": _warps(block * fields * words, TOKEN_THREAD // share),
    }
    return seal_token_kernel, (tiles,), constants, ("codes", "scale", "zero", "norm")


def _channel(form: PageFormat, is_keys: bool, tokens: int, head_dim: int, device: torch.device, rule: str) -> _Made:
    group, fields = form.group_size, fields_of(form.bits)
    block = power(group)
    # Ranks and words of raised channels need the whole page; else a group, and no more words than a program holds.
    name, over16, over4, divisor = parse_rule(rule) if rule else ("", 0.0, 0.0, 1.0)
    groups = form.page_size // group if rule or form.raised_count(4) else 1
    words = max(2, power(form.words(head_dim)))
    if not rule:
        words = max(2, min(words, CHANNEL_TILE // (groups * block * fields)))
    slices = 1 if rule else cdiv(form.words(head_dim), words)
    constants = {
        "BITS": form.bits,
        "GROUP": group,
        "TOKEN_MAJOR": is_keys,
        "CHOOSE": RULES.index(name) + 1 if rule else 0,
        "OVER16": over16,
        "OVER4": over4,
        "DIVISOR": divisor,
        "COUNT4": form.raised_count(4),
        "COUNT16": form.raised_count(16),
        "N4": form.raised_room(4),
        "N16": form.raised_room(16),
        "NG": groups,
        "BG": block,
        "BE": words,
        "BD": power(head_dim),
        "FL": min(fields, 4, max(1, 64 // words)),
        "VEC": 2,
        "num_warps": _warps(groups * block * fields * words, CHANNEL_THREAD),
    }
    names = ("codes", "scale", "zero", "norm", "high", "high_index", "full", "full_index")
    return seal_channel_kernel, (tokens // (groups * group), slices), constants, names
