"""Room in pages and tails, and new tokens that come into sink and tail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from hfkvq.kernels.decode import ABSENT, LENGTH, column_positions
from hfkvq.kernels.pages import Side, StoreFormat
from hfkvq.kernels.step import MAX_STEP, StepState

from ..base import outside_inference_mode
from ..schemes.base import Layout
from .state import SIDES, StoreState, as_bytes, in_turn

GROWTH = 1.25
"""Factor by which pages grow in eager use: amortized like doubling, with a fifth of the unused room at the most."""

EVICTING_GROWTH = 1 + 1 / 32
"""The same where tokens are evicted: a budget is soon full, and only what is generated comes beyond it. One page more
below 32 pages; from there on a token is copied some 32 times."""


def pages_for(form: StoreFormat, run: int, tokens: int) -> int:
    """Pages that so many tokens of a row take in a run; -1 is the last run, which often is the only one."""
    return -(-tokens // form.runs[run][0].page_size)


@outside_inference_mode
def grow(state: StoreState, run: int, blocks: int, factor: float = GROWTH) -> StoreState:
    """Reserves ``blocks`` pages a row at least, ``factor`` times those that a run has; pages keep their numbers."""
    view, form = state.runs[run], state.format
    have, first, pos = view.table.shape[1], view.keys[0].shape[0], view.pos
    if blocks <= have:
        return state
    if have and factor > 1:
        blocks = max(blocks, int(have * factor) + 1)
    # Blocks of a window take its pages in turn.
    held, extra = form.pages(have), state.batch * (form.pages(blocks) - form.pages(have))
    ids = torch.arange(first, first + extra, dtype=torch.int32, device=state.device).view(state.batch, -1)
    if pos is not None:
        pos = pad(pos, (0, (blocks - have) * form.runs[run][0].page_size))
    table = in_turn(torch.cat([view.table[:, :held], ids], 1), blocks)
    return (enlarge(state, run, extra) if extra else state).with_run(run, table=table, pos=pos)


def enlarge(state: StoreState, run: int, pages: int) -> StoreState:
    """Adds so many pages to a run, which belong to no row yet."""
    view, formats = state.runs[run], state.format.runs[run]
    keys, values = (
        [
            torch.cat([x, more]) if x.shape[0] else more
            for x, more in zip(parts, state.pages(fmt, side, pages), strict=True)
        ]
        for side, fmt, parts in zip(SIDES, formats, (view.keys, view.values), strict=True)
    )
    return state.with_run(run, keys=keys, values=values)


def tail_limits(layout: Layout, hold: int) -> dict[Side, int]:
    """Slots that tails need at the most, if ``hold`` tokens at least stay unsealed."""
    sides = zip(SIDES, (layout.keys, layout.values), strict=True)
    return {side: max(own.local, hold) + own.unit - 1 + MAX_STEP for side, own in sides}


@outside_inference_mode
def grow_tail(state: StoreState, side: Side, need: int, limit: int, empty: bool = False) -> StoreState:
    """Makes the tail at least ``need`` slots long, by doubling, up to ``limit``; tokens move to their new slots.

    ``empty``: nothing that the tail holds is wanted.
    """
    at = 2 + SIDES.index(side)
    tail = state.windows[at]
    have = tail.shape[2]
    if need <= have:
        return state
    # A crop may leave more in the tail than the layout would, hence the outer max.
    need = max(need, min(2 * have, limit))
    grown = tail.new_zeros(*tail.shape[:2], need, tail.shape[3])
    if empty:
        return state.with_window(at, grown)
    where = column_positions(state.format, state.counters, state.runs, have, side)[:, -have:]
    # Slots that hold nothing share one target outside the window and are cut off with it.
    slot = torch.where(where > ABSENT, (where - state.sizes.sink) % need, need).long()
    grown = pad(grown, (0, 0, 0, 1))
    grown.scatter_(2, slot[:, None, :, None].expand(-1, state.heads, -1, tail.shape[3]), tail)
    return state.with_window(at, grown[:, :, :need].contiguous())


def in_buffer(state: StoreState, buffer: StepState, blocks: Sequence[int]) -> StoreState:
    """The state with its tensors in a buffer of recorded steps; those that are elsewhere are copied there.

    ``blocks`` are a row's pages in the buffer, for each run: pages beyond these hold no token.
    """
    if state.counters is not buffer.counters:
        buffer.counters.copy_(state.counters)
    for own, new in zip(state.windows, buffer.windows, strict=True):
        if own is not new:
            new.copy_(own)
    for own, new, count in zip(state.runs, buffer.runs, blocks, strict=True):
        have = state.format.pages(min(own.table.shape[1], count))
        pairs = list(zip((*own.keys, *own.values), (*new.keys, *new.values), strict=True))
        if not all(a is b for a, b in pairs):
            new.table.copy_(state.own_table(count))
            target, source = (view.table[:, :have].flatten().long() for view in (new, own))
            for old, part in pairs:
                as_bytes(part)[target] = as_bytes(old)[source]
        elif own.table is not new.table:
            new.table.copy_(own.table)
        if own.pos is not None and new.pos is not None and own.pos is not new.pos:
            slots = min(own.pos.shape[1], new.pos.shape[1])
            new.pos[:, :slots].copy_(own.pos[:, :slots])
    return state.replace(counters=buffer.counters, windows=buffer.windows, runs=buffer.runs)


@dataclass(frozen=True, slots=True)
class Padding:
    """Padding among newly arrived tokens.

    Attributes:
        lead: i32 (B,), new columns before each row's first real token.
        amounts: the distinct values of ``lead``, on the host.
        source: i64 (B, t), new column whose vector each new column takes, or None if there are no holes.
    """

    lead: Tensor
    amounts: frozenset[int]
    source: Tensor | None


class Ragged:
    """First tokens of rows of any lengths, which stand one row behind another in one row of columns.

    One object serves all layers of a forward, which share the columns that it works out.

    Args:
        first: column of each row's first token.
        lengths: tokens of each row, one at least.

    Attributes:
        first: i32 (B,).
        length: i32 (B,).
        lengths: the distinct lengths, on the host.
    """

    def __init__(self, first: Sequence[int], lengths: Sequence[int], device: torch.device) -> None:
        self.first, self.length = torch.tensor([first, lengths], dtype=torch.int32, device="cpu").to(device)
        self.lengths = frozenset(lengths)
        self._columns: dict[tuple[int, int], Tensor] = {}

    def windows(self, state: StoreState, keys: Tensor, values: Tensor) -> list[Tensor]:
        """Windows, as long as the state's, of a store that takes these rows; unused slots hold any token of their row.

        Keys (1, H, n, Dk) and values (1, H, n, Dv) are in the basis of the store.
        """
        found = []
        for at, x in enumerate((keys, values, keys, values)):
            columns = self._window_columns(state.sizes.sink, 0 if at < 2 else state.windows[at].shape[2])
            found.append(x[0][:, columns].transpose(0, 1))
        return found

    def _window_columns(self, sink: int, tail: int) -> Tensor:
        """Columns of the tokens in a tail of so many slots, or with 0 in the sink: i64 (B, n)."""
        if (sink, tail) not in self._columns:
            slot = torch.arange(tail or sink, dtype=torch.int32, device=self.first.device)
            length = self.length[:, None]
            if tail:
                newest = length - sink - 1
                slot = sink + (newest - (newest - slot) % tail).clamp(min=0)
            self._columns[sink, tail] = (self.first[:, None] + torch.minimum(slot, length - 1)).long()
        return self._columns[sink, tail]


def fill_windows(state: StoreState, keys: Tensor, values: Tensor, old: Tensor, padding: Padding | None) -> None:
    """Writes new tokens into sink and tail: each slot looks up the new column it should hold, if any.

    Args:
        state: the store's, which counts the new tokens already.
        keys: (B, H, t, Dk), in the basis of the store; so are ``values``.
        old: i32 (B,), tokens that each row had before.
    """
    sink = state.sizes.sink
    if padding is None and len(state.states) == 1:
        copy_to_windows(state, keys, values)
        return
    # Column of row token x among the new ones.
    shift = (0 if padding is None else padding.lead) - old
    rest = (state.counters[LENGTH] - sink)[:, None]
    found: dict[tuple[bool, int], tuple[Tensor, Tensor]] = {}
    for at, x in enumerate((keys, values, keys, values)):
        window = state.windows[at]
        # The same for keys and values, where their tails are of one length.
        kind = at >= 2, window.shape[2]
        if not window.shape[2] or not x.shape[2]:
            continue
        if kind not in found:
            token = slot = torch.arange(window.shape[2], dtype=torch.int32, device=state.device)[None]
            if at >= 2:
                behind = rest - 1 - (rest - 1 - slot) % window.shape[2]
                token = torch.where(behind >= 0, behind + sink, -1)
            column = token + shift[:, None]
            new = (token >= old[:, None]) & (column >= 0) & (column < x.shape[2])
            found[kind] = column.clamp(0, x.shape[2] - 1).long()[:, None, :, None], new[:, None, :, None]
        index, new = found[kind]
        picked = x.gather(2, index.expand(-1, state.heads, -1, x.shape[3]))
        window.copy_(torch.where(new, picked, window))


def copy_to_windows(state: StoreState, keys: Tensor, values: Tensor) -> None:
    """The same where all rows are alike, so that the host knows the slots: a few copies of what lies together."""
    (row,) = state.states
    sink, tokens = state.sizes.sink, keys.shape[2]
    old, rest = row.length - tokens, row.length - sink
    for x, held, tail in ((keys, state.windows[0], state.windows[2]), (values, state.windows[1], state.windows[3])):
        if old < sink:
            held[:, :, old : row.length].copy_(x[:, :, : sink - old])
        ring = tail.shape[2]
        behind = max(rest - ring, old - sink, 0)
        while behind < rest:
            slot, column = behind % ring, behind + sink - old
            count = min(ring - slot, rest - behind)
            tail[:, :, slot : slot + count].copy_(x[:, :, column : column + count])
            behind += count
