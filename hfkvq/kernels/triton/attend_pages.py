"""The page loop of decode attention: it never branches, and its loads run ahead."""

from __future__ import annotations

import triton
import triton.language as tl

from . import key_logits as keys
from . import value_sums as values
from .fields import LOG2E, fields_of, key_unit, words_of
from .tiles import as_operand, as_product, dotable, put, unstacked


@triton.jit
def attend_pages(
    run, outs, p_head, b_qs, i_row, i_b, i_h, o_m, m_m, i_first, i_end, n_tokens, n_table, i_start, o_last, o_past,
    mask, factors, FORM: tl.constexpr, SHAPE: tl.constexpr,
):  # fmt: skip
    """Steps ``i_first`` to ``i_end`` over the pages of one row's run against the queries of a KV head.

    Of pages that are not full (OPEN), slots behind ``n_tokens`` are hidden, whatever they hold, as long as scales and
    minima are finite.
    """
    H: tl.constexpr = SHAPE.H
    D: tl.constexpr = SHAPE.D
    DV: tl.constexpr = SHAPE.DV
    G: tl.constexpr = SHAPE.G
    BM: tl.constexpr = SHAPE.BM
    MASK: tl.constexpr = SHAPE.MASK
    WINDOW: tl.constexpr = SHAPE.WINDOW
    ORDERED: tl.constexpr = SHAPE.TOTAL == 1
    CAUSAL: tl.constexpr = not ORDERED and SHAPE.SEVERAL and MASK == 0
    K_BITS: tl.constexpr = FORM.key_bits
    K_CHANNEL: tl.constexpr = FORM.key_channel
    K_GROUP: tl.constexpr = FORM.key_group
    K_TRELLIS: tl.constexpr = FORM.key_trellis
    # Numbers of walks have no powers of two to be multiplied by, as bytes have none.
    K_CODES: tl.constexpr = 8 if K_TRELLIS else K_BITS
    N4: tl.constexpr = FORM.room4
    N16: tl.constexpr = FORM.room16
    V_BITS: tl.constexpr = FORM.value_bits
    V_GROUP: tl.constexpr = FORM.value_group
    BT: tl.constexpr = FORM.step
    SUB: tl.constexpr = FORM.sub
    # Raised channels are taken sixteen at a time.
    B4: tl.constexpr = 16
    B16: tl.constexpr = FORM.ranks16
    BEK: tl.constexpr = FORM.key_words
    BEV: tl.constexpr = FORM.value_words
    # A turn of the loop loads BT tokens and takes them in parts, each with a maximum of its own.
    PART: tl.constexpr = FORM.part
    OPEN: tl.constexpr = FORM.open
    EK: tl.constexpr = words_of(D, K_BITS)
    EV: tl.constexpr = words_of(DV, V_BITS)
    K_FIELDS: tl.constexpr = fields_of(D, K_BITS)
    V_FIELDS: tl.constexpr = fields_of(DV, V_BITS)
    TRELLIS: tl.constexpr = FORM.value_trellis
    # Tokens of a tile of values: trellis codes come by halves or quarters of a page.
    V_SUB: tl.constexpr = G * V_BITS // 4 if TRELLIS else SUB
    V_ZEROS: tl.constexpr = values.zero_tiles_of(DV, V_BITS, V_GROUP, TRELLIS)
    STEPS: tl.constexpr = G // BT
    TILES: tl.constexpr = PART // SUB
    # Fields of raised channels' words that a tile of tokens has; a step is a whole page there.
    COUNT: tl.constexpr = 8 * SUB // G
    RANKS: tl.constexpr = (N4 + B4 - 1) // B4
    # Groups of scales in a step, and in a part of it; up to two are loaded at once.
    STEP_SETS: tl.constexpr = BT // K_GROUP if BT > K_GROUP else 1
    SETS: tl.constexpr = STEP_SETS if STEP_SETS <= 2 else PART // K_GROUP
    # Raised channels come before this field: a product comes last, since `as_operand` needs what one leaves.
    LATE: tl.constexpr = K_FIELDS - 1
    # Whether logits have to be looked at one by one; they stay raw where nothing but the exponent uses them.
    LOOKS: tl.constexpr = MASK > 0 or SHAPE.SOFTCAP or CAUSAL or WINDOW > 0
    RAW: tl.constexpr = K_CHANNEL and not LOOKS
    # Whether a part of a step may see nothing.
    BLIND: tl.constexpr = MASK > 0 or CAUSAL or WINDOW > 0 or (OPEN and PART < BT)
    o_sub = tl.arange(0, SUB)
    m_sub = o_sub < SUB
    log2_scaling = factors.scaling * LOG2E
    unit = log2_scaling * key_unit(K_CODES)
    b_halves = keys.half_queries(b_qs, K_CODES, SHAPE.DTYPE)
    b_totals = ()
    if not K_CHANNEL and K_BITS < 8:
        b_totals = keys.group_totals(b_qs, D, EK, K_GROUP)
    b_accs = values.zero_tiles(V_FIELDS, BEV, BM)
    b_zeros = values.zero_tiles(V_ZEROS, 16, BM)
    b_sum = tl.zeros([16, BM], tl.float32)
    b_ones = dotable(tl.full([16, SUB], 1.0, tl.float32).to(SHAPE.DTYPE if V_BITS == 16 else tl.float16))
    b_top = tl.full([BM], float("-inf"), tl.float32)

    for i_step in tl.range(i_first, i_end, num_stages=FORM.stages):
        i_slot = i_step % STEPS * BT
        i_head = tl.load(run.table + i_b * n_table + i_step // STEPS).to(tl.int64) * H + i_h
        if N4 > 0:
            # The loads start now; their values are used when the other bits are done.
            b_highs = ()
            b_raised = ()
            b_risen = ()
            for r in tl.static_range(RANKS):
                b_own, b_channel = keys.raised_queries(p_head, m_m, run.k_high_index + i_head * N4, r * B4, N4, B4)
                b_raised = b_raised + (b_own,)
                for n in tl.static_range(G // SUB):
                    p_group = run.k_scale + (i_head * (G // K_GROUP) + n * SUB // K_GROUP) * D
                    b_risen = b_risen + (keys.raised_scales(p_group, b_channel, r * B4, N4, B4),)
                b_highs = b_highs + (keys.raised_fields(run.k_high, i_head, 0, r * B4, G, N4, B4, G),)
        if N16 > 0:
            b_wholes = keys.whole_queries(p_head, m_m, run.k_full_index + i_head * N16, N16, B16, BM, MASK)
        for h in tl.static_range(BT // PART):
            b_logits = ()
            b_vs = ()
            if K_CHANNEL and (h == 0 or STEP_SETS > 2):
                i_set = i_slot + h * PART
                b_scales = keys.channel_meta(run.k_scale, i_head, i_set, D, G, K_GROUP, EK, BEK, K_FIELDS, SETS)
                b_lows = keys.channel_meta(run.k_zero, i_head, i_set, D, G, K_GROUP, EK, BEK, K_FIELDS, SETS, True)
                b_biases = keys.channel_biases(b_halves, b_lows, K_CODES, BEK, BM, SETS)
            for n in tl.static_range(TILES):
                o_slot = i_slot + h * PART + n * SUB + o_sub
                i_j = i_step * BT + h * PART + n * SUB
                m_j = m_sub
                if OPEN:
                    m_j = i_j + o_sub < n_tokens
                if not K_TRELLIS:
                    b_ks = keys.key_fields(run.k_codes, i_head, o_slot, m_sub, D, G, K_BITS, BEK, False)
                if K_TRELLIS:
                    b_s = keys.add_walks(
                        keys.biased(b_biases[n], SUB, BM), run, i_head, b_halves, b_scales, p_head, m_m, D, G, BEK,
                        FORM.room3, BM,
                    )  # fmt: skip
                    # Eighths of a page do not stand as one product leaves it when they are put together.
                    b_s = as_product(b_s, SUB, BM)
                    if not RAW:
                        b_s = b_s * unit
                elif K_CHANNEL:
                    b_own_scales = keys.set_of(b_scales, (h * TILES + n) * SUB // K_GROUP % SETS, SETS)
                    b_s = keys.biased(b_biases[(h * TILES + n) * SUB // K_GROUP % SETS], SUB, BM)
                    b_s = keys.add_channel_logits(b_s, b_ks, b_halves, b_own_scales, 0, LATE)
                    if N16 > 0:
                        b_s = keys.add_whole_logits(
                            b_s, b_wholes, run.k_full, i_head, i_slot + h * PART + n * SUB, G, N16, SUB, B16, BM
                        )
                    if N4 > 0:
                        b_owns = ()
                        for r in tl.static_range(RANKS):
                            b_owns = b_owns + (b_raised[r] * b_risen[r * (G // SUB) + h * TILES + n][:, None],)
                        b_s = keys.add_raised_logits(b_s, b_highs, b_owns, (h * TILES + n) * COUNT, COUNT, SUB, BM)
                    b_s = keys.add_channel_logits(b_s, b_ks, b_halves, b_own_scales, LATE, K_FIELDS)
                    if FORM.key_norm:
                        b_s = keys.norm_logits(b_s, run.k_norm, i_head, o_slot, m_sub, G, False)
                    if not RAW:
                        b_s = b_s * unit
                else:
                    b_s = keys.token_logits(
                        b_ks, b_halves, b_totals, run.k_scale, run.k_zero, i_head, o_slot, m_j, log2_scaling, D, G,
                        K_BITS, K_GROUP, EK, SUB, BM, False, OPEN and not LOOKS,
                    )  # fmt: skip
                if LOOKS:
                    o_x = i_j + o_sub + SHAPE.S
                    if not ORDERED:
                        o_x = tl.load(run.pos + i_b * (n_table * G) + i_j + o_sub, mask=m_j, other=0)
                    b_s = keys.visible_logits(
                        b_s,
                        o_x,
                        m_j,
                        o_last,
                        o_past,
                        mask,
                        i_start,
                        factors.softcap,
                        MASK,
                        SHAPE.ROWS,
                        SHAPE.SOFTCAP,
                        WINDOW,
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
                b_p = as_operand(b_p.to(SHAPE.DTYPE if V_BITS == 16 else tl.float16), SUB, BM)
                b_ps = b_ps + (b_p,)
                b_sum = tl.dot(b_ones, dotable(b_p), b_sum)
                # Values are loaded no earlier: registers are short while logits are made.
                if not TRELLIS:
                    o_slot = i_slot + h * PART + n * SUB + o_sub
                    b_vs = b_vs + values.value_fields(
                        run.v_codes, i_head, o_slot, m_sub, DV, G, V_BITS, BEV, False, False
                    )
            if TRELLIS:
                b_vs = values.page_fields(run.v_codes, i_head, DV, G, V_BITS, BEV)
                b_wholes_p = b_ps
                b_ps = ()
                for n in tl.static_range(TILES):
                    b_ps = b_ps + unstacked(b_wholes_p[n], 4 // V_BITS // TILES, BM)
            if FORM.value_norm:
                # A factor is of a channel and a page: these tokens' sums meet it before they meet other pages'.
                b_owns, b_least = values.add_values(
                    values.zero_tiles(V_FIELDS, BEV, BM), values.zero_tiles(V_ZEROS, 16, BM), b_vs, b_ps, run.v_scale,
                    run.v_zero, i_head, i_slot + h * PART, m_sub, G, DV, V_BITS, V_GROUP, TRELLIS, EV, PART, SUB, False,
                )  # fmt: skip
                b_owns = values.page_sums(b_owns, b_least, V_BITS, BEV, BM)
                b_accs = values.add_normed(b_accs, b_shrink, b_owns, run.v_norm, i_head, DV, EV, BEV)
            else:
                for f in tl.static_range(V_FIELDS):
                    b_accs = put(b_accs, f, b_accs[f] * b_shrink)
                for g in tl.static_range(V_ZEROS):
                    b_zeros = put(b_zeros, g, b_zeros[g] * b_shrink)
                b_accs, b_zeros = values.add_values(
                    b_accs, b_zeros, b_vs, b_ps, run.v_scale, run.v_zero, i_head, i_slot + h * PART, m_sub, G, DV,
                    V_BITS, V_GROUP, TRELLIS, EV, PART, V_SUB, False,
                )  # fmt: skip

    if FORM.value_norm:
        b_outs = b_accs
    else:
        b_outs = values.whole_sums(b_accs, b_zeros, V_BITS, V_GROUP, TRELLIS, EV, BM)
    values.store_part(
        outs, b_outs, b_top, tl.max(b_sum, 0), i_row, o_m, m_m, DV, V_BITS, EV, BEV, FORM.room3 + N4 + N16 == 0
    )
