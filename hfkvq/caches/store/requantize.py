"""Requantization: tokens that are stored already change their run, or are forgotten.

`requantized` gives each token a run, or forgets it: it makes a new state of the old one and asks the device once. By it
`keep_tokens` forgets all tokens but some.

- A token that stays in a run whose formats are per token keeps its bits. One that comes from elsewhere is dequantized
  and quantized again.
- A page with a scale per channel, or a normed one, keeps its bits if all its tokens stay and stay together. Other
  survivors are dequantized and sealed again, in order; those that fill no page go back to the tail. Several runs have
  no such pages.
- A row that forgets e tokens has ``start`` and ``dropped`` greater and ``length`` smaller by e. Where runs have
  positions and there is no sink, positions of sealed tokens are smaller by e as well (and may be negative), so that
  their logical columns stay what they were. Otherwise what is left of a row is contiguous: sink, pages, tail, in the
  newest logical columns, each token in its order. Tokens newer than all forgotten ones keep their columns in any case.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hfkvq.kernels.decode import ABSENT, LENGTH, RUNS, START, column_positions, run_count
from hfkvq.kernels.pages import PageFormat, RunView, Side
from hfkvq.kernels.quantize import dequantize_pages
from hfkvq.kernels.windows import tokens_due_by_row

from ..base import outside_inference_mode
from ..schemes.base import Layout, Scheme
from .kvstore import KVStore, write_pages
from .row_lengths import RowState
from .state import SIDES, StoreState, as_bytes, token_axis


def positions(state: StoreState) -> Tensor:
    """Row position of every column of `sink | runs | tail`: i32 (B, N), `ABSENT` where there is no token."""
    return column_positions(state.format, state.counters, state.runs, state.windows[2].shape[2], "keys")


def run_columns(state: StoreState) -> list[tuple[int, int]]:
    """Columns of each run and then of the tail: the first, and how many."""
    found, at = [], state.format.sink
    for view, (fmt, _) in zip(state.runs, state.format.runs, strict=True):
        size = view.table.shape[1] * fmt.page_size
        found.append((at, size))
        at += size
    return [*found, (at, state.windows[2].shape[2])]


def gather(state: StoreState, side: Side, columns: Tensor, runs: Sequence[int]) -> Tensor:
    """Dequantized tokens of columns (B, m) of `sink | runs | tail`: (B, H, m, D), anything where there is none.

    In the model's dtype if all ``runs``, those of which tokens are wanted, are whole; else in f32.
    """
    spans, at, dim = run_columns(state), SIDES.index(side), state.dims[side]

    def picked(x: Tensor, slot: Tensor) -> Tensor:
        index = slot.clamp(0, max(x.shape[2] - 1, 0))[:, None, :, None]
        return x.gather(2, index.expand(-1, x.shape[1], -1, dim))

    out = picked(state.windows[2 + at], columns - spans[-1][0])
    if state.sizes.sink:
        sink = picked(state.windows[at], columns)
        out = torch.where((columns < state.sizes.sink)[:, None, :, None], sink, out)
    for i in runs:
        (first, size), view, fmt = spans[i], state.runs[i], state.format.runs[i][at]
        if not size:
            continue
        slots = (columns - first).clamp(0, size - 1)
        if fmt.whole:
            parts = [part[view.table.long()].flatten(0, 1) for part in (view.keys, view.values)[at]]
            dense = dequantize_pages(parts, fmt, side, dim).unflatten(0, view.table.shape)
            dense = picked(dense.transpose(1, 2).flatten(2, 3), slots)
        else:
            parts = gather_bits(view, fmt, side, slots)
            dense = parts[0] if fmt.bits == 16 else dequantize_pages(parts, fmt, side, dim)
        inside = (columns >= first) & (columns < first + size)
        out = torch.where(inside[:, None, :, None], dense, out)
    return out


def gather_bits(view: RunView, fmt: PageFormat, side: Side, slots: Tensor) -> list[Tensor]:
    """Tokens of a run, as pages have them, bit for bit.

    Args:
        fmt: the side's format, per token.
        side: "keys" or "values".
        slots: i64 (B, m), run token of each; must exist in the row's table.

    Returns:
        The format's tensors as pages of m tokens: (B, H, ...).
    """
    page = view.table.gather(1, slots // fmt.page_size).long()
    slot = slots % fmt.page_size
    out = []
    for name, part in zip(fmt.names, view.keys if side == "keys" else view.values, strict=True):
        axis = token_axis(name, fmt, side)
        tokens = as_bytes(part).movedim(axis, 1)[page, slot].movedim(1, axis)
        out.append(tokens.contiguous().view(part.dtype))
    return out


def as_pages(parts: Sequence[Tensor], fmt: PageFormat, side: Side, blocks: int) -> list[Tensor]:
    """Result of `gather_bits`, cut into ``blocks`` pages a row: (B * blocks, H, ...)."""
    out = []
    for name, part in zip(fmt.names, parts, strict=True):
        axis = token_axis(name, fmt, side)
        tokens = as_bytes(part).movedim(axis, -1)
        tokens = pad(tokens, (0, blocks * fmt.page_size - tokens.shape[-1]))
        tokens = tokens.unflatten(-1, (blocks, fmt.page_size)).movedim(-2, 1).flatten(0, 1).movedim(-1, axis)
        out.append(tokens.contiguous().view(part.dtype))
    return out


EVICT, STAY = -1, -2
"""Targets beside the number of a run."""

LAST = torch.iinfo(torch.int32).max
"""A position behind every other."""


class RunChanges(NamedTuple):
    """Tokens of one side of a run: entries that stay there and that come, bool (B, n), and how many: i32 (B,)."""

    stays: Tensor
    comes: Tensor
    kept: Tensor
    new: Tensor

    @classmethod
    def of(cls, stays: Tensor, comes: Tensor) -> RunChanges:
        return cls(stays, comes, *(mask.sum(1, dtype=torch.int32) for mask in (stays, comes)))

    def order(self, most_kept: int, most_new: int, coming: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Entries that stay, i64 (B, most_kept), those that come, (B, most_new), and these behind those.

        ``coming`` is `RequantizePlan.coming`.
        """
        old = self.stays.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :most_kept]
        fresh = torch.where(self.comes, coming, LAST).argsort(dim=1, stable=True)[:, :most_new]
        slot = torch.arange(most_kept + most_new, device=old.device)[None]
        pick = torch.where(slot < self.kept[:, None], slot, slot - self.kept[:, None] + most_kept)
        both = torch.cat([old, fresh], 1)
        return old, fresh, both.gather(1, pick.clamp(max=max(both.shape[1] - 1, 0)))


