"""Products with pages: every program takes some blocks of one row's pages, for a few of its queries.

Splits of weighted sums add up side by side, then their sums in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dispatch import reference
from ..pages import PageFormat, Side
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


@triton.jit
def place_of(i_block, n, o_t, G: tl.constexpr, BT: tl.constexpr):
    """Place of a block of BT tokens: its page, its first slot, its tokens and a mask of those that the row has."""
    CHUNKS: tl.constexpr = (G + BT - 1) // BT
    i_slot = i_block % CHUNKS * BT
    o_j = i_block // CHUNKS * G + i_slot + o_t
    return i_block // CHUNKS, i_slot, o_j, (o_j < n) & (i_slot + o_t < G)


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
        i_page, i_slot, o_j, m_t = place_of(i_block, n, o_t, G, BT)
        i_head = tl.load(table + i_b * N + i_page).to(tl.int64) * H + i_h
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


@triton.jit(do_not_specialize=["N", "ROWS", "SPLITS"])
def sv_pages_kernel(
    x, table, count, page, part, s_xb, s_xh, s_xm, N, ROWS, SPLITS, H: tl.constexpr, SHAPE: tl.constexpr,
    DOT: tl.constexpr, BT: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """BM rows of weights over every SPLITS-th block of BT tokens. Channels are the long side of the product."""
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
    p_p = x + i_b * s_xb + i_h * s_xh + o_m[None, :].to(tl.int64) * s_xm

    n = tl.load(count + i_b)
    n_held = n // G * CHUNKS + (n % G + BT - 1) // BT
    b_acc = tl.zeros([FIELDS * BE, BM], tl.float32)
    for i_block in range(i_s, n_held, SPLITS):
        i_page, i_slot, o_j, m_t = place_of(i_block, n, o_t, G, BT)
        i_head = tl.load(table + i_b * N + i_page).to(tl.int64) * H + i_h
        b_v = load_page(page, i_head, i_slot, m_t, SHAPE, BT)
        # [BT, BM]
        b_p = tl.load(p_p + o_j[:, None], mask=m_t[:, None] & m_m[None, :], other=0.0)
        b_acc = tl.dot(tl.trans(b_v.to(DOT)), b_p.to(DOT), b_acc, input_precision="ieee")

    o_c, m_c = field_channels(tl.arange(0, BE), D, (D + FIELDS - 1) // FIELDS, FIELDS, BE)
    p_part = part + ((i_bh * SPLITS + i_s) * ROWS + o_m)[None, :] * D + o_c[:, None]
    tl.store(p_part, b_acc, mask=m_c[:, None] & m_m[None, :])


@triton.jit(do_not_specialize=["SIZE", "SPLITS"])
def sum_splits_kernel(part, out, SIZE, SPLITS, BN: tl.constexpr):
    """Splits added one after the other, so that sums do not depend on who came first."""
    i_n, i_bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_n = i_n * BN + tl.arange(0, BN)
    m_n = o_n < SIZE
    b_sum = tl.zeros([BN], tl.float32)
    for i_s in range(0, SPLITS):
        b_sum += tl.load(part + (i_bh * SPLITS + i_s) * SIZE + o_n, mask=m_n, other=0.0)
    tl.store(out + i_bh * SIZE + o_n, b_sum, mask=m_n)


def _as_operand(x: Tensor) -> Tensor:
    """Queries or weights as kernels take them: f64 is not among their dtypes, nor any stride between channels."""
    if x.dtype not in DOT_DTYPES:
        x = x.float()
    return x if x.stride(-1) == 1 else x.contiguous()


def _constants(form: PageFormat, side: Side, head_dim: int, dtype: torch.dtype, rows: int) -> dict[str, Any]:
    return {
        "num_warps": max(4, power(head_dim) // 64),
        "BT": page_block(form, head_dim, 4096 if dtype == torch.float32 else 8192, 16),
        "BM": max(8, min(32 if head_dim <= 512 else 8, power(rows))),
        "SHAPE": page_shape(form, side, head_dim),
    }


def _is_too_wide(head_dim: int, dtype: torch.dtype) -> bool:
    """True where a head's tiles outgrow shared memory."""
    return power(head_dim) > (512 if dtype == torch.float32 else 1024)


