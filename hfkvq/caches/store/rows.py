"""Rows of a store: which of them there are, and which pages they share."""

from __future__ import annotations

import torch
from torch import Tensor

from hfkvq.kernels.decode import run_count

from .state import StoreState


def take_rows(state: StoreState, rows: Tensor) -> StoreState:
    """The state whose row b is row ``rows[b]`` (i64 (B',)), in all but its runs."""
    return state.replace(
        counters=state.counters[:, rows].contiguous(),
        dropped=state.dropped[rows],
        windows=[window[rows] for window in state.windows],
        tally=None,
    )


def share_pages(state: StoreState, run: int, rows: Tensor, slack: int) -> StoreState:
    """New table of a run after a reorder: full pages as they are, every other block a page that nobody reads.

    Args:
        state: has pages for as many rows as ``rows``.
        run: which run.
        rows: i64 (B',), rows that the new ones are copies of.
        slack: tokens by which one side may be ahead of the other; blocks that hold those are copied.
    """
    view = state.runs[run]
    blocks, device = view.table.shape[1], view.table.device
    if not blocks:
        return state.with_run(run, table=view.table[rows])
    page = state.format.runs[run][0].page_size
    counts = torch.stack([run_count(state.counters, run, "keys"), run_count(state.counters, run, "values")])
    full = (counts.amin(0) // page)[rows]
    table = view.table[rows]
    shared = torch.arange(blocks, device=device) < full[:, None]
    pages = view.keys[0].shape[0]
    used = torch.zeros(pages + 1, dtype=torch.int8, device=device)
    used[torch.where(shared, table, pages).long().flatten()] = 1
    free = torch.argsort(used[:pages], stable=True)
    rank = (~shared).flatten().cumsum(0) - 1
    fresh = free[rank.clamp(min=0)].view(table.shape).to(torch.int32)
    own = torch.where(shared, table, fresh)
    offset = torch.arange(min(-(-slack // page) + 1, blocks), device=device)
    block = (full[:, None] + offset).clamp(max=blocks - 1).long()
    source, target = table.gather(1, block).long(), own.gather(1, block).long()
    for part in (*view.keys, *view.values):
        raw = part.view(torch.uint8) if part.dtype == torch.float8_e4m3fn else part
        raw[target.flatten()] = raw[source.flatten()]
    return state.with_run(run, table=own)


def pages_of(part: Tensor, ids: Tensor) -> Tensor:
    """Pages ``ids`` of a tensor of them. Not every device indexes fp8."""
    if part.dtype == torch.float8_e4m3fn:
        return part.view(torch.uint8)[ids].view(part.dtype)
    return part[ids]
