"""Raised channels of a page: scores, ranks, and the places of those chosen."""

from __future__ import annotations

import triton
import triton.language as tl

from ...seal import SCORE_MAX as MOST
from .._lib import F16_MAX
from .arithmetic import divide_levels

SCORE_MAX = tl.constexpr(MOST)


@triton.jit
def halving_sum(b_x, F: tl.constexpr, T: tl.constexpr, C: tl.constexpr):
    """Sum of [F, T, C] over T as ``x[i] + x[i + n/2]`` until one is left, [F, C]: the same bits on every device."""
    for i in tl.static_range(T.bit_length() - 1):
        b_x = tl.sum(tl.reshape(b_x, (F, 2, T >> (i + 1), C)), 1)
    return tl.reshape(b_x, (F, C))


@triton.jit
def score_key(b_score, p_weight, o_c, m_c, SQUARED: tl.constexpr, D: tl.constexpr):
    """Scores as integers that are ordered as they are, and by channels where they are equal; -1 beyond the head."""
    if p_weight is not None:
        b_weight = tl.load(p_weight + o_c, mask=m_c, other=0.0)
        b_score *= b_weight
        if SQUARED:
            b_score *= b_weight
    b_score = tl.where(b_score > 0.0, b_score, 0.0)
    LAST: tl.constexpr = (1 << (D - 1).bit_length()) - 1
    return tl.where(m_c, (b_score.to(tl.int32, bitcast=True) & ~LAST) | (LAST - o_c), -1)


@triton.jit
def at_channels(b_x, o_d, o_c, F: tl.constexpr, C: tl.constexpr):
    """Integers of channels ``o_c``, [F, C], from those of channels ``o_d``, [CN]; 0 where there is none."""
    m_same = o_d[:, None] == tl.reshape(o_c, (F * C,))[None, :]
    return tl.reshape(tl.sum(tl.where(m_same, b_x[:, None], 0), 0), (F, C))


@triton.jit
def rank_keys(b_key, F: tl.constexpr, C: tl.constexpr):
    """Rank of every channel, [F, C], 0 for the greatest key."""
    b_key = tl.reshape(b_key, (F * C,))
    # [other, own]
    return tl.reshape(tl.sum((b_key[:, None] > b_key[None, :]).to(tl.int32), 0), (F, C))


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
    """Number of chosen channels before each, [F, C]; the flat order of the tile is the order of channels."""
    b_chosen = tl.reshape(m_chosen.to(tl.int32), (F * C,))
    return tl.reshape(tl.cumsum(b_chosen, 0) - b_chosen, (F, C))


@triton.jit
def place_width(
    p_widths, o_c, WIDTH: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, F: tl.constexpr, C: tl.constexpr
):
    """Number of channels of this width before each, [F, C], and in all."""
    o_d = tl.arange(0, BD)
    m_all = tl.load(p_widths + o_d, mask=o_d < D, other=0).to(tl.int32) == WIDTH
    # [BD, F * C]
    m_before = m_all[:, None] & (o_d[:, None] < tl.reshape(o_c, (F * C,))[None, :])
    return tl.reshape(tl.sum(m_before.to(tl.int32), 0), (F, C)), tl.sum(m_all.to(tl.int32), 0)