class RequantizePlan(NamedTuple):
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


def planned(state: StoreState, target: Tensor, where: Tensor | None) -> RequantizePlan:
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
    return RequantizePlan(where, to, columns, coming, left & ~first_tokens, first_tokens, gone, length - gone)


def changes_of_one_run(
    state: StoreState, plan: RequantizePlan, layout: Layout, hold: int
) -> dict[Side, list[RunChanges]]:
    """Changes of a store with one run: tokens sealed one by one stay so, whole pages are sealed as if all came now."""
    first, size = run_columns(state)[0]
    behind, found = plan.to - state.sizes.sink, {}
    for side, own, fmt in zip(SIDES, (layout.keys, layout.values), state.format.runs[0], strict=True):
        paged = (plan.columns[side] >= first) & (plan.columns[side] < first + size) & plan.free
        if not fmt.whole:
            found[side] = [RunChanges.of(paged, torch.zeros_like(paged))]
            continue
        due = tokens_due_by_row(plan.length - state.sizes.sink, 0, max(own.local, hold), own.unit)
        sealed = plan.free & (behind < due[:, None])
        found[side] = [RunChanges.of(sealed & paged, sealed & ~paged)]
    return found


def changes_by_target(state: StoreState, plan: RequantizePlan, target: Tensor) -> list[RunChanges]:
    """Changes of a store with several runs: as targets say."""
    found = []
    for i, ((first, size), pair) in enumerate(zip(run_columns(state)[:-1], state.format.runs, strict=True)):
        if any(fmt.whole for fmt in pair):
            raise NotImplementedError(
                f"requantize: got {state.format.spec}, of which one of several runs is sealed by whole pages; its "
                "tokens cannot be taken apart."
            )
        own = torch.zeros_like(plan.free)
        own[:, first : first + size] = True
        stays = plan.free & own & ((target == STAY) | (target == i))
        found.append(RunChanges.of(stays, plan.free & ~own & (target == i)))
    return found


