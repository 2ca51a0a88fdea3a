"""The page loop of decode attention: it never branches, and its loads run ahead."""

from __future__ import annotations

import triton
import triton.language as tl

from . import key_logits as keys
from . import pair_format as pair
from . import value_sums as values
from .fields import LOG2E, fields_of, key_unit, words_of
from .tiles import as_operand, as_product, dotable, put


@triton.jit
def attend_pages(
    run, outs, p_head, b_qs, i_row, i_b, i_h, o_m, m_m, i_first, i_end, n_tokens, n_table, i_start, o_last, o_past,
    mask, scaling, softcap, FORM: tl.constexpr, H: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, S: tl.constexpr,
    G: tl.constexpr, BM: tl.constexpr, ORDERED: tl.constexpr, MASK: tl.constexpr, ROWS: tl.constexpr,
    SOFTCAP: tl.constexpr, CAUSAL: tl.constexpr, DTYPE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Steps ``i_first`` to ``i_end`` over the pages of one row's run against the queries of a KV head.

    Of pages that are not full (OPEN), slots behind ``n_tokens`` are hidden, whatever they hold, as long as scales and
    minima are finite.
    """
    table, pos = run[pair.TABLE], run[pair.POS]
    k_codes, k_scale, k_zero = run[pair.K_CODES], run[pair.K_SCALE], run[pair.K_ZERO]
    k_high, k_high_index = run[pair.K_HIGH], run[pair.K_HIGH_INDEX]
    k_full, k_full_index = run[pair.K_FULL], run[pair.K_FULL_INDEX]
    v_codes, v_scale, v_zero = run[pair.V_CODES], run[pair.V_SCALE], run[pair.V_ZERO]
    K_BITS: tl.constexpr = FORM[pair.KEY_BITS]
    K_CHANNEL: tl.constexpr = FORM[pair.KEY_CHANNEL]
    K_GROUP: tl.constexpr = FORM[pair.KEY_GROUP]
    N4: tl.constexpr = FORM[pair.ROOM4]
    N16: tl.constexpr = FORM[pair.ROOM16]
    V_BITS: tl.constexpr = FORM[pair.VALUE_BITS]
    V_GROUP: tl.constexpr = FORM[pair.VALUE_GROUP]
    BT: tl.constexpr = FORM[pair.STEP]
    SUB: tl.constexpr = FORM[pair.SUB]
    B4: tl.constexpr = FORM[pair.RANKS4]
    B16: tl.constexpr = FORM[pair.RANKS16]
    BEK: tl.constexpr = FORM[pair.KEY_WORDS]
    BEV: tl.constexpr = FORM[pair.VALUE_WORDS]
    STAGES: tl.constexpr = FORM[pair.STAGES]
    # A turn of the loop loads BT tokens and takes them in parts, each with a maximum of its own.
    PART: tl.constexpr = FORM[pair.PART]
    # Where in ``run`` the factors of tokens and of channels are, 0 if nowhere.
    K_NORM: tl.constexpr = FORM[pair.KEY_NORM]
    V_NORM: tl.constexpr = FORM[pair.VALUE_NORM]
    OPEN: tl.constexpr = FORM[pair.OPEN]
    EK: tl.constexpr = words_of(D, K_BITS)
    EV: tl.constexpr = words_of(DV, V_BITS)
    K_FIELDS: tl.constexpr = fields_of(D, K_BITS)
    V_FIELDS: tl.constexpr = fields_of(DV, V_BITS)
    V_ZEROS: tl.constexpr = values.zero_tiles_of(DV, V_BITS, V_GROUP)
    STEPS: tl.constexpr = G // BT
    TILES: tl.constexpr = PART // SUB
    # Fields of raised channels' words that a tile of tokens has; a step is a whole page there.
    COUNT: tl.constexpr = 8 * SUB // G
    RANKS: tl.constexpr = (N4 + B4 - 1) // B4
    # Raised channels come before this field: a product comes last, since `as_operand` needs what one leaves.
    LATE: tl.constexpr = K_FIELDS - 1
    # Whether logits have to be looked at one by one; they stay raw where nothing but the exponent uses them.
    LOOKS: tl.constexpr = MASK > 0 or SOFTCAP or CAUSAL or WINDOW > 0
    RAW: tl.constexpr = K_CHANNEL and not LOOKS
    # Whether a part of a step may see nothing.
    BLIND: tl.constexpr = MASK > 0 or CAUSAL or WINDOW > 0 or (OPEN and PART < BT)
    o_sub = tl.arange(0, SUB)
    m_sub = o_sub < SUB
    log2_scaling = scaling * LOG2E
    unit = log2_scaling * key_unit(K_BITS)
    b_halves = keys.half_queries(b_qs, K_BITS, DTYPE)
    b_totals = ()
    if not K_CHANNEL and K_BITS < 8:
        b_totals = keys.group_totals(b_qs, D, EK, K_GROUP)
    b_accs = values.zero_tiles(V_FIELDS, BEV, BM)
    b_zeros = values.zero_tiles(V_ZEROS, 16, BM)
    b_sum = tl.zeros([16, BM], tl.float32)
    b_ones = dotable(tl.full([16, SUB], 1.0, tl.float32).to(DTYPE if V_BITS == 16 else tl.float16))
    b_top = tl.full([BM], float("-inf"), tl.float32)

    for i_step in tl.range(i_first, i_end, num_stages=STAGES):
        i_slot = i_step % STEPS * BT
        i_head = tl.load(table + i_b * n_table + i_step // STEPS).to(tl.int64) * H + i_h
        if N4 > 0:
            # The loads start now; their values are used when the other bits are done.
            b_highs = ()
            b_raised = ()
            b_risen = ()
            for r in tl.static_range(RANKS):
                b_own, b_channel = keys.raised_queries(p_head, m_m, k_high_index + i_head * N4, r * B4, N4, B4)
                b_raised = b_raised + (b_own,)
                for n in tl.static_range(G // SUB):
                    p_group = k_scale + (i_head * (G // K_GROUP) + n * SUB // K_GROUP) * D
                    b_risen = b_risen + (keys.raised_scales(p_group, b_channel, r * B4, N4, B4),)
                b_highs = b_highs + (keys.raised_fields(k_high, i_head, 0, r * B4, G, N4, B4, G),)
        if N16 > 0:
            b_wholes = keys.whole_queries(p_head, m_m, k_full_index + i_head * N16, N16, B16, BM, MASK)
        for h in tl.static_range(BT // PART):
            b_logits = ()
            b_vs = ()
            if K_CHANNEL:
                b_scales = keys.channel_meta(
                    k_scale, i_head, i_slot + h * PART, D, G, K_GROUP, EK, BEK, K_FIELDS, TILES
                )
                b_lows = keys.channel_meta(
                    k_zero, i_head, i_slot + h * PART, D, G, K_GROUP, EK, BEK, K_FIELDS, TILES, True
                )
                b_biases = keys.channel_biases(b_halves, b_lows, K_BITS, BEK, BM, TILES)
            for n in tl.static_range(TILES):
                o_slot = i_slot + h * PART + n * SUB + o_sub
                i_j = i_step * BT + h * PART + n * SUB
                m_j = m_sub
                if OPEN:
                    m_j = i_j + o_sub < n_tokens
                b_ks = keys.key_fields(k_codes, i_head, o_slot, m_sub, D, G, K_BITS, BEK, False)
                if K_CHANNEL:
                    b_s = keys.biased(b_biases[n], SUB, BM)
                    b_s = keys.add_channel_logits(b_s, b_ks, b_halves, b_scales, n * K_FIELDS, 0, LATE)
                    if N16 > 0 and K_NORM == 0:
                        b_s = keys.add_whole_logits(
                            b_s, b_wholes, k_full, i_head, i_slot + h * PART + n * SUB, G, N16, SUB, B16, BM
                        )
                    if N4 > 0:
                        b_owns = ()
                        for r in tl.static_range(RANKS):
                            b_owns = b_owns + (b_raised[r] * b_risen[r * (G // SUB) + h * TILES + n][:, None],)
                        b_s = keys.add_raised_logits(b_s, b_highs, b_owns, (h * TILES + n) * COUNT, COUNT, SUB, BM)
                    b_s = keys.add_channel_logits(b_s, b_ks, b_halves, b_scales, n * K_FIELDS, LATE, K_FIELDS)
                    if K_NORM > 0:
                        b_s = keys.norm_logits(b_s, run[K_NORM], i_head, o_slot, m_sub, G, False)
                        if N16 > 0:
                            b_s += keys.add_whole_logits(
                                tl.zeros([SUB, BM], tl.float32), b_wholes, k_full, i_head, i_slot + h * PART + n * SUB,
                                G, N16, SUB, B16, BM,
                            )  # fmt: skip
                    if not RAW:
                        b_s = b_s * unit
                else:
                    b_s = keys.token_logits(
                        b_ks, b_halves, b_totals, k_scale, k_zero, i_head, o_slot, m_j, log2_scaling, D, G, K_BITS,
                        K_GROUP, EK, SUB, BM, False, OPEN and not LOOKS,
                    )  # fmt: skip
                if LOOKS:
                    o_x = i_j + o_sub + S
                    if not ORDERED:
                        o_x = tl.load(pos + i_b * (n_table * G) + i_j + o_sub, mask=m_j, other=0)
                    b_s = keys.visible_logits(
                        b_s, o_x, m_j, o_last, o_past, mask, i_start, softcap, MASK, ROWS, SOFTCAP, WINDOW
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
                # Values are loaded no earlier: registers are short while logits are made.
                o_slot = i_slot + h * PART + n * SUB + o_sub
                b_vs = b_vs + values.value_fields(v_codes, i_head, o_slot, m_sub, DV, G, V_BITS, BEV, False)
            if V_NORM > 0:
                # A factor is of a channel and a page: these tokens' sums meet it before they meet other pages'.
                b_owns, b_least = values.add_values(
                    values.zero_tiles(V_FIELDS, BEV, BM), values.zero_tiles(V_ZEROS, 16, BM), b_vs, b_ps, v_scale,
                    v_zero, i_head, i_slot + h * PART, m_sub, G, DV, V_BITS, V_GROUP, EV, PART, SUB, False,
                )  # fmt: skip
                b_owns = values.page_sums(b_owns, b_least, V_BITS, BEV, BM)
                b_accs = values.add_normed(b_accs, b_shrink, b_owns, run[V_NORM], i_head, DV, EV, BEV)
            else:
                for f in tl.static_range(V_FIELDS):
                    b_accs = put(b_accs, f, b_accs[f] * b_shrink)
                for g in tl.static_range(V_ZEROS):
                    b_zeros = put(b_zeros, g, b_zeros[g] * b_shrink)
                b_accs, b_zeros = values.add_values(
                    b_accs, b_zeros, b_vs, b_ps, v_scale, v_zero, i_head, i_slot + h * PART, m_sub, G, DV, V_BITS,
                    V_GROUP, EV, PART, SUB, False,
                )  # fmt: skip

    if V_NORM > 0:
        b_outs = b_accs
    else:
        b_outs = values.whole_sums(b_accs, b_zeros, V_BITS, V_GROUP, EV, BM)
    values.store_part(outs, b_outs, b_top, tl.max(b_sum, 0), i_row, o_m, m_m, DV, V_BITS, EV, BEV, N4 + N16 == 0)
