"""Joins attention over two sets of keys: one read of both, one write."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..dispatch import reference
from ._lib import DOT_DTYPES, cdiv, on_device, power
from .hadamard import saturated

TILE = 2048
"""Elements that a program takes."""


@triton.jit(do_not_specialize=["Q"])
def join_kernel(
    out, lse, other, other_lse, s_ob, s_oh, s_oq, s_xb, s_xh, s_xq, HQ, Q,
    D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """BR queries of a row and head."""
    i_q, i_bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_b, i_h = i_bh // HQ, i_bh % HQ
    o_q, o_d = i_q * BR + tl.arange(0, BR), tl.arange(0, BD)
    m_q = o_q < Q
    m_x = m_q[:, None] & (o_d < D)[None, :]
    # [BR]
    b_own = tl.load(lse + i_bh * Q + o_q, mask=m_q, other=0.0)
    b_more = tl.load(other_lse + i_bh * Q + o_q, mask=m_q, other=0.0)
    b_top = tl.maximum(b_own, b_more)
    # A query that sees nothing on either side has -inf twice.
    b_top = tl.where(b_top == float("-inf"), 0.0, b_top)
    m_own, m_more = m_x & (b_own > float("-inf"))[:, None], m_x & (b_more > float("-inf"))[:, None]
    b_own, b_more = tl.exp(b_own - b_top), tl.exp(b_more - b_top)
    b_sum = b_own + b_more
    b_total = tl.maximum(b_sum, 1e-30)
    o_row = o_q.to(tl.int64)[:, None]
    p_out = out + i_b * s_ob + i_h * s_oh + o_row * s_oq + o_d[None, :]
    p_other = other + i_b * s_xb + i_h * s_xh + o_row * s_xq + o_d[None, :]
    # [BR, BD]
    b_x = tl.load(p_out, mask=m_own, other=0.0).to(tl.float32) * (b_own / b_total)[:, None]
    b_x += tl.load(p_other, mask=m_more, other=0.0).to(tl.float32) * (b_more / b_total)[:, None]
    tl.store(p_out, saturated(b_x, out.dtype.element_ty), mask=m_x)
    b_lse = tl.where(b_sum > 0, b_top + tl.log(b_total), float("-inf"))
    tl.store(lse + i_bh * Q + o_q, b_lse, mask=m_q)


def join_triton(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Launcher of `hfkvq.kernels.join`; float64 takes the reference."""
    if out.dtype not in DOT_DTYPES or out.stride(-1) != 1 or other.stride(-1) != 1:
        reference("join")(out, lse, other, other_lse)
        return
    batch, heads, queries, dim = out.shape
    block = max(1, TILE // power(dim))
    with on_device(out):
        join_kernel[(cdiv(queries, block), batch * heads)](
            out,
            lse,
            other,
            other_lse,
            *out.stride()[:3],
            *other.stride()[:3],
            heads,
            queries,
            D=dim,
            BR=block,
            BD=power(dim),
            num_warps=4,
        )
