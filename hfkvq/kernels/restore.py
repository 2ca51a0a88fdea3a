"""Restore: a page's tokens come back into a row's window. The contract and its torch reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .dispatch import call, define, triton_slot
from .hadamard import saturated
from .pages import SIDES, StoreFormat, split_runs
from .quantize import dequantize_pages


@define("restore", mutates=("windows",))
def _restore(
    windows: Sequence[Tensor], run: Sequence[Tensor], due: Tensor, source: Tensor, rows: Tensor, store: str
) -> None:
    form, row = StoreFormat.parse(store), due.nonzero()[:, 0]
    (view,) = split_runs(form, run)
    at, to, ids = source.long()[row], rows.long()[row], view.table.long()[row, 0]
    for window, parts, fmt, side in zip(windows, (view.keys, view.values), form.runs[0], SIDES, strict=True):
        dense = dequantize_pages([part[ids] for part in parts], fmt, side, window.shape[3])
        held = window[at.clamp(min=0)]
        window[to] = torch.where((at < 0)[:, None, None, None], saturated(dense.float(), window.dtype), held)


triton_slot("restore", "restore:restore_triton")


def restore(
    windows: Sequence[Tensor], run: Sequence[Tensor], due: Tensor, source: Tensor, rows: Tensor, store: StoreFormat
) -> None:
    """Fills windows of a page's tokens, of the rows that want it: from another row's window, or from the first page.

    Args:
        windows: keys and values (N, H, G, D), in the basis of the store, written in place.
        run: flat tensors of the store's only run (`RunView.flat`); of a row's blocks the first is read.
        due: i32 (B,), not 0 for rows that want it; a launch leaves at once where none does.
        source: i32 (B,), the window that holds the same tokens, none that is written now; -1 for none.
        rows: i32 (B,), the window of each row.
    """
    call(_restore, windows[0], list(windows), list(run), due, source, rows, store.spec)
