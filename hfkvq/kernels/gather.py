"""Everything a layer holds as dense keys or values: the contract and its torch reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .decode import ABSENT, START, column_positions, dense_columns, newest_pages
from .dispatch import define, triton_slot
from .hadamard import hadamard, saturated
from .pages import Side, StoreFormat, split_runs


@define("gather_rows")
def _gather_rows(
    counters: Tensor, windows: Sequence[Tensor], runs: Sequence[Tensor], columns: int, store: str, side: str
) -> Tensor:
    form = StoreFormat.parse(store)
    which: Side = "keys" if side == "keys" else "values"
    views = split_runs(form, runs)
    sink, tail = (windows[0], windows[2]) if which == "keys" else (windows[1], windows[3])
    views, before = newest_pages(form, counters, views, columns)
    positions = column_positions(form, counters, views, tail.shape[2], which, before)
    batch, count = positions.shape
    logical = positions + counters[START, :, None]
    if form.window:
        logical = logical - (counters[:2].sum(0)[:, None] - columns)
    logical = torch.where(positions > ABSENT, logical, columns).long()
    logical = torch.where(logical < 0, columns, logical)
    origin = torch.full((batch, columns + 1), -1, dtype=torch.int64, device=sink.device)
    origin.scatter_(1, logical.clamp(max=columns), torch.arange(count, device=sink.device).expand(batch, count))
    origin = origin[:, None, :columns, None]
    dense = dense_columns(form, windows, views, which)
    dense = dense.gather(2, origin.clamp(min=0).expand(-1, dense.shape[1], -1, dense.shape[3]))
    dense = dense.masked_fill(origin < 0, 0.0)
    rotate = form.rotate_keys if which == "keys" else form.rotate_values
    return saturated(hadamard(dense, rotate, back=True), sink.dtype)


@_gather_rows.register_fake
def _(
    counters: Tensor, windows: Sequence[Tensor], runs: Sequence[Tensor], columns: int, store: str, side: str
) -> Tensor:
    sink = windows[0] if side == "keys" else windows[1]
    return sink.new_empty((sink.shape[0], sink.shape[1], columns, sink.shape[3]))


triton_slot("gather_rows", "gather:gather_rows_triton")


def gather_rows(
    counters: Tensor,
    windows: Sequence[Tensor],
    runs: Sequence[Tensor],
    columns: int,
    store: StoreFormat,
    side: Side,
) -> Tensor:
    """Dense keys or values in logical order, rotated back: the way to attention functions that know no pages.

    Args:
        counters: i32 (2 + 2*runs, B), see `decode_attention`.
        windows: sink and tail tensors, see `decode_attention`.
        runs: flat tensors of all runs.
        columns: number of logical columns, padding included; of a store with a window the newest ones, which hold
            no token that has fallen out of its pages.
        side: "keys" or "values".

    Returns:
        (B, H, columns, D) in the model's dtype; 0 at padding, and wherever else a row has no token. Kernels and the
        reference agree to the bit.
    """
    return _gather_rows(counters, list(windows), list(runs), columns, store.spec, side)
