"""Decode attention in one launch over everything a layer holds.

Programs of one warp. Some take pages, in a loop that never branches and whose loads run ahead; the others take a block
each of what is *loose*: the sink, the tail, and what only one side has sealed. Pages that are not full are loose too,
where their formats do not let the loop take them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import pair_format as pair
from .attend_digits import attend_digits, twice
from .attend_loose import attend_loose
from .attend_pages import attend_pages
from .attend_rows import first_token, last_past, last_visible, loop_tokens, mask_start, query_rows, row_counters
from .fields import fields_of, query_fields, words_of


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
def split_steps(
    n_k, n_v, i_length, n_q, i_split, SPLITS, FINE, FORM: tl.constexpr, SEVERAL: tl.constexpr, S: tl.constexpr,
    G: tl.constexpr, ORDERED: tl.constexpr, MASK: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Tokens that the loop takes in all, and the first and the end of a split's steps."""
    BT: tl.constexpr = FORM[pair.STEP]
    n_tokens = loop_tokens(n_k, n_v, i_length, n_q, SEVERAL, S, G, ORDERED, MASK, FORM[pair.OPEN])
    i_base = first_token(i_length, n_q, n_tokens, S, G, WINDOW)
    n_share = share_of(n_tokens - i_base, SPLITS, FINE, BT, G)
    i_first = i_base // BT + i_split * n_share
    return n_tokens, i_first, tl.minimum(i_first + n_share, (n_tokens + BT - 1) // BT)


@triton.jit
def table_entry(run, i_b, i_page, n_table):
    """Past the L1 cache, which must not keep what is written while this program waits."""
    return tl.load(run[pair.TABLE] + i_b * n_table + i_page, cache_modifier=".cg")


@triton.jit
def ask_for_page(
    run, i_head, FORM: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Has a head's part of a page brought into the L2 cache."""
    K_META: tl.constexpr = G * D // FORM[pair.KEY_GROUP]
    V_META: tl.constexpr = G * DV // FORM[pair.VALUE_GROUP]
    K_BYTES: tl.constexpr = G * D * FORM[pair.KEY_BITS] // 8
    V_BYTES: tl.constexpr = G * DV * FORM[pair.VALUE_BITS] // 8
    ask_ahead(run[pair.K_CODES] + i_head * (K_BYTES // 2), K_BYTES)
    ask_ahead(run[pair.K_SCALE] + i_head * K_META, 2 * K_META)
    ask_ahead(run[pair.K_ZERO] + i_head * K_META, 2 * K_META)
    if FORM[pair.ROOM4] > 0:
        ask_ahead(run[pair.K_HIGH] + i_head * (G // 8 * FORM[pair.ROOM4]), G // 4 * FORM[pair.ROOM4])
    if FORM[pair.ROOM16] > 0:
        ask_ahead(run[pair.K_FULL] + i_head * (G * FORM[pair.ROOM16]), 2 * G * FORM[pair.ROOM16])
    ask_ahead(run[pair.V_CODES] + i_head * (V_BYTES // 2), V_BYTES)
    ask_ahead(run[pair.V_SCALE] + i_head * V_META, 2 * V_META)
    ask_ahead(run[pair.V_ZERO] + i_head * V_META, 2 * V_META)


@triton.jit
def attend_split(
    run, counters, outs, p_q, p_head, p_rows, m_w, i_row, i_b, i_h, o_m, m_m, i_split, SPLITS, B, n_table, FINE, EARLY,
    mask, scaling, softcap, n_q, FORM: tl.constexpr, RUN: tl.constexpr, H: tl.constexpr, SHARE: tl.constexpr,
    SEVERAL: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, S: tl.constexpr, G: tl.constexpr, BM: tl.constexpr,
    ORDERED: tl.constexpr, MASK: tl.constexpr, ROWS: tl.constexpr, SOFTCAP: tl.constexpr, CAUSAL: tl.constexpr,
    DTYPE: tl.constexpr, ROTATE: tl.constexpr, PDL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Split ``i_split`` of SPLITS of a row's pages: whole pages or, if FINE, steps."""
    K_BITS: tl.constexpr = FORM[pair.KEY_BITS]
    # With little to attend to, a program's time is what it waits for, one thing after the other: counters and queries
    # are asked for together, the first page as soon as counters are there. EARLY, counters may be a step behind, so
    # they are read again; until then they only say what to prefetch.
    i_start, i_length, n_k, n_v = row_counters(counters, i_b, B, RUN)
    ASKS: tl.constexpr = PDL and K_BITS < 8 and FORM[pair.VALUE_BITS] < 8
    i_guess = i_split
    i_entry = i_split
    if ASKS:
        # Where every split has a page or a step, and that is where time is short, it is known which.
        i_guess = tl.minimum(tl.where(FINE != 0, i_split * FORM[pair.STEP] // G, i_split), n_table - 1)
        i_entry = table_entry(run, i_b, i_guess, n_table)
    if FORM[pair.DIGITS]:
        p_rows, m_w = twice(p_q, 16, SHARE)
    b_qs = query_fields(
        p_rows, m_w, D, fields_of(D, K_BITS), words_of(D, K_BITS), FORM[pair.KEY_WORDS], K_BITS, BM, ROTATE
    )  # fmt: skip
    n_tokens, i_first, i_end = split_steps(
        n_k, n_v, i_length, n_q, i_split, SPLITS, FINE, FORM, SEVERAL, S, G, ORDERED, MASK, WINDOW
    )
    if ASKS:
        if i_first < i_end:
            i_page = i_first * FORM[pair.STEP] // G
            if i_page != i_guess:
                i_entry = table_entry(run, i_b, i_page, n_table)
            ask_for_page(run, i_entry.to(tl.int64) * H + i_h, FORM, D, DV, G)
    if PDL:
        if EARLY != 0:
            tl.extra.cuda.gdc_wait()
            i_start, i_length, n_k, n_v = row_counters(counters, i_b, B, RUN)
            n_tokens, i_first, i_end = split_steps(
                n_k, n_v, i_length, n_q, i_split, SPLITS, FINE, FORM, SEVERAL, S, G, ORDERED, MASK, WINDOW
            )
    if i_first >= i_end:
        tl.store(outs[1] + i_row + o_m, tl.full([BM], float("-inf"), tl.float32), mask=m_m)
    else:
        o_last = last_visible(i_length, o_m, m_m, n_q, MASK)
        o_past = last_past(i_length, o_m, n_q, o_last, WINDOW)
        i_start = mask_start(i_start, i_length, mask, MASK, WINDOW)
        if FORM[pair.DIGITS]:
            attend_digits(
                run, outs, b_qs, i_row, i_b, i_h, i_first, i_end, n_tokens, n_table, scaling, FORM, H, SHARE, D,
                DV, G,
            )  # fmt: skip
        else:
            attend_pages(
                run, outs, p_head, b_qs, i_row, i_b, i_h, o_m, m_m, i_first, i_end, n_tokens, n_table, i_start, o_last,
                o_past, mask, scaling, softcap, FORM, H, D, DV, S, G, BM, ORDERED, MASK, ROWS, SOFTCAP, CAUSAL, DTYPE,
                WINDOW,
            )  # fmt: skip


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
    ROTATE: tl.constexpr, ROTATED: tl.constexpr, PDL: tl.constexpr, WINDOW: tl.constexpr,
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
    i_s += TURN
    i_s = tl.where(i_s >= tl.num_programs(1), i_s - tl.num_programs(1), i_s)
    COUNT: tl.constexpr = len(runs)
    ORDERED: tl.constexpr = TOTAL == 1
    FORM0: tl.constexpr = FORMATS[0]
    FORM1: tl.constexpr = FORMATS[COUNT - 1]
    LOOSE_FORM: tl.constexpr = FORMATS[0 if ORDERED else COUNT]
    # Whether blocks take what a run has in pages that are not full.
    RESTS0: tl.constexpr = not ORDERED and FORM0[pair.RESTS]
    RESTS1: tl.constexpr = COUNT > 1 and FORM1[pair.RESTS]
    CAUSAL: tl.constexpr = not ORDERED and SEVERAL and MASK == 0
    n_q = QUERIES if SEVERAL else 1
    i_row = (i_bh * SPLITS + FIRST + i_s) * (SHARE * n_q)
    outs = (out, out_top, out_sum)
    s_q = (s_qb, s_qh, s_qt)
    s_m = (s_mb, s_mh, s_mq)
    o_m, m_m, p_head, masks, p_rows, m_w = query_rows(q, mask, s_q, s_m, s_ml, L, i_b, i_h, i_m, n_q, SHARE, BM, MASK)

    # A KV head's queries, one token's.
    p_q = (q + i_b * s_qb + i_h * SHARE * s_qh, s_qh)
    if i_s < PAGES0:
        attend_split(
            runs[0], counters, outs, p_q, p_head, p_rows, m_w, i_row, i_b, i_h, o_m, m_m, i_s, PAGES0, B, TABLE0, FINE,
            EARLY, masks, scaling, softcap, n_q, FORM0, AT, H, SHARE, SEVERAL, D, DV, S, G, BM, ORDERED, MASK, ROWS,
            SOFTCAP, CAUSAL, DTYPE, ROTATE, PDL, WINDOW,
        )  # fmt: skip
    elif i_s < PAGES0 + PAGES1:
        if COUNT > 1:
            attend_split(
                runs[1], counters, outs, p_q, p_head, p_rows, m_w, i_row, i_b, i_h, o_m, m_m, i_s - PAGES0, PAGES1, B,
                TABLE1, FINE, EARLY, masks, scaling, softcap, n_q, FORM1, AT + 1, H, SHARE, SEVERAL, D, DV, S, G, BM,
                ORDERED, MASK, ROWS, SOFTCAP, CAUSAL, DTYPE, ROTATE, PDL, WINDOW,
            )  # fmt: skip
    elif i_s < PAGES0 + PAGES1 + LOOSE:
        attend_loose(
            runs[0], windows, counters, outs, q, mask, s_q, s_m, s_ml, i_bh, i_m, i_row, i_s - PAGES0 - PAGES1, B,
            TABLE0, EARLY, L, WK, WV, scaling, softcap, n_q, LOOSE_FORM, AT, TOTAL, H, SHARE, SEVERAL, D, DV, S, G, BM,
            BR, 0 if ORDERED else 1, MASK, ROWS, SOFTCAP, DTYPE, ROTATE, ROTATED, PDL, WINDOW,
        )  # fmt: skip
    elif i_s < PAGES0 + PAGES1 + LOOSE + REST0:
        if RESTS0:
            attend_loose(
                runs[0], windows, counters, outs, q, mask, s_q, s_m, s_ml, i_bh, i_m, i_row,
                i_s - PAGES0 - PAGES1 - LOOSE, B, TABLE0, EARLY, L, WK, WV, scaling, softcap, n_q, FORM0, AT, TOTAL, H,
                SHARE, SEVERAL, D, DV, S, G, BM, BR, 2, MASK, ROWS, SOFTCAP, DTYPE, ROTATE, ROTATED, PDL, WINDOW,
            )  # fmt: skip
    else:
        if RESTS1:
            attend_loose(
                runs[1], windows, counters, outs, q, mask, s_q, s_m, s_ml, i_bh, i_m, i_row,
                i_s - PAGES0 - PAGES1 - LOOSE - REST0, B, TABLE1, EARLY, L, WK, WV, scaling, softcap, n_q, FORM1,
                AT + 1, TOTAL, H, SHARE, SEVERAL, D, DV, S, G, BM, BR, 2, MASK, ROWS, SOFTCAP, DTYPE, ROTATE, ROTATED,
                PDL, WINDOW,
            )  # fmt: skip
