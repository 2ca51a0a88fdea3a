"""Values in trellis codes: whole pages, four tokens a program. See `hfkvq.kernels.trellis`, which has the same order.

A program is one warp and walks four loops at a time: more of either makes minima cross warps, several times as slow.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ...pages import PageFormat
from ...trellis import FAR, FRACTION, SPREAD
from .._lib import F16_MAX, power
from ..trellis import numbers_of
from .arithmetic import F16_TINY, rounded_product

PARTS, MEAN = tl.constexpr(float(FRACTION)), tl.constexpr(SPREAD)
OWN = tl.constexpr(1 / (FRACTION * SPREAD))
NEVER = tl.constexpr(FAR)

LOOPS = 4
"""Loops that a program walks at a time, at most."""


@triton.jit
def load_units(p_x, m_x, b_top, b_per):
    """Values in parts of their token's largest magnitude, whole numbers in f32."""
    b_x = tl.load(p_x, mask=m_x, other=0.0).to(tl.float32)
    b_x = tl.minimum(tl.maximum(tl.where(b_x == b_x, b_x, 0.0), -b_top), b_top)
    return tl.floor(rounded_product(b_x, b_per) + 0.5)


@triton.jit
def measured(p_x, s_d, D: tl.constexpr, BD: tl.constexpr):
    """A token's largest magnitude, parts of 1, its squares summed in parts, and the deviation (scalars)."""
    o_d = tl.arange(0, BD)
    b_x = tl.abs(tl.load(p_x + o_d * s_d, mask=o_d < D, other=0.0).to(tl.float32))
    b_top = tl.maximum(tl.max(tl.where(b_x <= F16_MAX, b_x, 0.0), 0), F16_TINY)
    b_per = tl.math.div_rn(PARTS, b_top)
    b_units = load_units(p_x + o_d * s_d, o_d < D, b_top, b_per).to(tl.int32)
    b_squares = tl.sum(b_units * b_units, 0).to(tl.float32)
    b_deviation = tl.math.sqrt_rn(tl.math.div_rn(b_squares, D * 1.0))
    b_gain = tl.where(b_squares > 0.0, tl.math.div_rn(MEAN, tl.maximum(b_deviation, F16_TINY)), 0.0)
    return b_top, b_per, b_gain, b_squares, b_deviation


@triton.jit
def with_state(b_cost, p_token, facts, i_state, s_d, o_e, E: tl.constexpr, b_first, b_second):
    """Costs f32 [BN, 16, 16] and what the two numbers of a state add to them beside its squares.

    ``p_token`` and ``facts`` have the tokens of the first half, then those of the second.
    """
    m_half = i_state < 8
    b_numbers = ()
    for j in tl.static_range(2):
        p_x = tl.where(m_half, p_token[j], p_token[2 + j]) + (i_state % 8 * E + o_e).to(tl.int64) * s_d
        b_top = tl.where(m_half, facts[j][0], facts[2 + j][0])
        b_per = tl.where(m_half, facts[j][1], facts[2 + j][1])
        b_gain = tl.where(m_half, facts[j][2], facts[2 + j][2])
        b_x = rounded_product(load_units(p_x, o_e < E, b_top, b_per), b_gain).to(tl.float16)
        b_numbers = b_numbers + (b_x.to(tl.float32) * -2.0,)
    # Products are exact.
    b_cost = tl.fma(b_numbers[0][:, None, None], b_first, b_cost)
    return tl.fma(b_numbers[1][:, None, None], b_second, b_cost)


@triton.jit
def cheapest(b_cost):
    """Least of costs [BN, 16, 16] over the upper halves of states: [BN, 16], with that half in the last 4 bits."""
    b_bits = (b_cost.to(tl.int32, bitcast=True) & -16) | tl.arange(0, 16)[None, :, None]
    return tl.min(b_bits.to(tl.float32, bitcast=True), 1)


@triton.jit
def walked(
    p_token, facts, s_d, o_e, E: tl.constexpr, b_first, b_second, b_shared, PLACE: tl.constexpr, SHARES: tl.constexpr
):
    """Least costs [BN, 16] of the last states by their lower half, and upper halves by lower ones, 4 bits a state.

    Two words hold the upper halves of eight states each, before the last of which there are seven.
    """
    BN: tl.constexpr = o_e.shape[0]
    b_first, b_second = tl.broadcast_to(b_first, BN, 16, 16), tl.broadcast_to(b_second, BN, 16, 16)
    b_squares = b_first * b_first + b_second * b_second
    b_cost = with_state(b_squares, p_token, facts, PLACE, s_d, o_e, E, b_first, b_second)
    if SHARES:
        b_cost = tl.where(tl.arange(0, 16)[None, :, None] == b_shared[:, None, None], b_cost, NEVER)
    b_early = tl.zeros([BN, 16], tl.int32)
    b_late = tl.zeros([BN, 16], tl.int32)
    for i in range(8):
        b_best = cheapest(b_cost)
        b_early |= (b_best.to(tl.int32, bitcast=True) & 15) << (4 * i)
        i_state = (PLACE + 1 + i) % 16
        b_cost = with_state(b_best[:, :, None] + b_squares, p_token, facts, i_state, s_d, o_e, E, b_first, b_second)
    for i in range(7):
        b_best = cheapest(b_cost)
        b_late |= (b_best.to(tl.int32, bitcast=True) & 15) << (4 * i)
        i_state = (PLACE + 9 + i) % 16
        b_cost = with_state(b_best[:, :, None] + b_squares, p_token, facts, i_state, s_d, o_e, E, b_first, b_second)
    b_best = cheapest(b_cost)
    return b_best, b_early, b_late | (b_best.to(tl.int32, bitcast=True) & 15) << 28


