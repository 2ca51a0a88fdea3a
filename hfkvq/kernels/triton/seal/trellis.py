"""Pages in trellis codes, sealed whole. See `hfkvq.kernels.trellis`, which has the same order.

Keys are measured first, a page a program; then come walks of all channels, and of what they leave of those that are
raised. A program of walks is one warp that takes four lanes, of 1-bit codes eight, and walks four loops at a
time: more of either makes minima cross warps, several times as slow.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ...pages import WALK, PageFormat
from ...trellis import FAR, FARTHEST, FRACTION, SPREAD
from .._lib import F16_MAX, power
from ..tiles import put
from ..trellis import AGAIN, load_numbers, numbers_of
from .arithmetic import F16_TINY, rounded_product, warps_of
from .ranks import rank_keys, score_key

PARTS, MEAN = tl.constexpr(float(FRACTION)), tl.constexpr(SPREAD)
NEVER, FARTHEST_NUMBER = tl.constexpr(FAR), tl.constexpr(FARTHEST)

LOOPS = 4
"""Loops that a program walks at a time, at most."""


MEASURED_THREAD = 64
"""Elements of a page that a thread has where keys are measured."""


class WalkShape(NamedTuple):
    """Constants of `seal_trellis_kernel`; those that `_lib.PageShape` has, too, are explained there.

    Attributes:
        KEYS: whether lanes are channels.
        RAISED: whether what is left of raised channels is walked, not all lanes.
        LANES: lanes that are walked.
        ALONG: numbers of a lane.
        BA: ALONG, a power of two.
        BN: loops that are walked at a time.
    """

    D: int
    G: int
    KEYS: bool
    BITS: int
    RAISED: bool
    LANES: int
    ALONG: int
    BA: int
    BN: int


@triton.jit
def in_units(b_x, b_top, b_per):
    """Numbers in parts of their lane's largest magnitude, whole numbers in f32."""
    b_x = tl.minimum(tl.maximum(tl.where(b_x == b_x, b_x, 0.0), -b_top), b_top)
    return tl.floor(rounded_product(b_x, b_per) + 0.5)


@triton.jit
def load_units(p_x, m_x, b_top, b_per):
    """Values in parts of their token's largest magnitude, whole numbers in f32."""
    return in_units(tl.load(p_x, mask=m_x, other=0.0).to(tl.float32), b_top, b_per)


@triton.jit
def measured(p_x, s_x, SHAPE: tl.constexpr):
    """A token's largest magnitude, parts of 1, what these are multiplied by, squares summed in parts, the deviation."""
    o_x = tl.arange(0, SHAPE.BA)
    b_x = tl.abs(tl.load(p_x + o_x * s_x, mask=o_x < SHAPE.ALONG, other=0.0).to(tl.float32))
    b_top = tl.maximum(tl.max(tl.where(b_x <= F16_MAX, b_x, 0.0), 0), F16_TINY)
    b_per = tl.math.div_rn(PARTS, b_top)
    b_units = load_units(p_x + o_x * s_x, o_x < SHAPE.ALONG, b_top, b_per).to(tl.int32)
    b_squares = tl.sum(b_units * b_units, 0).to(tl.float32)
    b_deviation = tl.math.sqrt_rn(tl.math.div_rn(b_squares, SHAPE.ALONG * 1.0))
    b_gain = tl.where(b_squares > 0.0, tl.math.div_rn(MEAN, tl.maximum(b_deviation, F16_TINY)), 0.0)
    return b_top, b_per, b_gain, b_squares, b_deviation


@triton.jit
def known(page, i_head, i_lane, SHAPE: tl.constexpr):
    """Mean, scale, one over that of this walk, and channel of a lane of keys."""
    i_channel = i_lane
    if SHAPE.RAISED:
        i_channel = tl.load(page.high_index + i_head * SHAPE.LANES + i_lane).to(tl.int32)
    b_zero = tl.load(page.zero + i_head * SHAPE.D + i_channel).to(tl.float32)
    b_scale = tl.load(page.scale + i_head * SHAPE.D + i_channel).to(tl.float32)
    b_own = b_scale * AGAIN if SHAPE.RAISED else b_scale
    b_per = tl.where(b_own > 0.0, tl.math.div_rn(1.0, tl.where(b_own > 0.0, b_own, 1.0)), 0.0)
    return b_zero, b_scale, b_per, i_channel


