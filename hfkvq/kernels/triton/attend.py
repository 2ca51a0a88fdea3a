"""Decode attention in one launch over everything a layer holds.

Programs of one warp. Some take pages, in a loop that never branches and whose loads run ahead; the others take a block
each of what is *loose*: the sink, the tail, and what only one side has sealed. Pages that are not full are loose too,
where their formats do not let the loop take them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .fields import (
    LOG2E,
    as_operand,
    as_product,
    channels_of,
    dotable,
    fields_of,
    first_channel,
    key_unit,
    of_head,
    put,
    query_fields,
    words_of,
)
from .pages import (
    add_channel_logits,
    add_normed,
    add_raised_logits,
    add_values,
    add_whole_logits,
    biased,
    channel_biases,
    channel_meta,
    group_totals,
    half_queries,
    key_fields,
    norm_logits,
    page_sums,
    raised_fields,
    raised_queries,
    raised_scales,
    store_part,
    token_logits,
    value_fields,
    visible_logits,
    whole_queries,
    whole_sums,
    zero_tiles_of,
)


@triton.jit
def zero_tiles(COUNT: tl.constexpr, R: tl.constexpr, BM: tl.constexpr):
    """COUNT tiles [R, BM] of zeros."""
    b_tiles = ()
    for _ in tl.static_range(COUNT):
        b_tiles = b_tiles + (tl.zeros([R, BM], tl.float32),)
    return b_tiles


@triton.jit
def row_counters(counters, i_b, B, RUN: tl.constexpr):
    """Of a row: padding, tokens, and keys and values that stand in pages of a run."""
    p_row = counters + i_b
    p_run = p_row + (2 + 2 * RUN) * B
    return tl.load(p_row), tl.load(p_row + B), tl.load(p_run), tl.load(p_run + B)


@triton.jit
def loop_tokens(
    n_k, n_v, i_length, n_q, SEVERAL: tl.constexpr, S: tl.constexpr, G: tl.constexpr, ORDERED: tl.constexpr,
    MASK: tl.constexpr, OPEN: tl.constexpr,
):  # fmt: skip
    """Tokens that the loop takes: sealed on both sides, and seen by all queries; those of whole pages unless OPEN."""
    n_tokens = n_k
    if ORDERED:
        n_tokens = tl.minimum(n_k, n_v)
        if SEVERAL and MASK == 0:
            n_tokens = tl.minimum(n_tokens, tl.maximum(i_length - n_q - S + 1, 0))
    if OPEN:
        return n_tokens
    else:
        return n_tokens // G * G


@triton.jit
def last_visible(i_length, o_m, m_m, n_q, MASK: tl.constexpr):
    """The last position that each query sees, masks aside; rows of padding see nothing."""
    if MASK > 0:
        return tl.where(m_m, 1073741824, -1)
    else:
        return tl.where(m_m, i_length - n_q + o_m % n_q, -1)


@triton.jit
def attend_pages(
    run, out, out_top, out_sum, p_head, b_qs, i_row, i_b, i_h, o_m, m_m, i_first, i_end, n_tokens, n_table, i_start,
    o_last, p_mask, o_mask, s_ml, L, scaling, softcap, FORMATS: tl.constexpr, I: tl.constexpr, H: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, S: tl.constexpr, G: tl.constexpr, BM: tl.constexpr, ORDERED: tl.constexpr,
    MASK: tl.constexpr, ROWS: tl.constexpr, SOFTCAP: tl.constexpr, CAUSAL: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Steps ``i_first`` to ``i_end`` over the pages of one row's run against the queries of a KV head.

    Of pages that are not full (OPEN), slots behind ``n_tokens`` are hidden, whatever they hold, as long as scales and
    minima are finite.
    """
    table, pos = run[0], run[1]
    k_codes, k_scale, k_zero, k_high, k_high_index, k_full, k_full_index = (
        run[2], run[3], run[4], run[5], run[6], run[7], run[8],
    )  # fmt: skip
    v_codes, v_scale, v_zero = run[9], run[10], run[11]
    K_BITS: tl.constexpr = FORMATS[I][0]
    K_CHANNEL: tl.constexpr = FORMATS[I][1]
    K_GROUP: tl.constexpr = FORMATS[I][2]
    N4: tl.constexpr = FORMATS[I][3]
    N16: tl.constexpr = FORMATS[I][4]
    V_BITS: tl.constexpr = FORMATS[I][5]
    V_GROUP: tl.constexpr = FORMATS[I][6]
    BT: tl.constexpr = FORMATS[I][7]
    SUB: tl.constexpr = FORMATS[I][8]
    B4: tl.constexpr = FORMATS[I][9]
    B16: tl.constexpr = FORMATS[I][10]
    BEK: tl.constexpr = FORMATS[I][11]
    BEV: tl.constexpr = FORMATS[I][12]
    STAGES: tl.constexpr = FORMATS[I][13]
    # A turn of the loop loads BT tokens and takes them in parts, each with a maximum of its own.
    PART: tl.constexpr = FORMATS[I][14]
    # Where in ``run`` the factors of tokens and of channels are, 0 if nowhere.
    K_NORM: tl.constexpr = FORMATS[I][15]
    V_NORM: tl.constexpr = FORMATS[I][16]
    OPEN: tl.constexpr = FORMATS[I][17]
    EK: tl.constexpr = words_of(D, K_BITS)
    EV: tl.constexpr = words_of(DV, V_BITS)
    K_FIELDS: tl.constexpr = fields_of(D, K_BITS)
    V_FIELDS: tl.constexpr = fields_of(DV, V_BITS)
    V_ZEROS: tl.constexpr = zero_tiles_of(DV, V_BITS, V_GROUP)
    STEPS: tl.constexpr = G // BT
    TILES: tl.constexpr = PART // SUB
    # Fields of raised channels' words that a tile of tokens has; a step is a whole page there.
    COUNT: tl.constexpr = 8 * SUB // G
    RANKS: tl.constexpr = (N4 + B4 - 1) // B4
    # Raised channels come before this field: a product comes last, since `as_operand` needs what one leaves.
    LATE: tl.constexpr = K_FIELDS - 1
    # Whether logits have to be looked at one by one; they stay raw where nothing but the exponent uses them.
    LOOKS: tl.constexpr = MASK > 0 or SOFTCAP or CAUSAL
    RAW: tl.constexpr = K_CHANNEL and not LOOKS
    # Whether a part of a step may see nothing.
    BLIND: tl.constexpr = MASK > 0 or CAUSAL or (OPEN and PART < BT)
    o_sub = tl.arange(0, SUB)
    m_sub = o_sub < SUB
    log2_scaling = scaling * LOG2E
    unit = log2_scaling * key_unit(K_BITS)
    b_halves = half_queries(b_qs, K_BITS, DTYPE)
    b_totals = ()
    if not K_CHANNEL and K_BITS < 8:
        b_totals = group_totals(b_qs, D, EK, K_GROUP)
    b_accs = zero_tiles(V_FIELDS, BEV, BM)
    b_zeros = zero_tiles(V_ZEROS, 16, BM)
    b_sum = tl.zeros([16, BM], tl.float32)
    b_ones = dotable(tl.full([16, SUB], 1.0, tl.float32).to(DTYPE if V_BITS == 16 else tl.float16))
    b_top = tl.full([BM], float("-inf"), tl.float32)

    for i_step in tl.range(i_first, i_end, num_stages=STAGES):
        i_slot = i_step % STEPS * BT
        i_head = tl.load(table + i_b * n_table + i_step // STEPS).to(tl.int64) * H + i_h
        if N4 > 0:
            # Asked for now, used when the other bits are done.
            b_highs = ()
            b_raised = ()
            b_risen = ()
            for r in tl.static_range(RANKS):
                b_own, b_channel = raised_queries(p_head, m_m, k_high_index + i_head * N4, r * B4, N4, B4)
                b_raised = b_raised + (b_own,)
                for n in tl.static_range(G // SUB):
                    p_group = k_scale + (i_head * (G // K_GROUP) + n * SUB // K_GROUP) * D
                    b_risen = b_risen + (raised_scales(p_group, b_channel, r * B4, N4, B4),)
                b_highs = b_highs + (raised_fields(k_high, i_head, 0, r * B4, G, N4, B4, G),)
        if N16 > 0:
            b_wholes = whole_queries(p_head, m_m, k_full_index + i_head * N16, N16, B16, BM, MASK)
        for h in tl.static_range(BT // PART):
            b_logits = ()
            b_vs = ()
            if K_CHANNEL:
                b_scales = channel_meta(k_scale, i_head, i_slot + h * PART, D, G, K_GROUP, EK, BEK, K_FIELDS, TILES)
                b_lows = channel_meta(k_zero, i_head, i_slot + h * PART, D, G, K_GROUP, EK, BEK, K_FIELDS, TILES, True)
                b_biases = channel_biases(b_halves, b_lows, K_BITS, BEK, BM, TILES)
            for n in tl.static_range(TILES):
                o_slot = i_slot + h * PART + n * SUB + o_sub
                i_j = i_step * BT + h * PART + n * SUB
                m_j = m_sub
                if OPEN:
                    m_j = i_j + o_sub < n_tokens
                b_ks = key_fields(k_codes, i_head, o_slot, m_sub, D, G, K_BITS, BEK, False)
                if K_CHANNEL:
                    b_s = biased(b_biases[n], SUB, BM)
                    b_s = add_channel_logits(b_s, b_ks, b_halves, b_scales, n * K_FIELDS, 0, LATE)
                    if N16 > 0 and K_NORM == 0:
                        b_s = add_whole_logits(
                            b_s, b_wholes, k_full, i_head, i_slot + h * PART + n * SUB, G, N16, SUB, B16, BM
                        )
                    if N4 > 0:
                        b_owns = ()
                        for r in tl.static_range(RANKS):
                            b_owns = b_owns + (b_raised[r] * b_risen[r * (G // SUB) + h * TILES + n][:, None],)
                        b_s = add_raised_logits(b_s, b_highs, b_owns, (h * TILES + n) * COUNT, COUNT, SUB, BM)
                    b_s = add_channel_logits(b_s, b_ks, b_halves, b_scales, n * K_FIELDS, LATE, K_FIELDS)
                    if K_NORM > 0:
                        b_s = norm_logits(b_s, run[K_NORM], i_head, o_slot, m_sub, G, False)
                        if N16 > 0:
                            b_s += add_whole_logits(
                                tl.zeros([SUB, BM], tl.float32), b_wholes, k_full, i_head,
                                i_slot + h * PART + n * SUB, G, N16, SUB, B16, BM,
                            )  # fmt: skip
                    if not RAW:
                        b_s = b_s * unit
                else:
                    b_s = token_logits(
                        b_ks, b_halves, b_totals, k_scale, k_zero, i_head, o_slot, m_j, log2_scaling, D, G, K_BITS,
                        K_GROUP, EK, SUB, BM, False, OPEN and not LOOKS,
                    )  # fmt: skip
                if LOOKS:
                    o_x = i_j + o_sub + S
                    if not ORDERED:
                        o_x = tl.load(pos + i_b * (n_table * G) + i_j + o_sub, mask=m_j, other=0)
                    b_s = visible_logits(
                        b_s, o_x, m_j, o_last, p_mask, o_mask, s_ml, i_start, L, softcap, MASK, ROWS, SOFTCAP
                    )
                b_logits = b_logits + (b_s,)

            # Within lanes first, between them once.
            b_most = b_logits[0]
            for n in tl.static_range(1, TILES):
                b_most = tl.maximum(b_most, b_logits[n])
            b_most = tl.max(b_most, 0)
            if RAW:
                b_most = b_most * unit
            b_new = tl.maximum(b_top, b_most)
            b_safe = b_new
            if BLIND:
                # A step in which nothing is visible, before anything else was.
                b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
            b_shrink = tl.exp2(b_top - b_safe)[None, :]
            b_top = b_new
            b_ps = ()
            b_sum = b_sum * b_shrink
            for n in tl.static_range(TILES):
                if RAW:
                    b_p = tl.exp2(b_logits[n] * unit - b_safe[None, :])
                else:
                    b_p = tl.exp2(b_logits[n] - b_safe[None, :])
                    if BLIND:
                        b_p = as_product(b_p, SUB, BM)
                b_p = as_operand(b_p.to(DTYPE if V_BITS == 16 else tl.float16), SUB, BM)
                b_ps = b_ps + (b_p,)
                b_sum = tl.dot(b_ones, dotable(b_p), b_sum)
                # Not before: registers are short while logits are made.
                o_slot = i_slot + h * PART + n * SUB + o_sub
                b_vs = b_vs + value_fields(v_codes, i_head, o_slot, m_sub, DV, G, V_BITS, BEV, False)
            if V_NORM > 0:
                # A factor is of a channel and a page: these tokens' sums meet it before they meet other pages'.
                b_owns, b_least = add_values(
                    zero_tiles(V_FIELDS, BEV, BM), zero_tiles(V_ZEROS, 16, BM), b_vs, b_ps, v_scale, v_zero, i_head,
                    i_slot + h * PART, m_sub, G, DV, V_BITS, V_GROUP, EV, PART, SUB, False,
                )  # fmt: skip
                b_owns = page_sums(b_owns, b_least, V_BITS, BEV, BM)
                b_accs = add_normed(b_accs, b_shrink, b_owns, run[V_NORM], i_head, DV, EV, BEV)
            else:
                for f in tl.static_range(V_FIELDS):
                    b_accs = put(b_accs, f, b_accs[f] * b_shrink)
                for g in tl.static_range(V_ZEROS):
                    b_zeros = put(b_zeros, g, b_zeros[g] * b_shrink)
                b_accs, b_zeros = add_values(
                    b_accs, b_zeros, b_vs, b_ps, v_scale, v_zero, i_head, i_slot + h * PART, m_sub, G, DV,
                    V_BITS, V_GROUP, EV, PART, SUB, False,
                )  # fmt: skip

    if V_NORM > 0:
        b_outs = b_accs
    else:
        b_outs = whole_sums(b_accs, b_zeros, V_BITS, V_GROUP, EV, BM)
    store_part(out, out_top, out_sum, b_outs, b_top, tl.max(b_sum, 0), i_row, o_m, m_m, DV, V_BITS, EV, BEV)


@triton.jit
def ask_ahead(p, BYTES: tl.constexpr):
    """Has BYTES from ``p`` on brought into the L2 cache: one instruction, from compute capability 9.0 on.

    It takes multiples of 16; of head dims that make others nothing is asked for.
    """
    if BYTES % 16 == 0:
        tl.inline_asm_elementwise(
            asm="""{
            .reg .pred p;
            .reg .b32 t;
            mov.u32 t, %laneid;
            setp.eq.u32 p, t, 0;
            @p cp.async.bulk.prefetch.L2.global [$1], $2;
            mov.b32 $0, 0;
            }""",
            constraints="=r,l,r",
            args=[p.to(tl.int64), BYTES],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def share_of(n_tokens, SPLITS, FINE, BT: tl.constexpr, G: tl.constexpr):
    """Steps of BT tokens that each of SPLITS programs takes: those of whole pages or, if FINE, any number."""
    n_units = tl.where(FINE != 0, (n_tokens + BT - 1) // BT, (n_tokens + G - 1) // G)
    return (n_units + SPLITS - 1) // SPLITS * tl.where(FINE != 0, 1, G // BT)


@triton.jit
def ask_for_page(
    run, counters, i_b, i_h, i_split, SPLITS, B, n_table, FINE, FORMATS: tl.constexpr, I: tl.constexpr,
    AT: tl.constexpr, H: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Has a split's first page brought into the L2 cache, where counters may be a step behind: this is but a hint.

    Past the L1 cache, which must not keep what is written while this program waits.
    """
    p_count = counters + (2 + 2 * (AT + I)) * B + i_b
    n_tokens = tl.load(p_count, cache_modifier=".cg")
    if not FORMATS[I][17]:
        n_tokens = n_tokens // G * G
    i_page = i_split * share_of(n_tokens, SPLITS, FINE, FORMATS[I][7], G) * FORMATS[I][7] // G
    if i_page * G < n_tokens:
        i_head = tl.load(run[0] + i_b * n_table + i_page, cache_modifier=".cg").to(tl.int64) * H + i_h
        K_META: tl.constexpr = G * D // FORMATS[I][2]
        V_META: tl.constexpr = G * DV // FORMATS[I][6]
        ask_ahead(run[2] + i_head * (G * D * FORMATS[I][0] // 16), G * D * FORMATS[I][0] // 8)
        ask_ahead(run[3] + i_head * K_META, 2 * K_META)
        ask_ahead(run[4] + i_head * K_META, 2 * K_META)
        if FORMATS[I][3] > 0:
            ask_ahead(run[5] + i_head * (G // 8 * FORMATS[I][3]), G // 4 * FORMATS[I][3])
        if FORMATS[I][4] > 0:
            ask_ahead(run[7] + i_head * (G * FORMATS[I][4]), 2 * G * FORMATS[I][4])
        ask_ahead(run[9] + i_head * (G * DV * FORMATS[I][5] // 16), G * DV * FORMATS[I][5] // 8)
        ask_ahead(run[10] + i_head * V_META, 2 * V_META)
        ask_ahead(run[11] + i_head * V_META, 2 * V_META)


@triton.jit
def attend_split(
    run, counters, out, out_top, out_sum, p_head, p_rows, m_w, i_row, i_b, i_h, o_m, m_m, i_split, SPLITS, B, n_table,
    FINE, p_mask, o_mask, s_ml, L, scaling, softcap, n_q, FORMATS: tl.constexpr, I: tl.constexpr, AT: tl.constexpr,
    H: tl.constexpr, SEVERAL: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, S: tl.constexpr, G: tl.constexpr,
    BM: tl.constexpr, ORDERED: tl.constexpr, MASK: tl.constexpr, ROWS: tl.constexpr, SOFTCAP: tl.constexpr,
    CAUSAL: tl.constexpr, DTYPE: tl.constexpr, ROTATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Split ``i_split`` of SPLITS of a row's pages: whole pages or, if FINE, steps."""
    BT: tl.constexpr = FORMATS[I][7]
    K_BITS: tl.constexpr = FORMATS[I][0]
    # Asked for together: with little to attend to, a program's time is what it waits for, one thing after the other.
    if not PDL:
        i_start, i_length, n_k, n_v = row_counters(counters, i_b, B, AT + I)
    b_qs = query_fields(
        p_rows, m_w, D, fields_of(D, K_BITS), words_of(D, K_BITS), FORMATS[I][11], K_BITS, BM, ROTATE
    )  # fmt: skip
    if PDL:
        if K_BITS < 8 and FORMATS[I][5] < 8:
            ask_for_page(run, counters, i_b, i_h, i_split, SPLITS, B, n_table, FINE, FORMATS, I, AT, H, D, DV, G)
        tl.extra.cuda.gdc_wait()
        i_start, i_length, n_k, n_v = row_counters(counters, i_b, B, AT + I)
    n_tokens = loop_tokens(n_k, n_v, i_length, n_q, SEVERAL, S, G, ORDERED, MASK, FORMATS[I][17])
    n_share = share_of(n_tokens, SPLITS, FINE, BT, G)
    i_first = i_split * n_share
    i_end = tl.minimum(i_first + n_share, (n_tokens + BT - 1) // BT)
    if i_first >= i_end:
        tl.store(out_top + i_row + o_m, tl.full([BM], float("-inf"), tl.float32), mask=m_m)
    else:
        o_last = last_visible(i_length, o_m, m_m, n_q, MASK)
        attend_pages(
            run, out, out_top, out_sum, p_head, b_qs, i_row, i_b, i_h, o_m, m_m, i_first, i_end, n_tokens, n_table,
            i_start, o_last, p_mask, o_mask, s_ml, L, scaling, softcap, FORMATS, I, H, D, DV, S, G, BM, ORDERED, MASK,
            ROWS, SOFTCAP, CAUSAL, DTYPE,
        )  # fmt: skip


@triton.jit
def query_rows(
    q, mask, s_qb, s_qh, s_qt, s_mb, s_mh, s_mq, i_b, i_h, i_m, n_q, SHARE: tl.constexpr, BM: tl.constexpr,
    MASK: tl.constexpr,
):  # fmt: skip
    """Of BM queries of a KV head: which they are, which there are, and where they are and their masks.

    Then, for as many as a product's left operand has rows, where they are and which there are.
    """
    o_m = i_m * BM + tl.arange(0, BM)
    m_m = o_m < SHARE * n_q
    p_head = q + i_b * s_qb + (i_h * SHARE + o_m // n_q) * s_qh + o_m % n_q * s_qt
    o_w = tl.arange(0, 16)
    m_w = (o_w < BM) & (i_m * BM + o_w < SHARE * n_q)
    o_w += i_m * BM
    p_rows = q + i_b * s_qb + (i_h * SHARE + o_w // n_q) * s_qh + o_w % n_q * s_qt
    p_mask = q
    o_mask = o_m
    if MASK > 0:
        p_mask = mask + i_b * s_mb
        o_mask = (i_h * SHARE + o_m // n_q) * s_mh + o_m % n_q * s_mq
    return o_m, m_m, p_head, p_mask, o_mask, p_rows, m_w


# A function of its own: some of Triton's passes take the square of what is reached from a load, and more. It ends the
# program, so that nothing is kept beside it.
@triton.jit(noinline=True)
def attend_loose(
    run, windows, counters, out, out_top, out_sum, q, mask, s_qb, s_qh, s_qt, s_mb, s_mh, s_mq, s_ml, i_bh, i_m, i_row,
    i_block, B, n_table, L, WK, WV, scaling, softcap, n_q, FORMATS: tl.constexpr, I: tl.constexpr,
    AT: tl.constexpr, TOTAL: tl.constexpr, H: tl.constexpr, SHARE: tl.constexpr, SEVERAL: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, S: tl.constexpr, G: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr, KIND: tl.constexpr,
    MASK: tl.constexpr, ROWS: tl.constexpr, SOFTCAP: tl.constexpr, DTYPE: tl.constexpr, ROTATE: tl.constexpr,
    ROTATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One block of BR loose tokens.

    KIND 0: the sink, then everything of an ordered row from run token ``i_from`` on: keys below ``n_k`` and values
    below ``n_v`` stand in pages, the others in the tail. KIND 1: the sink, then the tail, which begins behind what all
    TOTAL runs have sealed; I is the format of unquantized tokens, since its channels are taken in their own order.
    KIND 2: tokens of a run that has positions, from ``i_from`` to ``n_k``.
    """
    table, pos = run[0], run[1]
    K_BITS: tl.constexpr = FORMATS[I][0]
    K_CHANNEL: tl.constexpr = FORMATS[I][1]
    K_GROUP: tl.constexpr = FORMATS[I][2]
    N4: tl.constexpr = FORMATS[I][3]
    N16: tl.constexpr = FORMATS[I][4]
    V_BITS: tl.constexpr = FORMATS[I][5]
    V_GROUP: tl.constexpr = FORMATS[I][6]
    B4: tl.constexpr = FORMATS[I][9]
    B16: tl.constexpr = FORMATS[I][10]
    BEK: tl.constexpr = FORMATS[I][11]
    BEV: tl.constexpr = FORMATS[I][12]
    K_NORM: tl.constexpr = FORMATS[I][15]
    V_NORM: tl.constexpr = FORMATS[I][16]
    EK: tl.constexpr = words_of(D, K_BITS)
    EV: tl.constexpr = words_of(DV, V_BITS)
    K_FIELDS: tl.constexpr = fields_of(D, K_BITS)
    V_FIELDS: tl.constexpr = fields_of(DV, V_BITS)
    V_ZEROS: tl.constexpr = zero_tiles_of(DV, V_BITS, V_GROUP)
    SINKS: tl.constexpr = (S + BR - 1) // BR if KIND < 2 else 0
    log2_scaling = scaling * LOG2E
    i_b, i_h = i_bh // H, (i_bh % H).to(tl.int32)
    o_m, m_m, p_head, p_mask, o_mask, p_rows, m_w = query_rows(
        q, mask, s_qb, s_qh, s_qt, s_mb, s_mh, s_mq, i_b, i_h, i_m, n_q, SHARE, BM, MASK
    )
    o_r = tl.arange(0, BR)

    b_qs = query_fields(p_rows, m_w, D, K_FIELDS, EK, BEK, K_BITS, BM, ROTATE)
    if PDL:
        # Again where it has been done: then it takes no time.
        tl.extra.cuda.gdc_wait()
    i_start, i_length, n_k, n_v = row_counters(counters, i_b, B, 0 if KIND == 1 else AT + I)
    if KIND == 1:
        for i in tl.static_range(1, TOTAL):
            n_k += tl.load(counters + (2 + 2 * i) * B + i_b)
        n_v = n_k
        i_from = n_k
    else:
        if KIND == 2:
            n_v = n_k
        i_from = loop_tokens(n_k, n_v, i_length, n_q, SEVERAL, S, G, KIND == 0, MASK, FORMATS[I][17])
    o_last = last_visible(i_length, o_m, m_m, n_q, MASK)

    # Run tokens of the block, and where their keys and values stand.
    i_j = (i_from if KIND == 1 else i_from // BR * BR) + (i_block - SINKS) * BR
    if KIND < 2:
        sink_k, sink_v, tail_k, tail_v = windows[0], windows[1], windows[2], windows[3]
        if i_block < SINKS:
            o_x = i_block * BR + o_r
            m_t = (o_x < S) & (o_x < i_length)
            o_j = tl.full([BR], 1073741824, tl.int32)
            o_ring_k = o_x
            o_ring_v = o_x
            p_ring_k = sink_k + i_bh * (S * D)
            p_ring_v = sink_v + i_bh * (S * DV)
        else:
            o_j = i_j + o_r
            o_x = o_j + S
            m_t = (o_j >= i_from) & (o_x < i_length)
            o_ring_k = o_j % WK
            o_ring_v = o_j % WV
            p_ring_k = tail_k + i_bh * (WK * D)
            p_ring_v = tail_v + i_bh * (WV * DV)
    else:
        o_j = i_j + o_r
        m_t = o_j < n_k
        o_x = tl.load(pos + i_b * (n_table * G) + o_j, mask=m_t, other=0)
    if tl.max(m_t.to(tl.int32), 0) == 0:
        tl.store(out_top + i_row + o_m, tl.full([BM], float("-inf"), tl.float32), mask=m_m)
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
                i_head = tl.load(table + i_b * n_table + i_j // G)
        i_head = i_head.to(tl.int64) * H + i_h

        b_s = tl.zeros([BR, BM], tl.float32)
        if KIND < 2:
            for f in tl.static_range(K_FIELDS):
                b_high = b_qs[f].to(DTYPE)
                b_s = tl.dot(dotable(b_rings_k[f]), dotable(b_high), b_s)
                if ROTATED:
                    # A rotated query has more bits than the model's dtype holds.
                    b_low = (b_qs[f] - b_high.to(tl.float32)).to(DTYPE)
                    b_s = tl.dot(dotable(b_rings_k[f]), dotable(b_low), b_s)
            b_s = b_s * log2_scaling
        if KIND != 1:
            if (i_block >= SINKS) & (i_j < n_k):
                b_halves = half_queries(b_qs, K_BITS, DTYPE)
                o_slot = i_slot + o_r
                b_ks = key_fields(run[2], i_head, o_slot, m_page_k, D, G, K_BITS, BEK, True)
                if K_CHANNEL:
                    b_scales = channel_meta(run[3], i_head, i_slot, D, G, K_GROUP, EK, BEK, K_FIELDS, 1)
                    b_lows = channel_meta(run[4], i_head, i_slot, D, G, K_GROUP, EK, BEK, K_FIELDS, 1)
                    b_biases = channel_biases(b_halves, b_lows, K_BITS, BEK, BM, 1)
                    b_own = add_channel_logits(biased(b_biases[0], BR, BM), b_ks, b_halves, b_scales, 0, 0, K_FIELDS)
                    if N16 > 0 and K_NORM == 0:
                        b_wholes = whole_queries(p_head, m_m, run[8] + i_head * N16, N16, B16, BM, MASK)
                        b_own = add_whole_logits(b_own, b_wholes, run[7], i_head, i_slot, G, N16, BR, B16, BM)
                    if N4 > 0:
                        p_group = run[3] + (i_head * (G // K_GROUP) + i_slot // K_GROUP) * D
                        b_risen = ()
                        b_highs = ()
                        for r in tl.static_range((N4 + B4 - 1) // B4):
                            b_raised, b_channel = raised_queries(p_head, m_m, run[6] + i_head * N4, r * B4, N4, B4)
                            b_risen = b_risen + (b_raised * raised_scales(p_group, b_channel, r * B4, N4, B4)[:, None],)
                            b_highs = b_highs + (raised_fields(run[5], i_head, i_slot, r * B4, G, N4, B4, BR),)
                        b_own = add_raised_logits(b_own, b_highs, b_risen, 0, 8 * BR // G, BR, BM)
                    if K_NORM > 0:
                        b_own = norm_logits(b_own, run[K_NORM], i_head, o_slot, m_page_k, G, True)
                        if N16 > 0:
                            b_wholes = whole_queries(p_head, m_m, run[8] + i_head * N16, N16, B16, BM, MASK)
                            b_own = add_whole_logits(b_own, b_wholes, run[7], i_head, i_slot, G, N16, BR, B16, BM)
                    b_own = b_own * (log2_scaling * key_unit(K_BITS))
                else:
                    b_totals = ()
                    if K_BITS < 8:
                        b_totals = group_totals(b_qs, D, EK, K_GROUP)
                    b_own = token_logits(
                        b_ks, b_halves, b_totals, run[3], run[4], i_head, o_slot, m_page_k, log2_scaling, D, G, K_BITS,
                        K_GROUP, EK, BR, BM, True,
                    )  # fmt: skip
                b_s = tl.where(m_page_k[:, None], b_own, b_s)
        b_s = visible_logits(b_s, o_x, m_t, o_last, p_mask, o_mask, s_ml, i_start, L, softcap, MASK, ROWS, SOFTCAP)

        b_top = tl.max(b_s, 0)
        b_p = tl.exp2(b_s - tl.where(b_top == float("-inf"), 0.0, b_top)[None, :])
        b_sum = tl.sum(b_p, 0)
        b_p = as_product(b_p, BR, BM)
        b_outs = zero_tiles(V_FIELDS, BEV, BM)
        if KIND < 2:
            m_ring = m_t & (o_j >= n_v)
            b_kept = as_operand(tl.where(m_ring[:, None], b_p, 0.0).to(DTYPE), BR, BM)
            for f in tl.static_range(V_FIELDS):
                b_outs = put(b_outs, f, tl.dot(dotable(b_rings_v[f]), dotable(b_kept), b_outs[f]))
        if KIND != 1:
            if (i_block >= SINKS) & (i_j < n_v):
                b_paged = tl.where(m_page_v[:, None], b_p, 0.0).to(DTYPE if V_BITS == 16 else tl.float16)
                b_ps = (as_operand(b_paged, BR, BM),)
                b_vs = value_fields(run[9], i_head, i_slot + o_r, m_page_v, DV, G, V_BITS, BEV, True)
                b_accs, b_zeros = add_values(
                    zero_tiles(V_FIELDS, BEV, BM), zero_tiles(V_ZEROS, 16, BM), b_vs, b_ps, run[10], run[11], i_head,
                    i_slot, m_page_v, G, DV, V_BITS, V_GROUP, EV, BR, BR, True,
                )  # fmt: skip
                if V_NORM > 0:
                    b_more = page_sums(b_accs, b_zeros, V_BITS, BEV, BM)
                    b_outs = add_normed(b_outs, 1.0, b_more, run[V_NORM], i_head, DV, EV, BEV)
                else:
                    b_more = whole_sums(b_accs, b_zeros, V_BITS, V_GROUP, EV, BM)
                    for f in tl.static_range(V_FIELDS):
                        b_outs = put(b_outs, f, b_outs[f] + b_more[f])
        store_part(out, out_top, out_sum, b_outs, b_top, b_sum, i_row, o_m, m_m, DV, V_BITS, EV, BEV)


@triton.jit(
    do_not_specialize=[
        "B", "L", "WK", "WV", "SPLITS", "FIRST", "PAGES0", "PAGES1", "LOOSE", "REST0", "REST1", "TABLE0", "TABLE1",
        "FINE", "TURN", "EARLY", "QUERIES", "s_mb", "s_mh", "s_mq",
    ]
)  # fmt: skip
def decode_kernel(
    q, counters, windows, runs, mask, out, out_top, out_sum, s_qb, s_qh, s_qt, s_mb, s_mh, s_mq, s_ml, scaling, softcap,
    B, L, WK, WV, SPLITS, FIRST, PAGES0, PAGES1, LOOSE, REST0, REST1, TABLE0, TABLE1, FINE, TURN, EARLY, QUERIES,
    FORMATS: tl.constexpr, AT: tl.constexpr, TOTAL: tl.constexpr, H: tl.constexpr, SHARE: tl.constexpr,
    SEVERAL: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, S: tl.constexpr, G: tl.constexpr, BM: tl.constexpr,
    BR: tl.constexpr, MASK: tl.constexpr, ROWS: tl.constexpr, SOFTCAP: tl.constexpr, DTYPE: tl.constexpr,
    ROTATE: tl.constexpr, ROTATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One split of one row and KV head against BM of the queries that share the head.

    The runs here are AT and, perhaps, AT + 1 of TOTAL. In the order of programs: PAGES0 and PAGES1 splits of their full
    pages; LOOSE blocks of what is loose; where tokens have positions, REST0 and REST1 blocks of what the runs have in
    pages that are not full, unless there are none or the loop takes them. The first programs take what is TURN places
    further on. FORMATS: of the runs, then of unquantized tokens. EARLY: queries are asked for before the launch before
    this one has ended. QUERIES: of a row and head, if they are SEVERAL; one has a variant of its own.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if EARLY == 0:
            tl.extra.cuda.gdc_wait()
    i_bh, i_s, i_m = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    i_b, i_h = i_bh // H, (i_bh % H).to(tl.int32)
    i_s = (i_s + TURN) % tl.num_programs(1)
    COUNT: tl.constexpr = len(runs)
    ORDERED: tl.constexpr = TOTAL == 1
    # Whether blocks take what a run has in pages that are not full.
    RESTS0: tl.constexpr = not ORDERED and FORMATS[0][18]
    RESTS1: tl.constexpr = COUNT > 1 and FORMATS[COUNT - 1][18]
    CAUSAL: tl.constexpr = not ORDERED and SEVERAL and MASK == 0
    n_q = QUERIES if SEVERAL else 1
    i_row = (i_bh * SPLITS + FIRST + i_s) * (SHARE * n_q)
    o_m, m_m, p_head, p_mask, o_mask, p_rows, m_w = query_rows(
        q, mask, s_qb, s_qh, s_qt, s_mb, s_mh, s_mq, i_b, i_h, i_m, n_q, SHARE, BM, MASK
    )

    if i_s < PAGES0:
        attend_split(
            runs[0], counters, out, out_top, out_sum, p_head, p_rows, m_w, i_row, i_b, i_h, o_m, m_m, i_s, PAGES0, B,
            TABLE0, FINE, p_mask, o_mask, s_ml, L, scaling, softcap, n_q, FORMATS, 0, AT, H, SEVERAL, D, DV, S, G, BM,
            ORDERED, MASK, ROWS, SOFTCAP, CAUSAL, DTYPE, ROTATE, PDL,
        )  # fmt: skip
    elif i_s < PAGES0 + PAGES1:
        if COUNT > 1:
            attend_split(
                runs[1], counters, out, out_top, out_sum, p_head, p_rows, m_w, i_row, i_b, i_h, o_m, m_m, i_s - PAGES0,
                PAGES1, B, TABLE1, FINE, p_mask, o_mask, s_ml, L, scaling, softcap, n_q, FORMATS, 1, AT, H, SEVERAL, D,
                DV, S, G, BM, ORDERED, MASK, ROWS, SOFTCAP, CAUSAL, DTYPE, ROTATE, PDL,
            )  # fmt: skip
    elif i_s < PAGES0 + PAGES1 + LOOSE:
        attend_loose(
            runs[0], windows, counters, out, out_top, out_sum, q, mask, s_qb, s_qh, s_qt, s_mb, s_mh, s_mq, s_ml, i_bh,
            i_m, i_row, i_s - PAGES0 - PAGES1, B, TABLE0, L, WK, WV, scaling, softcap, n_q, FORMATS,
            0 if ORDERED else COUNT, AT, TOTAL, H, SHARE, SEVERAL, D, DV, S, G, BM, BR, 0 if ORDERED else 1, MASK, ROWS,
            SOFTCAP, DTYPE, ROTATE, ROTATED, PDL,
        )  # fmt: skip
    elif i_s < PAGES0 + PAGES1 + LOOSE + REST0:
        if RESTS0:
            attend_loose(
                runs[0], windows, counters, out, out_top, out_sum, q, mask, s_qb, s_qh, s_qt, s_mb, s_mh, s_mq, s_ml,
                i_bh, i_m, i_row, i_s - PAGES0 - PAGES1 - LOOSE, B, TABLE0, L, WK, WV, scaling, softcap, n_q, FORMATS,
                0, AT, TOTAL, H, SHARE, SEVERAL, D, DV, S, G, BM, BR, 2, MASK, ROWS, SOFTCAP, DTYPE, ROTATE, ROTATED,
                PDL,
            )  # fmt: skip
    else:
        if RESTS1:
            attend_loose(
                runs[1], windows, counters, out, out_top, out_sum, q, mask, s_qb, s_qh, s_qt, s_mb, s_mh, s_mq, s_ml,
                i_bh, i_m, i_row, i_s - PAGES0 - PAGES1 - LOOSE - REST0, B, TABLE1, L, WK, WV, scaling, softcap,
                n_q, FORMATS, 1, AT, TOTAL, H, SHARE, SEVERAL, D, DV, S, G, BM, BR, 2, MASK, ROWS, SOFTCAP, DTYPE,
                ROTATE, ROTATED, PDL,
            )  # fmt: skip
