"""Rows of a store: which of them there are, and which pages they share."""

from __future__ import annotations

import torch
from torch import Tensor

from hfkvq.kernels.decode import RUNS, run_count

from ..lasting import lasting
from ..routing import read_counters
from ..scheme import Layout
from .growth import enlarge, fresh_pages
from .pool import as_bytes, shared, taken
from .state import PageWrite, StoreState


def reordered(state: StoreState, layout: Layout, rows: Tensor) -> StoreState:
    """The state whose row b is what row ``rows[b]`` was (i64 (B',)). Full pages are shared, not copied."""
    state, grown, slack = state.unshared(), rows.shape[0] - state.batch, _slack(layout)
    for run in range(len(state.runs)):
        if grown > 0:
            state = enlarge(state, run, grown * state.runs[run].table.shape[1])
        state = share_pages(state, run, rows, slack)
        pos = state.runs[run].pos
        if pos is not None:
            state = state.with_run(run, pos=pos[rows])
    return take_rows(state, rows)


def part_pages(state: StoreState, layout: Layout) -> StoreState:
    """The state in which every page that is not full is of one row only."""
    state, rows, slack = state.unshared(), torch.arange(state.batch, device=state.device), _slack(layout)
    for run in range(len(state.runs)):
        state = share_pages(state, run, rows, slack)
    return state


def selected(state: StoreState, rows: Tensor) -> StoreState:
    """The state of rows ``rows`` (i64 (B',)) only, without the other rows' pages."""
    return take_rows(state.replace(runs=[taken(view, rows) for view in state.runs]), rows)


@lasting
def copied(state: StoreState) -> tuple[StoreState, StoreState]:
    """What a state is to be from now on, and a copy of it that reads the same full pages. Asks the device."""
    counters, own, theirs = read_counters(state.counters), [], []
    for run, (view, (fmt, _)) in enumerate(zip(state.runs, state.format.runs, strict=True)):
        counts = list(zip(*counters[RUNS + 2 * run : RUNS + 2 * run + 2], strict=True))
        full, used = [min(pair) // fmt.page_size for pair in counts], [-(-max(pair) // fmt.page_size) for pair in counts]
        pair = shared(view, full, used, fresh_pages(state, run)) if any(full) else (view, taken(view))
        own.append(pair[0])
        theirs.append(pair[1])
    copy = state.replace(runs=()).map(torch.clone)
    return state.replace(runs=own), copy.replace(runs=theirs)


def _slack(layout: Layout) -> int:
    """Tokens by which one side is ahead of the other at the most: the local window and a seal unit."""
    keys, values = layout.keys, layout.values
    return max(keys.local, values.local) + max(keys.unit, values.unit)


def take_rows(state: StoreState, rows: Tensor) -> StoreState:
    """The state whose row b is row ``rows[b]`` (i64 (B',)), in all but its runs."""
    return state.replace(
        counters=state.counters[:, rows].contiguous(),
        dropped=state.dropped[rows],
        windows=[window[rows] for window in state.windows],
        host_counters=None,
    )


def share_pages(state: StoreState, run: int, rows: Tensor, slack: int) -> StoreState:
    """New table of a run after a reorder: full pages as they are, every other block a page that nobody reads then.

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
    source, target = (ids.gather(1, block).long().flatten() for ids in (table, own))
    raw = [as_bytes(part) for part in (*view.keys, *view.values)]
    writes = [PageWrite(part, target, part[source]) for part in raw]
    return state.with_run(run, table=own).replace(writes=(*state.writes, *writes))
