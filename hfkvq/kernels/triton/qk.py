"""Logits against paged keys: every program takes some blocks of one row's pages, for a few of its queries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dispatch import reference
from ..pages import PageFormat
from ._lib import (
    DOT_DTYPES,
    cdiv,
    dot_dtype,
    field_channels,
    load_page,
    multiprocessors,
    on_device,
    page_block,
    page_constants,
    page_kinds,
    page_tensors,
    power,
)
from .ahead import Wanted

PROGRAMS_PER_SM = 8


@triton.jit(do_not_specialize=["N", "ROWS", "SPLITS"])
def qk_pages_kernel(
    q, table, count, codes, scale, zero, norm, high, high_index, full, full_index, out, s_qb, s_qh, s_qm, N, ROWS,
    SPLITS, H: tl.constexpr, D: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    PER_CHANNEL: tl.constexpr, TOKEN_MAJOR: tl.constexpr, N4: tl.constexpr, N16: tl.constexpr, DOT: tl.constexpr,
    BT: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """BM queries against every SPLITS-th block of BT tokens. Tokens are the long side of the product."""
    i_s, i_bh, i_m = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    i_b, i_h = i_bh // H, i_bh % H
    FIELDS: tl.constexpr = 16 // BITS if BITS < 8 else 1
    CHUNKS: tl.constexpr = (G + BT - 1) // BT
    o_m = i_m * BM + tl.arange(0, BM)
    m_m = o_m < ROWS
    o_t = tl.arange(0, BT)
    o_c, m_c = field_channels(tl.arange(0, BE), D, (D + FIELDS - 1) // FIELDS, FIELDS, BE)
    # [FIELDS * BE, BM]
    p_q = q + i_b * s_qb + i_h * s_qh + o_m[None, :].to(tl.int64) * s_qm + o_c[:, None]
    b_q = tl.load(p_q, mask=m_c[:, None] & m_m[None, :], other=0.0).to(DOT)
    p_out = out + (i_bh * ROWS + o_m)[None, :] * (N * G)

    n = tl.load(count + i_b)
    n_held = n // G * CHUNKS + (n % G + BT - 1) // BT
    n_mine = (tl.maximum(n_held - i_s, 0) + SPLITS - 1) // SPLITS
    for i in range(0, n_mine):
        i_block = i_s + i * SPLITS
        i_slot = i_block % CHUNKS * BT
        o_j = i_block // CHUNKS * G + i_slot + o_t
        m_t = (o_j < n) & (i_slot + o_t < G)
        i_head = tl.load(table + i_b * N + i_block // CHUNKS).to(tl.int64) * H + i_h
        b_k = load_page(
            codes, scale, zero, norm, high, high_index, full, full_index, i_head, i_slot, m_t,
            D, G, BITS, GROUP, PER_CHANNEL, TOKEN_MAJOR, N4, N16, BT, BE,
        )  # fmt: skip
        # [BT, BM]
        b_s = tl.dot(b_k.to(DOT), b_q, input_precision="ieee")
        b_s = tl.where(m_t[:, None], b_s, float("-inf"))
        tl.store(p_out + o_j[:, None], b_s, mask=m_m[None, :] & (i_slot + o_t < G)[:, None])
    # Pages beyond the row's own are not even looked up.
    for i_block in range(i_s + n_mine * SPLITS, N * CHUNKS, SPLITS):
        i_slot = i_block % CHUNKS * BT
        o_j = i_block // CHUNKS * G + i_slot + o_t
        b_s = tl.full([BT, BM], float("-inf"), tl.float32)
        tl.store(p_out + o_j[:, None], b_s, mask=m_m[None, :] & (i_slot + o_t < G)[:, None])


def qk_pages_triton(q: Tensor, table: Tensor, count: Tensor, parts: Sequence[Tensor], fmt: str) -> Tensor:
    """Launcher of `hfkvq.kernels.qk_pages`; heads whose tiles outgrow shared memory take the reference."""
    form = PageFormat.parse(fmt)
    batch, heads, rows, head_dim = q.shape
    if q.dtype not in DOT_DTYPES:
        q = q.float()
    if power(head_dim) > (512 if q.dtype == torch.float32 else 1024):
        return reference("qk_pages")(q, table, count, parts, fmt)
    if q.stride(-1) != 1:
        q = q.contiguous()
    blocks = table.shape[1]
    out = torch.empty((batch, heads, rows, blocks * form.page_size), dtype=torch.float32, device=q.device)
    if not out.numel():
        return out
    constants = _constants(form, head_dim, q.dtype, rows)
    tiles = cdiv(rows, constants["BM"])
    aim = -(-multiprocessors(q.device) * PROGRAMS_PER_SM // (batch * heads * tiles))
    splits = min(blocks * -(-form.page_size // constants["BT"]), aim)
    with on_device(q):
        qk_pages_kernel[(splits, batch * heads, tiles)](
            q,
            table.contiguous(),
            count.contiguous(),
            *page_tensors(parts, form),
            out,
            *q.stride()[:3],
            blocks,
            rows,
            splits,
            H=heads,
            DOT=dot_dtype(q),
            **constants,
        )
    return out


def _constants(form: PageFormat, head_dim: int, dtype: torch.dtype, rows: int) -> dict[str, Any]:
    return {
        "num_warps": max(4, power(head_dim) // 64),
        "BT": page_block(form, head_dim, 4096 if dtype == torch.float32 else 8192, 16),
        "BM": max(8, min(32 if head_dim <= 512 else 8, power(rows))),
        **page_constants(form, "keys", head_dim),
    }


def qk_wanted(fmt: PageFormat, heads: int, head_dim: int, dtype: torch.dtype, rows: int) -> Iterator[Wanted]:
    """The variant for f32 queries and pages of a model's dtype, if there is a kernel."""
    if power(head_dim) <= 512:
        constants = _constants(fmt, head_dim, torch.float32, rows) | {"H": heads, "DOT": tl.float32}
        i32, f32 = torch.int32, torch.float32
        tensors = (f32, i32, i32, *page_kinds(fmt, "keys", heads, head_dim, dtype), f32)
        yield Wanted(qk_pages_kernel, (*tensors, head_dim, head_dim, head_dim, 1, rows, 1), constants)
