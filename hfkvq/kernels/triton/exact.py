"""Exact keys on the GPU: a program looks at a page of a head, and leaves at once if it is not due."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dispatch import reference
from ..pages import PageFormat
from ._lib import power
from .compile import Wanted
from .launch import Launch


@triton.jit(do_not_specialize=["count", "new", "N", "M"])
def keep_exact_kernel(
    exact, slots, table, count, new, source, index, query, s_b, s_h, s_l, s_d, H, N, M,
    G: tl.constexpr, D: tl.constexpr, COUNT: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """The COUNT exact keys of one page and head."""
    i_j, i_bh = tl.program_id(0) * G, tl.program_id(1).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    if i_j >= tl.minimum(tl.load(new + i_b), M):
        return
    i_head = tl.load(table + i_b * N + (tl.load(count + i_b) + i_j) // G).to(tl.int64) * H + i_h
    o_t, o_d = tl.arange(0, BT), tl.arange(0, BD)
    p_source = source + i_b * s_b + i_h * s_h + o_d * s_d
    p_column = index + i_b * M + i_j
    b_score = o_t * 0.0
    if query is not None:
        b_q = tl.load(query + i_bh * D + o_d, mask=o_d < D, other=0.0)
        b_column = tl.load(p_column + o_t, mask=o_t < G, other=0).to(tl.int64)
        # [BT, BD]
        p_x = p_source[None, :] + b_column[:, None] * s_l
        b_x = tl.load(p_x, mask=(o_t < G)[:, None] & (o_d < D)[None, :], other=0.0).to(tl.float32) * b_q[None, :]
        for i in tl.static_range(BD.bit_length() - 1):
            b_x = tl.sum(tl.reshape(b_x, (BT, 2, BD >> (i + 1))), 1)
        b_x = tl.reshape(b_x, (BT,))
        b_score = tl.where(b_x == b_x, b_x, float("-inf"))
    m_left = o_t < G
    for r in tl.static_range(COUNT):
        # The first of equals among those that are left.
        b_top = tl.max(tl.where(m_left, b_score, float("-inf")), 0)
        i_slot = tl.min(tl.where(m_left & (b_score == b_top), o_t, BT), 0)
        m_left = m_left & (o_t != i_slot)
        b_key = tl.load(p_source + tl.load(p_column + i_slot).to(tl.int64) * s_l, mask=o_d < D, other=0.0)
        tl.store(exact + (i_head * COUNT + r) * D + o_d, b_key, mask=o_d < D)
        tl.store(slots + i_head * COUNT + r, i_slot.to(slots.dtype.element_ty))


@lru_cache(maxsize=256)
def _launch(
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    device: torch.device,
    page: int,
    exact: int,
    blocks: int,
    tokens: int,
    asks: bool,
) -> Launch:
    """Takes both planes, table, count, new, source and index, and the query if there is one.

    ``shape`` and ``stride`` are the source's, the first of them but for its tokens.
    """
    batch, heads, head_dim = shape
    block, wide = power(page), power(head_dim)
    numbers = dict(zip(("s_b", "s_h", "s_l", "s_d"), stride, strict=True)) | {"H": heads, "N": blocks, "M": tokens}
    constants = {"G": page, "D": head_dim, "COUNT": exact, "BT": block, "BD": wide}
    # A fused multiply-add would round once where the contract rounds twice, and choose otherwise at ties.
    constants |= {"enable_fp_fusion": False, "num_warps": max(1, min(8, block * wide // 2048))}

    def nest(given: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(given) if asks else (*given, None)

    return Launch(keep_exact_kernel, (tokens // page, batch * heads), numbers, constants, device, nest)


def keep_exact_triton(
    exact: Tensor,
    slots: Tensor,
    table: Tensor,
    count: Tensor,
    new: Tensor,
    source: Tensor,
    index: Tensor,
    query: Tensor | None,
    page: int,
) -> None:
    """Launcher of `hfkvq.kernels.exact.keep_exact`; bf16 rounding under the interpreter takes the reference."""
    # Triton's interpreter truncates where bf16 should be rounded.
    if not source.is_cuda and exact.dtype == torch.bfloat16 != source.dtype:
        return reference("keep_exact")(exact, slots, table, count, new, source, index, query, page)
    assert all([x.is_contiguous() for x in (exact, slots)]), "pages are contiguous: they are written in place"
    (batch, heads, _, head_dim), tokens = source.shape, index.shape[1]
    if not tokens or not batch:
        return None
    rest = source.stride(), source.device, page, exact.shape[2], table.shape[1], tokens
    launch = _launch((batch, heads, head_dim), *rest, query is not None)
    given = [table.contiguous(), count.contiguous(), new.contiguous(), source, index.contiguous()]
    given += [] if query is None else [query.to(torch.float32).contiguous()]
    launch(exact, slots, *given)
    return None


def exact_wanted(
    fmt: PageFormat,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    tokens: int,
) -> Iterator[Wanted]:
    """The variant for a source (B, H, D) of the model's dtype, with a query."""
    made = _launch(shape, stride, device, fmt.page_size, fmt.exact, 1, tokens, True)
    i32 = torch.int32
    yield made.wanted([dtype, fmt.index_dtype(fmt.page_size), i32, i32, i32, dtype, i32, torch.float32])
