"""Pages whose channels have scales of their own: a program seals groups of tokens, and may choose raised channels."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ...pages import PageFormat
from ...seal import RULES, Rule, parse_rule
from .._lib import F16_MAX, cdiv, fields_of, power
from .arithmetic import affine_codes, affine_scale, inverse_of, is_wide, load_tokens, warps_of
from .fit import FIT_THREAD, fit_scale, in_steps, squared_errors
from .ranks import (
    at_channels,
    choose_ranges,
    halving_sum,
    place_chosen,
    place_width,
    rank_keys,
    score_key,
)

CHANNEL_TILE, CHANNEL_THREAD = 16384, 128
"""Most elements of a tile without a page's ranks, and elements of a thread."""

MAX_TILE = 32768
"""Most elements of a page that one program ranks the channels of."""


class ChannelShape(NamedTuple):
    """Constants of `seal_channel_kernel`; those that `_lib.PageShape` has, too, are explained there.

    Attributes:
        FIT: power of the error that scales are fitted to, 0 for none.
        CHOOSE: rule by which channels are raised: its place in `RULES`, from 1 on; 0 for none.
        OVER16: see `Rule`.
        OVER4: see `Rule`.
        DIVISOR: see `Rule`.
        COUNT4: channels that are raised to 4 bits.
        COUNT16: to 16.
        NG: groups of a program.
        BE: words of a program.
        BD: D, a power of two.
        FL: fields along a warp.
        VEC: words of a row that share an i32.
    """

    D: int
    G: int
    BITS: int
    GROUP: int
    TOKEN_MAJOR: bool
    FIT: int
    CHOOSE: int
    OVER16: float
    OVER4: float
    DIVISOR: float
    COUNT4: int
    COUNT16: int
    N4: int
    N16: int
    NG: int
    BE: int
    BD: int
    FL: int
    VEC: int


@triton.jit
def fit_channels(
    p_source, p_column, p_norm, o_d, m_d, s_l, s_d, LEVELS: tl.constexpr, FIT: tl.constexpr, GROUP: tl.constexpr,
    NG: tl.constexpr, LOSES: tl.constexpr,
):  # fmt: skip
    """Scale and zero (f16) of groups of these channels, [NG, CN]; with LOSES also each channel's squared errors, [CN].

    Four lanes have a channel, so that what is worked out for a group is worked out for few, and sums stay within a warp
    where there are channels enough. Loads that the compiler sees to be contiguous would deal tokens out to lanes.
    """
    CN: tl.constexpr = o_d.shape[0]
    LANES: tl.constexpr = 4 if GROUP >= 4 else GROUP
    ROWS: tl.constexpr = GROUP // LANES
    o_i = tl.arange(0, NG * GROUP * CN)
    o_slot = o_i // (LANES * CN * NG) * LANES + (o_i % LANES ^ (LANES > 1))
    o_t = o_i // (LANES * CN) % NG * GROUP + o_slot
    o_x = tl.reshape(tl.broadcast_to(o_d[None, None, :, None], (ROWS, NG, CN, LANES)), (NG * GROUP * CN,))
    m_x = tl.reshape(tl.broadcast_to(m_d[None, None, :, None], (ROWS, NG, CN, LANES)), (NG * GROUP * CN,))
    b_column = o_t.to(tl.int64)
    if p_column is not None:
        b_column = tl.load(p_column + o_t, mask=m_x, other=0).to(tl.int64)
    b_x = tl.load(p_source + b_column * s_l + o_x * s_d, mask=m_x, other=0.0).to(tl.float32)
    if p_norm is not None:
        b_norm = tl.load(p_norm + o_t, mask=m_x, other=1.0).to(tl.float32)
        b_x = b_x * tl.math.div_rn(tl.full([NG * GROUP * CN], 1.0, tl.float32), b_norm)
    b_x, m_x = tl.reshape(b_x, (ROWS, NG, CN, LANES)), tl.reshape(m_x, (ROWS, NG, CN, LANES))
    b_units, b_scale, b_zero, b_low, b_step, b_per_step, b_count, b_sum = in_steps(b_x, m_x, LEVELS, 0, 3)
    if FIT:
        b_scale, b_zero = fit_scale(
            b_units, b_scale, b_zero, b_low, b_step, b_per_step, b_count, b_sum, LEVELS, FIT, GROUP, 0, 3
        )  # fmt: skip
    b_lost = tl.zeros([CN], tl.float32)
    if LOSES:
        b_lost = squared_errors(b_units, b_scale, b_zero, b_low, b_step, b_per_step, b_count, LEVELS, GROUP, 0, 3)
        b_lost = tl.reshape(halving_sum(tl.reshape(b_lost, (1, NG, CN)), 1, NG, CN), (CN,))
    return tl.reshape(b_scale, (NG, CN)), tl.reshape(b_zero, (NG, CN)), b_lost