def keep_tokens(store: KVStore, keep: Tensor, hold: int = 0, q_abs: Tensor | None = None) -> bool:
    """Forgets all tokens but some, in each row its own, whatever the layout. Asks the device once.

    Args:
        store: whose tokens they are; of a headwise one, rows are KV heads.
        keep: bool (B, n), of each row's tokens, oldest first; n at least the longest row, padding does not count.
        hold: see `KVStore`; so is ``q_abs``.

    Returns:
        Whether any token was forgotten.

    Raises:
        NotImplementedError: several runs of which one is sealed by whole pages.
    """
    state = store.state
    target = torch.where(keep[:, : state.longest], STAY, EVICT).to(torch.int8)
    where = None
    if not state.format.ordered:
        where = positions(state)
        order = torch.where(where > ABSENT, where, LAST).argsort(1)[:, : target.shape[1]]
        target = torch.full_like(where, STAY, dtype=torch.int8).scatter_(1, order, target)
    done = requantized(state, store.layout, store.scheme, target, where, hold, q_abs)
    if done is not None:
        store.adopt(done.state)
    return done is not None


class Requantized(NamedTuple):
    """Result of a requantization.

    Attributes:
        state: what the store holds now.
        rows: what each row is like.
        held: tokens that each row has in each run, of the side that has more.
    """

    state: StoreState
    rows: list[RowState]
    held: list[list[int]]


