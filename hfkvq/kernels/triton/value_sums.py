"""Sums of values in pages, weighted by probabilities, without ever dequantizing.

Scales fold into probabilities, minima into sums of their own. A normed page's sums meet its factors before they meet
other pages' sums. See `fields` for how codes become operands.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .fields import (
    VALUE_SHIFT,
    channels_of,
    field_unit,
    first_channel,
    of_head,
    unpack2,
    unpack4,
    unpacked_fields,
    weight,
    words_of,
)
from .key_logits import channel_meta, in_eights
from .tiles import INTERPRETED, dotable, parted, put
from .trellis import load_numbers, trellis_fields


@triton.jit
def value_fields(
    codes, i_head, o_slot, m_t, D: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr, BE: tl.constexpr,
    TRELLIS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Fields of values at slots ``o_slot`` of a page, each [BE, BT]; with MASKED, 0 where ``m_t`` says so.

    Of trellis codes slots are pairs within a half of the page.
    """
    o_e = tl.arange(0, BE)
    if BITS == 1:
        E: tl.constexpr = words_of(D, BITS)
        b_fields = ()
        for f in tl.static_range(8):
            m_x = m_t[None, :] & (o_e < E)[:, None]
            p_head = codes + i_head * (G * E // 2)
            b_x = load_numbers(p_head, o_slot[None, :], o_e[:, None], f, m_x, G, BITS)
            b_fields = b_fields + (b_x.to(tl.float16),)
        return b_fields
    elif BITS < 8:
        E: tl.constexpr = words_of(D, BITS)
        p_w = codes + i_head * (G * E) + o_e[:, None] * G + o_slot[None, :]
        if E == BE:
            b_w = tl.load(p_w)
        else:
            b_w = tl.load(p_w, mask=(o_e < E)[:, None], other=0)
        if TRELLIS:
            p_other = codes + i_head * (G * E) + o_e[:, None] * G + ((o_slot + G // 2) % G)[None, :]
            return trellis_fields(b_w, tl.load(p_other, mask=(o_e < E)[:, None], other=0), 2, False)
        elif BITS == 2:
            return unpack2(b_w)
        else:
            return unpack4(b_w)
    else:
        # Slots that were never written may hold NaN.
        return unpacked_fields(codes, i_head, o_slot, m_t, D, G, BITS, BE, MASKED, 0)


@triton.jit
def page_fields(codes, i_head, D: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr, BE: tl.constexpr):
    """Fields of trellis codes of a whole page, eight of each half or quarter of its tokens: [BE, G * BITS / 4]."""
    E: tl.constexpr = words_of(D, BITS)
    HALF: tl.constexpr = G * BITS // 4
    o_e = tl.arange(0, BE)
    p_w = codes + i_head * (2 * HALF * E) + o_e[:, None] * (2 * HALF) + tl.arange(0, HALF)[None, :]
    if E == BE:
        b_left, b_right = tl.load(p_w), tl.load(p_w + HALF)
    else:
        m_e = (o_e < E)[:, None]
        b_left, b_right = tl.load(p_w, mask=m_e, other=0), tl.load(p_w + HALF, mask=m_e, other=0)
    return trellis_fields(b_left, b_right, BITS, True) + trellis_fields(b_right, b_left, BITS, True)


@triton.jit
def zero_tiles(COUNT: tl.constexpr, R: tl.constexpr, BM: tl.constexpr):
    """COUNT tiles [R, BM] of zeros."""
    b_tiles = ()
    for _ in tl.static_range(COUNT):
        b_tiles = b_tiles + (tl.zeros([R, BM], tl.float32),)
    return b_tiles


@triton.constexpr_function
def zero_tiles_of(value_dim, bits, group, trellis):
    """Tiles that sums by groups of zeros make: two groups to a tile."""
    return max(1, value_dim // group // 2) if bits < 8 and not trellis else 0


@triton.jit
def add_values(
    b_accs, b_zeros, b_vs, b_ps, scale, zero, i_head, i_slot, m_t, G: tl.constexpr, D: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, TRELLIS: tl.constexpr, E: tl.constexpr, BT: tl.constexpr,
    SUB: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds a step's values, weighted by probabilities, to the sums by field and (rows alike) by group of zeros.

    ``b_vs`` holds BT / SUB tiles by field, ``b_ps`` as many tiles of probabilities [SUB, BM] as right operands.
    """
    TILES: tl.constexpr = BT // SUB
    FIELDS: tl.constexpr = len(b_accs)
    if BITS == 16:
        for n in tl.static_range(TILES):
            for f in tl.static_range(FIELDS):
                b_accs = put(b_accs, f, tl.dot(dotable(b_vs[n * FIELDS + f]), dotable(b_ps[n]), b_accs[f]))
    else:
        GROUPS: tl.constexpr = D // GROUP if BITS < 8 else 1
        o_slot = i_slot + tl.arange(0, BT)
        for g in tl.static_range(GROUPS):
            p_t = (i_head * GROUPS + g) * G + o_slot
            if MASKED:
                b_scale = tl.load(scale + p_t, mask=m_t, other=0.0)
            else:
                b_scale = tl.load(scale + p_t)
            if BITS == 8:
                # Scales of e4m3 are small, and so are probabilities: their product would be lost among subnormals.
                b_scale = b_scale * VALUE_SHIFT
            b_scales = parted(b_scale, TILES, SUB)
            if TRELLIS:
                pass
            elif BITS < 8 and GROUPS == 1:
                if MASKED:
                    b_zero = tl.load(zero + p_t, mask=m_t, other=0.0)
                else:
                    b_zero = tl.load(zero + p_t)
                b_lows = parted(b_zero, TILES, SUB)
                for n in tl.static_range(TILES):
                    b_least = b_ps[n] * b_lows[n][:, None]
                    b_zeros = put(b_zeros, 0, tl.dot(tl.full([16, SUB], 1.0, tl.float16), b_least, b_zeros[0]))
            elif BITS < 8 and g % 2 == 0:
                # Two groups in one product, and nothing is multiplied beforehand. [2, SUB] at a time: parts of one
                # load would have to be moved to where operands stand.
                o_sub = tl.arange(0, SUB)
                p_z = zero + (i_head * GROUPS + g) * G + i_slot + (tl.arange(0, 2)[:, None] * G + o_sub[None, :])
                for n in tl.static_range(TILES):
                    if MASKED:
                        b_zero = tl.load(p_z, mask=m_t[None, :], other=0.0)
                    else:
                        b_zero = tl.load(p_z + n * SUB)
                    b_zeros = put(b_zeros, g // 2, tl.dot(in_eights(b_zero, SUB), b_ps[n], b_zeros[g // 2]))
            for n in tl.static_range(TILES):
                b_p = b_ps[n] * b_scales[n][:, None]
                for f in tl.static_range(FIELDS):
                    if BITS == 8 or f * E // GROUP == g:
                        b_accs = put(b_accs, f, tl.dot(b_vs[n * FIELDS + f], b_p, b_accs[f]))
    return b_accs, b_zeros


@triton.jit
def add_normed(b_accs, b_shrink, b_owns, norm, i_head, D: tl.constexpr, E: tl.constexpr, BE: tl.constexpr):
    """Adds a page's sums by channel ``b_owns``, which no factor has met, to those of other pages, shrunk."""
    b_norms = channel_meta(norm, i_head, 0, D, 1, 1, E, BE, len(b_accs), 1)
    b_sums = ()
    for f in tl.static_range(len(b_accs)):
        b_sums = b_sums + (b_accs[f] * b_shrink + b_owns[f] * b_norms[f].to(tl.float32)[:, None],)
    return b_sums


@triton.jit
def whole_sums(
    b_accs, b_zeros, BITS: tl.constexpr, GROUP: tl.constexpr, TRELLIS: tl.constexpr, E: tl.constexpr, BM: tl.constexpr
):
    """Sums by field as they are: powers of two out, zeros in."""
    b_lows = ()
    for i in tl.static_range(len(b_zeros)):
        b_pair = tl.max(tl.reshape(b_zeros[i], (2, 8, BM)), 1)
        b_first, b_last = tl.split(tl.permute(b_pair, (1, 0)))
        b_lows = b_lows + (b_first, b_last)
    b_outs = ()
    for f in tl.static_range(len(b_accs)):
        b_out = b_accs[f]
        if BITS < 8 and not TRELLIS:
            b_out = b_out * (field_unit(BITS) * weight(f, BITS)) + b_lows[f * E // GROUP][None, :]
        elif BITS == 8:
            b_out = b_out * (1.0 / VALUE_SHIFT)
        b_outs = b_outs + (b_out,)
    return b_outs


@triton.jit
def page_sums(b_accs, b_zeros, BITS: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr):
    """`whole_sums` of a page whose tokens have one scale each, without a step between lanes."""
    b_low = b_zeros[0]
    if BE > 16:
        # Rows are alike.
        b_low = tl.reshape(tl.broadcast_to(b_low[None, :, :], (BE // 16, 16, BM)), (BE, BM))
    b_outs = ()
    for f in tl.static_range(len(b_accs)):
        b_outs = b_outs + (b_accs[f] * (field_unit(BITS) * weight(f, BITS)) + b_low,)
    return b_outs


@triton.jit
def store_in_place(p_x, b_x, m_x):
    """Stores f32 from where they stand: the compiler would move them first, through shared memory, to make rows."""
    if INTERPRETED:
        tl.store(p_x, b_x, mask=m_x)
    else:
        tl.inline_asm_elementwise(
            asm="""{
            .reg .pred p;
            setp.ne.b32 p, $3, 0;
            @p st.global.b32 [$1], $2;
            mov.b32 $0, 0;
            }""",
            constraints="=r,l,r,r",
            args=[p_x.to(tl.int64), b_x, m_x.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def store_part(
    outs, b_outs, b_top, b_sum, i_row, o_m, m_m, DV: tl.constexpr, BITS: tl.constexpr,
    E: tl.constexpr, BE: tl.constexpr, IN_PLACE: tl.constexpr,
):  # fmt: skip
    """A split's part of the result: sums by channel, the maximum (in units of ln 2) and the sum of probabilities.

    Not IN_PLACE where channels are raised: the compiler chooses by these stores, too, how lanes share what is gathered.
    """
    out, out_top, out_sum = outs[0], outs[1], outs[2]
    p_out = out + (i_row + o_m)[None, :] * DV + channels_of(0, tl.arange(0, BE), E, BITS)[:, None]
    for f in tl.static_range(len(b_outs)):
        m_out = of_head(m_m[None, :], f, DV, E, BE, BITS, 1)
        if IN_PLACE:
            store_in_place(p_out + first_channel(f, E, BITS), b_outs[f], m_out)
        else:
            tl.store(p_out + first_channel(f, E, BITS), b_outs[f], mask=m_out)
    tl.store(out_top + i_row + o_m, b_top, mask=m_m)
    tl.store(out_sum + i_row + o_m, b_sum, mask=m_m)
