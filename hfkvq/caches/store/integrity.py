"""Checks of a store's contents against each other."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hfkvq.kernels.decode import ABSENT, LENGTH, RUNS, START, column_positions

from .accounting import nbytes
from .host import is_hosted
from .routing import read_counters
from .row_lengths import row_states
from .state import SIDES, StoreState, in_turn


def contradictions(state: StoreState, columns: int) -> Iterator[str]:
    """Faults of a store that was given so many logical columns, in words; asks the device.

    Args:
        state: of the store.
        columns: what its rows were given, padding included.
    """
    counters, dropped = read_counters(state.counters), state.dropped.tolist()
    if min(map(min, counters)) < 0 or min(dropped) < 0:
        yield f"counters {counters} and {dropped} forgotten tokens"
        return
    ends = {start + length for start, length in zip(counters[START], counters[LENGTH], strict=True)}
    if ends != {columns}:
        yield f"rows end at columns {sorted(ends)} of {columns}"
    if any(gone > start for gone, start in zip(dropped, counters[START], strict=True)):
        yield f"{dropped} tokens forgotten of {counters[START]} columns before the first one"
    rows = row_states(counters)
    if not rows <= state.states:
        yield f"rows are {sorted(rows)}, and the host takes them to be of {sorted(state.states)}"
    known = state.counted()
    if known is not None and known != counters:
        yield f"counters are {counters}, and the host takes them to be {known}"
    if not state.format.ordered:
        # Tokens that no other run has sealed are in the last one, in the tail or in the sink.
        others = [sum(row) for row in zip(*counters[RUNS:-2:2], strict=True)] if len(state.runs) > 1 else []
        wide = max(
            length - min(state.sizes.sink, length) - held for length, held in zip(counters[LENGTH], others, strict=True)
        )
        if wide > state.wide_most:
            yield f"{wide} tokens in the last run and the tail, and the host takes them to be {state.wide_most}"
    for at, side in enumerate(SIDES):
        rest = max(max(row.length - state.sizes.sink, 0) - row.sealed(side) for row in rows)
        if rest > state.windows[2 + at].shape[2]:
            yield f"{rest} tokens in a tail of {state.windows[2 + at].shape[2]} {side}"
        elif not _stand_once(state, at):
            yield f"{side} of some token stand nowhere, or twice"
    for i in range(len(state.runs)):
        yield from _wrong_pages(state, i)
    pages = [part for view in state.runs for part in (*view.keys, *view.values) if part.numel()]
    if any(is_hosted(part) != state.offloaded for part in pages):
        yield f"pages lie elsewhere than in the {'host' if state.offloaded else 'device'}'s memory"
    if state.writes:
        yield "pages are still to be written"
    counted = nbytes(state)
    if counted.total != sum(x.nbytes for x in state.tensors()):
        yield "bytes are miscounted"


def _stand_once(state: StoreState, at: int) -> bool:
    """True if each token of a row stands in one column of `sink | runs | tail`."""
    length = state.windows[2 + at].shape[2]
    where = column_positions(state.format, state.counters, state.runs, length, SIDES[at]).sort(1).values
    is_there = where > ABSENT
    twice = (where[:, 1:] == where[:, :-1]) & is_there[:, 1:]
    complete = is_there.sum(1) == state.counters[LENGTH]
    return bool((complete & ~twice.any(1) & (where.amax(1) < state.counters[LENGTH].clamp(min=1))).all())


def _wrong_pages(state: StoreState, run: int) -> Iterator[str]:
    """Pages of a run that are not there, or are written to by one row and read by another."""
    view, page = state.runs[run], state.format.runs[run][0].page_size
    pages, blocks = view.keys[0].shape[0], view.table.shape[1]
    if any(part.shape[0] != pages for part in (*view.keys, *view.values)):
        yield f"run {run}: keys and values have different numbers of pages"
    if not blocks:
        return
    pages_held = state.format.pages(blocks)
    if state.format.ring and bool((view.table != in_turn(view.table[:, :pages_held], blocks)).any()):
        yield f"run {run}: blocks do not take a window's pages in turn"
    table, counts = view.table[:, :pages_held].long(), state.counters[RUNS + 2 * run : RUNS + 2 * run + 2]
    if bool((table < 0).any() | (table >= pages).any()):
        yield f"run {run}: a table names pages that are not among {pages}"
        return
    if bool((counts > blocks * page).any()):
        yield f"run {run}: {int(counts.max())} tokens in {blocks} pages of {page}"
    full = counts.amin(0) // page if not state.format.ring else counts.new_zeros(state.batch)
    is_open = torch.arange(table.shape[1], device=state.device) >= full[:, None]
    used = torch.bincount(table.flatten(), minlength=pages)
    if bool((used[table] > 1).logical_and(is_open).any()):
        yield f"run {run}: rows share a page that is not full"
    if any(row.unique().numel() < table.shape[1] for row in table):
        yield f"run {run}: a row has a page twice"
