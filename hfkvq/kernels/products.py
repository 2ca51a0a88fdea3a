"""Pages as dense tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .dispatch import launched
from .hadamard import saturated
from .pages import PageFormat, Side
from .quantize import dequantize_pages


def table_pages(parts: Sequence[Tensor], table: Tensor, fmt: PageFormat, side: Side, head_dim: int) -> Tensor:
    """Dense pages of every row, f32 (B, n, H, G, D); reserved pages hold anything, NaN included."""
    ids = table.flatten().long()
    picked = [part.view(torch.uint8)[ids].view(part.dtype) if fmt.bits == 8 else part[ids] for part in parts]
    return dequantize_pages(picked, fmt, side, head_dim).unflatten(0, table.shape)


@launched("gather:run_pages_triton")
def run_pages(
    table: Tensor,
    count: Tensor | None,
    parts: Sequence[Tensor],
    fmt: PageFormat,
    side: Side,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Dense tokens of every row's pages, (B, H, n*G, D); anything behind its ``count`` (i32 (B,)), NaN included.

    Without ``count`` all pages are read whole, and hold anything where nothing was sealed.
    """
    return saturated(table_pages(parts, table, fmt, side, head_dim).transpose(1, 2), dtype).flatten(2, 3)