@triton.jit
def halves_before(b_notes, b_lower, b_word, COUNT: tl.constexpr):
    """Follows notes from the last ones on: the lower half COUNT states before, and these halves above a word's own."""
    for i in range(COUNT):
        m_own = tl.arange(0, 16)[None, :] == b_lower[:, None]
        b_lower = (tl.sum(tl.where(m_own, b_notes, 0), 1) >> (28 - 4 * i)) & 15
        if COUNT == 7:
            b_word |= b_lower << (4 * i + 4)
    return b_lower, b_word


@triton.jit(do_not_specialize=["count", "new", "index", "N", "M"])
def seal_trellis_kernel(
    page, table, count, new, source, index, strides, H, N, M, D: tl.constexpr, G: tl.constexpr, BD: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Two neighbouring tokens of each half of a page."""
    E: tl.constexpr = D // 8
    i_t, i_bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    i_new, i_slot = i_t // (G // 4) * G, i_t % (G // 4) * 2
    if i_new >= tl.minimum(tl.load(new + i_b), M):
        return
    i_page = (tl.load(count + i_b) + i_new) // G
    i_head = tl.load(table + i_b * N + i_page).to(tl.int64) * H + i_h
    p_token = ()
    facts = ()
    for k in tl.static_range(4):
        i_column = tl.load(index + i_b * M + i_new + k // 2 * (G // 2) + i_slot + k % 2).to(tl.int64)
        p_own = source + i_b * strides[0] + i_h * strides[1] + i_column * strides[2]
        p_token = p_token + (p_own,)
        facts = facts + (measured(p_own, strides[3], D, BD),)
    o_s = tl.arange(0, 16)
    b_first, b_second = numbers_of(o_s[:, None] * 16 + o_s[None, :])
    b_first, b_second = b_first.to(tl.float32)[None], b_second.to(tl.float32)[None]
    b_sums = ()
    for k in tl.static_range(4):
        b_sums = b_sums + (tl.zeros([BN], tl.int32),)
    for i_e in range(0, E, BN):
        o_e = i_e + tl.arange(0, BN)
        b_none = tl.zeros([BN], tl.int32)
        b_best, _, b_late = walked(p_token, facts, strides[3], o_e, E, b_first, b_second, b_none, 8, False)
        b_shared, _ = halves_before(b_late, tl.argmin(b_best, 1).to(tl.int32), b_none, 8)
        _, b_early, b_late = walked(p_token, facts, strides[3], o_e, E, b_first, b_second, b_shared, 0, True)
        b_lower, b_right = halves_before(b_late, b_shared, b_shared, 7)
        m_own = o_s[None, :] == b_lower[:, None]
        b_lower = tl.sum(tl.where(m_own, b_late, 0), 1) & 15
        _, b_left = halves_before(b_early, b_lower, b_lower, 7)
        p_word = page.codes + i_head * (G * E) + o_e * G + i_slot
        for half in tl.static_range(2):
            b_word = b_left if half == 0 else b_right
            b_before = b_right if half == 0 else b_left
            tl.store(p_word + half * (G // 2), b_word.to(tl.int16), mask=o_e < E)
            tl.store(p_word + half * (G // 2) + 1, (b_word >> 16).to(tl.int16), mask=o_e < E)
            # Whole numbers, so sums are the same in any order.
            b_1, b_2 = b_sums[2 * half], b_sums[2 * half + 1]
            for i in range(8):
                b_state = tl.where(i == 0, (b_before & 15) << 4 | (b_word >> 28 & 15), b_word >> (28 - 4 * i) & 255)
                b_firsts, b_seconds = numbers_of(b_state)
                o_c = (i * E + o_e).to(tl.int64) * strides[3]
                b_units = load_units(p_token[2 * half] + o_c, o_e < E, facts[2 * half][0], facts[2 * half][1])
                b_1 += b_units.to(tl.int32) * tl.floor(b_firsts.to(tl.float32) * PARTS + 0.5).to(tl.int32)
                b_units = load_units(
                    p_token[2 * half + 1] + o_c, o_e < E, facts[2 * half + 1][0], facts[2 * half + 1][1]
                )  # fmt: skip
                b_2 += b_units.to(tl.int32) * tl.floor(b_seconds.to(tl.float32) * PARTS + 0.5).to(tl.int32)
            if half == 0:
                b_sums = (b_1, b_2, b_sums[2], b_sums[3])
            else:
                b_sums = (b_sums[0], b_sums[1], b_1, b_2)
    for k in tl.static_range(4):
        b_along = tl.sum(b_sums[k], 0).to(tl.float32)
        b_own = rounded_product(facts[k][4], OWN)
        b_kept = tl.math.div_rn(facts[k][3], tl.maximum(b_along, 1.0))
        b_scale = rounded_product(facts[k][0], tl.where((b_along > 0.0) & (b_kept < b_own + b_own), b_kept, b_own))
        p_scale = page.scale + i_head * G + k // 2 * (G // 2) + i_slot + k % 2
        tl.store(p_scale, tl.minimum(b_scale, F16_MAX).to(tl.float16))


def trellis_constants(form: PageFormat, tokens: int, head_dim: int) -> tuple[int, dict[str, Any]]:
    """Programs for so many tokens, and what `seal_trellis_kernel` takes by name."""
    return tokens // 4, {
        "D": head_dim,
        "G": form.page_size,
        "BD": power(head_dim),
        "BN": min(LOOPS, power(head_dim // 8)),
        "num_warps": 1,
    }
