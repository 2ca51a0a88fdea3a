"""Decode attention over a block of what is loose: the sink, the tail, and pages that the page loop leaves."""

from __future__ import annotations

import triton
import triton.language as tl

from . import key_logits as keys
from . import value_sums as values
from .attend_rows import last_past, last_visible, loop_tokens, mask_start, query_rows, row_counters
from .fields import LOG2E, channels_of, fields_of, first_channel, key_unit, of_head, query_fields, words_of
from .pair_format import EARLY
from .tiles import as_operand, as_product, dotable, put

IS_EARLY = tl.constexpr(EARLY)


@triton.jit
def loose_counters(counters, i_b, B, KIND: tl.constexpr, RUN: tl.constexpr, TOTAL: tl.constexpr):
    """Counters as of `row_counters`; of the tail behind several runs (KIND 1), what all of them have sealed."""
    i_start, i_length, n_k, n_v = row_counters(counters, i_b, B, 0 if KIND == 1 else RUN)
    if KIND == 1:
        for i in tl.static_range(1, TOTAL):
            n_k += tl.load(counters + (2 + 2 * i) * B + i_b, cache_modifier=".cg")
        n_v = n_k
    return i_start, i_length, n_k, n_v


# A function of its own: some of Triton's passes take the square of what is reached from a load, and more. It ends the
# program, so that nothing is kept beside it.
@triton.jit(noinline=True)
def attend_loose(
    run, row, outs, q, mask, strides, s_m, i_bh, i_m, i_row, i_block, B, n_table, MODE, L, WK, WV, factors, n_q,
    FORM: tl.constexpr, RUN: tl.constexpr, KIND: tl.constexpr, SHAPE: tl.constexpr,
):  # fmt: skip
    """One block of BR loose tokens.

    KIND 0: the sink, then everything of an ordered row from run token ``i_from`` on: keys below ``n_k`` and values
    below ``n_v`` stand in pages, the others in the tail. KIND 1: the sink, then the tail, which begins behind what all
    TOTAL runs have sealed; I is the format of unquantized tokens, since its channels are taken in their own order.
    KIND 2: tokens of a run that has positions, from ``i_from`` to ``n_k``.
    """
    H: tl.constexpr = SHAPE.H
    D: tl.constexpr = SHAPE.D
    DV: tl.constexpr = SHAPE.DV
    S: tl.constexpr = SHAPE.S
    G: tl.constexpr = SHAPE.G
    BM: tl.constexpr = SHAPE.BM
    BR: tl.constexpr = SHAPE.BR
    MASK: tl.constexpr = SHAPE.MASK
    WINDOW: tl.constexpr = SHAPE.WINDOW
    DTYPE: tl.constexpr = SHAPE.DTYPE
    K_BITS: tl.constexpr = FORM.key_bits
    K_CHANNEL: tl.constexpr = FORM.key_channel
    K_GROUP: tl.constexpr = FORM.key_group
    K_TRELLIS: tl.constexpr = FORM.key_trellis
    K_CODES: tl.constexpr = 8 if K_TRELLIS else K_BITS
    N4: tl.constexpr = FORM.room4
    N16: tl.constexpr = FORM.room16
    V_BITS: tl.constexpr = FORM.value_bits
    V_GROUP: tl.constexpr = FORM.value_group
    # Raised channels are taken sixteen at a time.
    B4: tl.constexpr = 16
    B16: tl.constexpr = FORM.ranks16
    BEK: tl.constexpr = FORM.key_words
    BEV: tl.constexpr = FORM.value_words
    EK: tl.constexpr = words_of(D, K_BITS)
    EV: tl.constexpr = words_of(DV, V_BITS)
    K_FIELDS: tl.constexpr = fields_of(D, K_BITS)
    V_FIELDS: tl.constexpr = fields_of(DV, V_BITS)
    TRELLIS: tl.constexpr = FORM.value_trellis
    V_ZEROS: tl.constexpr = values.zero_tiles_of(DV, V_BITS, V_GROUP, TRELLIS)
    SINKS: tl.constexpr = (S + BR - 1) // BR if KIND < 2 else 0
    log2_scaling = factors.scaling * LOG2E
    i_b, i_h = i_bh // H, (i_bh % H).to(tl.int32)
    # The head among those of the windows, whose rows may be others.
    i_wh = i_bh
    if row.rows is not None:
        i_wh = tl.load(row.rows + i_b).to(tl.int64) * H + i_h
    o_m, m_m, p_head, masks, p_rows, m_w = query_rows(q, mask, strides, s_m, L, i_b, i_h, i_m, n_q, SHAPE)
    o_r = tl.arange(0, BR)

    # Counters and queries are loaded together. In the mode `EARLY` counters may be a step behind, and are loaded again.
    i_start, i_length, n_k, n_v = loose_counters(row.counters, i_b, B, KIND, RUN, SHAPE.TOTAL)
    b_qs = query_fields(p_rows, m_w, D, K_FIELDS, EK, BEK, K_BITS, BM, SHAPE.ROTATE)
    if SHAPE.PDL:
        if MODE & IS_EARLY != 0:
            tl.extra.cuda.gdc_wait()
            i_start, i_length, n_k, n_v = loose_counters(row.counters, i_b, B, KIND, RUN, SHAPE.TOTAL)
    if KIND == 1:
        i_from = n_k
    else:
        if KIND == 2:
            n_v = n_k
        i_from = loop_tokens(n_k, n_v, i_length, n_q, FORM.open, SHAPE)
    o_last = last_visible(i_length, o_m, m_m, n_q, MASK)
    o_past = last_past(i_length, o_m, n_q, o_last, WINDOW)
    i_start = mask_start(i_start, i_length, masks, MASK, WINDOW)

    # Run tokens of the block, and where their keys and values stand.
    i_j = (i_from if KIND == 1 else i_from // BR * BR) + (i_block - SINKS) * BR
    if KIND < 2:
        if i_block < SINKS:
            o_x = i_block * BR + o_r
            m_t = (o_x < S) & (o_x < i_length)
            o_j = tl.full([BR], 1073741824, tl.int32)
            o_ring_k = o_x
            o_ring_v = o_x
            p_ring_k = row.sink_k + i_wh * (S * D)
            p_ring_v = row.sink_v + i_wh * (S * DV)
        else:
            o_j = i_j + o_r
            o_x = o_j + S
            m_t = (o_j >= i_from) & (o_x < i_length)
            o_ring_k = o_j % WK
            o_ring_v = o_j % WV
            p_ring_k = row.tail_k + i_wh * (WK * D)
            p_ring_v = row.tail_v + i_wh * (WV * DV)
    else:
        o_j = i_j + o_r
        m_t = o_j < n_k
        o_x = tl.load(run.pos + i_b * (n_table * G) + o_j, mask=m_t, other=0)
    if tl.max(m_t.to(tl.int32), 0) == 0:
        tl.store(outs[1] + i_row + o_m, tl.full([BM], float("-inf"), tl.float32), mask=m_m)
    else:
        # Everything that can be asked for is asked for before anything waits.
        b_rings_k = ()
        b_rings_v = ()
        if KIND < 2:
            m_ring = m_t & (o_j >= n_k)
            p_x = p_ring_k + o_ring_k[:, None] * D + channels_of(0, tl.arange(0, BEK), EK, K_BITS)[None, :]
            for f in tl.static_range(K_FIELDS):
                m_x = of_head(m_ring[:, None], f, D, EK, BEK, K_BITS, 0)
                b_rings_k = b_rings_k + (tl.load(p_x + first_channel(f, EK, K_BITS), mask=m_x, other=0.0),)
            m_ring = m_t & (o_j >= n_v)
            p_x = p_ring_v + o_ring_v[None, :] * DV + channels_of(0, tl.arange(0, BEV), EV, V_BITS)[:, None]
            for f in tl.static_range(V_FIELDS):
                m_x = of_head(m_ring[None, :], f, DV, EV, BEV, V_BITS, 1)
                b_rings_v = b_rings_v + (tl.load(p_x + first_channel(f, EV, V_BITS), mask=m_x, other=0.0),)
        m_page_k = m_t & (o_j < n_k)
        m_page_v = m_t & (o_j < n_v)
        i_slot = i_j % G
        i_head = i_j * 0
        if KIND != 1:
            if (i_block >= SINKS) & (i_j < tl.maximum(n_k, n_v)):
                i_head = tl.load(run.table + i_b * n_table + i_j // G)
        i_head = i_head.to(tl.int64) * H + i_h

        b_s = tl.zeros([BR, BM], tl.float32)
        if KIND < 2:
            for f in tl.static_range(K_FIELDS):
                b_high = b_qs[f].to(DTYPE)
                b_s = tl.dot(dotable(b_rings_k[f]), dotable(b_high), b_s)
                if SHAPE.ROTATED:
                    # A rotated query has more bits than the model's dtype holds.
                    b_low = (b_qs[f] - b_high.to(tl.float32)).to(DTYPE)
                    b_s = tl.dot(dotable(b_rings_k[f]), dotable(b_low), b_s)
            b_s = b_s * log2_scaling
        if KIND != 1:
            if (i_block >= SINKS) & (i_j < n_k):
                b_halves = keys.half_queries(b_qs, K_CODES, DTYPE)
                o_slot = i_slot + o_r
                if K_TRELLIS:
                    b_ks = keys.walked_fields(run, i_head, o_slot, m_page_k, D, G, BEK, FORM.room3)
                else:
                    b_ks = keys.key_fields(run.k_codes, i_head, o_slot, m_page_k, D, G, K_BITS, BEK, True)
                if K_CHANNEL:
                    b_scales = keys.channel_meta(run.k_scale, i_head, i_slot, D, G, K_GROUP, EK, BEK, K_FIELDS, 1)
                    b_lows = keys.channel_meta(run.k_zero, i_head, i_slot, D, G, K_GROUP, EK, BEK, K_FIELDS, 1)
                    b_biases = keys.channel_biases(b_halves, b_lows, K_CODES, BEK, BM, 1)
                    b_own = keys.add_channel_logits(
                        keys.biased(b_biases[0], BR, BM), b_ks, b_halves, b_scales, 0, K_FIELDS
                    )
                    if N16 > 0:
                        b_wholes = keys.whole_queries(p_head, m_m, run.k_full_index + i_head * N16, N16, B16, BM, MASK)
                        b_own = keys.add_whole_logits(b_own, b_wholes, run.k_full, i_head, i_slot, G, N16, BR, B16, BM)
                    if N4 > 0:
                        p_group = run.k_scale + (i_head * (G // K_GROUP) + i_slot // K_GROUP) * D
                        b_risen = ()
                        b_highs = ()
                        for r in tl.static_range((N4 + B4 - 1) // B4):
                            b_raised, b_channel = keys.raised_queries(
                                p_head, m_m, run.k_high_index + i_head * N4, r * B4, N4, B4
                            )
                            b_risen = b_risen + (
                                b_raised * keys.raised_scales(p_group, b_channel, r * B4, N4, B4)[:, None],
                            )
                            b_highs = b_highs + (keys.raised_fields(run.k_high, i_head, i_slot, r * B4, G, N4, B4, BR),)
                        b_own = keys.add_raised_logits(b_own, b_highs, b_risen, 0, 8 * BR // G, BR, BM)
                    if FORM.key_norm:
                        b_own = keys.norm_logits(b_own, run.k_norm, i_head, o_slot, m_page_k, G, True)
                    b_own = b_own * (log2_scaling * key_unit(K_CODES))
                else:
                    b_totals = ()
                    if K_BITS < 8:
                        b_totals = keys.group_totals(b_qs, D, EK, K_GROUP)
                    b_own = keys.token_logits(
                        b_ks, b_halves, b_totals, run.k_scale, run.k_zero, i_head, o_slot, m_page_k,
                        log2_scaling, D, G, K_BITS, K_GROUP, EK, BR, BM, True,
                    )  # fmt: skip
                b_s = tl.where(m_page_k[:, None], b_own, b_s)
        b_s = keys.visible_logits(
            b_s, o_x, m_t, o_last, o_past, masks, i_start, factors.softcap, MASK, SHAPE.ROWS, SHAPE.SOFTCAP, WINDOW
        )

        b_top = tl.max(b_s, 0)
        b_p = tl.exp2(b_s - tl.where(b_top == float("-inf"), 0.0, b_top)[None, :])
        b_sum = tl.sum(b_p, 0)
        b_p = as_product(b_p, BR, BM)
        b_outs = values.zero_tiles(V_FIELDS, BEV, BM)
        if KIND < 2:
            m_ring = m_t & (o_j >= n_v)
            b_kept = as_operand(tl.where(m_ring[:, None], b_p, 0.0).to(DTYPE), BR, BM)
            for f in tl.static_range(V_FIELDS):
                b_outs = put(b_outs, f, tl.dot(dotable(b_rings_v[f]), dotable(b_kept), b_outs[f]))
        if KIND != 1:
            if (i_block >= SINKS) & (i_j < n_v):
                b_paged = tl.where(m_page_v[:, None], b_p, 0.0).to(DTYPE if V_BITS == 16 else tl.float16)
                b_ps = (as_operand(b_paged, BR, BM),)
                b_vs = values.value_fields(
                    run.v_codes, i_head, i_slot + o_r, m_page_v, DV, G, V_BITS, BEV, TRELLIS, True
                )
                b_accs, b_zeros = values.add_values(
                    values.zero_tiles(V_FIELDS, BEV, BM), values.zero_tiles(V_ZEROS, 16, BM), b_vs, b_ps,
                    run.v_scale, run.v_zero, i_head, i_slot, m_page_v, G, DV, V_BITS, V_GROUP, TRELLIS, EV,
                    BR, BR, True,
                )  # fmt: skip
                if FORM.value_norm:
                    b_more = values.page_sums(b_accs, b_zeros, V_BITS, BEV, BM)
                    b_outs = values.add_normed(b_outs, 1.0, b_more, run.v_norm, i_head, DV, EV, BEV)
                else:
                    b_more = values.whole_sums(b_accs, b_zeros, V_BITS, V_GROUP, TRELLIS, EV, BM)
                    for f in tl.static_range(V_FIELDS):
                        b_outs = put(b_outs, f, b_outs[f] + b_more[f])
        values.store_part(outs, b_outs, b_top, b_sum, i_row, o_m, m_m, DV, V_BITS, EV, BEV, FORM.room3 + N4 + N16 == 0)
