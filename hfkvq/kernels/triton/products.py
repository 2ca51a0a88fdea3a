"""Logits of pages: every program takes some blocks of one row's pages, for a few of its queries."""

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
    page_kinds,
    page_shape,
    page_tensors,
    power,
)
from .compile import Wanted

PROGRAMS_PER_SM = 8


@triton.jit(do_not_specialize=["N", "ROWS", "SPLITS"])
def qk_pages_kernel(
    x, table, count, page, out, s_xb, s_xh, s_xm, N, ROWS, SPLITS, H: tl.constexpr, SHAPE: tl.constexpr,
    DOT: tl.constexpr, BT: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """BM queries against every SPLITS-th block of BT tokens. Tokens are the long side of the product."""
    i_s, i_bh, i_m = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    i_b, i_h = i_bh // H, i_bh % H
    D: tl.constexpr = SHAPE.D
    G: tl.constexpr = SHAPE.G
    BE: tl.constexpr = SHAPE.BE
    FIELDS: tl.constexpr = 16 // SHAPE.BITS if SHAPE.BITS < 8 else 1
    CHUNKS: tl.constexpr = (G + BT - 1) // BT
    o_m = i_m * BM + tl.arange(0, BM)
    m_m = o_m < ROWS
    o_t = tl.arange(0, BT)
    o_c, m_c = field_channels(tl.arange(0, BE), D, (D + FIELDS - 1) // FIELDS, FIELDS, BE)
    # [FIELDS * BE, BM]
    p_q = x + i_b * s_xb + i_h * s_xh + o_m[None, :].to(tl.int64) * s_xm + o_c[:, None]
    b_q = tl.load(p_q, mask=m_c[:, None] & m_m[None, :], other=0.0).to(DOT)
    p_out = out + (i_bh * ROWS + o_m)[None, :] * (N * G)

    n = tl.load(count + i_b)
    n_held = n // G * CHUNKS + (n % G + BT - 1) // BT
    n_mine = (tl.maximum(n_held - i_s, 0) + SPLITS - 1) // SPLITS
    for i in range(0, n_mine):
        i_block = i_s + i * SPLITS
        # A block of BT tokens: its first slot in its page, its columns and a mask of those that the row has.
        i_slot = i_block % CHUNKS * BT
        o_j = i_block // CHUNKS * G + i_slot + o_t
        m_t = (o_j < n) & (i_slot + o_t < G)
        i_head = tl.load(table + i_b * N + i_block // CHUNKS).to(tl.int64) * H + i_h
        b_k = load_page(page, i_head, i_slot, m_t, SHAPE, BT)
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


def _constants(form: PageFormat, head_dim: int, dtype: torch.dtype, rows: int) -> dict[str, Any]:
    return {
        "num_warps": max(4, power(head_dim) // 64),
        "BT": page_block(form, head_dim, 4096 if dtype == torch.float32 else 8192, 16),
        "BM": max(8, min(32 if head_dim <= 512 else 8, power(rows))),
        "SHAPE": page_shape(form, "keys", head_dim),
    }


def qk_pages_triton(q: Tensor, table: Tensor, count: Tensor, parts: Sequence[Tensor], fmt: str) -> Tensor:
    """Launcher of `hfkvq.kernels.qk_pages`; heads whose tiles outgrow shared memory take the reference."""
    form = PageFormat.parse(fmt)
    # f64 is not among the kernel's dtypes, nor any stride between channels.
    q = q if q.dtype in DOT_DTYPES else q.float()
    q = q if q.stride(-1) == 1 else q.contiguous()
    batch, heads, rows, head_dim = q.shape
    if power(head_dim) > (512 if q.dtype == torch.float32 else 1024):
        return reference("qk_pages")(q, table, count, parts, fmt)
    blocks = table.shape[1]
    out = torch.empty((batch, heads, rows, blocks * form.page_size), dtype=torch.float32, device=q.device)
    if not out.numel():
        return out
    constants = _constants(form, head_dim, q.dtype, rows)
    tiles = cdiv(rows, constants["BM"])
    aim = -(-multiprocessors(q.device) * PROGRAMS_PER_SM // max(1, batch * heads * tiles))
    splits = max(1, min(blocks * cdiv(form.page_size, constants["BT"]), aim))
    s_xb, s_xh, s_xm, _ = q.stride()
    with on_device(q):
        qk_pages_kernel[splits, batch * heads, tiles](
            x=q, table=table.contiguous(), count=count.contiguous(), page=page_tensors(parts, form), out=out,
            s_xb=s_xb, s_xh=s_xh, s_xm=s_xm, N=blocks, ROWS=rows, SPLITS=splits, H=heads, DOT=dot_dtype(q),
            **constants,
        )  # fmt: skip
    return out


def qk_wanted(fmt: PageFormat, heads: int, head_dim: int, dtype: torch.dtype, rows: int) -> Iterator[Wanted]:
    """The variant for f32 queries and pages of a model's dtype, if there is a kernel."""
    if power(head_dim) <= 512:
        constants = _constants(fmt, head_dim, torch.float32, rows) | {"H": heads, "DOT": tl.float32}
        i32, f32 = torch.int32, torch.float32
        tensors = (f32, i32, i32, page_kinds(fmt, "keys", heads, head_dim, dtype), f32)
        yield Wanted(qk_pages_kernel, (*tensors, head_dim, head_dim, head_dim, 1, rows, 1), constants)
