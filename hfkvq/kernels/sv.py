"""Weighted sums of paged values: the contract and its torch reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .dispatch import define, triton_slot
from .pages import PageFormat
from .qk import table_pages


@define("sv_pages")
def _sv_pages(probs: Tensor, table: Tensor, count: Tensor, parts: Sequence[Tensor], fmt: str, head_dim: int) -> Tensor:
    form = PageFormat.parse(fmt)
    values = table_pages(parts, table, form, "values", head_dim)
    slot = torch.arange(table.shape[1] * form.page_size, device=probs.device).view(-1, 1, form.page_size, 1)
    # Not 0 * value: what a reserved page holds may be NaN.
    values = values.masked_fill(slot >= count[:, None, None, None, None], 0.0)
    probs = probs.unflatten(-1, (table.shape[1], form.page_size)).permute(0, 3, 1, 2, 4)
    return (probs.float() @ values).sum(1)


@_sv_pages.register_fake
def _(probs: Tensor, table: Tensor, count: Tensor, parts: Sequence[Tensor], fmt: str, head_dim: int) -> Tensor:
    return probs.new_empty((*probs.shape[:3], head_dim), dtype=torch.float32)


triton_slot("sv_pages", "sv:sv_pages_triton")


def sv_pages(
    probs: Tensor, table: Tensor, count: Tensor, parts: Sequence[Tensor], fmt: PageFormat, head_dim: int
) -> Tensor:
    """Weighted sum of paged values: ``out[b, h, i, d] = sum_t probs[b, h, i, t] * v̂[b, h, t, d]``.

    Args:
        probs: (B, H, r, n*G), 0 at columns the row does not have.
        table: i32 (B, n), page of each block.
        count: i32 (B,), tokens that the row has in these pages.
        parts: value tensors in the order of ``fmt.names``.
        fmt: their format.
        head_dim: D of the values.

    Returns:
        f32 (B, H, r, D), in the basis of the pages.
    """
    return _sv_pages(probs, table, count, list(parts), fmt.spec, head_dim)
