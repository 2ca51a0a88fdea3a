"""Weights of pages by the queries of their tokens: the contract and its torch reference."""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import launched


@launched("query_sums:page_weights_triton")
def page_weights(
    q: Tensor, ranges: Tensor, rows: Tensor, sums: Tensor, counts: Tensor, pages: int, page_size: int
) -> Tensor:
    """Mean magnitudes of queries of pages that new tokens fill, and sums of those of pages that are not full yet.

    Args:
        q: (n, Hq, D), queries of the new tokens of all requests.
        ranges: i32 (8, N). Of each page that is full of new tokens: its first query, the one behind its last, its
            number, -1 for no request, and four numbers of no meaning. Of each request the queries that fill the page
            that was being filled, likewise, and that page's number, or -1 where it does not become full; the request;
            first query of the page that is being filled afterwards, the one behind its last, whether ``sums`` belong to
            the page that was being filled, and tokens of the one that is being filled afterwards.
        rows: i32 (R,), each request's row of ``sums`` and ``counts``.
        sums: f64 (B, H, D), means over the query heads of a KV head, written in place.
        counts: i32 (H, B), queries in ``sums``, likewise.
        pages: P, that become full.
        page_size: G, their tokens.

    Returns:
        f32 (P, H, D); sums are exact in f64 but for absurd numbers, so it depends on no batch.
    """
    weight = q.new_zeros((pages, *sums.shape[1:]), dtype=torch.float32)

    def total(first: int, end: int) -> Tensor:
        return q[first:end].abs().double().sum(0).unflatten(0, (sums.shape[1], -1)).mean(1)

    for start, stop, page, request, begin, end, carried, left in ranges.T.tolist():
        row = int(rows[request]) if request >= 0 else -1
        held = sums[row].clone() if carried else 0.0
        if page >= 0:
            weight[page], held = ((total(start, stop) + held) / page_size).float(), 0.0
        if row >= 0:
            sums[row], counts[:, row] = total(begin, end) + held, left
    return weight
