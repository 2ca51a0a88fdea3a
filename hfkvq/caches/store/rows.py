"""Rows of a store: reordered, selected, joined, and cropped to their older tokens; pages that rows share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace as replaced

import torch
from torch import Tensor

from hfkvq.kernels.decode import LENGTH, RUNS, START, run_count
from hfkvq.kernels.pages import RunView, Side
from hfkvq.kernels.products import table_pages

from ..base import outside_inference_mode
from ..schemes.base import Layout, SideLayout
from .row_lengths import RowState
from .state import SIDES, PageWrite, StoreState, as_bytes, in_turn
from .windows import enlarge, grow_tail, pages_for


def reordered(state: StoreState, layout: Layout, rows: Tensor) -> StoreState:
    """The state whose row b is what row ``rows[b]`` was (i64 (B',)). Full pages are shared, not copied.

    Those of a window are copied, since every row will write to them again.
    """
    if state.format.ring:
        return selected(state, rows)
    grown = rows.shape[0] - state.batch
    for run in range(len(state.runs)):
        if grown > 0:
            state = enlarge(state, run, grown * state.runs[run].table.shape[1])
        state = share_pages(state, run, rows, layout)
        pos = state.runs[run].pos
        if pos is not None:
            state = state.with_run(run, pos=pos[rows])
    return take_rows(state, rows)


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


@outside_inference_mode
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
        runs.append(RunView(one.own_table(blocks, rows), pos, sides[0], sides[1]))
    return one.replace(
        counters=torch.cat([state.counters for state in states], 1),
        dropped=torch.cat([state.dropped for state in states]),
        windows=[torch.cat(windows) for windows in zip(*(state.windows for state in states), strict=True)],
        runs=runs,
        states=frozenset().union(*(state.states for state in states)),
        history=None,
        settled=max(state.settled for state in states),
    )


def used_blocks(state: StoreState) -> tuple[int, ...]:
    """Blocks of each run that may hold tokens; a run of a buffer has more."""
    longest = state.longest
    return tuple(min(view.table.shape[1], pages_for(state.format, i, longest)) for i, view in enumerate(state.runs))


@outside_inference_mode
def part(state: StoreState, first: int, rows: int, blocks: Sequence[int]) -> StoreState:
    """The state of some rows one behind another, with so many blocks in each run."""
    runs = []
    for view, count, (fmt, _) in zip(state.runs, blocks, state.format.runs, strict=True):
        pos = None if view.pos is None else view.pos[:, : count * fmt.page_size]
        runs.append(replaced(view, table=view.table[:, :count], pos=pos))
    return selected(state.replace(runs=runs), torch.arange(first, first + rows, device=state.device))


def take_rows(state: StoreState, rows: Tensor) -> StoreState:
    """The state whose row b is row ``rows[b]`` (i64 (B',)), in all but its runs."""
    return state.replace(
        counters=state.counters[:, rows].contiguous(),
        dropped=state.dropped[rows],
        windows=[window[rows] for window in state.windows],
        history=None,
    )


def share_pages(state: StoreState, run: int, rows: Tensor, layout: Layout) -> StoreState:
    """New table of a run after a reorder: full pages as they are, every other block a page that nobody reads then.

    The state has pages for as many rows as ``rows``.
    """
    # Tokens by which one side is ahead of the other at the most; blocks that hold those are copied.
    keys, values = layout.keys, layout.values
    slack = max(keys.local, values.local) + max(keys.unit, values.unit)
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


def cropped(state: StoreState, layout: Layout, tail_limit: Mapping[Side, int], tokens: int, seen: int) -> StoreState:
    """The state without the newest ``tokens`` logical columns of ``seen``.

    Tokens of a page that is cut return to the tail as that page has them (exact for 16-bit pages).

    Raises:
        NotImplementedError: a requantization has forgotten or moved tokens from among them, tokens have widths of
            their own and a page of several would be cut, or a window's pages have been filled again since.
    """
    ring = state.format.ring > 0
    held = _held_from(state, seen) if ring and seen > tokens else 0
    if tokens and seen - tokens < held:
        raise NotImplementedError(
            f"crop: cannot remove {tokens} tokens, since a window of {state.format.window} tokens has let go of what "
            "would be in sight then; crop less, or start the conversation again from a copy (copy.deepcopy) of the "
            "cache."
        )
    if not ring and seen - tokens < state.settled:
        raise NotImplementedError(
            f"crop: cannot remove {tokens} tokens, since a trim has evicted tokens from among them or before them; "
            "crop less, or start the conversation again from a copy (copy.deepcopy) of the cache."
        )
    sink = layout.sink
    length = (state.counters[LENGTH] - tokens).clamp(min=0)
    rest = (length - sink).clamp(min=0)
    reopens = any(max(row.length - tokens - sink, 0) < max(row[1:]) for row in state.states)
    states = set()
    for row in state.states:
        left = max(row.length - tokens, 0)
        behind = max(left - sink, 0)
        # One run reopens the unit that is cut. Several runs take no page apart: what stays sealed is just cut short.
        # An eviction may have left a unit that is not full, which stays if nothing is cut.
        keys, values = (
            min(row.sealed(side), behind // own.unit * own.unit if reopens and state.format.ordered else behind)
            for side, own in zip(SIDES, (layout.keys, layout.values), strict=True)
        )
        states.add(RowState(left, keys, values))
    counters = state.counters.clone()
    if reopens and not state.format.ordered:
        counters[RUNS:] = _sealed_before(state, length)
    elif reopens:
        for side, own in zip(SIDES, (layout.keys, layout.values), strict=True):
            state = _reopened(state, side, own, rest, tail_limit[side])
            kept = torch.minimum(run_count(counters, 0, side), rest // own.unit * own.unit)
            counters[RUNS + (side == "values")] = kept
    counters[LENGTH] = length
    counters[START] = counters[START].clamp(max=seen - tokens)
    # Pages that have been cut are lost for good.
    wide, settled = state.wide_most, held if ring else state.settled
    state = state.replace(counters=counters, states=frozenset(states), history=None, settled=settled)
    if reopens:
        # The tokens taken back may all have been in other runs, so the last one's bound cannot be lowered. A page that
        # was full, and so may be shared, takes new tokens again.
        state = state.replace(wide_bound=(wide, state.longest))
        state = state if ring else reordered(state, layout, torch.arange(state.batch, device=state.device))
    return state


def _held_from(state: StoreState, seen: int) -> int:
    """Fewest of ``seen`` logical columns that may be left, so that a ring of pages holds what is in sight then."""
    form, held = state.format, state.settled
    page = form.runs[0][0].page_size
    for row in state.states:
        first = (-(-max(row[1:]) // page) - form.ring) * page
        if first > 0:
            held = max(held, seen - row.length + form.sink + first + form.window - 1)
    return held


def _sealed_before(state: StoreState, length: Tensor) -> Tensor:
    """Counters of several runs without tokens at row positions from ``length`` (i32 (B,)) on: i32 (2*runs, B).

    Each run has its tokens in order of position, so the first ones of each stay. Asks the device once.
    """
    counts, torn = [], torch.zeros((), dtype=torch.bool, device=state.device)
    for i, (view, (fmt, _)) in enumerate(zip(state.runs, state.format.runs, strict=True)):
        if view.pos is None:
            raise AssertionError("a run of several has positions")
        count = run_count(state.counters, i, "keys")
        slot = torch.arange(view.pos.shape[1], device=state.device)
        stays = (slot < count[:, None]) & (view.pos < length[:, None])
        left = stays.sum(1, dtype=torch.int32)
        counts += [left, left]
        if fmt.whole:
            torn = torn | (left % fmt.page_size != 0).any()
    if bool(torn):
        raise NotImplementedError(
            "crop: cannot remove tokens that are already sealed where tokens have widths of their own and a page "
            "per channel would be cut; crop less, or start the conversation again from a copy (copy.deepcopy) of "
            "the cache."
        )
    return torch.stack(counts)


def _reopened(state: StoreState, side: Side, layout: SideLayout, rest: Tensor, limit: int) -> StoreState:
    """The tokens of a page that is cut, all before ``rest`` (i32 (B,)), are in the tail again; nothing is counted."""
    at = 2 + SIDES.index(side)
    count, view, fmt = run_count(state.counters, 0, side), state.runs[0], state.format.runs[0][at - 2]
    kept = torch.minimum(count, rest // layout.unit * layout.unit)
    # The blocks alone that the unit which is cut may stand in.
    blocks = torch.arange(1 + -(-layout.unit // fmt.page_size), dtype=torch.int32, device=state.device)
    first = kept // fmt.page_size
    table = view.table.gather(1, (first[:, None] + blocks).clamp(max=view.table.shape[1] - 1).long())
    pages = table_pages(view.keys if side == "keys" else view.values, table, fmt, side, state.dims[side])
    pages = pages.transpose(1, 2).flatten(2, 3)
    state = grow_tail(state, side, layout.unit, limit)
    behind = kept[:, None] + torch.arange(layout.unit, dtype=torch.int32, device=state.device)
    index = (behind - (first * fmt.page_size)[:, None]).long()
    back = behind < torch.minimum(count, rest)[:, None]
    tail = state.windows[at]
    values = pages.gather(2, index[:, None, :, None].expand(-1, state.heads, -1, pages.shape[3])).to(state.dtype)
    padded = torch.nn.functional.pad(tail, (0, 0, 0, 1))
    slot = torch.where(back, behind % tail.shape[2], tail.shape[2]).long()
    padded.scatter_(2, slot[:, None, :, None].expand_as(values), values)
    return state.with_window(at, padded[:, :, : tail.shape[2]].contiguous())
