"""Decode attention for what `decode` has no tiles for: f32, odd page sizes and groups, heads wider than 256.

Pages are dequantized in registers; queries stand on the long side of the products.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dispatch import reference
from ..hadamard import hadamard
from ..masks import MaskKind, mask_kind
from ..pages import PageFormat, split_runs
from ._lib import (
    DOT_DTYPES,
    cdiv,
    load_page,
    multiprocessors,
    on_device,
    page_shape,
    page_tensors,
    power,
)
from .attend_rows import first_token, last_past, last_visible, mask_start
from .fields import LOG2E
from .key_logits import visible_logits
from .merge import mask_words, merge_launch
from .pair_format import Factors, Row

PROGRAMS_PER_SM = 8
"""Aim of the split count: enough programs to keep every multiprocessor's memory pipe full to the end."""


class Shape(NamedTuple):
    """Constants of the kernel, by the names of `pair_format.DecodeShape`, and those of their own.

    Attributes:
        Q: queries of a head.
        DK: channels of a key.
        DOT: dtype of products.
        BT: tokens of a block.
        RUNS: how many there are.
    """

    H: int
    SHARE: int
    Q: int
    DK: int
    DV: int
    S: int
    MASK: int
    SOFTCAP: bool
    DOT: Any
    BM: int
    BT: int
    WINDOW: int
    ROWS: bool
    RUNS: int


@triton.jit
def load_ring(ring, o_slot, m_t, o_c, m_c, D: tl.constexpr):
    """[BT, C] of a window's slots, 0 where masked."""
    p_x = ring + o_slot.to(tl.int64)[:, None] * D + o_c[None, :]
    return tl.load(p_x, mask=m_t[:, None] & m_c[None, :], other=0.0)


@triton.jit
def attend(b_q, b_k, b_v, b_acc, b_top, b_sum, o_x, m_t, o_last, o_past, masks, i_start, factors, SHAPE: tl.constexpr):
    """One block of tokens at row positions ``o_x`` joins the running softmax of all queries."""
    # [BT, BM]
    b_s = tl.dot(b_k.to(SHAPE.DOT), b_q, input_precision="ieee") * (factors.scaling * LOG2E)
    b_s = visible_logits(
        b_s, o_x, m_t, o_last, o_past, masks, i_start, factors.softcap, SHAPE.MASK, SHAPE.ROWS, SHAPE.SOFTCAP,
        SHAPE.WINDOW,
    )  # fmt: skip
    b_new = tl.maximum(b_top, tl.max(b_s, 0))
    # A query that has seen nothing yet keeps -inf, and -inf - -inf is NaN.
    b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
    b_shrink = tl.exp2(b_top - b_safe)
    b_p = tl.exp2(b_s - b_safe[None, :])
    b_sum = b_sum * b_shrink + tl.sum(b_p, 0)
    b_p = tl.trans(b_p.to(SHAPE.DOT))
    b_acc = tl.dot(b_p, b_v.to(SHAPE.DOT), b_acc * b_shrink[:, None], input_precision="ieee")
    return b_acc, b_new, b_sum


