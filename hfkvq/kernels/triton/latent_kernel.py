"""Attention to latents in one launch: the page loop, and a block of what is loose.

A latent is key and value at once. Its words come from memory once, into shared memory, and are unpacked twice: as
left operand of the logits' product, and as right operand of the sums'. See `fields` for how codes become operands.
Query heads, which all share the one latent, stand on the short side of both products.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attend_rows import last_visible
from .fields import (
    LOG2E,
    Q_SHIFT,
    VALUE_SHIFT,
    channels_of,
    dotable,
    field_unit,
    first_channel,
    key_unit,
    put,
    unpack4,
    unpack8,
    weight,
)
from .hadamard import signs
from .key_logits import visible_logits
from .value_sums import zero_tiles


@triton.constexpr_function
def tile_of(dim, bits):
    """E, elements of a field: at most 128, of a token's words."""
    return min(dim * bits // 16, 128)


@triton.constexpr_function
def field_count(dim, bits):
    """Fields that a token's channels make."""
    return dim // min(dim * bits // 16, 128)


@triton.jit
def latent_queries(p_q, m_q, D: tl.constexpr, BITS: tl.constexpr, ROTATE: tl.constexpr):
    """Queries of rows ``p_q`` as tiles f32 [E, BM] by field, rotated (but for the factor) by ROTATE, 0 for not."""
    E: tl.constexpr = tile_of(D, BITS)
    H: tl.constexpr = ROTATE % 65536
    o_e = tl.arange(0, E)
    b_qs = ()
    if ROTATE > 0:
        WITHIN: tl.constexpr = H if H < E else E
        o_bits = o_e[:, None] & o_e[None, :] & (WITHIN - 1)
        # The sign is the parity of the bits in common.
        o_bits = o_bits ^ (o_bits >> 4)
        o_bits = o_bits ^ (o_bits >> 2)
        o_bits = o_bits ^ (o_bits >> 1)
        m_block = o_e[:, None] // WITHIN == o_e[None, :] // WITHIN
        b_turn = tl.where(m_block, 1.0 - 2.0 * (o_bits & 1).to(tl.float32), 0.0)
    for f in tl.static_range(field_count(D, BITS)):
        # [E, BM]
        p_x = p_q[None, :] + (channels_of(0, o_e, E, BITS) + first_channel(f, E, BITS))[:, None]
        b_q = tl.load(p_x, mask=m_q[None, :], other=0.0)
        if ROTATE >= 65536:
            b_sign = signs(channels_of(0, o_e, E, BITS) + first_channel(f, E, BITS), ROTATE)
            b_q = (b_q.to(tl.float32) * b_sign[:, None]).to(b_q.dtype)
        if ROTATE > 0:
            b_q = tl.dot(dotable(b_turn.to(b_q.dtype)), dotable(b_q))
        b_qs = b_qs + (b_q.to(tl.float32),)
    if H > E:
        for i in tl.static_range(len(b_qs)):
            # Stage i combines fields that stand 2^i apart, as long as they are of one block.
            if (1 << i) * E < H:
                b_next = ()
                for f in tl.static_range(len(b_qs)):
                    if f & (1 << i):
                        b_next = b_next + (b_qs[f - (1 << i)] - b_qs[f],)
                    else:
                        b_next = b_next + (b_qs[f] + b_qs[f + (1 << i)],)
                b_qs = b_next
    return b_qs


@triton.jit
def operands(b_qs, BITS: tl.constexpr, DTYPE: tl.constexpr):
    """Queries as right operands of products with fields: f16, their powers of two folded in; 16 bits: DTYPE."""
    b_halves = ()
    for f in tl.static_range(len(b_qs)):
        if BITS == 16:
            b_halves = b_halves + (dotable(b_qs[f].to(DTYPE)),)
        else:
            b_halves = b_halves + ((b_qs[f] * (weight(f, BITS) * Q_SHIFT)).to(tl.float16),)
    return b_halves


@triton.jit
def words(p_tokens, m_t, D: tl.constexpr, BITS: tl.constexpr, MASKED: tl.constexpr):
    """Words of tokens at ``p_tokens``, as few tiles [BT, E] as that takes; if MASKED, 0 where there is no token."""
    E: tl.constexpr = tile_of(D, BITS)
    o_e = tl.arange(0, E)
    b_ws = ()
    for i in tl.static_range(D * BITS // 16 // E):
        p_w = p_tokens[:, None] + (i * E + o_e)[None, :]
        if MASKED:
            b_ws = b_ws + (tl.load(p_w, mask=m_t[:, None], other=0),)
        else:
            b_ws = b_ws + (tl.load(p_w),)
    return b_ws


@triton.jit
def unpacked(b_ws, BITS: tl.constexpr):
    """Fields [BT, E] of words."""
    b_fields = ()
    for i in tl.static_range(len(b_ws)):
        if BITS == 4:
            b_fields = b_fields + unpack4(b_ws[i])
        elif BITS == 8:
            b_fields = b_fields + unpack8(b_ws[i])
        else:
            b_fields = b_fields + (dotable(b_ws[i]),)
    return b_fields


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
def field_logits(b_ks, b_halves, FIRST: tl.constexpr, END: tl.constexpr):
    """Raw logits [BT, BM] of fields FIRST to END."""
    b_s = tl.dot(b_ks[FIRST], b_halves[FIRST])
    for f in tl.static_range(FIRST + 1, END):
        b_s = tl.dot(b_ks[f], b_halves[f], b_s)
    return b_s


@triton.jit
def side_logits(
    b_ws, b_halves, b_totals, b_meta, log2_scaling, D: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr
):
    """Logits [BT, BM] in units of ln 2 of the latents, or rotary parts, of a step's tokens."""
    E: tl.constexpr = tile_of(D, BITS)
    FIELDS: tl.constexpr = field_count(D, BITS)
    b_ks = unpacked(b_ws, BITS)
    if BITS == 16:
        return field_logits(b_ks, b_halves, 0, FIELDS) * log2_scaling
    elif BITS == 8:
        return field_logits(b_ks, b_halves, 0, FIELDS) * (b_meta[0] * (log2_scaling * key_unit(BITS)))[:, None]
    else:
        PER: tl.constexpr = GROUP // E
        b_s = tl.zeros([1, 1], tl.float32)
        for g in tl.static_range(D // GROUP):
            b_own = field_logits(b_ks, b_halves, g * PER, (g + 1) * PER)
            b_s += b_own * (b_meta[2 * g] * (log2_scaling * key_unit(BITS)))[:, None]
            b_s += b_meta[2 * g + 1][:, None] * (b_totals[g] * log2_scaling)[None, :]
        return b_s


@triton.jit
def sums_of_groups(b_sums, b_p, b_shrink, b_meta, BITS: tl.constexpr):
    """Adds probabilities [BT, BM], and with each group's minima as weights (4 bits), to sums by slot of a step.

    Lanes meet once, when all steps are done.
    """
    b_next = (b_sums[0] * b_shrink[None, :] + b_p,)
    for g in tl.static_range(len(b_sums) - 1):
        b_next = b_next + (b_sums[g + 1] * b_shrink[None, :] + b_p * b_meta[2 * g + 1][:, None],)
    return b_next


@triton.jit
def add_latents(
    b_accs, b_ws, b_p, b_shrink, b_meta, D: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, DTYPE: tl.constexpr
):
    """Adds a step's latents, weighted by probabilities [BT, BM], to the sums [BM, E] by field."""
    E: tl.constexpr = tile_of(D, BITS)
    b_vs = unpacked(b_ws, BITS)
    PER: tl.constexpr = GROUP // E if BITS == 4 else len(b_accs)
    for g in tl.static_range(len(b_accs) // PER):
        b_own = b_p
        if BITS == 8:
            # Scales of e4m3 are small, and so are probabilities: their product would be lost among subnormals.
            b_own = b_p * (b_meta[0] * VALUE_SHIFT)[:, None]
        if BITS == 4:
            b_own = b_p * b_meta[2 * g][:, None]
        b_own = tl.trans(dotable(b_own.to(DTYPE if BITS == 16 else tl.float16)))
        for f in tl.static_range(g * PER, (g + 1) * PER):
            b_accs = put(b_accs, f, tl.dot(b_own, b_vs[f], b_accs[f] * b_shrink[:, None]))
    return b_accs


@triton.jit
def new_state(D: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr, BT: tl.constexpr):
    """Nothing attended to yet: sums of latents by field, sums of probabilities, maxima."""
    SUMS: tl.constexpr = 1 + D // GROUP if BITS == 4 else 1
    b_accs = zero_tiles(field_count(D, BITS), BM, tile_of(D, BITS))
    return b_accs, zero_tiles(SUMS, BT, BM), tl.full([BM], float("-inf"), tl.float32)


@triton.jit
def attended(
    state, b_ws, b_rs, b_halves, b_rotary, b_totals, b_meta, b_rope_meta, m_t, o_x, o_last, masks, i_start, scaling,
    softcap, D: tl.constexpr, R: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, ROPE_BITS: tl.constexpr,
    MASK: tl.constexpr, ROWS: tl.constexpr, SOFTCAP: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The state after BT more tokens, at row positions ``o_x``."""
    b_accs, b_sums, b_top = state
    log2_scaling = scaling * LOG2E
    b_s = side_logits(b_rs, b_rotary, (), b_rope_meta, log2_scaling, R, ROPE_BITS, R)
    b_s += side_logits(b_ws, b_halves, b_totals, b_meta, log2_scaling, D, BITS, GROUP)
    b_s = visible_logits(b_s, o_x, m_t, o_last, o_last, masks, i_start, softcap, MASK, ROWS, SOFTCAP, 0)
    b_new = tl.maximum(b_top, tl.max(b_s, 0))
    # A step in which nothing is visible, before anything else was.
    b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
    b_shrink = tl.exp2(b_top - b_safe)
    b_p = tl.exp2(b_s - b_safe[None, :])
    b_sums = sums_of_groups(b_sums, b_p, b_shrink, b_meta, BITS)
    b_accs = add_latents(b_accs, b_ws, b_p, b_shrink, b_meta, D, BITS, GROUP, DTYPE)
    return b_accs, b_sums, b_new


@triton.jit
def store_state(
    outs, state, i_row, o_m, m_m, D: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr
):
    """A split's part of the result: powers of two out of its sums, and minima in."""
    b_accs, b_sums, b_top = state
    E: tl.constexpr = tile_of(D, BITS)
    b_lows = ()
    for g in tl.static_range(len(b_sums) - 1):
        b_lows = b_lows + (tl.sum(b_sums[g + 1], 0),)
    p_out = outs[0] + (i_row + o_m)[:, None] * D + channels_of(0, tl.arange(0, E), E, BITS)[None, :]
    for f in tl.static_range(len(b_accs)):
        b_out = b_accs[f]
        if BITS == 4:
            b_out = b_out * (field_unit(BITS) * weight(f, BITS)) + b_lows[f * E // GROUP][:, None]
        if BITS == 8:
            b_out = b_out * (1.0 / VALUE_SHIFT)
        tl.store(p_out + first_channel(f, E, BITS), b_out, mask=m_m[:, None])
    tl.store(outs[1] + i_row + o_m, b_top, mask=m_m)
    tl.store(outs[2] + i_row + o_m, tl.sum(b_sums[0], 0), mask=m_m)


@triton.jit
def attend_pages_of_split(
    run, outs, b_qs, b_rope, i_row, i_b, o_m, m_m, i_first, i_end, n_tokens, n_table, i_start, o_last, masks, scaling,
    softcap, D: tl.constexpr, R: tl.constexpr, S: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr, ROPE_BITS: tl.constexpr, BM: tl.constexpr, BT: tl.constexpr, STAGES: tl.constexpr,
    MASK: tl.constexpr, ROWS: tl.constexpr, SOFTCAP: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Steps ``i_first`` to ``i_end`` over a row's pages.

    Words run ahead through shared memory, as the compiler has it; scales, which are too small for that, are asked for
    a step ahead, and their pages two.
    """
    E: tl.constexpr = tile_of(D, BITS)
    STEPS: tl.constexpr = G // BT
    GROUPS: tl.constexpr = D // GROUP if BITS == 4 else 1
    b_halves = operands(b_qs, BITS, DTYPE)
    b_rotary = operands(b_rope, ROPE_BITS, DTYPE)
    b_totals = ()
    if BITS == 4:
        for g in tl.static_range(GROUPS):
            b_sum = tl.sum(b_qs[g * GROUP // E], 0)
            for f in tl.static_range(g * GROUP // E + 1, (g + 1) * GROUP // E):
                b_sum += tl.sum(b_qs[f], 0)
            b_totals = b_totals + (b_sum,)
    o_t = tl.arange(0, BT)
    state = new_state(D, BITS, GROUP, BM, BT)
    p_table = run[0] + i_b * n_table
    i_near = tl.load(p_table + i_first // STEPS).to(tl.int64) * G + i_first % STEPS * BT
    i_far = tl.load(p_table + tl.minimum(i_first + 1, i_end - 1) // STEPS)
    m_near = i_first * BT + o_t < n_tokens
    b_meta = token_meta(run[2], run[3], i_near // G * (GROUPS * G) + i_near % G + o_t, m_near, D, G, BITS, GROUP)
    b_rope_meta = token_meta(run[5], run[5], i_near + o_t, m_near, R, G, ROPE_BITS, R)
    for i_step in tl.range(i_first, i_end, num_stages=STAGES):
        i_next = tl.minimum(i_step + 1, i_end - 1)
        i_near = i_far.to(tl.int64) * G + i_next % STEPS * BT
        m_near = i_next * BT + o_t < n_tokens
        b_next = token_meta(run[2], run[3], i_near // G * (GROUPS * G) + i_near % G + o_t, m_near, D, G, BITS, GROUP)
        b_rope_next = token_meta(run[5], run[5], i_near + o_t, m_near, R, G, ROPE_BITS, R)
        i_far = tl.load(p_table + tl.minimum(i_step + 2, i_end - 1) // STEPS)
        o_slot = i_step % STEPS * BT + o_t
        i_page = tl.load(p_table + i_step // STEPS).to(tl.int64)
        o_j = i_step * BT + o_t
        m_t = o_j < n_tokens
        # What was never written may be NaN, which no probability of 0 takes away; codes of 4 bits are never.
        p_c = run[1] + i_page * (G * D * BITS // 16) + o_slot * (D * BITS // 16)
        b_ws = words(p_c, m_t, D, BITS, BITS > 4)
        p_r = run[4] + i_page * (G * R * ROPE_BITS // 16) + o_slot * (R * ROPE_BITS // 16)
        b_rs = words(p_r, m_t, R, ROPE_BITS, False)
        state = attended(
            state, b_ws, b_rs, b_halves, b_rotary, b_totals, b_meta, b_rope_meta, m_t, o_j + S, o_last, masks, i_start,
            scaling, softcap, D, R, BITS, GROUP, ROPE_BITS, MASK, ROWS, SOFTCAP, DTYPE,
        )  # fmt: skip
        b_meta = b_next
        b_rope_meta = b_rope_next
    store_state(outs, state, i_row, o_m, m_m, D, BITS, GROUP, BM)


@triton.jit
def attend_block(
    windows, outs, b_qs, b_rope, i_row, i_b, i_block, o_m, m_m, n_sealed, i_length, W, i_start, o_last, masks, scaling,
    softcap, D: tl.constexpr, R: tl.constexpr, S: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr, MASK: tl.constexpr,
    ROWS: tl.constexpr, SOFTCAP: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """One block of BR tokens of the sink, or slots of the tail."""
    SINKS: tl.constexpr = (S + BR - 1) // BR
    o_r = tl.arange(0, BR)
    if i_block < SINKS:
        o_place = i_block * BR + o_r
        o_x = o_place
        m_t = (o_x < S) & (o_x < i_length)
        p_c = windows[0] + i_b * (S * D)
        p_r = windows[1] + i_b * (S * R)
    else:
        o_place = (i_block - SINKS) * BR + o_r
        # Which token stands in a slot of the ring: the oldest that is not sealed and that the slot can be of.
        o_x = n_sealed + (o_place - n_sealed % W + W) % W + S
        m_t = (o_place < W) & (o_x < i_length)
        p_c = windows[2] + i_b * W * D
        p_r = windows[3] + i_b * W * R
    if tl.max(m_t.to(tl.int32), 0) == 0:
        tl.store(outs[1] + i_row + o_m, tl.full([BM], float("-inf"), tl.float32), mask=m_m)
    else:
        b_ws = words(p_c + o_place * D, m_t, D, 16, True)
        b_rs = words(p_r + o_place * R, m_t, R, 16, True)
        state = attended(
            new_state(D, 16, D, BM, BR), b_ws, b_rs, operands(b_qs, 16, DTYPE), operands(b_rope, 16, DTYPE), (), (), (),
            m_t, o_x, o_last, masks, i_start, scaling, softcap, D, R, 16, D, 16, MASK, ROWS, SOFTCAP, DTYPE,
        )  # fmt: skip
        store_state(outs, state, i_row, o_m, m_m, D, 16, D, BM)


@triton.jit(do_not_specialize=["B", "L", "W", "SPLITS", "PAGED", "TABLE", "QUERIES", "s_mb", "s_mh", "s_mq"])
def latent_kernel(
    q, counters, windows, run, mask, out, out_top, out_sum, s_qb, s_qh, s_qt, s_mb, s_mh, s_mq, s_ml, scaling, factor,
    softcap, B, L, W, SPLITS, PAGED, TABLE, QUERIES,
    HEADS: tl.constexpr, SEVERAL: tl.constexpr, D: tl.constexpr, R: tl.constexpr, S: tl.constexpr, G: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, ROPE_BITS: tl.constexpr, BM: tl.constexpr, BT: tl.constexpr,
    BR: tl.constexpr, STAGES: tl.constexpr, MASK: tl.constexpr, ROWS: tl.constexpr, SOFTCAP: tl.constexpr,
    DTYPE: tl.constexpr, ROTATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One split of one row against BM of its queries: PAGED splits of its pages, then blocks of what is loose.

    ``run``: table, codes, scales and minima of latents, codes and scales of rotary parts. A query is (D + R) numbers,
    of which the first D are rotated by ROTATE here; ``factor`` is the rotation's. QUERIES: of a head, if SEVERAL.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    i_b, i_s, i_m = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    n_q = QUERIES if SEVERAL else 1
    i_row = (i_b * SPLITS + i_s) * (HEADS * n_q)
    outs = (out, out_top, out_sum)
    # As for one KV head of all query heads.
    o_m = i_m * BM + tl.arange(0, BM)
    m_m = o_m < HEADS * n_q
    p_q = q + i_b * s_qb + o_m // n_q * s_qh + o_m % n_q * s_qt
    p_mask = q
    o_mask = o_m
    if MASK > 0:
        p_mask = mask + i_b * s_mb
        o_mask = o_m // n_q * s_mh + o_m % n_q * s_mq
    masks = (p_mask, o_mask, s_ml, L)
    p_row = counters + i_b
    i_start, i_length, n_sealed = tl.load(p_row), tl.load(p_row + B), tl.load(p_row + 2 * B)
    o_last = last_visible(i_length, o_m, m_m, n_q, MASK)
    if i_s < PAGED:
        # Whole steps, shared out evenly.
        n_steps = (n_sealed + BT - 1) // BT
        n_share = (n_steps + PAGED - 1) // PAGED
        i_first = i_s * n_share
        i_end = tl.minimum(i_first + n_share, n_steps)
        if i_first >= i_end:
            tl.store(out_top + i_row + o_m, tl.full([BM], float("-inf"), tl.float32), mask=m_m)
        else:
            b_qs = latent_queries(p_q, m_m, D, BITS, ROTATE)
            b_rope = latent_queries(p_q + D, m_m, R, ROPE_BITS, 0)
            # The rotation's factor goes with the queries, so that logits of rotary parts need none.
            for f in tl.static_range(len(b_qs)):
                b_qs = put(b_qs, f, b_qs[f] * factor)
            attend_pages_of_split(
                run, outs, b_qs, b_rope, i_row, i_b, o_m, m_m, i_first, i_end, n_sealed, TABLE, i_start, o_last, masks,
                scaling, softcap, D, R, S, G, BITS, GROUP, ROPE_BITS, BM, BT, STAGES, MASK, ROWS, SOFTCAP, DTYPE,
            )  # fmt: skip
    else:
        b_qs = latent_queries(p_q, m_m, D, 16, ROTATE)
        b_rope = latent_queries(p_q + D, m_m, R, 16, 0)
        for f in tl.static_range(len(b_qs)):
            b_qs = put(b_qs, f, b_qs[f] * factor)
        attend_block(
            windows, outs, b_qs, b_rope, i_row, i_b, i_s - PAGED, o_m, m_m, n_sealed, i_length, W, i_start, o_last,
            masks, scaling, softcap, D, R, S, BM, BR, MASK, ROWS, SOFTCAP, DTYPE,
        )  # fmt: skip
