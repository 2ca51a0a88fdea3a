"""Decode attention for what `decode` has no tiles for: f32, odd page sizes and groups, heads wider than 256.

Pages are dequantized in registers; queries stand on the long side of the products.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dispatch import reference
from ..hadamard import hadamard
from ..masks import MaskKind, mask_kind
from ..pages import PageFormat, RunView, StoreFormat, split_runs
from ._lib import (
    DOT_DTYPES,
    cdiv,
    dot_dtype,
    field_channels,
    load_page,
    multiprocessors,
    on_device,
    page_tensors,
    power,
    words_of,
)
from .attend_rows import first_token, last_past, mask_start
from .fields import LOG2E
from .key_logits import soft_cap
from .merge import mask_words, merge_launch, sinks_kind

PROGRAMS_PER_SM = 8
"""Aim of the split count: enough programs to keep every multiprocessor's memory pipe full to the end."""


@triton.jit
def load_ring(ring, o_slot, m_t, o_c, m_c, D: tl.constexpr):
    """[BT, C] of a window's slots, 0 where masked."""
    p_x = ring + o_slot.to(tl.int64)[:, None] * D + o_c[None, :]
    return tl.load(p_x, mask=m_t[:, None] & m_c[None, :], other=0.0)


@triton.jit
def attend(
    b_q, b_k, b_v, b_acc, b_top, b_sum, o_x, m_t, o_last, o_past, p_mask, s_mask, i_start, L, scaling, softcap,
    MASK: tl.constexpr, SOFTCAP: tl.constexpr, DOT: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """One block of tokens at row positions ``o_x`` joins the running softmax of all query rows."""
    # [BM, BT]
    b_s = tl.dot(b_q, tl.trans(b_k.to(DOT)), input_precision="ieee") * scaling
    if SOFTCAP:
        b_s = soft_cap(b_s, softcap)
    if MASK == 0:
        m_s = m_t[None, :] & (o_x[None, :] <= o_last[:, None])
    else:
        o_column = tl.minimum(tl.maximum(o_x + i_start, 0), L - 1).to(tl.int64)
        m_s = m_t[None, :] & (o_last >= 0)[:, None]
    if WINDOW > 0:
        m_s = m_s & (o_x[None, :] > o_past[:, None])
        if MASK > 0:
            m_s = m_s & (o_x + i_start >= 0)[None, :]
    if MASK > 0:
        b_mask = tl.load(p_mask[:, None] + o_column[None, :] * s_mask, mask=m_s, other=0)
        if MASK == 1:
            m_s = m_s & (b_mask != 0)
        else:
            b_s += b_mask.to(tl.float32)
    b_s = tl.where(m_s, b_s, float("-inf"))
    b_new = tl.maximum(b_top, tl.max(b_s, 1))
    # A row that has seen nothing yet keeps -inf, and -inf - -inf is NaN.
    b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
    b_shrink = tl.exp(b_top - b_safe)
    b_p = tl.exp(b_s - b_safe[:, None])
    b_sum = b_sum * b_shrink + tl.sum(b_p, 1)
    b_acc = tl.dot(b_p.to(DOT), b_v.to(DOT), b_acc * b_shrink[:, None], input_precision="ieee")
    return b_acc, b_new, b_sum


@triton.jit
def load_queries(
    q, mask, s_q, s_m, i_b, i_h, i_length, o_m, m_m, o_c, m_c, SHARE: tl.constexpr, Q: tl.constexpr,
    MASK: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Queries [BM, C], the last position that each sees (padding rows see nothing), and where their masks are."""
    i_q = o_m % Q
    i_hq = i_h * SHARE + o_m // Q
    p_q = q + i_b * s_q[0] + i_hq * s_q[1] + i_q * s_q[2]
    b_q = tl.load(p_q[:, None] + o_c[None, :], mask=m_m[:, None] & m_c[None, :], other=0.0).to(DOT)
    if MASK == 0:
        o_last = tl.where(m_m, i_length - Q + i_q, -1)
        return b_q, o_last, o_last
    else:
        return b_q, tl.where(m_m, 0, -1), mask + i_b * s_m[0] + i_hq * s_m[1] + i_q * s_m[2]


@triton.jit
def store_split(out, out_top, out_sum, b_acc, b_top, b_sum, i_row, o_m, m_m, o_v, m_v, DV: tl.constexpr):
    """A split's part of the result: sums [BM, C], maxima (in units of ln 2) and sums of probabilities."""
    p_out = out + (i_row + o_m)[:, None] * DV + o_v[None, :]
    tl.store(p_out, b_acc, mask=m_m[:, None] & m_v[None, :])
    tl.store(out_top + i_row + o_m, b_top * LOG2E, mask=m_m)
    tl.store(out_sum + i_row + o_m, b_sum, mask=m_m)


# Lengths that change from step to step must not compile anew.
@triton.jit
def window_head(rows, i_bh, i_b, i_h, H: tl.constexpr):
    """A row's head among those of the windows, whose rows may be others."""
    if rows is not None:
        return tl.load(rows + i_b).to(tl.int64) * H + i_h
    else:
        return i_bh


@triton.jit(do_not_specialize=["N", "L", "SPLITS", "FIRST", "PAGED", "WK", "WV"])
def dequantized_pages_kernel(
    q, counters, rows, table, pos, tail_k, tail_v,
    k_codes, k_scale, k_zero, k_norm, k_high, k_high_index, k_full, k_full_index,
    v_codes, v_scale, v_zero, v_norm, mask, out, out_top, out_sum, s_qb, s_qh, s_qt, s_mb, s_mh, s_mq, s_ml,
    scaling, softcap, B, N, L, SPLITS, FIRST, PAGED, WK, WV,
    H: tl.constexpr, SHARE: tl.constexpr, Q: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, S: tl.constexpr,
    RUN: tl.constexpr, G: tl.constexpr,
    K_BITS: tl.constexpr, K_GROUP: tl.constexpr, K_CHANNEL: tl.constexpr, N4: tl.constexpr, N16: tl.constexpr,
    V_BITS: tl.constexpr, V_GROUP: tl.constexpr, MASK: tl.constexpr, SOFTCAP: tl.constexpr, DOT: tl.constexpr,
    BM: tl.constexpr, BT: tl.constexpr, BEK: tl.constexpr, BEV: tl.constexpr, STAGES: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """One split of the pages of a row's run RUN against BM of the queries that share a KV head."""
    i_s, i_bh, i_m = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    i_b, i_h = i_bh // H, i_bh % H
    i_wh = window_head(rows, i_bh, i_b, i_h, H)
    ROWS: tl.constexpr = SHARE * Q
    o_m = i_m * BM + tl.arange(0, BM)
    m_m = o_m < ROWS
    i_row = (i_bh * SPLITS + FIRST + i_s) * ROWS

    i_start = tl.load(counters + i_b)
    i_length = tl.load(counters + B + i_b)
    n_k = tl.load(counters + (2 + 2 * RUN) * B + i_b)
    n_v = tl.load(counters + (3 + 2 * RUN) * B + i_b)
    n_run = tl.maximum(n_k, n_v)

    CHUNKS: tl.constexpr = (G + BT - 1) // BT
    n_blocks = (n_run + G - 1) // G * CHUNKS
    # The first one that any query sees anything of.
    i_base = first_token(i_length, Q, n_run, S, G, WINDOW) // G * CHUNKS
    per_page = (n_blocks - i_base + PAGED - 1) // PAGED
    i_first = tl.minimum(i_base + i_s * per_page, n_blocks)
    i_end = tl.minimum(i_first + per_page, n_blocks)
    if i_first >= i_end:
        tl.store(out_top + i_row + o_m, tl.full([BM], float("-inf"), tl.float32), mask=m_m)
        return

    FIELDS_K: tl.constexpr = 16 // K_BITS if K_BITS < 8 else 1
    FIELDS_V: tl.constexpr = 16 // V_BITS if V_BITS < 8 else 1
    o_k, m_k = field_channels(tl.arange(0, BEK), DK, (DK + FIELDS_K - 1) // FIELDS_K, FIELDS_K, BEK)
    o_v, m_v = field_channels(tl.arange(0, BEV), DV, (DV + FIELDS_V - 1) // FIELDS_V, FIELDS_V, BEV)
    b_q, o_last, p_mask = load_queries(
        q, mask, (s_qb, s_qh, s_qt), (s_mb, s_mh, s_mq), i_b, i_h, i_length, o_m, m_m, o_k, m_k, SHARE, Q, MASK, DOT
    )  # fmt: skip
    o_past = last_past(i_length, o_m, Q, o_last, WINDOW)
    i_start = mask_start(i_start, i_length, (mask, o_m, s_ml, L), MASK, WINDOW)
    o_t = tl.arange(0, BT)
    b_acc = tl.zeros([BM, FIELDS_V * BEV], tl.float32)
    b_top = tl.full([BM], float("-inf"), tl.float32)
    b_sum = tl.zeros([BM], tl.float32)

    # Pages that both sides have sealed: no branch in the loop, so its loads can run ahead.
    i_both = tl.maximum(i_first, tl.minimum(i_end, tl.minimum(n_k, n_v) // G * CHUNKS))
    for i_block in tl.range(i_first, i_both, num_stages=STAGES):
        i_slot = i_block % CHUNKS * BT
        o_j = i_block // CHUNKS * G + i_slot + o_t
        m_t = i_slot + o_t < G
        if pos is None:
            o_x = o_j + S
        else:
            o_x = tl.load(pos + i_b * (N * G) + o_j, mask=m_t, other=0)
        i_head = tl.load(table + i_b * N + i_block // CHUNKS).to(tl.int64) * H + i_h
        b_k = load_page(
            k_codes, k_scale, k_zero, k_norm, k_high, k_high_index, k_full, k_full_index,
            i_head, i_slot, m_t, DK, G, K_BITS, K_GROUP, K_CHANNEL, True, N4, N16, BT, BEK,
        )  # fmt: skip
        b_v = load_page(
            v_codes, v_scale, v_zero, v_norm, None, None, None, None, i_head, i_slot, m_t,
            DV, G, V_BITS, V_GROUP, False, V_BITS >= 8, 0, 0, BT, BEV,
        )  # fmt: skip
        b_acc, b_top, b_sum = attend(
            b_q, b_k, b_v, b_acc, b_top, b_sum, o_x, m_t, o_last, o_past, p_mask, s_ml, i_start, L, scaling, softcap,
            MASK, SOFTCAP, DOT, WINDOW,
        )  # fmt: skip

    # Keys and values are sealed at different steps: between the two counts one side is still in its tail.
    for i_block in range(i_both, i_end):
        i_slot = i_block % CHUNKS * BT
        i_j = i_block // CHUNKS * G + i_slot
        o_j = i_j + o_t
        m_t = (o_j < n_run) & (i_slot + o_t < G)
        if pos is None:
            o_x = o_j + S
        else:
            o_x = tl.load(pos + i_b * (N * G) + o_j, mask=m_t, other=0)
        i_head = tl.load(table + i_b * N + i_block // CHUNKS).to(tl.int64) * H + i_h
        b_k = load_page(
            k_codes, k_scale, k_zero, k_norm, k_high, k_high_index, k_full, k_full_index,
            i_head, i_slot, m_t & (o_j < n_k), DK, G, K_BITS, K_GROUP, K_CHANNEL, True, N4, N16, BT, BEK,
        )  # fmt: skip
        if (n_k < n_run) & (i_j + BT > n_k):
            b_tail = load_ring(tail_k + i_wh * (WK * DK), (o_x - S) % WK, m_t & (o_j >= n_k), o_k, m_k, DK)
            b_k += b_tail.to(b_k.dtype)
        b_v = load_page(
            v_codes, v_scale, v_zero, v_norm, None, None, None, None, i_head, i_slot, m_t & (o_j < n_v),
            DV, G, V_BITS, V_GROUP, False, V_BITS >= 8, 0, 0, BT, BEV,
        )  # fmt: skip
        if (n_v < n_run) & (i_j + BT > n_v):
            b_tail = load_ring(tail_v + i_wh * (WV * DV), (o_x - S) % WV, m_t & (o_j >= n_v), o_v, m_v, DV)
            b_v += b_tail.to(b_v.dtype)
        b_acc, b_top, b_sum = attend(
            b_q, b_k, b_v, b_acc, b_top, b_sum, o_x, m_t, o_last, o_past, p_mask, s_ml, i_start, L, scaling, softcap,
            MASK, SOFTCAP, DOT, WINDOW,
        )  # fmt: skip

    store_split(out, out_top, out_sum, b_acc, b_top, b_sum, i_row, o_m, m_m, o_v, m_v, DV)


@triton.jit(do_not_specialize=["L", "SPLITS", "FIRST", "WINDOWED", "WK", "WV"])
def dequantized_windows_kernel(
    q, counters, rows, sink_k, sink_v, tail_k, tail_v, mask, out, out_top, out_sum,
    s_qb, s_qh, s_qt, s_mb, s_mh, s_mq, s_ml, scaling, softcap, B, L, SPLITS, FIRST, WINDOWED, WK, WV,
    H: tl.constexpr, SHARE: tl.constexpr, Q: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, S: tl.constexpr,
    RUNS: tl.constexpr, MASK: tl.constexpr, SOFTCAP: tl.constexpr, DOT: tl.constexpr, BM: tl.constexpr,
    BT: tl.constexpr, BDK: tl.constexpr, BDV: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """One split of what keys and values both hold unsealed: the sink, and the newest tokens."""
    i_s, i_bh, i_m = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    i_b, i_h = i_bh // H, i_bh % H
    i_wh = window_head(rows, i_bh, i_b, i_h, H)
    ROWS: tl.constexpr = SHARE * Q
    o_m = i_m * BM + tl.arange(0, BM)
    m_m = o_m < ROWS
    i_row = (i_bh * SPLITS + FIRST + i_s) * ROWS

    i_start = tl.load(counters + i_b)
    i_length = tl.load(counters + B + i_b)
    n_sealed_k = 0
    n_sealed_v = 0
    for i_run in tl.static_range(RUNS):
        n_sealed_k += tl.load(counters + (2 + 2 * i_run) * B + i_b)
        n_sealed_v += tl.load(counters + (3 + 2 * i_run) * B + i_b)
    n_sealed = tl.maximum(n_sealed_k, n_sealed_v)
    n_window = tl.minimum(i_length, S) + tl.maximum(i_length - S - n_sealed, 0)
    n_blocks = (n_window + BT - 1) // BT
    per_split = (n_blocks + WINDOWED - 1) // WINDOWED
    i_first = tl.minimum(i_s * per_split, n_blocks)
    i_end = tl.minimum(i_first + per_split, n_blocks)
    if i_first >= i_end:
        tl.store(out_top + i_row + o_m, tl.full([BM], float("-inf"), tl.float32), mask=m_m)
        return

    o_k = tl.arange(0, BDK)
    o_v = tl.arange(0, BDV)
    m_k = o_k < DK
    m_v = o_v < DV
    b_q, o_last, p_mask = load_queries(
        q, mask, (s_qb, s_qh, s_qt), (s_mb, s_mh, s_mq), i_b, i_h, i_length, o_m, m_m, o_k, m_k, SHARE, Q, MASK, DOT
    )  # fmt: skip
    o_past = last_past(i_length, o_m, Q, o_last, WINDOW)
    i_start = mask_start(i_start, i_length, (mask, o_m, s_ml, L), MASK, WINDOW)
    b_acc = tl.zeros([BM, BDV], tl.float32)
    b_top = tl.full([BM], float("-inf"), tl.float32)
    b_sum = tl.zeros([BM], tl.float32)
    for i_block in range(i_first, i_end):
        o_u = i_block * BT + tl.arange(0, BT)
        m_t = o_u < n_window
        m_tail = m_t & (o_u >= S)
        o_x = tl.where(o_u < S, o_u, o_u + n_sealed)
        b_k = load_ring(tail_k + i_wh * (WK * DK), (o_x - S) % WK, m_tail, o_k, m_k, DK)
        b_v = load_ring(tail_v + i_wh * (WV * DV), (o_x - S) % WV, m_tail, o_v, m_v, DV)
        if S > 0:
            m_sink = m_t & (o_u < S)
            b_k = tl.where(m_sink[:, None], load_ring(sink_k + i_wh * (S * DK), o_u, m_sink, o_k, m_k, DK), b_k)
            b_v = tl.where(m_sink[:, None], load_ring(sink_v + i_wh * (S * DV), o_u, m_sink, o_v, m_v, DV), b_v)
        b_acc, b_top, b_sum = attend(
            b_q, b_k, b_v, b_acc, b_top, b_sum, o_x, m_t, o_last, o_past, p_mask, s_ml, i_start, L, scaling, softcap,
            MASK, SOFTCAP, DOT, WINDOW,
        )  # fmt: skip

    store_split(out, out_top, out_sum, b_acc, b_top, b_sum, i_row, o_m, m_m, o_v, m_v, DV)


def _split_counts(
    form: StoreFormat, views: Sequence[RunView], queries: int, window: int, block: int, programs: int, sms: int
) -> tuple[list[int], int]:
    """Splits of each run and of the windows, from shapes alone: the lengths are on the device."""
    aim = -(-sms * PROGRAMS_PER_SM // programs)
    runs = []
    for view, (keys, _) in zip(views, form.runs, strict=True):
        blocks = form.pages_seen(view.table.shape[1], queries) * -(-keys.page_size // block)
        runs.append(min(blocks, aim, 128))
    return runs, max(1, min(-(-window // block), aim))


def _page_arguments(
    view: RunView, keys: PageFormat, values: PageFormat, head_dim: int, value_dim: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A run's tensors as the kernel names them, and the constants that describe them."""
    parts = {f"k_{name}": x for name, x in page_tensors(view.keys, keys).items()}
    named = page_tensors(view.values, values)
    parts |= {f"v_{name}": named[name] for name in ("codes", "scale", "zero", "norm")}
    constants = {
        "G": keys.page_size,
        "K_BITS": keys.bits,
        "K_GROUP": keys.group_size,
        "K_CHANNEL": keys.axis == "channel",
        "N4": keys.raised_room(4),
        "N16": keys.raised_room(16),
        "V_BITS": values.bits,
        "V_GROUP": values.group_size,
        "BEK": power(words_of(keys, head_dim)),
        "BEV": power(words_of(values, value_dim)),
    }
    return parts, constants


def dequantized_decode(
    q: Tensor,
    counters: Tensor,
    windows: Sequence[Tensor],
    runs: Sequence[Tensor],
    mask: Tensor | None,
    sinks: Tensor | None,
    scaling: float,
    softcap: float,
    store: str,
    rows: Tensor | None = None,
) -> Tensor:
    """Launcher of `hfkvq.kernels.decode_attention`; f64, and tiles that outgrow shared memory, take the reference."""
    form = StoreFormat.parse(store)
    sink_k, sink_v, tail_k, tail_v = (window.contiguous() for window in windows)
    batch, query_heads, queries, head_dim = q.shape
    heads, value_dim = sink_k.shape[1], sink_v.shape[-1]
    if q.dtype not in DOT_DTYPES or max(head_dim, value_dim) > (256 if q.dtype == torch.float32 else 512):
        scoring = mask, sinks, scaling, softcap
        return reference("decode_attention")(q, counters, windows, runs, *scoring, store, rows=rows)
    views = split_runs(form, runs)
    dtype, queried = q.dtype, query_heads // heads * queries
    dot = dot_dtype(q)
    if form.rotate_keys:
        q = hadamard(q.float(), form.rotate_keys)
    elif q.stride(-1) != 1:
        q = q.contiguous()

    # Tiles of tokens times channels that registers and shared memory hold; f32 dots stage both operands in the latter.
    wide = max(power(head_dim), power(value_dim))
    room = 4096 if dtype == torch.float32 else 8192
    page = form.runs[0][0].page_size
    block_t = max(16, min(64, room // wide, power(page)))
    block_m = min(32 if wide * 32 <= room else 16, max(16, power(queried)))
    tiles = cdiv(queried, block_m)
    sms = multiprocessors(q.device)
    own = form.sink + tail_k.shape[2], block_t, batch * heads * tiles, sms
    paged, windowed = _split_counts(form, views, queries, *own)
    splits = sum(paged) + windowed
    part = torch.empty((batch * heads, splits, queried, value_dim), dtype=torch.float32, device=q.device)
    part_top, part_sum = (torch.empty(part.shape[:3], dtype=torch.float32, device=q.device) for _ in range(2))
    kind, mask = (MaskKind(), q) if mask is None else (mask_kind(mask), mask_words(mask))
    counters = counters.contiguous()
    # Triton's interpreter truncates where bf16 should be rounded.
    out_dtype = dtype if q.is_cuda else torch.float32
    out = torch.empty((batch, query_heads, queries, value_dim), dtype=out_dtype, device=q.device)

    first = 0
    with on_device(q):
        common = {"q": q, "counters": counters, "rows": rows, "tail_k": tail_k, "tail_v": tail_v, "mask": mask}
        common |= {"out": part, "out_top": part_top, "out_sum": part_sum, "scaling": scaling, "softcap": softcap}
        common |= zip(("s_qb", "s_qh", "s_qt"), q.stride(), strict=False)
        common |= zip(("s_mb", "s_mh", "s_mq", "s_ml"), kind.strides, strict=True)
        common |= {"B": batch, "L": kind.length, "SPLITS": splits, "WK": tail_k.shape[2], "WV": tail_v.shape[2]}
        common |= {"H": heads, "SHARE": query_heads // heads, "Q": queries, "DK": head_dim, "DV": value_dim}
        common |= {"S": form.sink, "MASK": kind.kind, "SOFTCAP": softcap > 0, "DOT": dot, "BM": block_m, "BT": block_t}
        common |= {"WINDOW": form.window, "num_warps": 8 if wide > 256 else 4}
        for i, (view, (keys, values)) in enumerate(zip(views, form.runs, strict=True)):
            parts, constants = _page_arguments(view, keys, values, head_dim, value_dim)
            dequantized_pages_kernel[(paged[i], batch * heads, tiles)](
                table=view.table.contiguous(),
                pos=None if view.pos is None else view.pos.contiguous(),
                **parts,
                N=view.table.shape[1],
                FIRST=first,
                PAGED=paged[i],
                RUN=i,
                # More in flight than registers and shared memory hold costs more than it brings, but for plain tiles.
                STAGES=3 if keys.bits == values.bits == 16 and wide <= 128 and dtype != torch.float32 else 1,
                **common,
                **constants,
            )
            first += paged[i]
        dequantized_windows_kernel[(windowed, batch * heads, tiles)](
            sink_k=sink_k,
            sink_v=sink_v,
            FIRST=first,
            WINDOWED=windowed,
            RUNS=len(views),
            BDK=power(head_dim),
            BDV=power(value_dim),
            **common,
        )
    merge = merge_launch(part.shape, queries, sinks_kind(sinks), form.rotate_values, False, q.device, out_dtype)
    merge(part, part_top, part_sum, *([] if sinks is None else [sinks.contiguous()]), out)
    return out.to(dtype)
