"""Restore: a page's tokens come back into a row's window. The contract and its torch reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .dispatch import launched
from .hadamard import saturated
from .pages import SIDES, StoreFormat, split_runs
from .quantize import dequantize_pages


@launched("restore:restore_triton")
def restore(
    due: Tensor, source: Tensor, rows: Tensor, windows: Sequence[Tensor], run: Sequence[Tensor], store: StoreFormat
) -> None:
    """Fills windows of a page's tokens, of the rows that want it: from another row's window, or from the first page.

    Args:
        due: i32 (B,), not 0 for rows that want it; a launch leaves at once where none does.
        source: i32 (B,), the window that holds the same tokens, none that is written now; -1 for none.
        rows: i32 (B,), the window of each row.
        windows: keys and values (N, H, G, D), in the basis of the store, written in place.
        run: flat tensors of the store's only run (`RunView.flat`); of a row's blocks the first is read.
    """
    row, (view,) = due.nonzero()[:, 0], split_runs(store, run)
    at, to, ids = source.long()[row], rows.long()[row], view.table.long()[row, 0]
    for window, parts, fmt, side in zip(windows, (view.keys, view.values), store.runs[0], SIDES, strict=True):
        dense = dequantize_pages([part[ids] for part in parts], fmt, side, window.shape[3])
        held = window[at.clamp(min=0)]
        window[to] = torch.where((at < 0)[:, None, None, None], saturated(dense.float(), window.dtype), held)