@outside_inference_mode
def requantized(
    state: StoreState,
    layout: Layout,
    scheme: Scheme,
    target: Tensor,
    where: Tensor | None = None,
    hold: int = 0,
    q_abs: Tensor | None = None,
) -> Requantized | None:
    """The state whose tokens are where targets say; nothing of the old one is written that anybody reads.

    Args:
        scheme: raises channels of pages that are sealed whole.
        target: i8 (B, n). Of one run: `EVICT` or `STAY` for each token of a row, oldest first. Of several runs: over
            the columns of `positions`, or the number of a run, whose pages are given back where tokens leave them.
            Columns without a token count for nothing. Of the tail, those that go to a run must be older than those
            that stay.
        where: `positions`, if they are known already.

    Returns:
        What was made; None where no token moves.

    Raises:
        NotImplementedError: several runs of which one is sealed by whole pages.
    """
    if not state.longest:
        return None
    form, sink = state.format, state.sizes.sink
    plan = planned(state, target, where)
    if form.ordered:
        moves = changes_of_one_run(state, plan, layout, hold)
    else:
        moves = dict.fromkeys(SIDES, changes_by_target(state, plan, target))
    touched = (plan.where > ABSENT) & (target == EVICT)
    for run in () if form.ordered else moves["keys"]:
        touched = touched | run.comes
    start = state.counters[START]
    settled = torch.where(touched, plan.where + start[:, None] + 1, 0).amax(1)
    counts = [count for side in SIDES for run in moves[side] for count in (run.kept, run.new)]
    told = torch.cat([state.counters, torch.stack([plan.gone, plan.length, settled, *counts])]).tolist()
    before, (gone, length, last, *numbers) = told[RUNS : len(state.counters)], told[len(state.counters) :]
    runs = len(form.runs)
    kept, new = ([numbers[2 * runs * at + i :: 2][:runs] for at in (0, 1)] for i in (0, 1))
    forgets = any(gone)
    if not forgets and (form.ordered or not any(map(any, new[0]))):
        return None

    # Runs that tokens leave: what comes to others may be from there.
    leaves = [i for i in range(runs) if form.ordered or forgets or before[2 * i] != kept[0][i]]
    counters, views, held = state.counters.clone(), [], []
    counters[START] += plan.gone
    counters[LENGTH] = plan.length
    for i in range(runs):
        totals = [[a + b for a, b in zip(kept[at][i], new[at][i], strict=True)] for at in (0, 1)]
        most = [(max(kept[at][i]), max(new[at][i]), max(totals[at])) for at in (0, 1)]
        own = [(moves[side][i], *most[at]) for at, side in enumerate(SIDES)]
        held.append([max(pair) for pair in zip(*totals, strict=True)])
        views.append(_rebuilt(state, layout, scheme, i, plan, own, max(held[-1]), leaves, q_abs))
        for at, (move, *_) in enumerate(own):
            counters[RUNS + 2 * i + at] = move.kept + move.new
    sealed = [[sum(row) for row in zip(*kept[at], *new[at], strict=True)] for at in (0, 1)]
    rows = [RowState(*row) for row in zip(length, *sealed, strict=True)]
    changes: dict[str, Any] = {"counters": counters, "runs": views, "states": frozenset(rows)}
    if forgets:
        windows = list(state.windows)
        for at, side in enumerate(SIDES):
            if sink:
                windows[at] = _sink(state, plan, side)
            need = max(row.length - sink - count for row, count in zip(rows, sealed[at], strict=True))
            windows[2 + at] = _tail(state, plan, side, moves[side], need)
        changes |= {"windows": windows, "dropped": state.dropped + plan.gone}
    done = state.replace(
        # Room of the last run.
        None if form.ordered else max(held[-1]),
        history=None,
        settled=max(state.settled, *last),
        **changes,
    )
    return Requantized(done, rows, held)


