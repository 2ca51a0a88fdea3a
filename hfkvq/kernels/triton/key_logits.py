"""Logits of keys in pages against queries, without ever dequantizing.

Scales fold into the query (keys per channel) or into logits (per token), minima into one bias. Factors of normed pages
meet logits before anything else is added to them. See `fields` for how codes become operands.

Names: a step takes tokens in tiles of SUB (what shares the scales of a key channel); ``b_qs`` are queries by field,
f32 [BE, BM]; logits are kept *raw* where the exponent's own multiply-add can make them: ``raw * unit + bias``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._lib import rest_numbers
from .fields import LOG2E, Q_SHIFT, UNIT, key_unit, unpack2, unpack4, unpacked_fields, weight, words_of
from .tiles import dotable, paired, parted, put, stacked, unstacked
from .trellis import AGAIN, load_numbers, trellis_fields


@triton.jit
def key_fields(
    codes, i_head, o_slot, m_t, D: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr, BE: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Fields of keys at slots ``o_slot`` of a page, each [BT, BE]; with MASKED, 0 where ``m_t`` says so."""
    o_e = tl.arange(0, BE)
    if BITS < 8:
        E: tl.constexpr = words_of(D, BITS)
        p_w = codes + i_head * (G * E) + o_slot[:, None] * E + o_e[None, :]
        if E == BE:
            b_w = tl.load(p_w)
        else:
            b_w = tl.load(p_w, mask=(o_e < E)[None, :], other=0)
        if BITS == 2:
            return unpack2(b_w)
        else:
            return unpack4(b_w)
    else:
        # Bytes that were never written may be NaN: so are logits then, which are masked in the end.
        return unpacked_fields(codes, i_head, o_slot, m_t, D, G, BITS, BE, MASKED and BITS == 16, 1)


@triton.jit
def half_queries(b_qs, BITS: tl.constexpr, DTYPE: tl.constexpr):
    """Queries as right operands of products with fields: f16, their powers of two folded in; 16 bits: DTYPE."""
    b_halves = ()
    for f in tl.static_range(len(b_qs)):
        if BITS == 16:
            b_halves = b_halves + (dotable(b_qs[f].to(DTYPE)),)
        else:
            b_halves = b_halves + ((b_qs[f] * (weight(f, BITS) * Q_SHIFT)).to(tl.float16),)
    return b_halves


