"""Rows of a store: which of them there are, and which pages they share."""

from __future__ import annotations

from dataclasses import replace as replaced

import torch
from torch import Tensor
from torch.nn.functional import pad

from hfkvq.kernels.decode import RUNS, run_count

from ..lasting import lasting
from ..routing import read_counters
from ..scheme import Layout
from .growth import enlarge, fresh_pages
from .pool import as_bytes, backed, shared, taken
from .state import PageWrite, StoreState, in_turn


def reordered(state: StoreState, layout: Layout, rows: Tensor) -> StoreState:
    """The state whose row b is what row ``rows[b]`` was (i64 (B',)). Full pages are shared, not copied.

    Those of a window are copied, since every row will write to them again.
    """
    if state.format.ring:
        return selected(state, rows)
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
    if state.format.ring:
        return state
    state, rows, slack = state.unshared(), torch.arange(state.batch, device=state.device), _slack(layout)
    for run in range(len(state.runs)):
        state = share_pages(state, run, rows, slack)
    return state


def selected(state: StoreState, rows: Tensor) -> StoreState:
    """The state of rows ``rows`` (i64 (B',)) only, without the other rows' pages."""
    runs = []
    for view in state.runs:
        blocks = view.table.shape[1]
        own = taken(replaced(view, table=view.table[:, : state.format.pages(blocks)]), rows)
        runs.append(replaced(own, table=in_turn(own.table, blocks)))
    return take_rows(state.replace(runs=runs), rows)


def _blocks(state: StoreState, counters: Tensor) -> list[tuple[list[int], list[int]]]:
    """By run, each row's blocks that are full, and those that hold any token, by counters of the state."""
    told, found = read_counters(counters), []
    for run, (fmt, _) in enumerate(state.format.runs):
        pairs = list(zip(*told[RUNS + 2 * run : RUNS + 2 * run + 2], strict=True))
        found.append(([min(x) // fmt.page_size for x in pairs], [-(-max(x) // fmt.page_size) for x in pairs]))
    return found


@lasting
def brought_home(state: StoreState) -> StoreState:
    """The state of a buffer in tensors of its own, or where copies share its pages; only then it asks the device."""
    home = state.home
    if home is None:
        return state.map(torch.clone)
    before, now, runs = _blocks(state, home.counters), _blocks(state, state.counters), []
    for run, (view, old) in enumerate(zip(state.runs, home.runs, strict=True)):
        width, last = view.table.shape[1], max(now[run][1])
        if old.lease is None or old.lease.backed > width:
            runs.append(taken(view))
            continue
        table = pad(old.table, (0, max(width - old.table.shape[1], 0)))[:, :width]
        own = replaced(old, table=table, pos=None if view.pos is None else view.pos.clone())
        if last > old.lease.backed:
            own = backed(own, last, fresh_pages(state, run))
        pairs = zip(before[run][0], now[run][1], strict=True)
        places = [(row, block) for row, (full, used) in enumerate(pairs) for block in range(full, used)]
        if places:
            rows, blocks = torch.tensor(places, device=state.device).T
            target, source = (each.table[rows, blocks].long() for each in (own, view))
            for new, part in zip((*own.keys, *own.values), (*view.keys, *view.values), strict=True):
                as_bytes(new)[target] = as_bytes(part)[source]
        runs.append(own)
    return state.replace(runs=()).map(torch.clone).replace(runs=runs)


@lasting
def copied(state: StoreState) -> tuple[StoreState, StoreState]:
    """What a state is to be from now on, and a copy of it that reads the same full pages. Asks the device."""
    own, theirs = [], []
    for run, (view, (full, used)) in enumerate(zip(state.runs, _blocks(state, state.counters), strict=True)):
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