def _rebuilt(
    state: StoreState,
    layout: Layout,
    scheme: Scheme,
    run: int,
    plan: RequantizePlan,
    own: Sequence[tuple[RunChanges, int, int, int]],
    most: int,
    leaves: Sequence[int],
    q_abs: Tensor | None,
) -> RunView:
    """A run with the tokens that stay and, behind them, those that come.

    Args:
        own: the run's moves of each side, and the most tokens of a row that stay, that come, and of both together.
    """
    pair, view = state.format.runs[run], state.runs[run]
    page = pair[0].page_size
    blocks = -(-most // page)
    table = torch.arange(state.batch * blocks, dtype=torch.int32, device=state.device).view(state.batch, blocks)
    first, size = run_columns(state)[run]
    sides: list[list[Tensor]] = []
    done, (old, some, order) = None, [plan.where[:, :0].long()] * 3
    for side, fmt, (moves, most_kept, most_new, total) in zip(SIDES, pair, own, strict=True):
        columns = plan.columns[side]
        if moves is not done:
            # Keys and values that move alike are sorted once.
            done, (old, some, order) = moves, moves.order(most_kept, most_new, plan.coming)
            order = order[:, :total]
        fresh = some
        kept, new = moves.kept, moves.new
        if fmt.whole or not most_kept:
            parts = state.pages(fmt, side, state.batch * blocks)
        else:
            slots = (columns.gather(1, old) - first).clamp(0, size - 1)
            parts = as_pages(gather_bits(view, fmt, side, slots), fmt, side, blocks)
        if fmt.whole:
            kept, new = torch.zeros_like(kept), kept + new
            fresh = order
        if fresh.shape[1]:
            index = torch.arange(fresh.shape[1], dtype=torch.int32, device=state.device).expand(state.batch, -1)
            source = gather(state, side, columns.gather(1, fresh), leaves)
            pages = parts, table, kept, new
            own_q_abs = q_abs if side == "keys" else None
            write_pages(pages, fmt, side, source, index.contiguous(), layout, scheme, own_q_abs)
            if fmt.whole and size:
                slots = columns.gather(1, fresh) - first
                rank = torch.arange(fresh.shape[1], device=state.device)
                _keep_pages(parts, view, fmt, side, torch.where(rank < moves.kept[:, None], slots, -1), blocks)
        sides.append(parts)
    if state.format.ordered:
        return RunView(table, None, *sides)
    pos = pad(plan.to.gather(1, order), (0, max(blocks * page - order.shape[1], 0)))[:, : blocks * page].contiguous()
    return RunView(table, pos, *sides)


def _keep_pages(parts: list[Tensor], view: RunView, fmt: PageFormat, side: Side, slots: Tensor, blocks: int) -> None:
    """Gives pages whose tokens were one page before the bits that they had.

    Args:
        parts: tensors of the new pages, ``blocks`` of each row; changed in place.
        slots: i64 (B, n), run token that each token was, or something negative; n whole pages.
    """
    paged = slots.unflatten(1, (-1, fmt.page_size))
    first = paged[:, :, 0]
    together = (paged == first[:, :, None] + torch.arange(fmt.page_size, device=slots.device)).all(2)
    together &= (first >= 0) & (first % fmt.page_size == 0)
    ids = view.table.gather(1, (first // fmt.page_size).clamp(0, view.table.shape[1] - 1)).long()
    for part, old in zip(parts, view.keys if side == "keys" else view.values, strict=True):
        new = part.unflatten(0, (-1, blocks))[:, : ids.shape[1]]
        keeps = together.view(*together.shape, *[1] * (new.dim() - 2))
        new.copy_(torch.where(keeps, old[ids], new))


def _sink(state: StoreState, plan: RequantizePlan, side: Side) -> Tensor:
    """The sink of what is left: a row's first tokens, wherever they were."""
    at, length = SIDES.index(side), state.sizes.sink
    entry = torch.arange(plan.to.shape[1], device=state.device).expand_as(plan.to)
    slot = torch.where(plan.sink, plan.to, length).long()
    source = torch.zeros(state.batch, length + 1, dtype=torch.long, device=state.device).scatter_(1, slot, entry)
    columns = plan.columns[side].gather(1, source[:, :length])
    return gather(state, side, columns, range(len(state.runs))).to(state.windows[at].dtype)


def _tail(state: StoreState, plan: RequantizePlan, side: Side, moves: Sequence[RunChanges], need: int) -> Tensor:
    """The tail of what is left, of ``need`` slots at least: all tokens that are neither in the sink nor in a run."""
    at, window = run_columns(state)[-1][0], state.windows[2 + SIDES.index(side)]
    own, key, columns = plan.free, plan.where, plan.columns[side]
    for move in moves:
        own = own & ~move.stays & ~move.comes
    if not state.format.ordered:
        # Columns of the tail: no other token comes there.
        own, key, columns = own[:, at:], key[:, at:], columns[:, at:]
    ring = max(need, window.shape[2])
    oldest = torch.where(own, key, LAST).argsort(1)[:, :ring]
    sealed = torch.stack([move.kept + move.new for move in moves]).sum(0)
    rank = (torch.arange(ring, device=state.device) - sealed[:, None]) % ring
    columns = columns.gather(1, oldest.gather(1, rank.clamp(max=oldest.shape[1] - 1)))
    runs = [0] if state.format.ordered and state.format.runs[0][SIDES.index(side)].whole else []
    return gather(state, side, columns, runs).to(window.dtype)