@triton.jit
def load_rest(page, i_head, p_x, p_column, s_x, fact, o_e, i_step, SHAPE: tl.constexpr):
    """Numbers ``i_step * E + o_e`` of a channel that a walk is for, f16."""
    E: tl.constexpr = SHAPE.ALONG // 8
    b_zero, b_scale, b_per, i_channel = fact
    m_x = o_e < E
    b_column = tl.load(p_column + i_step * E + o_e, mask=m_x, other=0).to(tl.int64)
    b_x = tl.load(p_x + b_column * s_x, mask=m_x, other=0.0).to(tl.float32) - b_zero
    if SHAPE.RAISED:
        p_codes = page.codes + i_head * (E * (SHAPE.D // 2))
        b_made = load_numbers(p_codes, i_channel, o_e, i_step, m_x, SHAPE.D, 1)
        b_x -= rounded_product(b_made, b_scale)
    b_x = rounded_product(b_x, b_per)
    b_x = tl.where(b_x == b_x, b_x, 0.0)
    return tl.minimum(tl.maximum(b_x, -FARTHEST_NUMBER), FARTHEST_NUMBER).to(tl.float16)


@triton.jit
def either(m_first, facts, j: tl.constexpr, k: tl.constexpr):
    """The first four facts of one of two lanes: all that walks need."""
    b_facts = ()
    for i in tl.static_range(4):
        b_facts = b_facts + (tl.where(m_first, facts[j][i], facts[k][i]),)
    return b_facts


@triton.jit
def with_state(b_cost, page, i_head, lanes, p_column, facts, i_state, s_x, o_e, b_tables, SHAPE: tl.constexpr):
    """Costs f32 [BN, 16, 16] and what the numbers of a state add to them beside its squares.

    ``lanes`` (addresses) and ``facts`` have those of the first half, then those of the second.
    """
    E: tl.constexpr = SHAPE.ALONG // 8
    COUNT: tl.constexpr = 4 // SHAPE.BITS
    m_half = i_state < 8
    b_numbers = ()
    for j in tl.static_range(COUNT):
        p_x = tl.where(m_half, lanes[j], lanes[COUNT + j])
        fact = either(m_half, facts, j, COUNT + j)
        if SHAPE.KEYS:
            b_x = load_rest(page, i_head, p_x, p_column, s_x, fact, o_e, i_state % 8, SHAPE)
        else:
            p_x += (i_state % 8 * E + o_e).to(tl.int64) * s_x
            b_x = rounded_product(load_units(p_x, o_e < E, fact[0], fact[1]), fact[2]).to(tl.float16)
        b_numbers = b_numbers + (b_x.to(tl.float32) * -2.0,)
    # Products are exact.
    for j in tl.static_range(COUNT):
        b_cost = tl.fma(b_numbers[j][:, None, None], b_tables[j], b_cost)
    return b_cost


@triton.jit
def cheapest(b_cost):
    """Least of costs [BN, 16, 16] over the upper halves of states: [BN, 16], with that half in the last 4 bits."""
    b_bits = (b_cost.to(tl.int32, bitcast=True) & -16) | tl.arange(0, 16)[None, :, None]
    return tl.min(b_bits.to(tl.float32, bitcast=True), 1)


@triton.jit
def walked(
    page, i_head, lanes, p_column, facts, s_x, o_e, b_tables, b_shared, PLACE: tl.constexpr, SHARES: tl.constexpr,
    SHAPE: tl.constexpr,
):  # fmt: skip
    """Least costs [BN, 16] of the last states by their lower half, and upper halves by lower ones, 4 bits a state.

    Two words hold the upper halves of eight states each, before the last of which there are seven.
    """
    BN: tl.constexpr = SHAPE.BN
    b_squares = b_tables[0] * b_tables[0]
    for j in tl.static_range(1, 4 // SHAPE.BITS):
        b_squares = b_squares + rounded_product(b_tables[j], b_tables[j])
    b_cost = with_state(b_squares, page, i_head, lanes, p_column, facts, PLACE, s_x, o_e, b_tables, SHAPE)
    if SHARES:
        b_cost = tl.where(tl.arange(0, 16)[None, :, None] == b_shared[:, None, None], b_cost, NEVER)
    b_early = tl.zeros([BN, 16], tl.int32)
    b_late = tl.zeros([BN, 16], tl.int32)
    for i in range(8):
        b_best = cheapest(b_cost)
        b_early |= (b_best.to(tl.int32, bitcast=True) & 15) << (4 * i)
        b_cost = b_best[:, :, None] + b_squares
        b_cost = with_state(
            b_cost, page, i_head, lanes, p_column, facts, (PLACE + 1 + i) % 16, s_x, o_e, b_tables, SHAPE
        )  # fmt: skip
    for i in range(7):
        b_best = cheapest(b_cost)
        b_late |= (b_best.to(tl.int32, bitcast=True) & 15) << (4 * i)
        b_cost = b_best[:, :, None] + b_squares
        b_cost = with_state(
            b_cost, page, i_head, lanes, p_column, facts, (PLACE + 9 + i) % 16, s_x, o_e, b_tables, SHAPE
        )  # fmt: skip
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
def seal_trellis_kernel(page, table, count, new, source, index, strides, H, N, M, SHAPE: tl.constexpr):
    """Two neighbouring lanes of each half of a page's lanes, of 1-bit codes of each quarter."""
    G: tl.constexpr = SHAPE.G
    BITS: tl.constexpr = SHAPE.BITS
    BN: tl.constexpr = SHAPE.BN
    E: tl.constexpr = SHAPE.ALONG // 8
    COUNT: tl.constexpr = 4 // BITS
    ROW: tl.constexpr = SHAPE.LANES * BITS // 2
    # Lanes of a block, half of which are words of one half's row.
    BLOCK: tl.constexpr = SHAPE.LANES // COUNT
    i_t, i_bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    i_new, i_slot = i_t // (BLOCK // 2) * G, i_t % (BLOCK // 2) * 2
    if i_new >= tl.minimum(tl.load(new + i_b), M):
        return
    i_page = (tl.load(count + i_b) + i_new) // G
    i_head = tl.load(table + i_b * N + i_page).to(tl.int64) * H + i_h
    p_column = index + i_b * M + i_new
    p_source = source + i_b * strides[0] + i_h * strides[1]
    s_x = strides[2] if SHAPE.KEYS else strides[3]
    lanes = ()
    facts = ()
    for k in tl.static_range(2 * COUNT):
        i_lane = k // 2 * BLOCK + i_slot + k % 2
        if SHAPE.KEYS:
            fact = known(page, i_head, i_lane, SHAPE)
            p_own = p_source + fact[3].to(tl.int64) * strides[3]
        else:
            p_own = p_source + tl.load(p_column + i_lane).to(tl.int64) * strides[2]
            fact = measured(p_own, s_x, SHAPE)
        lanes = lanes + (p_own,)
        facts = facts + (fact,)
    o_s = tl.arange(0, 16)
    b_state = tl.broadcast_to((o_s[:, None] * 16 + o_s[None, :])[None], BN, 16, 16)
    b_first, b_second = numbers_of(b_state)
    b_tables = (b_first.to(tl.float32), b_second.to(tl.float32))
    if BITS == 1:
        b_first, b_second = numbers_of(b_state, True)
        b_tables = b_tables + (b_first.to(tl.float32), b_second.to(tl.float32))
    b_sums = ()
    for k in tl.static_range(2 * COUNT):
        b_sums = b_sums + (tl.zeros([BN], tl.int32),)
    p_codes = (page.high if SHAPE.RAISED else page.codes) + i_head * (E * ROW) + i_slot
    for i_e in range(0, E, BN):
        o_e = i_e + tl.arange(0, BN)
        b_none = tl.zeros([BN], tl.int32)
        b_best, _, b_late = walked(
            page, i_head, lanes, p_column, facts, s_x, o_e, b_tables, b_none, 8, False, SHAPE
        )  # fmt: skip
        b_shared, _ = halves_before(b_late, tl.argmin(b_best, 1).to(tl.int32), b_none, 8)
        _, b_early, b_late = walked(
            page, i_head, lanes, p_column, facts, s_x, o_e, b_tables, b_shared, 0, True, SHAPE
        )  # fmt: skip
        b_lower, b_right = halves_before(b_late, b_shared, b_shared, 7)
        m_own = o_s[None, :] == b_lower[:, None]
        b_lower = tl.sum(tl.where(m_own, b_late, 0), 1) & 15
        _, b_left = halves_before(b_early, b_lower, b_lower, 7)
        for half in tl.static_range(2):
            b_word = b_left if half == 0 else b_right
            p_word = p_codes + o_e * ROW + half * (ROW // 2)
            tl.store(p_word, b_word.to(tl.int16), mask=o_e < E)
            tl.store(p_word + 1, (b_word >> 16).to(tl.int16), mask=o_e < E)
            if not SHAPE.KEYS:
                b_before = b_right if half == 0 else b_left
                for j in tl.static_range(COUNT):
                    b_sum = along(b_sums[half * COUNT + j], lanes[half * COUNT + j], facts[half * COUNT + j], b_word,
                                  b_before, o_e, s_x, j, SHAPE)  # fmt: skip
                    b_sums = put(b_sums, half * COUNT + j, b_sum)
    if not SHAPE.KEYS:
        for k in tl.static_range(2 * COUNT):
            b_along = tl.sum(b_sums[k], 0).to(tl.float32)
            b_own = rounded_product(facts[k][4], 1 / (PARTS * MEAN))
            b_kept = tl.math.div_rn(facts[k][3], tl.maximum(b_along, 1.0))
            b_scale = rounded_product(facts[k][0], tl.where((b_along > 0.0) & (b_kept < b_own + b_own), b_kept, b_own))
            p_scale = page.scale + i_head * G + k // 2 * BLOCK + i_slot + k % 2
            tl.store(p_scale, tl.minimum(b_scale, F16_MAX).to(tl.float16))


@triton.jit
def along(b_sum, p_x, fact, b_word, b_before, o_e, s_x, j: tl.constexpr, SHAPE: tl.constexpr):
    """Sums of a token's values times the numbers ``j`` of states, in parts: whole numbers, the same in any order."""
    E: tl.constexpr = SHAPE.ALONG // 8
    for i in range(8):
        b_state = tl.where(i == 0, (b_before & 15) << 4 | (b_word >> 28 & 15), b_word >> (28 - 4 * i) & 255)
        b_first, b_second = numbers_of(b_state, j >= 2)
        b_number = b_first if j % 2 == 0 else b_second
        b_units = load_units(p_x + (i * E + o_e).to(tl.int64) * s_x, o_e < E, fact[0], fact[1])
        b_sum += b_units.to(tl.int32) * tl.floor(b_number.to(tl.float32) * PARTS + 0.5).to(tl.int32)
    return b_sum


class MeasureShape(NamedTuple):
    """Constants of `measure_keys_kernel`; those that `_lib.PageShape` has, too, are explained there.

    Attributes:
        RULED: whether channels are ranked by what they would lose.
        BD: D, a power of two.
    """

    D: int
    G: int
    N3: int
    RULED: bool
    BD: int


@triton.jit
def largest(b_x):
    """Largest magnitude along tokens [G, BD] that f16 holds, and parts of 1: [1, BD]."""
    b_abs = tl.abs(b_x)
    b_top = tl.maximum(tl.max(tl.where(b_abs <= F16_MAX, b_abs, 0.0), 0), F16_TINY)[None, :]
    return b_top, tl.math.div_rn(tl.zeros_like(b_top) + PARTS, b_top)


@triton.jit(do_not_specialize=["count", "new", "index", "N", "M"])
def measure_keys_kernel(page, table, count, new, source, index, widths, weight, strides, H, N, M, SHAPE: tl.constexpr):
    """Means, scales and ranks of the channels of a page."""
    D: tl.constexpr = SHAPE.D
    G: tl.constexpr = SHAPE.G
    N3: tl.constexpr = SHAPE.N3
    BD: tl.constexpr = SHAPE.BD
    i_t, i_bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    if i_t * G >= tl.minimum(tl.load(new + i_b), M):
        return
    i_page = (tl.load(count + i_b) + i_t * G) // G
    i_head = tl.load(table + i_b * N + i_page).to(tl.int64) * H + i_h
    o_t, o_d = tl.arange(0, SHAPE.G), tl.arange(0, BD)
    m_t, m_d = o_t < G, o_d < D
    b_column = tl.load(index + i_b * M + i_t * G + o_t, mask=m_t, other=0).to(tl.int64)
    p_x = source + i_b * strides[0] + i_h * strides[1] + b_column[:, None] * strides[2] + (o_d * strides[3])[None, :]
    m_x = m_t[:, None] & m_d[None, :]
    b_x = tl.load(p_x, mask=m_x, other=0.0).to(tl.float32)
    b_top, b_per = largest(b_x)
    b_sum = tl.sum(in_units(b_x, b_top, b_per).to(tl.int32), 0)[None, :].to(tl.float32)
    b_mean = tl.math.div_rn(b_sum, tl.zeros_like(b_sum) + PARTS * G)
    b_zero = rounded_product(b_top, b_mean).to(tl.float16)
    b_x = tl.where(m_x, b_x - b_zero.to(tl.float32), 0.0)
    b_top, b_per = largest(b_x)
    b_units = in_units(b_x, b_top, b_per).to(tl.int32)
    b_squares = tl.sum(b_units * b_units, 0)[None, :].to(tl.float32)
    b_deviation = tl.math.sqrt_rn(tl.math.div_rn(b_squares, tl.zeros_like(b_squares) + G * 1.0))
    b_scale = rounded_product(b_top, rounded_product(b_deviation, 1 / (PARTS * MEAN)))
    b_scale = tl.minimum(b_scale, F16_MAX).to(tl.float16)
    o_c = o_d[None, :]
    tl.store(page.zero + i_head * D + o_c, b_zero, mask=m_d[None, :])
    tl.store(page.scale + i_head * D + o_c, b_scale, mask=m_d[None, :])
    if N3 > 0:
        LAST: tl.constexpr = BD - 1
        b_width = tl.zeros([1, BD], tl.int32)
        if widths is not None:
            b_width = tl.load(widths + (i_bh * (M // G) + i_t) * D + o_c, mask=m_d[None, :], other=0).to(tl.int32)
        elif SHAPE.RULED:
            p_weight = None if weight is None else weight + i_bh * D
            b_score = rounded_product(b_scale.to(tl.float32), b_scale.to(tl.float32))
            b_rank = rank_keys(score_key(b_score, p_weight, o_c, m_d[None, :], True, D), 1, BD)
            b_width = (b_rank < N3).to(tl.int32)
        # Lower channels of equal widths come first.
        b_rank = rank_keys(tl.where(m_d[None, :], b_width * BD + LAST - o_c, -1), 1, BD)
        tl.store(page.high_index + i_head * N3 + b_rank, o_c, mask=m_d[None, :] & (b_rank < N3))


def walk_constants(
    form: PageFormat, is_keys: bool, raised: bool, tokens: int, head_dim: int
) -> tuple[int, dict[str, Any]]:
    """Programs for so many tokens, and what `seal_trellis_kernel` takes by name; see `WalkShape` of ``raised``."""
    lanes, along = (head_dim, form.page_size) if is_keys else (form.page_size, head_dim)
    bits = form.bits
    if raised:
        lanes, bits = form.raised_count(3), WALK
    shape = WalkShape(
        D=head_dim,
        G=form.page_size,
        KEYS=is_keys,
        BITS=bits,
        RAISED=raised,
        LANES=lanes,
        ALONG=along,
        BA=power(along),
        BN=min(LOOPS, power(along // 8)),
    )
    return tokens // form.page_size * (lanes * bits // 8), {"SHAPE": shape, "num_warps": 1}


def measure_constants(form: PageFormat, ruled: bool, tokens: int, head_dim: int) -> tuple[int, dict[str, Any]]:
    """Programs for so many tokens, and what `measure_keys_kernel` takes by name."""
    shape = MeasureShape(head_dim, form.page_size, form.raised_count(3), ruled, power(head_dim))
    warps = warps_of(shape.BD * shape.G, MEASURED_THREAD)
    return tokens // form.page_size, {"SHAPE": shape, "num_warps": warps}
