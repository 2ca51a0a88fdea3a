"""Products with pages: logits of queries, and weighted sums of values; contracts, and what PyTorch makes of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .dispatch import call, define, triton_slot
from .pages import PageFormat, Side
from .quantize import dequantize_pages


def table_pages(parts: Sequence[Tensor], table: Tensor, fmt: PageFormat, side: Side, head_dim: int) -> Tensor:
    """Dense pages of every row, f32 (B, n, H, G, D); reserved pages hold anything, NaN included."""
    ids = table.flatten().long()
    picked = [part.view(torch.uint8)[ids].view(part.dtype) if fmt.bits == 8 else part[ids] for part in parts]
    return dequantize_pages(picked, fmt, side, head_dim).unflatten(0, table.shape)


@define("qk_pages")
def _qk_pages(q: Tensor, table: Tensor, count: Tensor, parts: Sequence[Tensor], fmt: str) -> Tensor:
    form = PageFormat.parse(fmt)
    keys = table_pages(parts, table, form, "keys", q.shape[-1])
    logits = (q.float()[:, None] @ keys.transpose(-1, -2)).permute(0, 2, 3, 1, 4).flatten(-2)
    column = torch.arange(logits.shape[-1], device=q.device)
    return logits.masked_fill(column >= count[:, None, None, None], -torch.inf)


triton_slot("qk_pages", "products:qk_pages_triton")


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
    return call(_qk_pages, q, q, table, count, list(parts), fmt.spec)


def sv_pages(
    probs: Tensor, table: Tensor, count: Tensor, parts: Sequence[Tensor], fmt: PageFormat, head_dim: int
) -> Tensor:
    """Weighted sum of paged values: ``out[b, h, i, d] = sum_t probs[b, h, i, t] * v̂[b, h, t, d]``.

    The reference of attention alone adds values up by themselves, so this has no kernel.

    Args:
        probs: (B, H, r, n*G), 0 at columns the row does not have.
        table: i32 (B, n), page of each block.
        count: i32 (B,), tokens that the row has in these pages.
        parts: value tensors in the order of ``fmt.names``.

    Returns:
        f32 (B, H, r, D), in the basis of the pages.
    """
    values = table_pages(parts, table, fmt, "values", head_dim)
    slot = torch.arange(table.shape[1] * fmt.page_size, device=probs.device).view(-1, 1, fmt.page_size, 1)
    # Values are masked, not multiplied by 0: a reserved page may hold NaN.
    values = values.masked_fill(slot >= count[:, None, None, None, None], 0.0)
    probs = probs.unflatten(-1, (table.shape[1], fmt.page_size)).permute(0, 3, 1, 2, 4)
    return (probs.float() @ values).sum(1)