@triton.jit
def group_totals(b_qs, D: tl.constexpr, E: tl.constexpr, GROUP: tl.constexpr):
    """Sums of queries over the channels of each group of a token's scales: a tuple of [BM]."""
    b_totals = ()
    for g in tl.static_range(D // GROUP):
        b_sum = tl.sum(b_qs[g * GROUP // E], 0)
        for f in tl.static_range(g * GROUP // E + 1, (g + 1) * GROUP // E):
            b_sum += tl.sum(b_qs[f], 0)
        b_totals = b_totals + (b_sum,)
    return b_totals


@triton.jit
def channel_meta(
    meta, i_head, i_slot, D: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, E: tl.constexpr, BE: tl.constexpr,
    FIELDS: tl.constexpr, TILES: tl.constexpr, PAIRS: tl.constexpr = False,
):  # fmt: skip
    """Scales (or zeros) of key channels, from the group of slot ``i_slot`` on: TILES * FIELDS vectors of BE.

    With PAIRS, those of two tiles as FIELDS pairs [2, BE].
    """
    p_meta = meta + (i_head * (G // GROUP) + i_slot // GROUP) * D
    o_x = tl.arange(0, TILES * FIELDS * BE)
    if E == BE and FIELDS * E == D:
        b_meta = tl.load(p_meta + o_x)
    else:
        o_c = o_x // BE % FIELDS * E + o_x % BE
        m_c = (o_x % BE < E) & (o_c < D)
        b_meta = tl.load(p_meta + o_x // (FIELDS * BE) * D + o_c, mask=m_c, other=0.0)
    if PAIRS and TILES > 1:
        return paired(tl.reshape(b_meta, (2, FIELDS * BE)), FIELDS, BE)
    else:
        return parted(b_meta, TILES * FIELDS, BE)


@triton.jit
def in_eights(b_pair, E: tl.constexpr):
    """Two vectors [2, E] as [16, E]: eight rows of each."""
    return tl.reshape(tl.broadcast_to(b_pair[:, None, :], (2, 8, E)), (16, E))


@triton.jit
def channel_biases(b_qs, b_zeros, BITS: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, TILES: tl.constexpr):
    """Biases that zeros of one group or two add to the raw logits of tiles, alike for their tokens: [8, BM] twice.

    Rows are alike: a product's columns stand where the logits' do, whatever the row. ``b_zeros`` has vectors by field
    for one group, pairs of them for two.
    """
    CLASSES: tl.constexpr = 5 if BITS == 2 else 2
    b_sums = ()
    for f in tl.static_range(len(b_qs)):
        if TILES == 1:
            b_left = tl.full([16, BE], 1.0, tl.float16)
            b_right = b_qs[f] * b_zeros[f][:, None]
        else:
            # One product for two tiles, and nothing is multiplied beforehand.
            b_left = in_eights(b_zeros[f], BE)
            b_right = b_qs[f]
        if f < CLASSES:
            b_sums = b_sums + (tl.dot(b_left, b_right),)
        else:
            b_sums = put(b_sums, f % CLASSES, tl.dot(b_left, b_right, b_sums[f % CLASSES]))
    b_bias = b_sums[0] * (1.0 / (Q_SHIFT * key_unit(BITS)))
    for f in tl.static_range(1, CLASSES):
        b_bias += b_sums[f] * (1.0 / (weight(f, BITS) * Q_SHIFT * key_unit(BITS)))
    return tl.split(tl.permute(tl.reshape(b_bias, (2, 8, BM)), (1, 2, 0)))


@triton.jit
def set_of(b_meta, i: tl.constexpr, SETS: tl.constexpr):
    """Vectors by field of the group ``i`` among SETS."""
    COUNT: tl.constexpr = len(b_meta) // SETS
    b_set = ()
    for f in tl.static_range(COUNT):
        b_set = b_set + (b_meta[i * COUNT + f],)
    return b_set


@triton.jit
def add_channel_logits(b_s, b_ks, b_qs, b_scales, FIRST: tl.constexpr, END: tl.constexpr):
    """Raw logits [SUB, BM] with those of fields FIRST to END of keys with scales per channel added.

    Raw: what `key_unit` makes logits of, not yet scaled. ``b_scales``: vectors of this tile's group, by field.
    """
    for f in tl.static_range(FIRST, END):
        b_s = tl.dot(b_ks[f], b_qs[f] * b_scales[f][:, None], b_s)
    return b_s


@triton.jit
def biased(b_bias, SUB: tl.constexpr, BM: tl.constexpr):
    """Raw logits [SUB, BM] before any key has been seen: ``b_bias`` of `channel_biases`."""
    return tl.reshape(tl.broadcast_to(b_bias[None, :, :], (SUB // 8, 8, BM)), (SUB, BM))


@triton.jit
def walked_fields(run, i_head, o_slot, m_t, D: tl.constexpr, G: tl.constexpr, BE: tl.constexpr, N3: tl.constexpr):
    """Fields of keys in trellis codes at slots ``o_slot`` of a page, raised channels included: each f16 [BT, BE]."""
    E: tl.constexpr = D // 8
    o_e = tl.arange(0, BE)
    m_x = m_t[:, None] & (o_e < E)[None, :]
    o_t = o_slot[:, None]
    p_head = run.k_codes + i_head * (G // 8 * (D // 2))
    b_fields = ()
    for f in tl.static_range(8):
        o_c = f * E + o_e
        b_x = load_numbers(p_head, o_c[None, :], o_t % (G // 8), o_t // (G // 8), m_x, D, 1)
        if N3 > 0:
            b_x += rest_numbers(run.k_high, run.k_high_index, i_head, o_t, o_c, m_x, G, N3)
        b_fields = b_fields + (b_x.to(tl.float16),)
    return b_fields


@triton.jit
def add_walk(
    b_parts, p_words, b_qs, FIRST: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, HALF: tl.constexpr,
    BITS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Raw logits by eighths of a page with those of lanes in trellis codes added: columns FIRST to FIRST + BR, of R.

    ``b_qs``: scaled queries [BR, BM] of the left half's lanes, of 1-bit codes of each quarter's, then the right one's.
    """
    o_r = FIRST + tl.arange(0, BR)
    p_w = p_words + tl.arange(0, ROWS)[:, None] * (2 * HALF) + o_r[None, :]
    if FIRST + BR <= R:
        b_left, b_right = tl.load(p_w), tl.load(p_w + HALF)
    else:
        m_r = (o_r < R)[None, :]
        b_left, b_right = tl.load(p_w, mask=m_r, other=0), tl.load(p_w + HALF, mask=m_r, other=0)
    b_fields = trellis_fields(b_left, b_right, BITS, True) + trellis_fields(b_right, b_left, BITS, True)
    for i in tl.static_range(len(b_qs)):
        for f in tl.static_range(8):
            b_parts = put(b_parts, f, tl.dot(b_fields[8 * i + f], b_qs[i], b_parts[f]))
    return b_parts


@triton.jit
def add_walks(b_s, run, i_head, b_qs, b_scales, p_q, m_m, D: tl.constexpr, G: tl.constexpr, BE: tl.constexpr,
    N3: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Raw logits [G, BM] of a page of keys in trellis codes, to which means have been added.

    ``b_qs`` and ``b_scales`` are those of fields. Queries of raised channels are gathered, sixteen at a time.
    """
    E: tl.constexpr = D // 8
    ROWS: tl.constexpr = G // 8
    b_parts = unstacked(b_s, 8, BM)
    p_words = run.k_codes + i_head * (ROWS * (D // 2))
    for i in tl.static_range(2):
        b_own = ()
        for j in tl.static_range(4):
            b_own = b_own + (b_qs[2 * j + i] * b_scales[2 * j + i][:, None],)
        b_parts = add_walk(b_parts, p_words, b_own, i * E, (i + 1) * E, BE, 2 * E, 1, ROWS)
    p_words = run.k_high + i_head * (ROWS * N3)
    for r in tl.static_range((N3 // 2 + 15) // 16):
        b_own = ()
        for half in tl.static_range(2):
            p_index = run.k_high_index + i_head * N3 + half * (N3 // 2)
            b_q, b_channel = raised_queries(p_q, m_m, p_index, r * 16, N3 // 2, 16, AGAIN)
            b_scale = raised_scales(run.k_scale + i_head * D, b_channel, r * 16, N3 // 2, 16)
            b_own = b_own + (b_q * b_scale[:, None],)
        b_parts = add_walk(b_parts, p_words, b_own, r * 16, N3 // 2, 16, N3 // 2, 2, ROWS)
    return stacked(b_parts, G, BM)


@triton.jit
def raised_queries(p_q, m_m, index, FIRST: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, FACTOR: tl.constexpr = 4.0):
    """Queries [BR, BM] of raised channels in f16, times FACTOR, and the channels: gathered, so that keys need not be.

    Ranks from FIRST on, of R. Sixteen at a time: more of them would be loaded in one layout and used in another.
    """
    o_r = FIRST + tl.arange(0, BR)
    m_r = o_r < R
    b_channel = tl.load(index + o_r, mask=m_r, other=0).to(tl.int32)
    b_q = tl.load(p_q[None, :] + b_channel[:, None], mask=m_r[:, None] & m_m[None, :], other=0.0).to(tl.float32)
    return (b_q * (FACTOR * Q_SHIFT)).to(tl.float16), b_channel


@triton.jit
def raised_scales(scale, b_channel, FIRST: tl.constexpr, R: tl.constexpr, BR: tl.constexpr):
    """Scales of raised channels in a group: [BR]."""
    return tl.load(scale + b_channel, mask=FIRST + tl.arange(0, BR) < R, other=0.0)


@triton.jit
def raised_fields(
    high, i_head, i_slot, FIRST: tl.constexpr, G: tl.constexpr, N4: tl.constexpr, BR: tl.constexpr, BT: tl.constexpr
):
    """The raised channels' upper bits of BT tokens from slot ``i_slot`` on: fields of G / 8 tokens, each [G / 8, BR].

    BT is the page or a quarter of it.
    """
    o_r = FIRST + tl.arange(0, BR)
    p_w = high + i_head * (G // 8 * N4) + tl.arange(0, G // 8)[:, None] * N4 + o_r[None, :]
    if FIRST + BR <= N4:
        b_w = tl.load(p_w)
    else:
        b_w = tl.load(p_w, mask=(o_r < N4)[None, :], other=0)
    if BT == G:
        return unpack2(b_w)
    else:
        # The shift comes in the words' dtype, since another would change how operands stand.
        b_fields = unpack2(b_w >> (tl.zeros([G // 8, BR], tl.int16) + (i_slot // (G // 8) * 2).to(tl.int16)))
        return b_fields[0], b_fields[1]


@triton.jit
def add_raised_logits(
    b_s, b_fields, b_qs, FIRST: tl.constexpr, COUNT: tl.constexpr, SUB: tl.constexpr, BM: tl.constexpr
):
    """Raw logits [SUB, BM] with those of the upper bits added: fields FIRST to FIRST + COUNT, one below the other.

    ``b_fields`` and ``b_qs`` hold those of some channels each.
    """
    b_parts = unstacked(b_s, COUNT, BM)
    for r in tl.static_range(len(b_qs)):
        for i in tl.static_range(COUNT):
            b_part = tl.dot(b_fields[r][FIRST + i], b_qs[r] * weight(FIRST + i, 2), b_parts[i])
            b_parts = put(b_parts, i, b_part)
    return stacked(b_parts, SUB, BM)


@triton.jit
def whole_queries(p_q, m_m, index, R: tl.constexpr, BR: tl.constexpr, BM: tl.constexpr, MASK: tl.constexpr):
    """Queries of the channels kept in 16 bits, as they are: a right operand [BR, BM].

    Of eight channels two, with them in the upper half and in the lower one: `add_whole_logits` has rows of two tokens.
    Not with a MASK: a hidden token may be no number, which times zero would be none for the other token either.
    """
    if R == 8 and MASK == 0:
        # Channels are read as words: products that bytes lead to are laid out for bytes, as ldmatrix does not load. So
        # are those that a join leads to.
        o_r = tl.arange(0, R)
        b_word = tl.load(index.to(tl.pointer_type(tl.int32), bitcast=True) + o_r // 4)
        b_channel = (b_word >> (o_r % 4 * 8)) & 0xFF
        b_q = tl.load(p_q[None, :] + b_channel[:, None], mask=m_m[None, :], other=0.0)
        b_twice = tl.broadcast_to(b_q[None, :, :], (2, R, BM))
        m_upper = (tl.arange(0, 2) == 0)[:, None, None]
        b_upper = tl.reshape(tl.where(m_upper, b_twice, 0.0), (2 * R, BM))
        return b_upper, tl.reshape(tl.where(m_upper, 0.0, b_twice), (2 * R, BM))
    else:
        o_r = tl.arange(0, BR)
        m_r = o_r < R
        b_channel = tl.load(index + o_r, mask=m_r, other=0).to(tl.int32)
        return (tl.load(p_q[None, :] + b_channel[:, None], mask=m_r[:, None] & m_m[None, :], other=0.0),)


@triton.jit
def add_whole_logits(
    b_s, b_qs, full, i_head, i_slot, G: tl.constexpr, N16: tl.constexpr, SUB: tl.constexpr, BR: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """Raw logits [SUB, BM] with those of the channels kept in 16 bits added, of tokens from slot ``i_slot`` on."""
    o_r = tl.arange(0, BR)
    p_full = full + (i_head * G + i_slot) * N16
    if len(b_qs) == 2:
        # A row is two tokens, SUB / 2 apart: padding would double what is loaded.
        o_t = tl.arange(0, SUB // 2)
        b_x = tl.load(p_full + o_t[:, None] * N16 + (o_r // N16 * (SUB // 2 * N16) + o_r % N16)[None, :])
    else:
        o_t = tl.arange(0, SUB)
        b_x = tl.load(p_full + o_t[:, None] * N16 + o_r[None, :], mask=(o_r < N16)[None, :], other=0.0)
    b_parts = unstacked(b_s, len(b_qs), BM)
    for i in tl.static_range(len(b_qs)):
        if b_x.dtype == tl.bfloat16:
            # bf16 has the exponents of f32, so the unit folds into the query.
            b_q = (b_qs[i].to(tl.float32) * (Q_SHIFT / UNIT)).to(tl.bfloat16)
            b_part = tl.dot(dotable(b_x), dotable(b_q), b_parts[i])
        else:
            b_part = b_parts[i] + tl.dot(b_x, b_qs[i].to(tl.float16)) * (Q_SHIFT / UNIT)
        b_parts = put(b_parts, i, b_part)
    return stacked(b_parts, SUB, BM)


@triton.jit
def norm_logits(b_s, norm, i_head, o_slot, m_t, G: tl.constexpr, MASKED: tl.constexpr):
    """Raw logits [SUB, BM] times the factors of their tokens."""
    p_t = norm + i_head * G + o_slot
    if MASKED:
        b_norm = tl.load(p_t, mask=m_t, other=0.0)
    else:
        b_norm = tl.load(p_t)
    return b_s * b_norm.to(tl.float32)[:, None]


@triton.jit
def token_logits(
    b_ks, b_qs, b_totals, scale, zero, i_head, o_slot, m_t, log2_scaling, D: tl.constexpr, G: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, E: tl.constexpr, BT: tl.constexpr, BM: tl.constexpr, MASKED: tl.constexpr,
    HIDDEN: tl.constexpr = False,
):  # fmt: skip
    """Logits [BT, BM] of keys with scales per token (or none, for 16 bits), in units of ln 2.

    MASKED: nothing is loaded of tokens that are not in ``m_t``. HIDDEN (below 8 bits): their logits are -inf.
    """
    if BITS >= 8:
        b_s = tl.zeros([BT, BM], tl.float32)
        for f in tl.static_range(len(b_qs)):
            b_s = tl.dot(dotable(b_ks[f]), b_qs[f], b_s)
        if BITS == 8:
            p_t = i_head * G + o_slot
            if MASKED:
                b_scale = tl.load(scale + p_t, mask=m_t, other=0.0)
            else:
                b_scale = tl.load(scale + p_t)
            return b_s * (b_scale.to(tl.float32) * (log2_scaling * key_unit(BITS)))[:, None]
        else:
            return b_s * log2_scaling
    else:
        b_s = tl.zeros([BT, BM], tl.float32)
        for g in tl.static_range(D // GROUP):
            b_own = tl.zeros([BT, BM], tl.float32)
            for f in tl.static_range(g * GROUP // E, (g + 1) * GROUP // E):
                b_own = tl.dot(b_ks[f], b_qs[f], b_own)
            p_t = (i_head * (D // GROUP) + g) * G + o_slot
            if MASKED:
                b_scale = tl.load(scale + p_t, mask=m_t, other=0.0)
                b_zero = tl.load(zero + p_t, mask=m_t, other=0.0)
            else:
                b_scale = tl.load(scale + p_t)
                b_zero = tl.load(zero + p_t)
            b_scale = b_scale.to(tl.float32) * (log2_scaling * key_unit(BITS))
            b_low = b_zero.to(tl.float32)[:, None] * (b_totals[g] * log2_scaling)[None, :]
            if HIDDEN and g == 0:
                # In a sum that is made anyway: a choice for every logit would cost an instruction each.
                b_low += tl.where(m_t, 0.0, float("-inf"))[:, None]
            b_own = b_own * b_scale[:, None] + b_low
            if g == 0:
                b_s = b_own
            else:
                b_s += b_own
        return b_s


@triton.jit
def soft_cap(b_s, softcap):
    """``softcap * tanh(s / softcap)``; a series near 0, where the exponential form would cancel."""
    b_y = b_s / softcap
    b_abs = tl.abs(b_y)
    b_exp = tl.exp(-2.0 * b_abs)
    b_far = (1.0 - b_exp) / (1.0 + b_exp)
    b_sq = b_y * b_y
    b_near = b_y * (1.0 + b_sq * (-1.0 / 3 + b_sq * (2.0 / 15 + b_sq * (-17.0 / 315 + b_sq * (62.0 / 2835)))))
    return softcap * tl.where(b_abs < 0.25, b_near, tl.where(b_y < 0.0, -b_far, b_far))


@triton.jit
def visible_logits(
    b_s, o_x, m_t, o_last, o_past, mask, i_start, softcap, MASK: tl.constexpr, ROWS: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Logits [BT, BM] in units of ln 2 of tokens at row positions ``o_x``, capped and masked: -inf where hidden.

    MASK: 0 causal (up to ``o_last`` of each query), 1 whether visible, 2 added. ROWS: the mask differs by query.
    ``mask``: see `query_rows`. ``o_past``: if there is a WINDOW, the last position that each query sees no more.
    """
    p_mask, o_mask, s_ml, L = mask[0], mask[1], mask[2], mask[3]
    if SOFTCAP:
        b_s = soft_cap(b_s * (1.0 / LOG2E), softcap) * LOG2E
    m_s = m_t[:, None] & (o_x[:, None] <= o_last[None, :])
    if WINDOW > 0:
        m_s = m_s & (o_x[:, None] > o_past[None, :])
        if MASK > 0:
            m_s = m_s & (o_x + i_start >= 0)[:, None]
    if MASK > 0:
        o_column = tl.minimum(tl.maximum(o_x + i_start, 0), L - 1).to(tl.int64) * s_ml
        if ROWS:
            b_mask = tl.load(p_mask + o_column[:, None] + o_mask[None, :], mask=m_s, other=0)
        else:
            b_mask = tl.load(p_mask + o_column, mask=m_t, other=0)[:, None]
        if MASK == 1:
            m_s = m_s & (b_mask != 0)
        else:
            b_s += b_mask.to(tl.float32) * LOG2E
    return tl.where(m_s, b_s, float("-inf"))