# Lengths that change from step to step must not compile anew.
@triton.jit(do_not_specialize=["N", "L", "SPLITS", "FIRST", "OWN", "WK", "WV"])
def dequantized_kernel(
    q, row, table, pos, keys, values, mask, out, out_top, out_sum, s_q, s_m, factors, B, N, L, SPLITS, FIRST, OWN,
    WK, WV, SHAPE: tl.constexpr, RUN: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """One of OWN splits of a row against BM of the queries that share a KV head.

    The split is of the pages of run RUN; or, where RUN is the number of runs, of what keys and values both hold
    unsealed: the sink, and the newest tokens.
    """
    i_s, i_bh, i_m = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    i_b, i_h = i_bh // SHAPE.H, i_bh % SHAPE.H
    i_wh = i_bh
    if row.rows is not None:
        # Windows may have other rows than the batch.
        i_wh = tl.load(row.rows + i_b).to(tl.int64) * SHAPE.H + i_h
    # `tl.zeros` is a kernel function itself, which takes constants but no plain numbers.
    BM: tl.constexpr = SHAPE.BM
    ROWS: tl.constexpr = SHAPE.SHARE * SHAPE.Q
    G: tl.constexpr = KEYS.G
    S: tl.constexpr = SHAPE.S
    DK: tl.constexpr = SHAPE.DK
    DV: tl.constexpr = SHAPE.DV
    BT: tl.constexpr = SHAPE.BT
    CHUNKS: tl.constexpr = (G + BT - 1) // BT
    PAGES: tl.constexpr = RUN < SHAPE.RUNS
    o_m = i_m * BM + tl.arange(0, BM)
    m_m = o_m < ROWS
    o_t = tl.arange(0, BT)
    i_row = (i_bh * SPLITS + FIRST + i_s) * ROWS
    i_start = tl.load(row.counters + i_b)
    i_length = tl.load(row.counters + B + i_b)
    i_base = 0
    if PAGES:
        n_k = tl.load(row.counters + (2 + 2 * RUN) * B + i_b)
        n_v = tl.load(row.counters + (3 + 2 * RUN) * B + i_b)
        n_run = tl.maximum(n_k, n_v)
        n_blocks = (n_run + G - 1) // G * CHUNKS
        # The first one that any query sees anything of.
        i_base += first_token(i_length, SHAPE.Q, n_run, S, G, SHAPE.WINDOW) // G * CHUNKS
    else:
        n_k = 0
        n_v = 0
        for i_run in tl.static_range(RUN):
            n_k += tl.load(row.counters + (2 + 2 * i_run) * B + i_b)
            n_v += tl.load(row.counters + (3 + 2 * i_run) * B + i_b)
        n_run = tl.maximum(n_k, n_v)
        n_window = tl.minimum(i_length, S) + tl.maximum(i_length - S - n_run, 0)
        n_blocks = (n_window + BT - 1) // BT
    per_split = (n_blocks - i_base + OWN - 1) // OWN
    i_first = tl.minimum(i_base + i_s * per_split, n_blocks)
    i_end = tl.minimum(i_first + per_split, n_blocks)
    if i_first >= i_end:
        tl.store(out_top + i_row + o_m, tl.full([BM], float("-inf"), tl.float32), mask=m_m)
        return

    # Matrix products sum over 16 channels or more.
    BDK: tl.constexpr = triton.next_power_of_2(DK) if DK > 16 else 16
    BDV: tl.constexpr = triton.next_power_of_2(DV) if DV > 16 else 16
    o_k, o_v = tl.arange(0, BDK), tl.arange(0, BDV)
    m_k, m_v = o_k < DK, o_v < DV
    i_q = o_m % SHAPE.Q
    i_hq = i_h * SHAPE.SHARE + o_m // SHAPE.Q
    p_q = q + i_b * s_q[0] + i_hq * s_q[1] + i_q * s_q[2]
    # [C, BM]
    b_q = tl.load(p_q[None, :] + o_k[:, None], mask=m_k[:, None] & m_m[None, :], other=0.0).to(SHAPE.DOT)
    masks = (mask + i_b * s_m[0], i_hq * s_m[1] + i_q * s_m[2], s_m[3], L)
    o_last = last_visible(i_length, o_m, m_m, SHAPE.Q, SHAPE.MASK)
    o_past = last_past(i_length, o_m, SHAPE.Q, o_last, SHAPE.WINDOW)
    i_start = mask_start(i_start, i_length, masks, SHAPE.MASK, SHAPE.WINDOW)
    p_tail_k = row.tail_k + i_wh * (WK * DK)
    p_tail_v = row.tail_v + i_wh * (WV * DV)
    b_acc = tl.zeros([BM, BDV], tl.float32)
    b_top = tl.full([BM], float("-inf"), tl.float32)
    b_sum = tl.zeros([BM], tl.float32)

    if PAGES:
        # Keys and values are sealed at different steps: between the two counts one side is still in its tail.
        for i_block in range(i_first, i_end):
            i_slot = i_block % CHUNKS * BT
            i_j = i_block // CHUNKS * G + i_slot
            o_j = i_j + o_t
            m_t = (o_j < n_run) & (i_slot + o_t < G)
            o_x = o_j + S
            if pos is not None:
                o_x = tl.load(pos + i_b * (N * G) + o_j, mask=m_t, other=0)
            i_head = tl.load(table + i_b * N + i_block // CHUNKS).to(tl.int64) * SHAPE.H + i_h
            b_k = load_page(keys, i_head, i_slot, m_t & (o_j < n_k), KEYS, BT, BDK)
            if (n_k < n_run) & (i_j + BT > n_k):
                b_k += load_ring(p_tail_k, (o_x - S) % WK, m_t & (o_j >= n_k), o_k, m_k, DK).to(b_k.dtype)
            b_v = load_page(values, i_head, i_slot, m_t & (o_j < n_v), VALUES, BT, BDV)
            if (n_v < n_run) & (i_j + BT > n_v):
                b_v += load_ring(p_tail_v, (o_x - S) % WV, m_t & (o_j >= n_v), o_v, m_v, DV).to(b_v.dtype)
            b_acc, b_top, b_sum = attend(
                b_q, b_k, b_v, b_acc, b_top, b_sum, o_x, m_t, o_last, o_past, masks, i_start, factors, SHAPE
            )
    else:
        for i_block in range(i_first, i_end):
            o_u = i_block * BT + o_t
            m_t = o_u < n_window
            m_tail = m_t & (o_u >= S)
            o_x = tl.where(o_u < S, o_u, o_u + n_run)
            b_k = load_ring(p_tail_k, (o_x - S) % WK, m_tail, o_k, m_k, DK)
            b_v = load_ring(p_tail_v, (o_x - S) % WV, m_tail, o_v, m_v, DV)
            if S > 0:
                m_sink = m_t & (o_u < S)
                b_sink = load_ring(row.sink_k + i_wh * (S * DK), o_u, m_sink, o_k, m_k, DK)
                b_k = tl.where(m_sink[:, None], b_sink, b_k)
                b_sink = load_ring(row.sink_v + i_wh * (S * DV), o_u, m_sink, o_v, m_v, DV)
                b_v = tl.where(m_sink[:, None], b_sink, b_v)
            b_acc, b_top, b_sum = attend(
                b_q, b_k, b_v, b_acc, b_top, b_sum, o_x, m_t, o_last, o_past, masks, i_start, factors, SHAPE
            )

    # A split's part of the result: sums [BM, C], maxima in units of ln 2, and sums of probabilities.
    tl.store(out + (i_row + o_m)[:, None] * DV + o_v[None, :], b_acc, mask=m_m[:, None] & m_v[None, :])
    tl.store(out_top + i_row + o_m, b_top, mask=m_m)
    tl.store(out_sum + i_row + o_m, b_sum, mask=m_m)


def dequantized_decode(q: Tensor, *given: Any) -> Tensor:
    """Launcher of `hfkvq.kernels.decode_attention`; f64, and tiles that outgrow shared memory, take the reference."""
    counters, windows, runs, mask, sinks, scaling, softcap, form, _, rows = given
    sink_k, sink_v, tail_k, tail_v = (window.contiguous() for window in windows)
    batch, query_heads, queries, head_dim = q.shape
    heads, value_dim = sink_k.shape[1], sink_v.shape[-1]
    if q.dtype not in DOT_DTYPES or max(head_dim, value_dim) > (256 if q.dtype == torch.float32 else 512):
        return reference("decode_attention")(q, *given)
    views = split_runs(form, runs)
    dtype, queried = q.dtype, query_heads // heads * queries
    # The interpreter has no bf16 arithmetic: it dots the raw words.
    dot = DOT_DTYPES[dtype] if q.is_cuda else tl.float32
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
    # Splits of runs and of windows come from shapes alone: the lengths are on the device.
    aim = cdiv(multiprocessors(q.device) * PROGRAMS_PER_SM, batch * heads * tiles)
    seen = [form.pages_seen(view.table.shape[1], queries) for view in views]
    chunks = [cdiv(keys.page_size, block_t) for keys, _ in form.runs]
    paged = [min(blocks * own, aim, 128) for blocks, own in zip(seen, chunks, strict=True)]
    windowed = max(1, min(cdiv(form.sink + tail_k.shape[2], block_t), aim))
    splits = sum(paged) + windowed
    part = torch.empty((batch * heads, splits, queried, value_dim), dtype=torch.float32, device=q.device)
    part_top, part_sum = (torch.empty(part.shape[:3], dtype=torch.float32, device=q.device) for _ in range(2))
    kind, mask = (MaskKind(), q) if mask is None else (mask_kind(mask), mask_words(mask))
    counters = counters.contiguous()
    out = torch.empty((batch, query_heads, queries, value_dim), dtype=dtype, device=q.device)

    shape = Shape(
        heads, query_heads // heads, queries, head_dim, value_dim, form.sink, kind.kind, softcap > 0, dot, block_m,
        block_t, form.window, kind.strides[1] != 0 or kind.strides[2] != 0, len(views),
    )  # fmt: skip
    # Windows come last.
    unquantized = PageFormat(16, "token", 1, page)
    first = 0
    with on_device(q):
        for i, (view, formats) in enumerate(zip([*views, None], [*form.runs, (unquantized,) * 2], strict=True)):
            own, (keys, values) = windowed if view is None else paged[i], formats
            dequantized_kernel[(own, batch * heads, tiles)](
                q=q,
                row=Row(counters, sink_k, sink_v, tail_k, tail_v, rows),
                table=None if view is None else view.table.contiguous(),
                pos=None if view is None or view.pos is None else view.pos.contiguous(),
                keys=None if view is None else page_tensors(view.keys, keys),
                values=None if view is None else page_tensors(view.values, values),
                mask=mask,
                out=part,
                out_top=part_top,
                out_sum=part_sum,
                s_q=q.stride()[:3],
                s_m=kind.strides,
                factors=Factors(scaling, softcap),
                B=batch,
                N=0 if view is None else view.table.shape[1],
                L=kind.length,
                SPLITS=splits,
                FIRST=first,
                OWN=own,
                WK=tail_k.shape[2],
                WV=tail_v.shape[2],
                SHAPE=shape,
                RUN=i,
                KEYS=page_shape(keys, "keys", head_dim),
                VALUES=page_shape(values, "values", value_dim),
                num_warps=8 if wide > 256 else 4,
            )
            first += own
    merge = merge_launch(part.shape, queries, None if sinks is None else len(sinks), form.rotate_values, q.device)
    merge(part, part_top, part_sum, *([] if sinks is None else [sinks.contiguous()]), out)
    return out
