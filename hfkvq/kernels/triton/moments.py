"""Moments of attention: a program has the sum of a query's weights, then one has some keys' moments over all queries.

The logits are read three times, and nothing of their size is written.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dispatch import reference
from ..moments import LEAST
from ._lib import cdiv, on_device
from .compile import Wanted

BLOCK = 2048
"""Keys of a query that are summed at a time."""

KEYS = 64
"""Keys of a program that has their moments."""

QUERIES = 32
"""Queries it takes at a time."""

LEAST_PROB = tl.constexpr(LEAST)


@triton.jit(do_not_specialize=["n", "Q"])
def weight_sums_kernel(x, sinks, tops, shares, n, Q, BLOCK: tl.constexpr):
    """One query's greatest logit, and what a weight of 1 beside it pays: nothing if the query sees nothing.

    Two numbers, because the logarithm of a sum would be rounded as the logits are, whose differences matter.
    """
    i_row = tl.program_id(0).to(tl.int64)
    p_x = x + i_row * n
    o_n = tl.arange(0, BLOCK)
    b_top = tl.full([BLOCK], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK], tl.float32)
    for i in range(0, n, BLOCK):
        b_x = tl.load(p_x + i + o_n, mask=i + o_n < n, other=float("-inf"))
        b_new = tl.maximum(b_top, b_x)
        b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_sum = b_sum * tl.exp(b_top - b_safe) + tl.exp(b_x - b_safe)
        b_top = b_new
    top = tl.max(b_top, 0)
    if sinks is not None:
        sink = tl.load(sinks + i_row // Q)
        top = tl.maximum(top, sink)
    safe = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(b_sum * tl.exp(b_top - safe), 0)
    if sinks is not None:
        total += tl.exp(sink - safe)
    tl.store(tops + i_row, safe)
    tl.store(shares + i_row, tl.where(total > 0.0, 1.0 / total, 0.0))


@triton.jit(do_not_specialize=["n", "Q", "R"])
def moments_kernel(x, tops, shares, real, out, n, Q, R, BN: tl.constexpr, BQ: tl.constexpr):
    """Mean, squares, fourth powers and entropy of BN keys over the queries of one head."""
    i_n, i_nr = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_n = i_n * BN + tl.arange(0, BN)
    o_q = tl.arange(0, BQ)
    m_n = o_n < n
    p_x = x + i_nr * Q * n + o_n[None, :]
    p_tops, p_shares = tops + i_nr * Q, shares + i_nr * Q
    p_real = real + i_nr // R * Q
    b_total = tl.zeros([BN], tl.float32)
    b_entropy = tl.zeros([BN], tl.float32)
    count = 0.0
    for i in range(0, Q, BQ):
        m_q = i + o_q < Q
        b_w = tl.load(p_real + i + o_q, mask=m_q, other=0).to(tl.float32)
        b_top = tl.load(p_tops + i + o_q, mask=m_q, other=0.0)
        b_share = tl.load(p_shares + i + o_q, mask=m_q, other=0.0)
        p_tile = p_x + (i + o_q).to(tl.int64)[:, None] * n
        # [BQ, BN]
        b_a = tl.load(p_tile, mask=m_q[:, None] & m_n[None, :], other=float("-inf"))
        b_a = tl.exp(b_a - b_top[:, None]) * (b_share * b_w)[:, None]
        b_total += tl.sum(b_a, 0)
        b_entropy -= tl.sum(b_a * tl.log(b_a + LEAST_PROB), 0)
        count += tl.sum(b_w, 0)
    b_mean = b_total / tl.maximum(count, 1.0)
    b_square = tl.zeros([BN], tl.float32)
    b_fourth = tl.zeros([BN], tl.float32)
    for i in range(0, Q, BQ):
        m_q = i + o_q < Q
        b_w = tl.load(p_real + i + o_q, mask=m_q, other=0).to(tl.float32)
        b_top = tl.load(p_tops + i + o_q, mask=m_q, other=0.0)
        b_share = tl.load(p_shares + i + o_q, mask=m_q, other=0.0)
        p_tile = p_x + (i + o_q).to(tl.int64)[:, None] * n
        b_a = tl.load(p_tile, mask=m_q[:, None] & m_n[None, :], other=float("-inf"))
        b_d = (tl.exp(b_a - b_top[:, None]) * b_share[:, None] - b_mean[None, :]) * b_w[:, None]
        b_d = b_d * b_d
        b_square += tl.sum(b_d, 0)
        b_fourth += tl.sum(b_d * b_d, 0)
    p_out = out + i_nr * n + o_n
    s_out = tl.num_programs(1).to(tl.int64) * n
    tl.store(p_out, b_mean, mask=m_n)
    tl.store(p_out + s_out, b_square, mask=m_n)
    tl.store(p_out + 2 * s_out, b_fourth, mask=m_n)
    tl.store(p_out + 3 * s_out, b_entropy, mask=m_n)


def attention_moments_triton(logits: Tensor, sinks: Tensor | None, real: Tensor) -> Tensor:
    """Launcher of `hfkvq.kernels.attention_moments`; other dtypes than f32 take the reference."""
    rows, share, queries, columns = logits.shape
    if logits.dtype != torch.float32 or not logits.numel():
        return reference("attention_moments")(logits, sinks, real)
    logits, real = logits.contiguous(), real.contiguous()
    blocks = cdiv(columns, KEYS)
    tops, shares = torch.empty((2, rows * share * queries), dtype=torch.float32, device=logits.device).unbind()
    out = torch.empty((4, rows, share, columns), dtype=torch.float32, device=logits.device)
    with on_device(logits):
        named = {"x": logits, "tops": tops, "shares": shares, "n": columns, "Q": queries}
        own = None if sinks is None else sinks.float().contiguous()
        weight_sums_kernel[(rows * share * queries,)](sinks=own, BLOCK=BLOCK, **named)
        block_q = QUERIES if queries > 1 else 1
        named |= {"real": real, "out": out, "R": share}
        moments_kernel[(blocks, rows * share)](BN=KEYS, BQ=block_q, **named)
    return out


def moments_wanted(queries: int) -> Iterator[Wanted]:
    """The variants for so many queries, without sinks."""
    f32 = torch.float32
    yield Wanted(weight_sums_kernel, (f32, None, f32, f32, 1, queries), {"BLOCK": BLOCK})
    constants = {"BN": KEYS, "BQ": QUERIES if queries > 1 else 1}
    yield Wanted(moments_kernel, (f32, f32, f32, torch.bool, f32, 1, queries, 1), constants)
