"""Decode attention in one launch over everything a layer holds.

Programs of one warp. Some take pages, in a loop that never branches and whose loads run ahead; the others take a block
each of what is *loose*: the sink, the tail, and what only one side has sealed. Pages that are not full are loose too,
where their formats do not let the loop take them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attend_loose import attend_loose
from .attend_pages import attend_pages
from .attend_rows import first_token, last_past, last_visible, loop_tokens, mask_start, query_rows, row_counters
from .fields import fields_of, query_fields, words_of
from .pair_format import EARLY, FINE, TURNED

BY_STEPS, IS_EARLY, IS_TURNED = (tl.constexpr(bit) for bit in (FINE, EARLY, TURNED))


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
def split_steps(n_k, n_v, i_length, n_q, i_split, SPLITS, MODE, FORM: tl.constexpr, SHAPE: tl.constexpr):
    """Tokens that the loop takes in all, and the first and the end of a split's steps.

    Each of SPLITS programs takes the steps of whole pages or, in the mode `FINE`, any number of steps.
    """
    BT: tl.constexpr = FORM.step
    G: tl.constexpr = SHAPE.G
    n_tokens = loop_tokens(n_k, n_v, i_length, n_q, FORM.open, SHAPE)
    i_base = first_token(i_length, n_q, n_tokens, SHAPE.S, G, SHAPE.WINDOW)
    n_rest = n_tokens - i_base
    n_steps = (n_rest + BT - 1) // BT
    m_steps = MODE & BY_STEPS != 0
    n_units = tl.where(m_steps, n_steps, (n_rest + G - 1) // G)
    n_share = (n_units + SPLITS - 1) // SPLITS * tl.where(m_steps, 1, G // BT)
    i_first = i_base // BT + i_split * n_share
    return n_tokens, i_first, tl.minimum(i_first + n_share, (n_tokens + BT - 1) // BT)


@triton.jit
def table_entry(run, i_b, i_page, n_table):
    """Past the L1 cache, which must not keep what is written while this program waits."""
    return tl.load(run.table + i_b * n_table + i_page, cache_modifier=".cg")


@triton.jit
def ask_for_page(run, i_head, FORM: tl.constexpr, SHAPE: tl.constexpr):
    """Has a head's part of a page brought into the L2 cache."""
    G: tl.constexpr = SHAPE.G
    K_META: tl.constexpr = G * SHAPE.D // FORM.key_group
    V_META: tl.constexpr = G * SHAPE.DV // FORM.value_group
    K_BYTES: tl.constexpr = G * SHAPE.D * FORM.key_bits // 8
    V_BYTES: tl.constexpr = G * SHAPE.DV * FORM.value_bits // 8
    ask_ahead(run.k_codes + i_head * (K_BYTES // 2), K_BYTES)
    ask_ahead(run.k_scale + i_head * K_META, 2 * K_META)
    ask_ahead(run.k_zero + i_head * K_META, 2 * K_META)
    if FORM.room3 + FORM.room4 > 0:
        ask_ahead(run.k_high + i_head * (G // 8 * (FORM.room3 + FORM.room4)), G // 4 * (FORM.room3 + FORM.room4))
    if FORM.room16 > 0:
        ask_ahead(run.k_full + i_head * (G * FORM.room16), 2 * G * FORM.room16)
    ask_ahead(run.v_codes + i_head * (V_BYTES // 2), V_BYTES)
    ask_ahead(run.v_scale + i_head * V_META, 2 * V_META)
    if not FORM.value_trellis:
        ask_ahead(run.v_zero + i_head * V_META, 2 * V_META)


@triton.jit
def attend_split(
    run, counters, outs, p_head, p_rows, m_w, i_row, i_b, i_h, o_m, m_m, i_split, SPLITS, B, n_table, MODE, mask,
    factors, n_q, FORM: tl.constexpr, RUN: tl.constexpr, SHAPE: tl.constexpr,
):  # fmt: skip
    """Split ``i_split`` of SPLITS of a row's pages."""
    K_BITS: tl.constexpr = FORM.key_bits
    D: tl.constexpr = SHAPE.D
    # With little to attend to, a program's time is what it waits for, one thing after the other: counters and queries
    # are asked for together, the first page as soon as counters are there. In the mode `EARLY` counters may be a step
    # behind, so they are read again; until then they only say what to prefetch.
    i_start, i_length, n_k, n_v = row_counters(counters, i_b, B, RUN)
    ASKS: tl.constexpr = SHAPE.PDL and K_BITS < 8 and FORM.value_bits < 8
    i_guess = i_split
    i_entry = i_split
    if ASKS:
        # Where every split has a page or a step, and that is where time is short, it is known which.
        i_guess = tl.minimum(tl.where(MODE & BY_STEPS != 0, i_split * FORM.step // SHAPE.G, i_split), n_table - 1)
        i_entry = table_entry(run, i_b, i_guess, n_table)
    b_qs = query_fields(
        p_rows, m_w, D, fields_of(D, K_BITS), words_of(D, K_BITS), FORM.key_words, K_BITS, SHAPE.BM, SHAPE.ROTATE
    )  # fmt: skip
    n_tokens, i_first, i_end = split_steps(n_k, n_v, i_length, n_q, i_split, SPLITS, MODE, FORM, SHAPE)
    if ASKS:
        if i_first < i_end:
            i_page = i_first * FORM.step // SHAPE.G
            if i_page != i_guess:
                i_entry = table_entry(run, i_b, i_page, n_table)
            ask_for_page(run, i_entry.to(tl.int64) * SHAPE.H + i_h, FORM, SHAPE)
    if SHAPE.PDL:
        if MODE & IS_EARLY != 0:
            tl.extra.cuda.gdc_wait()
            i_start, i_length, n_k, n_v = row_counters(counters, i_b, B, RUN)
            n_tokens, i_first, i_end = split_steps(n_k, n_v, i_length, n_q, i_split, SPLITS, MODE, FORM, SHAPE)
    if i_first >= i_end:
        tl.store(outs[1] + i_row + o_m, tl.full([SHAPE.BM], float("-inf"), tl.float32), mask=m_m)
    else:
        o_last = last_visible(i_length, o_m, m_m, n_q, SHAPE.MASK)
        o_past = last_past(i_length, o_m, n_q, o_last, SHAPE.WINDOW)
        i_start = mask_start(i_start, i_length, mask, SHAPE.MASK, SHAPE.WINDOW)
        attend_pages(
            run, outs, p_head, b_qs, i_row, i_b, i_h, o_m, m_m, i_first, i_end, n_tokens, n_table, i_start, o_last,
            o_past, mask, factors, FORM, SHAPE,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "B", "L", "WK", "WV", "SPLITS", "FIRST", "PAGES0", "PAGES1", "TABLE0", "TABLE1", "MODE", "QUERIES", "s_mb",
        "s_mh", "s_mq",
    ]
)  # fmt: skip
def decode_kernel(
    q, row, runs, mask, out, out_top, out_sum, strides, factors, B, L, WK, WV, SPLITS, FIRST, PAGES0, PAGES1, TABLE0,
    TABLE1, MODE, QUERIES, s_mb, s_mh, s_mq, SHAPE: tl.constexpr,
):  # fmt: skip
    """One split of one row and KV head against some of the queries that share the head.

    In the order of programs: PAGES0 and PAGES1 splits of the runs' full pages; in the first launch, blocks of what is
    loose; where tokens have positions, blocks of what the runs have in pages that are not full, unless there are none
    or the loop takes them. ``strides`` are those of queries by row, head and token, and of the mask's columns. MODE:
    see `pair_format`. QUERIES: of a row and head, if they are SEVERAL.
    """
    if SHAPE.PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if MODE & IS_EARLY == 0:
            tl.extra.cuda.gdc_wait()
    H: tl.constexpr = SHAPE.H
    AT: tl.constexpr = SHAPE.AT
    i_bh, i_s, i_m = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    i_b, i_h = i_bh // H, (i_bh % H).to(tl.int32)
    i_s += tl.where(MODE & IS_TURNED != 0, PAGES0 + PAGES1, 0)
    i_s = tl.where(i_s >= tl.num_programs(1), i_s - tl.num_programs(1), i_s)
    COUNT: tl.constexpr = len(runs)
    ORDERED: tl.constexpr = SHAPE.TOTAL == 1
    FORM0: tl.constexpr = SHAPE.FORMATS[0]
    FORM1: tl.constexpr = SHAPE.FORMATS[COUNT - 1]
    LOOSE_FORM: tl.constexpr = SHAPE.FORMATS[0 if ORDERED else COUNT]
    # Blocks of what a run has in pages that are not full.
    REST0: tl.constexpr = 0 if ORDERED or not FORM0.rests else SHAPE.G // SHAPE.BR
    REST1: tl.constexpr = 0 if COUNT == 1 or not FORM1.rests else SHAPE.G // SHAPE.BR
    n_q = QUERIES if SHAPE.SEVERAL else 1
    i_row = (i_bh * SPLITS + FIRST + i_s) * (SHAPE.SHARE * n_q)
    outs = (out, out_top, out_sum)
    s_m = (s_mb, s_mh, s_mq)
    o_m, m_m, p_head, masks, p_rows, m_w = query_rows(q, mask, strides, s_m, L, i_b, i_h, i_m, n_q, SHAPE)
    n_loose = tl.num_programs(1) - REST0 - REST1
    if i_s < PAGES0:
        attend_split(
            runs[0], row.counters, outs, p_head, p_rows, m_w, i_row, i_b, i_h, o_m, m_m, i_s, PAGES0, B, TABLE0,
            MODE, masks, factors, n_q, FORM0, AT, SHAPE,
        )  # fmt: skip
    elif i_s < PAGES0 + PAGES1:
        if COUNT > 1:
            attend_split(
                runs[1], row.counters, outs, p_head, p_rows, m_w, i_row, i_b, i_h, o_m, m_m, i_s - PAGES0, PAGES1,
                B, TABLE1, MODE, masks, factors, n_q, FORM1, AT + 1, SHAPE,
            )  # fmt: skip
    elif i_s < n_loose:
        attend_loose(
            runs[0], row, outs, q, mask, strides, s_m, i_bh, i_m, i_row, i_s - PAGES0 - PAGES1, B, TABLE0, MODE, L, WK,
            WV, factors, n_q, LOOSE_FORM, AT, 0 if ORDERED else 1, SHAPE,
        )  # fmt: skip
    elif i_s < n_loose + REST0:
        if REST0 > 0:
            attend_loose(
                runs[0], row, outs, q, mask, strides, s_m, i_bh, i_m, i_row, i_s - n_loose, B, TABLE0, MODE, L, WK, WV,
                factors, n_q, FORM0, AT, 2, SHAPE,
            )  # fmt: skip
    else:
        if REST1 > 0:
            attend_loose(
                runs[1], row, outs, q, mask, strides, s_m, i_bh, i_m, i_row, i_s - n_loose - REST0, B, TABLE1, MODE, L,
                WK, WV, factors, n_q, FORM1, AT + 1, 2, SHAPE,
            )  # fmt: skip
