"""Smoothing of a call's queries and keys in one launch: one read of both, one write."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dispatch import reference
from ._lib import DOT_DTYPES, cdiv, power
from .compile import Wanted
from .hadamard import saturated
from .launch import Launch

TILE = 2048
"""Elements that a program takes."""

FEW = 4096
"""Rows of queries or keys, up to which a program takes four at the most."""

_STRIDES = ["s_qb", "s_qh", "s_qt", "s_kb", "s_kh", "s_kt"]


# Few variants: the first step after a prompt finds the prompt's, also while a graph is captured.
@triton.jit(do_not_specialize=[*_STRIDES, "PROGRAMS", "HQ", "TQ", "QROWS", "H", "TK", "KROWS"])
def smooth_kernel(
    q, k, vectors, out_q, out_k, s_qb, s_qh, s_qt, s_kb, s_kh, s_kt, PROGRAMS, HQ, TQ, QROWS, H, TK, KROWS,
    D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """BR rows of queries, or, from program PROGRAMS on, of keys; a row is the D channels of a token and head."""
    i_p = tl.program_id(0)
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    if i_p < PROGRAMS:
        o_row = i_p * BR + tl.arange(0, BR)
        m_x = (o_row < QROWS)[:, None] & m_d[None, :]
        o_head = (o_row // TQ) % HQ
        o_b = (o_row // TQ // HQ).to(tl.int64)
        p_x = q + (o_b * s_qb + o_head.to(tl.int64) * s_qh + (o_row % TQ).to(tl.int64) * s_qt)[:, None] + o_d[None, :]
        # Query heads that share keys take one scale.
        p_scale = vectors + ((2 * H + o_head // (HQ // H)) * D)[:, None] + o_d[None, :]
        b_x = tl.load(p_x, mask=m_x, other=0.0).to(tl.float32) * tl.load(p_scale, mask=m_x, other=0.0)
        p_out = out_q + o_row.to(tl.int64)[:, None] * D + o_d[None, :]
        tl.store(p_out, saturated(b_x, out_q.dtype.element_ty), mask=m_x)
    else:
        o_row = (i_p - PROGRAMS) * BR + tl.arange(0, BR)
        m_x = (o_row < KROWS)[:, None] & m_d[None, :]
        o_head = (o_row // TK) % H
        o_b = (o_row // TK // H).to(tl.int64)
        p_x = k + (o_b * s_kb + o_head.to(tl.int64) * s_kh + (o_row % TK).to(tl.int64) * s_kt)[:, None] + o_d[None, :]
        p_shift = vectors + (o_head * D)[:, None] + o_d[None, :]
        b_x = tl.load(p_x, mask=m_x, other=0.0).to(tl.float32) - tl.load(p_shift, mask=m_x, other=0.0)
        b_x *= tl.load(p_shift + H * D, mask=m_x, other=0.0)
        p_out = out_k + o_row.to(tl.int64)[:, None] * D + o_d[None, :]
        tl.store(p_out, saturated(b_x, out_k.dtype.element_ty), mask=m_x)


def smooth_triton(q: Tensor, k: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Launcher of `hfkvq.kernels.smooth`; float64 takes the reference."""
    if k.dtype not in DOT_DTYPES or q.dtype != k.dtype or not vectors.is_contiguous():
        return reference("smooth")(q, k, vectors)
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    out_q, out_k = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    if q.numel() or k.numel():
        smooth_launch(q.shape, q.stride(), k.shape, k.stride(), k.device)(q, k, vectors, out_q, out_k)
    return out_q, out_k


@lru_cache(maxsize=1024)
def smooth_launch(
    queries: tuple[int, ...],
    query_stride: tuple[int, ...],
    keys: tuple[int, ...],
    key_stride: tuple[int, ...],
    device: torch.device,
) -> Launch:
    """Takes queries, keys, the vectors, and what is written."""
    dim, query_rows, key_rows = keys[3], math.prod(queries[:3]), math.prod(keys[:3])
    block = max(1, TILE // power(dim))
    # One token's few rows are spread over more programs.
    block = min(block, 4) if max(query_rows, key_rows) <= FEW else block
    programs = cdiv(query_rows, block)
    grid = (programs + cdiv(key_rows, block),)
    numbers = dict(zip(_STRIDES, (*query_stride[:3], *key_stride[:3]), strict=True))
    numbers |= {"PROGRAMS": programs, "HQ": queries[1], "TQ": max(queries[2], 1), "QROWS": query_rows}
    numbers |= {"H": keys[1], "TK": max(keys[2], 1), "KROWS": key_rows}
    constants = {"D": dim, "BR": block, "BD": power(dim), "num_warps": 4}
    return Launch(smooth_kernel, grid, numbers, constants, device)


def smooth_wanted(query_heads: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> Iterator[Wanted]:
    """The variants for few rows and for many."""
    for rows in (1, FEW + 1):
        shapes = [(rows, own, 1, dim) for own in (query_heads, heads)]
        strides = [(own * dim, dim, dim, 1) for own in (query_heads, heads)]
        launch = smooth_launch(shapes[0], strides[0], shapes[1], strides[1], device)
        yield launch.wanted([dtype, dtype, torch.float32, dtype, dtype])
