"""Restore: a page's tokens come back into a row's window. The contract and its torch reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .dispatch import call, define, triton_slot
from .hadamard import saturated
from .pages import PageFormat, Side
from .quantize import dequantize_pages


@define("restore", mutates=("windows",))
def _restore(
    windows: Tensor,
    parts: Sequence[Tensor],
    table: Tensor,
    due: Tensor,
    source: Tensor,
    rows: Tensor,
    fmt: str,
    side: str,
) -> None:
    row = due.nonzero()[:, 0]
    at, to, ids = source.long()[row], rows.long()[row], table.long()[row, 0]
    pages = [part[ids] for part in parts]
    dense = dequantize_pages(pages, PageFormat.parse(fmt), "keys" if side == "keys" else "values", windows.shape[3])
    held = windows[at.clamp(min=0)]
    windows[to] = torch.where((at < 0)[:, None, None, None], saturated(dense.float(), windows.dtype), held)


triton_slot("restore", "restore:restore_triton")


def restore(
    windows: Tensor,
    parts: Sequence[Tensor],
    table: Tensor,
    due: Tensor,
    source: Tensor,
    rows: Tensor,
    fmt: PageFormat,
    side: Side,
) -> None:
    """Fills windows of a page's tokens, of the rows that want it: from another row's window, or from the first page.

    Args:
        windows: (N, H, G, D), in the basis of the store, written in place.
        parts: tensors of one side's pages, in the order of ``fmt.names``.
        table: i32 (B, n), blocks of each row, of which the first is read.
        due: i32 (B,), not 0 for rows that want it; a launch leaves at once where none does.
        source: i32 (B,), the window that holds the same tokens, none that is written now; -1 for none.
        rows: i32 (B,), the window of each row.
        side: "keys" or "values".
    """
    call(_restore, windows, windows, list(parts), table, due, source, rows, fmt.spec, side)
