"""Products with pages: logits of queries, and pages by themselves."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .dispatch import launched
from .pages import PageFormat, Side
from .quantize import dequantize_pages


def table_pages(parts: Sequence[Tensor], table: Tensor, fmt: PageFormat, side: Side, head_dim: int) -> Tensor:
    """Dense pages of every row, f32 (B, n, H, G, D); reserved pages hold anything, NaN included."""
    ids = table.flatten().long()
    picked = [part.view(torch.uint8)[ids].view(part.dtype) if fmt.bits == 8 else part[ids] for part in parts]
    return dequantize_pages(picked, fmt, side, head_dim).unflatten(0, table.shape)


@launched("gather:run_pages_triton")
def run_pages(
    table: Tensor, count: Tensor, parts: Sequence[Tensor], fmt: PageFormat, side: Side, head_dim: int
) -> Tensor:
    """Dense tokens of every row's pages, f32 (B, H, n*G, D); anything behind its ``count`` (i32 (B,)), NaN included."""
    return table_pages(parts, table, fmt, side, head_dim).transpose(1, 2).flatten(2, 3)


def qk_pages(q: Tensor, table: Tensor, count: Tensor, parts: Sequence[Tensor], fmt: PageFormat) -> Tensor:
    """Logits of queries against paged keys: ``out[b, h, i, t] = sum_d q[b, h, i, d] * k̂[b, h, t, d]``.

    Args:
        q: (B, H, r, D), already scaled by 1/sqrt(D), in the basis of the pages.
        table: i32 (B, n), page of each block.
        count: i32 (B,), tokens that the row has in these pages; later columns are -inf.
        parts: key tensors in the order of ``fmt.names``.

    Returns:
        f32 (B, H, r, n*G).
    """
    logits = q.float() @ run_pages(table, count, parts, fmt, "keys", q.shape[-1]).transpose(-1, -2)
    column = torch.arange(logits.shape[-1], device=q.device)
    return logits.masked_fill(column >= count[:, None, None, None], -torch.inf)