def _grid(x: Tensor, blocks: int, constants: dict[str, Any]) -> tuple[int, int, int]:
    """Splits of a row's blocks of tokens, rows and KV heads, and tiles of queries or weights."""
    batch, heads, rows, _ = x.shape
    tiles = cdiv(rows, constants["BM"])
    aim = -(-multiprocessors(x.device) * PROGRAMS_PER_SM // max(1, batch * heads * tiles))
    return max(1, min(blocks * cdiv(constants["SHAPE"].G, constants["BT"]), aim)), batch * heads, tiles


def _launch(kernel: Any, grid: tuple[int, int, int], x: Tensor, table: Tensor, count: Tensor, **rest: Any) -> None:
    """Arguments of both kernels for queries or weights ``x``, and ``rest``, by name."""
    _, heads, rows, _ = x.shape
    strides = dict(zip(("s_xb", "s_xh", "s_xm"), x.stride(), strict=False))
    named = {"table": table.contiguous(), "count": count.contiguous(), "N": table.shape[1]}
    kernel[grid](x=x, ROWS=rows, SPLITS=grid[0], H=heads, DOT=dot_dtype(x), **strides, **named, **rest)


def qk_pages_triton(q: Tensor, table: Tensor, count: Tensor, parts: Sequence[Tensor], fmt: str) -> Tensor:
    """Launcher of `hfkvq.kernels.qk_pages`; heads whose tiles outgrow shared memory take the reference."""
    form, q = PageFormat.parse(fmt), _as_operand(q)
    batch, heads, rows, head_dim = q.shape
    if _is_too_wide(head_dim, q.dtype):
        return reference("qk_pages")(q, table, count, parts, fmt)
    out = torch.empty((batch, heads, rows, table.shape[1] * form.page_size), dtype=torch.float32, device=q.device)
    if not out.numel():
        return out
    constants = _constants(form, "keys", head_dim, q.dtype, rows)
    grid = _grid(q, table.shape[1], constants)
    with on_device(q):
        _launch(qk_pages_kernel, grid, q, table, count, page=page_tensors(parts, form), out=out, **constants)
    return out


def qk_wanted(fmt: PageFormat, heads: int, head_dim: int, dtype: torch.dtype, rows: int) -> Iterator[Wanted]:
    """The variant for f32 queries and pages of a model's dtype, if there is a kernel."""
    if power(head_dim) <= 512:
        constants = _constants(fmt, "keys", head_dim, torch.float32, rows) | {"H": heads, "DOT": tl.float32}
        i32, f32 = torch.int32, torch.float32
        tensors = (f32, i32, i32, page_kinds(fmt, "keys", heads, head_dim, dtype), f32)
        yield Wanted(qk_pages_kernel, (*tensors, head_dim, head_dim, head_dim, 1, rows, 1), constants)


def sv_pages_triton(
    probs: Tensor, table: Tensor, count: Tensor, parts: Sequence[Tensor], fmt: str, head_dim: int
) -> Tensor:
    """Launcher of `hfkvq.kernels.sv_pages`; heads whose tiles outgrow shared memory take the reference."""
    form, probs = PageFormat.parse(fmt), _as_operand(probs)
    batch, heads, rows, _ = probs.shape
    if _is_too_wide(head_dim, probs.dtype):
        return reference("sv_pages")(probs, table, count, parts, fmt, head_dim)
    constants = _constants(form, "values", head_dim, probs.dtype, rows)
    grid = _grid(probs, table.shape[1], constants)
    part = torch.empty((batch, heads, grid[0], rows, head_dim), dtype=torch.float32, device=probs.device)
    if not part.numel():
        return part.sum(2)
    with on_device(probs):
        _launch(sv_pages_kernel, grid, probs, table, count, page=page_tensors(parts, form), part=part, **constants)
        if grid[0] == 1:
            return part.squeeze(2)
        out = torch.empty((batch, heads, rows, head_dim), dtype=torch.float32, device=probs.device)
        size = rows * head_dim
        block_n = min(512, power(size))
        programs = (cdiv(size, block_n), batch * heads)
        sum_splits_kernel[programs](part=part, out=out, SIZE=size, SPLITS=grid[0], BN=block_n)
    return out
