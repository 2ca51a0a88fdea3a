"""Attention to latents in one launch: the page loop, and a block of what is loose.

A latent is key and value at once. Its words come from memory once, into shared memory, and are unpacked twice: as
left operand of the logits' product, and as right operand of the sums'. See `fields` for how codes become operands.
Query heads, which all share the one latent, stand on the short side of both products.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .attend_rows import last_visible
from .fields import (
    LOG2E,
    Q_SHIFT,
    VALUE_SHIFT,
    across_fields,
    channels_of,
    field_unit,
    first_channel,
    key_unit,
    unpack4,
    unpack8,
    weight,
)
from .hadamard import sign_matrix
from .key_logits import visible_logits
from .tiles import dotable, put
from .value_sums import zero_tiles

STRETCH = tl.constexpr(4.0)
"""Excess of a logit, in units of ln 2, over the logit that its query's sums are relative to, before they are
rescaled.
"""

WITHIN = tl.constexpr(0.0625)
"""2^-STRETCH: with it, probabilities are at most 1 again, and their product with any f16 scale is finite."""

LEAST = tl.constexpr(-3e38)
"""Stand-in for the maximum of no logits, so that differences are numbers."""


class LatentShape(NamedTuple):
    """Constants of `latent_kernel`; those that `pair_format.DecodeShape` has, too, are explained there.

    Attributes:
        HEADS: query heads.
        D: channels of a latent.
        R: of a rotary part.
        BITS: width of the latents' codes.
        GROUP: elements that share a scale.
        ROPE_BITS: width of the rotary parts' codes.
        BT: tokens of a step.
        TILE: most words of a tile.
        STAGES: loads of the page loop in flight.
        WARPS: of a program.
    """

    HEADS: int
    SEVERAL: bool
    D: int
    R: int
    S: int
    G: int
    BITS: int
    GROUP: int
    ROPE_BITS: int
    BM: int
    BT: int
    TILE: int
    BR: int
    STAGES: int
    WARPS: int
    MASK: int
    ROWS: bool
    SOFTCAP: bool
    DTYPE: Any
    ROTATE: int
    PDL: bool


@triton.constexpr_function
def tile_of(dim, bits, most):
    """E, elements of a field: at most so many, of a token's words."""
    return min(dim * bits // 16, most)


@triton.constexpr_function
def parts_of(dim, bits, tile):
    """Tiles that a token's words make."""
    return dim * bits // 16 // tile


@triton.constexpr_function
def place(i, f, bits, parts):
    """Index of field ``f`` of words' tile ``i`` among all fields, in order of their channels."""
    return f * parts + i if bits < 8 else i * (16 // bits) + f


@triton.constexpr_function
def weight_at(at, bits, parts):
    """`weight` of the field that stands there."""
    return weight(at // parts, bits) if bits < 8 else 1.0


@triton.jit
def latent_queries(p_q, m_q, D: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr, ROTATE: tl.constexpr):
    """Queries of rows ``p_q`` as tiles f32 [E, BM] by field, rotated (but for the factor) by ROTATE, 0 for not."""
    E: tl.constexpr = tile_of(D, BITS, TILE)
    o_e = tl.arange(0, E)
    b_qs = ()
    if ROTATE > 0:
        b_turn = sign_matrix(E, ROTATE)
    for f in tl.static_range(D // E):
        # [E, BM]
        p_x = p_q[None, :] + (channels_of(0, o_e, E, BITS) + first_channel(f, E, BITS))[:, None]
        b_q = tl.load(p_x, mask=m_q[None, :], other=0.0)
        if ROTATE > 0:
            b_q = tl.dot(dotable(b_turn.to(b_q.dtype)), dotable(b_q))
        b_qs = b_qs + (b_q.to(tl.float32),)
    return across_fields(b_qs, E, ROTATE)


@triton.jit
def operands(b_qs, D: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr, DTYPE: tl.constexpr):
    """Queries as right operands of products with fields: f16, their powers of two folded in; 16 bits: DTYPE."""
    PARTS: tl.constexpr = parts_of(D, BITS, tile_of(D, BITS, TILE))
    b_halves = ()
    for f in tl.static_range(len(b_qs)):
        if BITS == 16:
            b_halves = b_halves + (dotable(b_qs[f].to(DTYPE)),)
        else:
            b_halves = b_halves + ((b_qs[f] * (weight_at(f, BITS, PARTS) * Q_SHIFT)).to(tl.float16),)
    return b_halves


@triton.jit
def words(p_tokens, m_t, D: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr):
    """Words of tokens at ``p_tokens`` as tiles [BT, E]; if MASKED, 0 where there is no token."""
    E: tl.constexpr = tile_of(D, BITS, TILE)
    o_e = tl.arange(0, E)
    b_ws = ()
    for i in tl.static_range(parts_of(D, BITS, E)):
        p_w = p_tokens[:, None] + (i * E + o_e)[None, :]
        if MASKED:
            b_ws = b_ws + (tl.load(p_w, mask=m_t[:, None], other=0),)
        else:
            b_ws = b_ws + (tl.load(p_w),)
    return b_ws


@triton.jit
def unpacked(b_w, BITS: tl.constexpr, AGAIN: tl.constexpr):
    """Fields [BT, E] of a tile of words; AGAIN for the second time, see `anew`."""
    if BITS == 4:
        return unpack4(b_w, AGAIN)
    elif BITS == 8:
        return unpack8(b_w, AGAIN)
    else:
        return (dotable(b_w),)


@triton.jit
def token_meta(scale, zero, o_meta, m_t, D: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr):
    """Scales, and minima of 4 bits, of tokens whose first scale stands at ``o_meta``: f32 (BT,), group by group."""
    b_meta = ()
    if BITS == 8:
        b_meta = (tl.load(scale + o_meta, mask=m_t, other=0.0).to(tl.float32),)
    if BITS == 4:
        for g in tl.static_range(D // GROUP):
            b_meta = b_meta + (tl.load(scale + o_meta + g * G).to(tl.float32),)
            b_meta = b_meta + (tl.load(zero + o_meta + g * G).to(tl.float32),)
    return b_meta


@triton.jit
def group_logits(
    b_ws, b_halves, g: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr
):
    """Raw logits [BT, BM] of a group of channels."""
    E: tl.constexpr = tile_of(D, BITS, TILE)
    PARTS: tl.constexpr = parts_of(D, BITS, E)
    b_s = tl.zeros([b_ws[0].shape[0], b_halves[0].shape[1]], tl.float32)
    for i in tl.static_range(PARTS):
        b_ks = unpacked(b_ws[i], BITS, False)
        for f in tl.static_range(16 // BITS):
            if place(i, f, BITS, PARTS) * E // GROUP == g:
                b_s = tl.dot(b_ks[f], b_halves[place(i, f, BITS, PARTS)], b_s)
    return b_s


@triton.jit
def side_logits(
    b_ws, b_halves, b_totals, b_meta, log2_scaling, D: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Logits [BT, BM] in units of ln 2 of the latents, or rotary parts, of a step's tokens."""
    if BITS == 16:
        return group_logits(b_ws, b_halves, 0, D, BITS, D, TILE) * log2_scaling
    elif BITS == 8:
        b_own = group_logits(b_ws, b_halves, 0, D, BITS, D, TILE)
        return b_own * (b_meta[0] * (log2_scaling * key_unit(BITS)))[:, None]
    else:
        b_s = tl.zeros([1, 1], tl.float32)
        for g in tl.static_range(D // GROUP):
            b_own = group_logits(b_ws, b_halves, g, D, BITS, GROUP, TILE)
            b_s += b_own * (b_meta[2 * g] * (log2_scaling * key_unit(BITS)))[:, None]
            b_s += b_meta[2 * g + 1][:, None] * (b_totals[g] * log2_scaling)[None, :]
        return b_s


@triton.jit
def by_slot(b_x, SLOTS: tl.constexpr):
    """[BT, BM] as sums [SLOTS, 8, BM] over what a lane holds: of a warp's sixteen rows two, of all its sixteens."""
    BT: tl.constexpr = b_x.shape[0]
    BM: tl.constexpr = b_x.shape[1]
    if BT >= 16 * SLOTS:
        return tl.sum(tl.sum(tl.reshape(b_x, (BT // (16 * SLOTS), SLOTS, 2, 8, BM)), 2), 0)
    else:
        return tl.reshape(b_x, (SLOTS, 8, BM))


@triton.jit
def sums_of_groups(b_sums, b_p, b_meta):
    """Adds probabilities [BT, BM], and with each group's minima as weights (4 bits), to sums by slot.

    Lanes meet once, when all steps are done.
    """
    SLOTS: tl.constexpr = b_sums[0].shape[0]
    b_next = (b_sums[0] + by_slot(b_p, SLOTS),)
    for g in tl.static_range(len(b_sums) - 1):
        b_next = b_next + (b_sums[g + 1] + by_slot(b_p * b_meta[2 * g + 1][:, None], SLOTS),)
    return b_next


@triton.jit
def add_latents(
    b_accs, b_ws, b_p, b_meta, D: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Adds a step's latents, weighted by probabilities [BT, BM], to the sums [BM, E] by field."""
    E: tl.constexpr = tile_of(D, BITS, TILE)
    PARTS: tl.constexpr = parts_of(D, BITS, E)
    for g in tl.static_range(D // GROUP if BITS == 4 else 1):
        b_own = b_p
        if BITS == 8:
            # Scales of e4m3 are small, and so are probabilities: their product would be lost among subnormals.
            b_own = b_p * (b_meta[0] * (VALUE_SHIFT * WITHIN))[:, None]
        if BITS == 4:
            b_own = b_p * (b_meta[2 * g] * WITHIN)[:, None]
        b_own = tl.trans(dotable(b_own.to(DTYPE if BITS == 16 else tl.float16)))
        for i in tl.static_range(PARTS):
            b_vs = unpacked(b_ws[i], BITS, True)
            for f in tl.static_range(16 // BITS):
                if BITS != 4 or place(i, f, BITS, PARTS) * E // GROUP == g:
                    b_acc = tl.dot(b_own, b_vs[f], b_accs[place(i, f, BITS, PARTS)])
                    b_accs = put(b_accs, place(i, f, BITS, PARTS), b_acc)
    return b_accs


@triton.jit
def new_state(
    D: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr, BT: tl.constexpr, TILE: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """Empty state: sums of latents by field, of probabilities, and the logit that both are relative to."""
    E: tl.constexpr = tile_of(D, BITS, TILE)
    SUMS: tl.constexpr = 1 + D // GROUP if BITS == 4 else 1
    # With fewer tokens than warps have rows, each row is a slot.
    SLOTS: tl.constexpr = WARPS if BT >= 16 * WARPS else BT // 8
    b_sums = ()
    for _ in tl.static_range(SUMS):
        b_sums = b_sums + (tl.zeros([SLOTS, 8, BM], tl.float32),)
    return zero_tiles(D // E, BM, E), b_sums, tl.full([BM], float("-inf"), tl.float32)


@triton.jit
def attended(
    state, b_ws, b_rs, b_halves, b_rotary, b_totals, b_meta, b_rope_meta, m_t, o_x, o_last, masks, i_start, factors,
    BITS: tl.constexpr, GROUP: tl.constexpr, ROPE_BITS: tl.constexpr, TILE: tl.constexpr, SHAPE: tl.constexpr,
):  # fmt: skip
    """The state after BT more tokens, at row positions ``o_x``."""
    b_accs, b_sums, b_top = state
    D: tl.constexpr = SHAPE.D
    R: tl.constexpr = SHAPE.R
    log2_scaling = factors.scaling * LOG2E
    b_s = side_logits(b_rs, b_rotary, (), b_rope_meta, log2_scaling, R, ROPE_BITS, R, TILE)
    b_s += side_logits(b_ws, b_halves, b_totals, b_meta, log2_scaling, D, BITS, GROUP, TILE)
    b_s = visible_logits(
        b_s, o_x, m_t, o_last, o_last, masks, i_start, factors.softcap, SHAPE.MASK, SHAPE.ROWS, SHAPE.SOFTCAP, 0
    )
    # Sums are rescaled only when the maximum has moved far.
    if tl.max(b_s - tl.maximum(b_top, LEAST)[None, :]) > STRETCH:
        b_new = tl.maximum(b_top, tl.max(b_s, 0))
        b_shrink = tl.exp2(b_top - tl.maximum(b_new, LEAST))
        b_less = ()
        for f in tl.static_range(len(b_accs)):
            b_less = b_less + (b_accs[f] * b_shrink[:, None],)
        b_accs = b_less
        b_less = ()
        for g in tl.static_range(len(b_sums)):
            b_less = b_less + (b_sums[g] * b_shrink[None, None, :],)
        b_sums = b_less
        b_top = b_new
    b_p = tl.exp2(b_s - tl.maximum(b_top, LEAST)[None, :])
    b_sums = sums_of_groups(b_sums, b_p, b_meta)
    b_accs = add_latents(b_accs, b_ws, b_p, b_meta, D, BITS, GROUP, TILE, SHAPE.DTYPE)
    return b_accs, b_sums, b_top


@triton.jit
def store_state(
    outs, state, i_row, o_m, m_m, D: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr
):
    """A split's part of the result: powers of two out of its sums, and minima in."""
    b_accs, b_sums, b_top = state
    E: tl.constexpr = tile_of(D, BITS, TILE)
    b_lows = ()
    for g in tl.static_range(len(b_sums) - 1):
        b_lows = b_lows + (tl.sum(tl.sum(b_sums[g + 1], 0), 0),)
    p_out = outs[0] + (i_row + o_m)[:, None] * D + channels_of(0, tl.arange(0, E), E, BITS)[None, :]
    for f in tl.static_range(len(b_accs)):
        b_out = b_accs[f]
        if BITS == 4:
            b_out = b_out * (field_unit(BITS) * weight_at(f, BITS, parts_of(D, BITS, E)) / WITHIN)
            b_out += b_lows[f * E // GROUP][:, None]
        if BITS == 8:
            b_out = b_out * (1.0 / (VALUE_SHIFT * WITHIN))
        tl.store(p_out + first_channel(f, E, BITS), b_out, mask=m_m[:, None])
    tl.store(outs[1] + i_row + o_m, b_top, mask=m_m)
    tl.store(outs[2] + i_row + o_m, tl.sum(tl.sum(b_sums[0], 0), 0), mask=m_m)


@triton.jit
def attend_pages_of_split(
    run, outs, b_qs, b_rope, i_row, i_b, o_m, m_m, i_first, i_end, n_tokens, n_table, i_start, o_last, masks, factors,
    SHAPE: tl.constexpr,
):  # fmt: skip
    """Steps ``i_first`` to ``i_end`` over a row's pages.

    Words run ahead through shared memory, as the compiler has it; scales, which are too small for that, are asked for
    a step ahead, and their pages two.
    """
    D: tl.constexpr = SHAPE.D
    R: tl.constexpr = SHAPE.R
    G: tl.constexpr = SHAPE.G
    BITS: tl.constexpr = SHAPE.BITS
    GROUP: tl.constexpr = SHAPE.GROUP
    ROPE_BITS: tl.constexpr = SHAPE.ROPE_BITS
    BT: tl.constexpr = SHAPE.BT
    TILE: tl.constexpr = SHAPE.TILE
    STEPS: tl.constexpr = G // BT
    GROUPS: tl.constexpr = D // GROUP if BITS == 4 else 1
    b_halves = operands(b_qs, D, BITS, TILE, SHAPE.DTYPE)
    b_rotary = operands(b_rope, R, ROPE_BITS, TILE, SHAPE.DTYPE)
    b_totals = ()
    if BITS == 4:
        PER: tl.constexpr = GROUP // tile_of(D, BITS, TILE)
        for g in tl.static_range(GROUPS):
            b_sum = b_qs[g * PER]
            for f in tl.static_range(g * PER + 1, (g + 1) * PER):
                b_sum += b_qs[f]
            b_totals = b_totals + (tl.sum(b_sum, 0),)
    o_t = tl.arange(0, BT)
    state = new_state(D, BITS, GROUP, SHAPE.BM, BT, TILE, SHAPE.WARPS)
    p_table = run.table + i_b * n_table
    i_near = tl.load(p_table + i_first // STEPS).to(tl.int64)
    i_far = tl.load(p_table + tl.minimum(i_first + 1, i_end - 1) // STEPS)
    m_near = i_first * BT + o_t < n_tokens
    o_near = i_first % STEPS * BT + o_t
    b_meta = token_meta(run.k_scale, run.k_zero, i_near * (GROUPS * G) + o_near, m_near, D, G, BITS, GROUP)
    b_rope_meta = token_meta(run.v_scale, run.v_scale, i_near * G + o_near, m_near, R, G, ROPE_BITS, R)
    for i_step in tl.range(i_first, i_end, num_stages=SHAPE.STAGES):
        i_next = tl.minimum(i_step + 1, i_end - 1)
        i_near = i_far.to(tl.int64)
        m_near = i_next * BT + o_t < n_tokens
        o_near = i_next % STEPS * BT + o_t
        b_next = token_meta(run.k_scale, run.k_zero, i_near * (GROUPS * G) + o_near, m_near, D, G, BITS, GROUP)
        b_rope_next = token_meta(run.v_scale, run.v_scale, i_near * G + o_near, m_near, R, G, ROPE_BITS, R)
        i_far = tl.load(p_table + tl.minimum(i_step + 2, i_end - 1) // STEPS)
        o_slot = i_step % STEPS * BT + o_t
        o_j = i_step * BT + o_t
        m_t = o_j < n_tokens
        i_page = tl.load(p_table + i_step // STEPS).to(tl.int64)
        # Slots that were never written may hold NaN, which a probability of 0 does not remove; 4-bit codes cannot.
        p_c = run.k_codes + i_page * (G * D * BITS // 16) + o_slot * (D * BITS // 16)
        p_r = run.v_codes + i_page * (G * R * ROPE_BITS // 16) + o_slot * (R * ROPE_BITS // 16)
        b_rs = words(p_r, m_t, R, ROPE_BITS, TILE, False)
        b_ws = words(p_c, m_t, D, BITS, TILE, BITS > 4)
        state = attended(
            state, b_ws, b_rs, b_halves, b_rotary, b_totals, b_meta, b_rope_meta, m_t, o_j + SHAPE.S, o_last, masks,
            i_start, factors, BITS, GROUP, ROPE_BITS, TILE, SHAPE,
        )  # fmt: skip
        b_meta = b_next
        b_rope_meta = b_rope_next
    store_state(outs, state, i_row, o_m, m_m, D, BITS, GROUP, TILE)


@triton.jit
def attend_block(
    row, outs, b_qs, b_rope, i_row, i_b, i_block, o_m, m_m, n_sealed, i_length, W, i_start, o_last, masks, factors,
    SHAPE: tl.constexpr,
):  # fmt: skip
    """One block of BR tokens of the sink, or slots of the tail."""
    D: tl.constexpr = SHAPE.D
    R: tl.constexpr = SHAPE.R
    S: tl.constexpr = SHAPE.S
    BM: tl.constexpr = SHAPE.BM
    BR: tl.constexpr = SHAPE.BR
    DTYPE: tl.constexpr = SHAPE.DTYPE
    SINKS: tl.constexpr = (S + BR - 1) // BR
    o_r = tl.arange(0, BR)
    if i_block < SINKS:
        o_place = i_block * BR + o_r
        o_x = o_place
        m_t = (o_x < S) & (o_x < i_length)
        p_c = row.sink_k + i_b * (S * D)
        p_r = row.sink_v + i_b * (S * R)
    else:
        o_place = (i_block - SINKS) * BR + o_r
        # Which token stands in a slot of the ring: the oldest that is not sealed and that the slot can be of.
        o_x = n_sealed + (o_place - n_sealed % W + W) % W + S
        m_t = (o_place < W) & (o_x < i_length)
        p_c = row.tail_k + i_b * W * D
        p_r = row.tail_v + i_b * W * R
    if tl.max(m_t.to(tl.int32), 0) == 0:
        tl.store(outs[1] + i_row + o_m, tl.full([BM], float("-inf"), tl.float32), mask=m_m)
    else:
        b_ws = words(p_c + o_place * D, m_t, D, 16, 128, True)
        b_rs = words(p_r + o_place * R, m_t, R, 16, 128, True)
        state = attended(
            new_state(D, 16, D, BM, BR, 128, SHAPE.WARPS), b_ws, b_rs, operands(b_qs, D, 16, 128, DTYPE),
            operands(b_rope, R, 16, 128, DTYPE), (), (), (), m_t, o_x, o_last, masks, i_start, factors, 16, D,
            16, 128, SHAPE,
        )  # fmt: skip
        store_state(outs, state, i_row, o_m, m_m, D, 16, D, 128)


@triton.jit(do_not_specialize=["B", "L", "W", "SPLITS", "PAGED", "TABLE", "QUERIES", "s_mb", "s_mh", "s_mq"])
def latent_kernel(
    q, row, runs, mask, out, out_top, out_sum, strides, factor, factors, B, L, W, SPLITS, PAGED, TABLE, QUERIES, s_mb,
    s_mh, s_mq, SHAPE: tl.constexpr,
):  # fmt: skip
    """One split of one row against some of its queries: PAGED splits of its pages, then blocks of what is loose.

    Keys of the run are latents, its values rotary parts. A query is (D + R) numbers,
    of which the first D are rotated here; ``factor`` is the rotation's. QUERIES: of a head, if SEVERAL.
    """
    if SHAPE.PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    i_b, i_s, i_m = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    n_q = QUERIES if SHAPE.SEVERAL else 1
    i_row = (i_b * SPLITS + i_s) * (SHAPE.HEADS * n_q)
    outs = (out, out_top, out_sum)
    # Rows are those of one KV head that all query heads share.
    o_m = i_m * SHAPE.BM + tl.arange(0, SHAPE.BM)
    m_m = o_m < SHAPE.HEADS * n_q
    p_q = q + i_b * strides[0] + o_m // n_q * strides[1] + o_m % n_q * strides[2]
    p_mask = q
    o_mask = o_m
    if SHAPE.MASK > 0:
        p_mask = mask + i_b * s_mb
        o_mask = o_m // n_q * s_mh + o_m % n_q * s_mq
    masks = (p_mask, o_mask, strides[3], L)
    p_row = row.counters + i_b
    i_start, i_length, n_sealed = tl.load(p_row), tl.load(p_row + B), tl.load(p_row + 2 * B)
    o_last = last_visible(i_length, o_m, m_m, n_q, SHAPE.MASK)
    if i_s < PAGED:
        # Whole steps, shared out evenly.
        n_steps = (n_sealed + SHAPE.BT - 1) // SHAPE.BT
        n_share = (n_steps + PAGED - 1) // PAGED
        i_first = i_s * n_share
        i_end = tl.minimum(i_first + n_share, n_steps)
        if i_first >= i_end:
            tl.store(out_top + i_row + o_m, tl.full([SHAPE.BM], float("-inf"), tl.float32), mask=m_m)
        else:
            b_qs = latent_queries(p_q, m_m, SHAPE.D, SHAPE.BITS, SHAPE.TILE, SHAPE.ROTATE)
            b_rope = latent_queries(p_q + SHAPE.D, m_m, SHAPE.R, SHAPE.ROPE_BITS, SHAPE.TILE, 0)
            # The rotation's factor goes with the queries, so that logits of rotary parts need none.
            for f in tl.static_range(len(b_qs)):
                b_qs = put(b_qs, f, b_qs[f] * factor)
            attend_pages_of_split(
                runs[0], outs, b_qs, b_rope, i_row, i_b, o_m, m_m, i_first, i_end, n_sealed, TABLE, i_start, o_last,
                masks, factors, SHAPE,
            )  # fmt: skip
    else:
        b_qs = latent_queries(p_q, m_m, SHAPE.D, 16, 128, SHAPE.ROTATE)
        b_rope = latent_queries(p_q + SHAPE.D, m_m, SHAPE.R, 16, 128, 0)
        for f in tl.static_range(len(b_qs)):
            b_qs = put(b_qs, f, b_qs[f] * factor)
        attend_block(
            row, outs, b_qs, b_rope, i_row, i_b, i_s - PAGED, o_m, m_m, n_sealed, i_length, W, i_start, o_last, masks,
            factors, SHAPE,
        )  # fmt: skip
