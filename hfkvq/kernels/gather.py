"""Everything a layer holds as dense keys or values: the contract and its torch reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .decode import ABSENT, START, column_positions, dense_columns, newest_pages
from .dispatch import launched
from .hadamard import hadamard, saturated
from .pages import SIDES, Side, StoreFormat, split_runs
from .quantize import dequantize_pages


@launched("gather:gather_rows_triton")
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
    at = SIDES.index(side)
    sink, tail = windows[at], windows[2 + at]
    views, before = newest_pages(store, counters, split_runs(store, runs), columns)
    positions = column_positions(store, counters, views, tail.shape[2], side, before)
    batch, count = positions.shape
    logical = positions + counters[START, :, None]
    if store.window:
        logical = logical - (counters[:2].sum(0)[:, None] - columns)
    logical = torch.where(positions > ABSENT, logical, columns).long()
    logical = torch.where(logical < 0, columns, logical)
    origin = torch.full((batch, columns + 1), -1, dtype=torch.int64, device=sink.device)
    origin.scatter_(1, logical.clamp(max=columns), torch.arange(count, device=sink.device).expand(batch, count))
    origin = origin[:, None, :columns, None]
    dense = dense_columns(store, windows, views, side)
    dense = dense.gather(2, origin.clamp(min=0).expand(-1, dense.shape[1], -1, dense.shape[3]))
    dense = dense.masked_fill(origin < 0, 0.0)
    return saturated(hadamard(dense, (store.rotate_keys, store.rotate_values)[at]), sink.dtype)


@launched("gather:gather_requests_triton")
def gather_requests(
    keys: Tensor,
    values: Tensor,
    units: Tensor,
    requests: Tensor,
    run: Sequence[Tensor],
    windows: Sequence[Tensor],
    tokens: int,
    store: StoreFormat,
) -> tuple[Tensor, Tensor]:
    """Dense keys and values of requests, one after another: what pages hold, rotated back, and then the new tokens.

    One launch for all requests, as attention functions take them that know requests of different lengths.

    Args:
        keys: (n, H, Dk), new tokens of all requests, after RoPE, not rotated.
        values: (n, H, Dv), likewise.
        units: i32 (2, U), request and block of G tokens: every block of the requests that are wanted.
        requests: i32 (4, R): of each request the row of the result at which it begins, tokens held, tokens with the new
            ones, and the first new one's row of ``keys``.
        run: flat tensors of the store's only run (`RunView.flat`): block i of a request holds its tokens from i * G on.
        windows: nothing where pages hold all tokens that are held; else i32 (2, R), windows of each request's first
            block and of the one that is being filled, and keys and values (N, H, G, D) in the basis of the store. Pages
            then hold the other blocks.
        tokens: of the result, m.

    Returns:
        (m, H, Dk) and (m, H, Dv). Kernels and the reference agree to the bit.
    """
    (view,), (fmt, _) = split_runs(store, run), store.runs[0]
    page, found = fmt.page_size, [x.new_zeros((tokens, *x.shape[1:])) for x in (keys, values)]
    for row in sorted(set(units[0].tolist())):
        begin, held, end, new = requests[:, row].tolist()
        ids = view.table[row, : -(-held // page)].long()
        sides = zip(
            SIDES, (keys, values), store.runs[0], (view.keys, view.values), (store.rotate_keys, store.rotate_values),
            found, strict=True,
        )  # fmt: skip
        for at, (side, x, own, parts, rotate, out) in enumerate(sides):
            dense = dequantize_pages([part[ids] for part in parts], own, side, x.shape[2]).float()
            dense = dense.transpose(1, 2).flatten(0, 1)[:held]
            if windows:
                first, filled = (windows[1 + at][i].transpose(0, 1).float() for i in windows[0][:, row].tolist())
                last = held // page * page
                dense[last:] = filled[: held - last]
                dense[:page] = first[:held]
            dense = saturated(hadamard(dense, rotate), x.dtype)
            out[begin : begin + end] = torch.cat([dense, x[new : new + end - held]])
    return found[0], found[1]
