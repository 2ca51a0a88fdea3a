"""Sums of queries on the GPU: a program adds some tokens of a KV head's query heads, and PyTorch adds programs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._lib import cdiv, on_device, power
from .compile import Wanted

CHUNK, STEP = 256, 16
"""Tokens of a program, and those that it looks at together."""


@triton.jit(do_not_specialize=["H"])
def query_sums_kernel(
    q, row, start, stop, out, s_b, s_h, s_l, s_d, H,
    D: tl.constexpr, SHARE: tl.constexpr, BD: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """CHUNK tokens of one KV head of one sum."""
    i_h, i_r, i_c = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_b = tl.load(row + i_r).to(tl.int64)
    i_first = tl.load(start + i_r) + i_c * CHUNK
    i_last = tl.minimum(tl.load(stop + i_r), i_first + CHUNK)
    o_d, o_t = tl.arange(0, BD), tl.arange(0, STEP)
    b_sum = tl.zeros([STEP, BD], tl.float64)
    for i_t in range(i_first, i_last, STEP):
        b_t = i_t + o_t
        m_q = (b_t < i_last)[:, None] & (o_d < D)[None, :]
        for i_g in tl.static_range(SHARE):
            p_q = q + i_b * s_b + (i_h * SHARE + i_g) * s_h
            b_q = tl.load(p_q + b_t.to(tl.int64)[:, None] * s_l + o_d[None, :] * s_d, mask=m_q, other=0.0)
            b_sum += tl.abs(b_q.to(tl.float64))
    p_out = out + ((i_c.to(tl.int64) * tl.num_programs(1) + i_r) * H + i_h) * D + o_d
    tl.store(p_out, tl.sum(b_sum, 0), mask=o_d < D)


def query_sums_triton(q: Tensor, row: Tensor, start: Tensor, stop: Tensor, most: int, heads: int) -> Tensor:
    """Launcher of `hfkvq.kernels.query_sums`."""
    _, query_heads, _, head_dim = q.shape
    share, rows, chunks = query_heads // heads, row.shape[0], max(1, cdiv(most, CHUNK))
    out = torch.empty((chunks, rows, heads, head_dim), dtype=torch.float64, device=q.device)
    if rows:
        with on_device(q):
            query_sums_kernel[(heads, rows, chunks)](
                q, row.contiguous(), start.contiguous(), stop.contiguous(), out, *q.stride(), heads,
                **_constants(head_dim, share),
            )  # fmt: skip
    return out.sum(0) / share


def _constants(head_dim: int, share: int) -> dict[str, int]:
    return {"D": head_dim, "SHARE": share, "BD": power(head_dim), "CHUNK": CHUNK, "STEP": STEP}


def query_sums_wanted(query_heads: int, heads: int, head_dim: int, dtype: torch.dtype) -> Iterator[Wanted]:
    """The variant for queries as models make them."""
    stride, i32 = query_heads * head_dim, torch.int32
    arguments = (dtype, i32, i32, i32, torch.float64, 16 * stride, head_dim, stride, 1, heads)
    yield Wanted(query_sums_kernel, arguments, _constants(head_dim, query_heads // heads))