@triton.jit
def store_groups(scale, zero, b_scale, b_zero, i_group, o_d, m_d, D: tl.constexpr, NG: tl.constexpr):
    """Scale and zero of groups [NG, CN], of which the first is group ``i_group`` of a tensor (groups, D)."""
    o_group = (i_group + tl.arange(0, NG) * D)[:, None] + o_d[None, :]
    m_group = tl.broadcast_to(m_d[None, :], b_scale.shape)
    tl.store(scale + o_group, b_scale, mask=m_group)
    tl.store(zero + o_group, b_zero, mask=m_group)


@triton.jit
def seal_channels(
    page, p_source, p_column, b_column, p_widths, p_weight, p_norm, i_head, i_token, i_e, s_l, s_d,
    SHAPE: tl.constexpr,
):  # fmt: skip
    """NG groups of GROUP tokens, from token ``i_token`` of the row on, times the FIELDS * BE channels of BE words.

    Channels of a tile are [FH, C] with C = FL * BE: FL fields and the words of a row lie along a warp, FH fields and
    all tokens in registers, so that ranges over tokens are cheap and a word is made with few shuffles. Tokens are
    columns ``b_column`` of a head's source, which ``p_column`` holds, or is None where they come in turn. Widths,
    weight and factors of the page and head may be None.
    """
    D: tl.constexpr = SHAPE.D
    G: tl.constexpr = SHAPE.G
    BITS: tl.constexpr = SHAPE.BITS
    GROUP: tl.constexpr = SHAPE.GROUP
    FIT: tl.constexpr = SHAPE.FIT
    CHOOSE: tl.constexpr = SHAPE.CHOOSE
    COUNT4: tl.constexpr = SHAPE.COUNT4
    COUNT16: tl.constexpr = SHAPE.COUNT16
    NG: tl.constexpr = SHAPE.NG
    BE: tl.constexpr = SHAPE.BE
    FL: tl.constexpr = SHAPE.FL
    VEC: tl.constexpr = SHAPE.VEC
    FIELDS: tl.constexpr = 16 // BITS
    LEVELS: tl.constexpr = (1 << BITS) - 1
    E: tl.constexpr = (D + FIELDS - 1) // FIELDS
    BT: tl.constexpr = NG * GROUP
    o_t = tl.arange(0, BT)
    m_t = o_t >= 0
    FH: tl.constexpr = FIELDS // FL
    C: tl.constexpr = FL * BE
    EXACT: tl.constexpr = BE * FIELDS == D
    RAISES: tl.constexpr = (CHOOSE > 0) | (p_widths is not None)
    i_slot = i_token % G

    # Offsets in C are visibly contiguous by VEC; else the compiler loads more at a time and leaves lanes to tokens.
    o_i = tl.arange(0, C)
    o_v = o_i // VEC
    o_e = i_e * BE + o_v % (BE // VEC) * VEC + o_i % VEC
    o_l = o_v // (BE // VEC) * E + o_e
    FITS: tl.constexpr = FIT > 0
    # Rules that look at tokens do so in this order. Registers that fit scales have no room for them.
    EARLY: tl.constexpr = not (FITS or CHOOSE == 3) or CHOOSE == 1 or CHOOSE == 2
    if EARLY:
        # [FH, BT, C]
        b_raw = load_tokens(p_source, b_column, m_t, o_l, o_e < E, s_l, s_d, FL * E, D, FH, EXACT)
        b_x = b_raw.to(tl.float32)
    # [FH, C]
    o_c = (tl.arange(0, FH) * (FL * E))[:, None] + o_l[None, :]
    m_c = (o_c < D) & (o_e < E)[None, :]
    # The same channels where each is by itself, [CN].
    o_n = tl.arange(0, FIELDS * BE) ^ 1
    o_d = o_n // BE * E + i_e * BE + o_n % BE
    m_d = (o_d < D) & (i_e * BE + o_n % BE < E)
    i_group = (i_head * (G // GROUP) + i_slot // GROUP) * D
    m_4 = o_c < 0
    m_16 = m_4
    b_place4 = o_c
    b_place16 = o_c
    i_used4 = 0
    i_used16 = 0
    if CHOOSE == 2:
        m_4, m_16 = choose_ranges(
            b_x, p_weight, o_c, m_c, SHAPE.OVER16, SHAPE.OVER4, SHAPE.DIVISOR, COUNT4, COUNT16, FH, C
        )
        if COUNT16 > 0:
            b_place16 = place_chosen(m_16, FH, C)
            i_used16 = tl.sum(tl.ravel(m_16.to(tl.int32)), 0)
        if COUNT4 > 0:
            b_place4 = place_chosen(m_4, FH, C)
            i_used4 = tl.sum(tl.ravel(m_4.to(tl.int32)), 0)
    elif CHOOSE > 0:
        if CHOOSE == 3:
            b_fitted, b_least, b_lost = fit_channels(
                p_source, p_column, None, o_d, m_d, s_l, s_d, LEVELS, FIT, GROUP, NG, True
            )
            if FITS:
                store_groups(page.scale, page.zero, b_fitted, b_least, i_group, o_d, m_d, D, NG)
            b_key = at_channels(score_key(b_lost, p_weight, o_d, m_d, True, D), o_d, o_c, FH, C)
            b_key = tl.where(m_c, b_key, -1)
        else:
            # The sum of |K|, see `hfkvq.kernels.seal.channel_widths`.
            b_key = score_key(halving_sum(tl.abs(b_x), FH, BT, C), p_weight, o_c, m_c, False, D)
        b_rank = rank_keys(b_key, FH, C)
        if COUNT16 > 0:
            m_16 = b_rank < COUNT16
            b_place16 = place_chosen(m_16, FH, C)
            i_used16 = COUNT16
        if COUNT4 > 0:
            m_4 = (b_rank >= COUNT16) & (b_rank < COUNT16 + COUNT4)
            b_place4 = place_chosen(m_4, FH, C)
            i_used4 = COUNT4
    elif p_widths is not None:
        b_width = tl.load(p_widths + o_c, mask=m_c, other=0).to(tl.int32)
        if COUNT4 > 0:
            b_place4, i_used4 = place_width(p_widths, o_c, 4, D, SHAPE.BD, FH, C)
            m_4 = (b_width == 4) & (b_place4 < COUNT4)
            i_used4 = tl.minimum(i_used4, COUNT4)
        if COUNT16 > 0:
            b_place16, i_used16 = place_width(p_widths, o_c, 16, D, SHAPE.BD, FH, C)
            m_16 = (b_width == 16) & (b_place16 < COUNT16)
            i_used16 = tl.minimum(i_used16, COUNT16)

    if FITS:
        if CHOOSE != 3:
            b_fitted, b_least, _ = fit_channels(
                p_source, p_column, p_norm, o_d, m_d, s_l, s_d, LEVELS, FIT, GROUP, NG, False
            )
            store_groups(page.scale, page.zero, b_fitted, b_least, i_group, o_d, m_d, D, NG)
        if COUNT4 > 0 and RAISES:
            # Few channels, so they are fitted by themselves.
            o_r = tl.arange(0, triton.next_power_of_2(COUNT4))
            b_4 = tl.reshape(tl.where(m_4, b_place4, -1), (FH * C,))
            b_chosen = tl.where(b_4[:, None] == o_r[None, :], tl.reshape(o_c, (FH * C,))[:, None], -1)
            o_r4 = tl.max(b_chosen, 0)
            # Other programs may have other words.
            m_r4, o_r4 = o_r4 >= 0, tl.maximum(o_r4, 0)
            b_fitted, b_least, _ = fit_channels(
                p_source, p_column, None, o_r4, m_r4, s_l, s_d, 15, FIT, GROUP, NG, False
            )
            # They have scales of low width from all of them.
            tl.debug_barrier()
            store_groups(page.scale, page.zero, b_fitted, b_least, i_group, o_r4, m_r4, D, NG)
        tl.debug_barrier()
    if not EARLY or FITS:
        b_raw = load_tokens(p_source, b_column, m_t, o_l, o_e < E, s_l, s_d, FL * E, D, FH, EXACT)
        b_x = b_raw.to(tl.float32)
    if page.norm is not None:
        b_norm = tl.load(p_norm + o_t, mask=m_t, other=1.0)
        if i_e == 0:
            tl.store(page.norm + i_head * G + i_slot + o_t, b_norm, mask=m_t)
        b_share = tl.math.div_rn(tl.full([BT], 1.0, tl.float32), b_norm.to(tl.float32))
        b_x = b_x * b_share[None, :, None]
    # [FH, 1, C]
    m_high = (m_4 | (LEVELS == 15))[:, None, :]
    o_group = (tl.arange(0, NG) * D)[None, :, None] + o_c[:, None, :]
    m_group = tl.broadcast_to(m_c[:, None, :], (FH, NG, C))
    if FITS:
        b_scale = tl.load(page.scale + i_group + o_group, mask=m_group, other=0.0)
        b_zero = tl.load(page.zero + i_group + o_group, mask=m_group, other=0.0)
    else:
        # NaN does not count in a minimum. [FH, NG, C]
        b_own = tl.reshape(b_x, (FH, NG, GROUP, C))
        b_low, b_high = tl.min(b_own, 2), tl.max(b_own, 2)
        if is_wide(b_low, b_high):
            # Loaded once more: hardly ever, and registers for it would cost every
            if p_column is not None:
                b_column = tl.load(p_column + o_t, mask=m_t, other=0)
            b_again = load_tokens(p_source, b_column, m_t, o_l, o_e < E, s_l, s_d, FL * E, D, FH, EXACT).to(tl.float32)
            if page.norm is not None:
                b_again = b_again * b_share[None, :, None]
            m_own = m_t[None, :, None] & (tl.abs(b_again) <= F16_MAX)
            b_low = tl.min(tl.reshape(tl.where(m_own, b_again, float("inf")), (FH, NG, GROUP, C)), 2)
            b_high = tl.max(tl.reshape(tl.where(m_own, b_again, float("-inf")), (FH, NG, GROUP, C)), 2)
        b_scale, b_zero = affine_scale(b_low, b_high, m_high)
    if COUNT16 > 0 and RAISES:
        b_scale = tl.where(m_16[:, None, :], 0.0, b_scale).to(tl.float16)
        b_zero = tl.where(m_16[:, None, :], 0.0, b_zero).to(tl.float16)
    if not FITS:
        tl.store(page.scale + i_group + o_group, b_scale, mask=m_group)
        tl.store(page.zero + i_group + o_group, b_zero, mask=m_group)
    elif COUNT16 > 0 and RAISES:
        tl.debug_barrier()
        tl.store(page.scale + i_group + o_group, b_scale, mask=m_group & m_16[:, None, :])
        tl.store(page.zero + i_group + o_group, b_zero, mask=m_group & m_16[:, None, :])
    b_inverse = inverse_of(b_scale.to(tl.float32))[:, :, None, :]
    b_levels = tl.where(m_high, 15.0, LEVELS * 1.0)[:, :, None, :]
    # A channel that is kept whole has scale 0, hence code 0 without more ado.
    b_code = affine_codes(
        tl.reshape(b_x, (FH, NG, GROUP, C)), b_inverse, b_zero.to(tl.float32)[:, :, None, :], b_levels
    )
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
    if SHAPE.TOKEN_MAJOR:
        p_word = page.codes + i_head * (G * E) + (i_slot + o_t)[:, None] * E + o_e[None, :]
    else:
        p_word = page.codes + i_head * (G * E) + o_e[None, :] * G + (i_slot + o_t)[:, None]
    tl.store(p_word, b_word, mask=m_t[:, None] & (o_e < E)[None, :])

    if COUNT4 > 0:
        # The tile is a whole
        o_w = tl.arange(0, BT // 8)
        p_high = page.high + i_head * (G // 8 * SHAPE.N4) + o_w * SHAPE.N4
        if RAISES:
            # Eight tokens of a channel share a word. [FH, BT / 8, C]
            b_upper = tl.reshape(b_code, (FH, 8, BT // 8, C)) >> 2
            b_upper = tl.sum(b_upper << (tl.arange(0, 8) * 2)[None, :, None, None], 1).to(tl.int16)
            p_upper = p_high[None, :, None] + b_place4[:, None, :]
            tl.store(p_upper, b_upper, mask=m_4[:, None, :])
            tl.store(page.high_index + i_head * SHAPE.N4 + b_place4, o_c.to(page.high_index.dtype.element_ty), mask=m_4)
        if i_e == 0:
            # Ranks that no channel takes hold zeros.
            o_free4 = tl.arange(0, triton.next_power_of_2(SHAPE.N4))
            m_free4 = (o_free4 >= i_used4) & (o_free4 < SHAPE.N4)
            b_zero4 = tl.zeros([BT // 8, triton.next_power_of_2(SHAPE.N4)], tl.int16)
            tl.store(p_high[:, None] + o_free4[None, :], b_zero4, mask=m_free4[None, :])
            tl.store(
                page.high_index + i_head * SHAPE.N4 + o_free4,
                tl.zeros_like(o_free4).to(page.high_index.dtype.element_ty),
                mask=m_free4,
            )
    if COUNT16 > 0:
        p_full = page.full + i_head * (G * SHAPE.N16) + (i_slot + o_t) * SHAPE.N16
        if RAISES:
            p_own = p_full[None, :, None] + b_place16[:, None, :]
            tl.store(p_own, b_raw, mask=m_t[None, :, None] & m_16[:, None, :])
            tl.store(
                page.full_index + i_head * SHAPE.N16 + b_place16, o_c.to(page.full_index.dtype.element_ty), mask=m_16
            )
        if i_e == 0:
            o_free16 = tl.arange(0, triton.next_power_of_2(SHAPE.N16))
            m_free16 = (o_free16 >= i_used16) & (o_free16 < SHAPE.N16)
            b_zero16 = tl.zeros([BT, triton.next_power_of_2(SHAPE.N16)], page.full.dtype.element_ty)
            tl.store(p_full[:, None] + o_free16[None, :], b_zero16, mask=m_t[:, None] & m_free16[None, :])
            tl.store(
                page.full_index + i_head * SHAPE.N16 + o_free16,
                tl.zeros_like(o_free16).to(page.full_index.dtype.element_ty),
                mask=m_free16,
            )


@triton.jit(do_not_specialize=["count", "new", "index", "N", "M"])
def seal_channel_kernel(
    page, table, count, new, source, index, widths, weight, given, strides, H, N, M, SHAPE: tl.constexpr
):
    """Groups of tokens of a row and head, and words, as `seal_channels` takes them."""
    D: tl.constexpr = SHAPE.D
    G: tl.constexpr = SHAPE.G
    i_g, i_bh, i_e = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    i_b, i_h = i_bh // H, i_bh % H
    i_j = i_g * (SHAPE.NG * SHAPE.GROUP)
    o_t = tl.arange(0, SHAPE.NG * SHAPE.GROUP)
    m_t = o_t >= 0
    # Three loads at once, before one of them may say that there is nothing to do.
    i_count = tl.load(count + i_b)
    p_column = index + i_b * M + i_j
    b_column = tl.load(p_column + o_t, mask=m_t, other=0)
    if i_j >= tl.minimum(tl.load(new + i_b), M):
        return
    i_token = i_count + i_j
    i_head = tl.load(table + i_b * N + i_token // G).to(tl.int64) * H + i_h
    p_source = source + i_b * strides[0] + i_h * strides[1]
    p_widths, p_weight, p_norm = widths, weight, given
    if widths is not None:
        p_widths = widths + (i_bh * (M // G) + i_j // G) * D
    if weight is not None:
        p_weight = weight + i_bh * D
    if given is not None:
        p_norm = given + i_bh * M + i_j
    seal_channels(
        page, p_source, p_column, b_column, p_widths, p_weight, p_norm, i_head, i_token, i_e, strides[2],
        strides[3], SHAPE,
    )  # fmt: skip


def ranks_in_kernel(form: PageFormat, head_dim: int) -> bool:
    """True where one program can hold a page, in the order of the rule's sums."""
    return form.page_size * fields_of(form.bits) * power(form.words(head_dim)) <= MAX_TILE


def channel_constants(
    form: PageFormat, is_keys: bool, tokens: int, head_dim: int, rule: str
) -> tuple[tuple[int, int], dict[str, Any]]:
    """Programs for groups of tokens and for slices of words, and what `seal_channel_kernel` takes by name."""
    group, fields = form.group_size, fields_of(form.bits)
    # Ranks and words of raised channels need the whole page; else a group, and no more words than a program holds.
    found = parse_rule(rule) if rule else Rule("")
    fits = bool(form.fit) or found.name == "error"
    groups = form.page_size // group if rule or form.raised_count(4) else 1
    words = max(2, power(form.words(head_dim)))
    if not rule:
        tile = CHANNEL_TILE // 2 if fits else CHANNEL_TILE
        words = max(2, min(words, tile // (groups * group * fields)))
    slices = 1 if rule else cdiv(form.words(head_dim), words)
    shape = ChannelShape(
        D=head_dim,
        G=form.page_size,
        BITS=form.bits,
        GROUP=group,
        TOKEN_MAJOR=is_keys,
        FIT=form.fit,
        CHOOSE=RULES.index(found.name) + 1 if rule else 0,
        OVER16=found.over16,
        OVER4=found.over4,
        DIVISOR=found.divisor,
        COUNT4=form.raised_count(4),
        COUNT16=form.raised_count(16),
        N4=form.raised_room(4),
        N16=form.raised_room(16),
        NG=groups,
        BE=words,
        BD=power(head_dim),
        FL=min(fields, 4, max(1, 64 // words)),
        VEC=2,
    )
    warps = warps_of(groups * group * fields * words, FIT_THREAD if fits else CHANNEL_THREAD)
    return (tokens // (groups * group), slices), {"SHAPE": shape, "num_warps": warps}
