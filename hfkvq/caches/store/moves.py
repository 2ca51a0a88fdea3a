"""Plan of a requantization: tokens that it forgets and moves, and their new places; masks and counts, no bytes yet."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hfkvq.kernels.decode import ABSENT, LENGTH, run_count
from hfkvq.kernels.pages import Side
from hfkvq.kernels.windows import tokens_due_by_row

from ..schemes.base import Layout
from .columns import positions, run_columns
from .state import SIDES, StoreState

EVICT, STAY = -1, -2
"""Targets beside the number of a run."""

LAST = torch.iinfo(torch.int32).max
"""Behind every position."""


class Moves(NamedTuple):
    """Tokens of one side of a run: entries that stay there and that come, bool (B, n), and how many: i32 (B,)."""

    stays: Tensor
    comes: Tensor
    kept: Tensor
    new: Tensor

    @classmethod
    def of(cls, stays: Tensor, comes: Tensor) -> Moves:
        return cls(stays, comes, *(mask.sum(1, dtype=torch.int32) for mask in (stays, comes)))

    def order(self, most_kept: int, most_new: int, coming: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Entries that stay, i64 (B, most_kept), those that come, (B, most_new), and these behind those.

        ``coming`` is `Plan.coming`.
        """
        old = self.stays.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :most_kept]
        fresh = torch.where(self.comes, coming, LAST).argsort(dim=1, stable=True)[:, :most_new]
        slot = torch.arange(most_kept + most_new, device=old.device)[None]
        pick = torch.where(slot < self.kept[:, None], slot, slot - self.kept[:, None] + most_kept)
        both = torch.cat([old, fresh], 1)
        return old, fresh, both.gather(1, pick.clamp(max=max(both.shape[1] - 1, 0)))


class Plan(NamedTuple):
    """Fate of each token of a row. Entries are columns where there are several runs, else the row's tokens.

    Attributes:
        where: i32 (B, n), row position of each entry, `ABSENT` where there is no token.
        to: i32 (B, n), its position then.
        columns: i64 (B, n), by side, where it stands in `sink | runs | tail`.
        coming: i32 (B, n), in whose order entries come to a run: that of columns, and of the tail that of positions.
            A tail is a ring, so that its columns would say how long it is.
        free: bool (B, n), tokens that are left and are not in the sink then.
        sink: bool (B, n), tokens in the sink then.
        gone: i32 (B,), tokens that are forgotten.
        length: i32 (B,), tokens that are left.
    """

    where: Tensor
    to: Tensor
    columns: dict[Side, Tensor]
    coming: Tensor
    free: Tensor
    sink: Tensor
    gone: Tensor
    length: Tensor


def planned(state: StoreState, target: Tensor, where: Tensor | None) -> Plan:
    """Tokens that are left, and their positions."""
    sink, length, device = state.sizes.sink, state.counters[LENGTH], state.device
    entry = torch.arange(target.shape[1], dtype=torch.int32, device=device)[None]
    if state.format.ordered:
        where = torch.where(entry < length[:, None], entry, ABSENT)
        first, size = run_columns(state)[0]
        columns = {}
        for at, side in enumerate(SIDES):
            behind, ring = entry - sink, state.windows[2 + at].shape[2]
            paged = behind < run_count(state.counters, 0, side)[:, None]
            place = torch.where(paged, first + behind, first + size + behind % ring)
            columns[side] = torch.where(entry < sink, entry, place).long()
        coming = entry
    else:
        where = positions(state) if where is None else where
        tail = run_columns(state)[-1][0]
        coming = torch.where(entry < tail, entry, tail + where)
        columns = dict.fromkeys(SIDES, entry.expand(state.batch, -1).long())
    evicted = (where > ABSENT) & (target == EVICT)
    left = (where > ABSENT) & ~evicted
    gone = evicted.sum(1, dtype=torch.int32)
    if state.format.ordered:
        before = evicted.cumsum(1, dtype=torch.int32)
    elif sink:
        at = torch.where(evicted, where, state.longest).long()
        before = torch.zeros(state.batch, state.longest + 1, dtype=torch.int32, device=device)
        before.scatter_(1, at, 1)[:, -1] = 0
        before = before.cumsum(1, dtype=torch.int32).gather(1, where.clamp(0, state.longest).long())
    else:
        before = gone[:, None]
    to = torch.where(left, where - before, ABSENT)
    first_tokens = left & (to < sink) if sink else torch.zeros_like(left)
    return Plan(where, to, columns, coming, left & ~first_tokens, first_tokens, gone, length - gone)


def moves_of_one_run(state: StoreState, plan: Plan, layout: Layout, hold: int) -> dict[Side, list[Moves]]:
    """Plan of a store with one run: tokens sealed one by one stay so, whole pages are sealed as if all came now."""
    first, size = run_columns(state)[0]
    behind, found = plan.to - state.sizes.sink, {}
    for side, own, fmt in zip(SIDES, (layout.keys, layout.values), state.format.runs[0], strict=True):
        paged = (plan.columns[side] >= first) & (plan.columns[side] < first + size) & plan.free
        if not fmt.whole:
            found[side] = [Moves.of(paged, torch.zeros_like(paged))]
            continue
        due = tokens_due_by_row(plan.length - state.sizes.sink, 0, max(own.local, hold), own.unit)
        sealed = plan.free & (behind < due[:, None])
        found[side] = [Moves.of(sealed & paged, sealed & ~paged)]
    return found


def moves_by_target(state: StoreState, plan: Plan, target: Tensor) -> list[Moves]:
    """Plan of a store with several runs: as the targets say, but tokens that fill no page go to the next wider run."""
    found, spilled = [], torch.zeros_like(plan.free)
    for i, ((first, size), pair) in enumerate(zip(run_columns(state)[:-1], state.format.runs, strict=True)):
        own = torch.zeros_like(plan.free)
        own[:, first : first + size] = True
        stays = plan.free & own & ((target == STAY) | (target == i)) & ~spilled
        comes = plan.free & ~own & (target == i) & ~spilled
        stays, comes = stays | (spilled & own), comes | (spilled & ~own)
        moves = Moves.of(stays, comes)
        if any(fmt.whole for fmt in pair):
            if i == len(state.format.runs) - 1:
                raise NotImplementedError(
                    f"requantize: got {state.format.spec}, whose last of several runs is sealed by whole pages; its "
                    "tokens cannot be taken apart."
                )
            page = pair[0].page_size
            room = ((moves.kept + moves.new) // page * page)[:, None]
            full = Moves.of(stays & (stays.cumsum(1) <= room), comes & (moves.kept[:, None] + comes.cumsum(1) <= room))
            spilled, moves = (stays | comes) & ~(full.stays | full.comes), full
        else:
            spilled = torch.zeros_like(spilled)
        found.append(moves)
    return found
