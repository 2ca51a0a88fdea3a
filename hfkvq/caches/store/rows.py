"""Rows of a store: which of them there are, and which pages they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace as replaced

import torch
from torch import Tensor

from hfkvq.kernels.decode import run_count
from hfkvq.kernels.pages import RunView

from ..base.inference_mode import lasting
from ..schemes.base import Layout
from .growth import enlarge, pages_for
from .state import PageWrite, StoreState, as_bytes, in_turn, own_table


def reordered(state: StoreState, layout: Layout, rows: Tensor) -> StoreState:
    """The state whose row b is what row ``rows[b]`` was (i64 (B',)). Full pages are shared, not copied.

    Those of a window are copied, since every row will write to them again.
    """
    if state.format.ring:
        return selected(state, rows)
    grown, slack = rows.shape[0] - state.batch, _slack(layout)
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
    rows, slack = torch.arange(state.batch, device=state.device), _slack(layout)
    for run in range(len(state.runs)):
        state = share_pages(state, run, rows, slack)
    return state


def selected(state: StoreState, rows: Tensor) -> StoreState:
    """The state of rows ``rows`` (i64 (B',)) only, without the other rows' pages."""
    runs = []
    for view in state.runs:
        blocks, pos = view.table.shape[1], None if view.pos is None else view.pos[rows].clone()
        pages = view.table[:, : state.format.pages(blocks)][rows]
        ids = pages.flatten().long()
        keys, values = ([as_bytes(part)[ids].view(part.dtype) for part in parts] for parts in (view.keys, view.values))
        table = torch.arange(ids.shape[0], dtype=torch.int32, device=ids.device).view(pages.shape)
        runs.append(RunView(in_turn(table, blocks), pos, keys, values))
    return take_rows(state.replace(runs=runs), rows)


@lasting
def joined(states: Sequence[StoreState]) -> StoreState:
    """A state of the rows of several, which are of one format and have windows and runs of one size; copies pages."""
    one = states[0]
    rows, runs = sum(state.batch for state in states), []
    for run, blocks in enumerate(used_blocks(one)):
        views = [state.runs[run] for state in states]
        ids = [view.table[:, :blocks].flatten().long() for view in views]
        sides = [
            [
                torch.cat([as_bytes(part)[own] for part, own in zip(parts, ids, strict=True)]).view(parts[0].dtype)
                for parts in zip(*each, strict=True)
            ]
            for each in ([view.keys for view in views], [view.values for view in views])
        ]
        slots, parts = blocks * one.format.runs[run][0].page_size, [view.pos for view in views]
        pos = torch.cat([part[:, :slots] for part in parts if part is not None]) if parts[0] is not None else None
        runs.append(RunView(own_table(one.format, rows, blocks, one.device), pos, sides[0], sides[1]))
    return one.replace(
        counters=torch.cat([state.counters for state in states], 1),
        dropped=torch.cat([state.dropped for state in states]),
        windows=[torch.cat(windows) for windows in zip(*(state.windows for state in states), strict=True)],
        runs=runs,
        states=frozenset().union(*(state.states for state in states)),
        host_counters=None,
        settled=max(state.settled for state in states),
    )


def used_blocks(state: StoreState) -> tuple[int, ...]:
    """Blocks of each run that may hold tokens; a run of a buffer has more."""
    longest = state.longest
    return tuple(min(view.table.shape[1], pages_for(state.format, i, longest)) for i, view in enumerate(state.runs))


@lasting
def part(state: StoreState, first: int, rows: int, blocks: Sequence[int]) -> StoreState:
    """The state of some rows one behind another, with so many blocks in each run."""
    runs = []
    for view, count, (fmt, _) in zip(state.runs, blocks, state.format.runs, strict=True):
        pos = None if view.pos is None else view.pos[:, : count * fmt.page_size]
        runs.append(replaced(view, table=view.table[:, :count], pos=pos))
    return selected(state.replace(runs=runs), torch.arange(first, first + rows, device=state.device))


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
