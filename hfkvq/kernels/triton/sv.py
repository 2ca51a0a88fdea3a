"""Weighted sums of paged values: splits of a row's pages add up side by side, then their sums in order."""

from __future__ import annotations

from collections.abc import Sequence

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
    page_tensors,
    power,
)

PROGRAMS_PER_SM = 8


@triton.jit(do_not_specialize=["N", "ROWS", "SPLITS"])
def sv_pages_kernel(
    probs, table, count, codes, scale, zero, norm, high, high_index, full, full_index, part, s_pb, s_ph, s_pm, N, ROWS,
    SPLITS, H: tl.constexpr, D: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    PER_CHANNEL: tl.constexpr, TOKEN_MAJOR: tl.constexpr, N4: tl.constexpr, N16: tl.constexpr, DOT: tl.constexpr,
    BT: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """BM rows of weights over every SPLITS-th block of BT tokens. Channels are the long side of the product."""
    i_s, i_bh, i_m = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    i_b, i_h = i_bh // H, i_bh % H
    FIELDS: tl.constexpr = 16 // BITS if BITS < 8 else 1
    CHUNKS: tl.constexpr = (G + BT - 1) // BT
    o_m = i_m * BM + tl.arange(0, BM)
    m_m = o_m < ROWS
    o_t = tl.arange(0, BT)
    p_p = probs + i_b * s_pb + i_h * s_ph + o_m[None, :].to(tl.int64) * s_pm

    n = tl.load(count + i_b)
    n_held = n // G * CHUNKS + (n % G + BT - 1) // BT
    b_acc = tl.zeros([FIELDS * BE, BM], tl.float32)
    for i_block in range(i_s, n_held, SPLITS):
        i_slot = i_block % CHUNKS * BT
        o_j = i_block // CHUNKS * G + i_slot + o_t
        m_t = (o_j < n) & (i_slot + o_t < G)
        i_head = tl.load(table + i_b * N + i_block // CHUNKS).to(tl.int64) * H + i_h
        b_v = load_page(
            codes, scale, zero, norm, high, high_index, full, full_index, i_head, i_slot, m_t,
            D, G, BITS, GROUP, PER_CHANNEL, TOKEN_MAJOR, N4, N16, BT, BE,
        )  # fmt: skip
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


def sv_pages_triton(
    probs: Tensor, table: Tensor, count: Tensor, parts: Sequence[Tensor], fmt: str, head_dim: int
) -> Tensor:
    """Launcher of `hfkvq.kernels.sv_pages`; heads whose tiles outgrow shared memory take the reference."""
    form = PageFormat.parse(fmt)
    batch, heads, rows, _ = probs.shape
    if probs.dtype not in DOT_DTYPES:
        probs = probs.float()
    if power(head_dim) > (512 if probs.dtype == torch.float32 else 1024):
        return reference("sv_pages")(probs, table, count, parts, fmt, head_dim)
    if probs.stride(-1) != 1:
        probs = probs.contiguous()
    blocks = table.shape[1]
    block_t = page_block(form, head_dim, 4096 if probs.dtype == torch.float32 else 8192, 16)
    block_m = max(8, min(32 if head_dim <= 512 else 8, power(rows)))
    tiles = cdiv(rows, block_m)
    aim = -(-multiprocessors(probs.device) * PROGRAMS_PER_SM // max(1, batch * heads * tiles))
    splits = max(1, min(blocks * -(-form.page_size // block_t), aim))
    part = torch.empty((batch, heads, splits, rows, head_dim), dtype=torch.float32, device=probs.device)
    if not part.numel():
        return part.sum(2)
    with on_device(probs):
        sv_pages_kernel[(splits, batch * heads, tiles)](
            probs,
            table.contiguous(),
            count.contiguous(),
            *page_tensors(parts, form),
            part,
            *probs.stride()[:3],
            blocks,
            rows,
            splits,
            H=heads,
            DOT=dot_dtype(probs),
            num_warps=max(4, power(head_dim) // 64),
            BT=block_t,
            BM=block_m,
            **page_constants(form, "values", head_dim),
        )
        if splits == 1:
            return part.squeeze(2)
        out = torch.empty((batch, heads, rows, head_dim), dtype=torch.float32, device=probs.device)
        size = rows * head_dim
        block_n = min(512, power(size))
        sum_splits_kernel[(cdiv(size, block_n), batch * heads)](part, out, size, splits, BN=block_n)
    return out
