"""Weights of pages by their queries, on the GPU."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._lib import power
from .compile import Wanted
from .launch import Launch

STEP = 16
"""Tokens that a program looks at together."""


@triton.jit
def range_sum(
    q, i_first, i_last, s_h, s_l, s_d, D: tl.constexpr, SHARE: tl.constexpr, BD: tl.constexpr, STEP: tl.constexpr
):
    """Sum of magnitudes of tokens of SHARE heads, f64 [BD]."""
    o_d, o_t = tl.arange(0, BD), tl.arange(0, STEP)
    b_sum = tl.zeros([STEP, BD], tl.float64)
    for i_t in range(i_first, i_last, STEP):
        b_t = i_t + o_t
        m_q = (b_t < i_last)[:, None] & (o_d < D)[None, :]
        for i_g in tl.static_range(SHARE):
            p_q = q + i_g * s_h + b_t.to(tl.int64)[:, None] * s_l + o_d[None, :] * s_d
            b_q = tl.load(p_q, mask=m_q, other=0.0)
            b_sum += tl.abs(b_q.to(tl.float64))
    return tl.sum(b_sum, 0)


@triton.jit(do_not_specialize=["ranges", "rows", "N", "B"])
def page_weights_kernel(
    q, ranges, rows, sums, counts, weight, N, B, s_l, s_h, H: tl.constexpr, D: tl.constexpr, G: tl.constexpr,
    SHARE: tl.constexpr, BD: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One head of a page that is full of new tokens, or of a request."""
    i_h, i_n = tl.program_id(0), tl.program_id(1)
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    p_range = ranges + i_n
    i_page, i_request = tl.load(p_range + 2 * N), tl.load(p_range + 3 * N)
    i_row = tl.load(rows + tl.maximum(i_request, 0)).to(tl.int64)
    p_sums = sums + (i_row * H + i_h) * D + o_d
    b_held = tl.load(p_sums, mask=m_d & (tl.load(p_range + 6 * N) != 0), other=0.0)
    p_q = q + i_h * SHARE * s_h
    if i_page >= 0:
        b_sum = range_sum(p_q, tl.load(p_range), tl.load(p_range + N), s_h, s_l, 1, D, SHARE, BD, STEP)
        b_sum = (b_sum / SHARE + b_held) / G
        tl.store(weight + (i_page * H + i_h) * D + o_d, b_sum.to(tl.float32), mask=m_d)
        b_held = tl.zeros([BD], tl.float64)
    if i_request >= 0:
        b_sum = range_sum(p_q, tl.load(p_range + 4 * N), tl.load(p_range + 5 * N), s_h, s_l, 1, D, SHARE, BD, STEP)
        # Every warp has read what is held by now.
        tl.debug_barrier()
        tl.store(p_sums, b_sum / SHARE + b_held, mask=m_d)
        tl.store(counts + i_h * B + i_row, tl.load(p_range + 7 * N))


@lru_cache(maxsize=256)
def _weights_launch(
    heads: int, share: int, dim: int, page: int, ranges: int, rows: int, strides: tuple[int, int], device: torch.device
) -> Launch:
    """Takes queries, ranges, rows, sums, counts, and what is written."""
    numbers = {"N": ranges, "B": rows, "s_l": strides[0], "s_h": strides[1]}
    constants = {"H": heads, "D": dim, "G": page, "SHARE": share, "BD": power(dim), "STEP": STEP}
    return Launch(page_weights_kernel, (heads, ranges), numbers, constants, device)


def page_weights_wanted(
    query_heads: int, heads: int, head_dim: int, page: int, dtype: torch.dtype, device: torch.device
) -> Wanted:
    """The variant for queries as models make them."""
    strides = query_heads * head_dim, head_dim
    made = _weights_launch(heads, query_heads // heads, head_dim, page, 1, 1, strides, device)
    return made.wanted([dtype, torch.int32, torch.int32, torch.float64, torch.int32, torch.float32])


def page_weights_triton(
    q: Tensor, ranges: Tensor, rows: Tensor, sums: Tensor, counts: Tensor, pages: int, page_size: int
) -> Tensor:
    """Launcher of `hfkvq.kernels.page_weights`."""
    assert all([x.is_contiguous() for x in (sums, counts)]), "written in place"
    q = q if q.stride(2) == 1 else q.contiguous()
    heads, dim = sums.shape[1:]
    weight = torch.empty((pages, heads, dim), dtype=torch.float32, device=q.device)
    if ranges.shape[1]:
        sizes = heads, q.shape[1] // heads, dim, page_size, ranges.shape[1], len(sums)
        launch = _weights_launch(*sizes, (q.stride(0), q.stride(1)), q.device)
        launch(q, ranges.contiguous(), rows.contiguous(), sums, counts, weight)
    return weight
