"""Sums of a prompt's queries over ranges of tokens, which join a row's statistics."""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import call, define, triton_slot


@define("query_sums")
def _query_sums(q: Tensor, row: Tensor, start: Tensor, stop: Tensor, most: int, heads: int) -> Tensor:
    token = torch.arange(q.shape[2], device=q.device)
    shown = (token >= start[:, None]) & (token < stop[:, None])
    x = q.abs()[row.long()].double()
    # Queries outside of the range may be NaN, so they are masked before the sum.
    return torch.where(shown[:, None, :, None], x, 0.0).sum(2).unflatten(1, (heads, -1)).mean(2)


@_query_sums.register_fake
def _(q: Tensor, row: Tensor, start: Tensor, stop: Tensor, most: int, heads: int) -> Tensor:
    return q.new_empty((row.shape[0], heads, q.shape[3]), dtype=torch.float64)


triton_slot("query_sums", "query_sums:query_sums_triton")


def query_sums(q: Tensor, row: Tensor, start: Tensor, stop: Tensor, most: int, heads: int) -> Tensor:
    """Sums of magnitudes of queries over tokens: exact in f64 but for absurd ranges.

    Args:
        q: (B, Hq, n, D).
        row: i32 (R,), the row of ``q`` that each sum is of.
        start: i32 (R,), its first token.
        stop: i32 (R,), the token behind its last.
        most: tokens that a sum has at the most.
        heads: KV heads, H.

    Returns:
        f64 (R, H, D): means over the query heads of a KV head.
    """
    return call(_query_sums, q, q, row, start, stop, most, heads)
