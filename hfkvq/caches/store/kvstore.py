"""Store of one layer: `sink | runs of pages | tail`, keys beside values, in place and with counters on the device.

Invariants, each with a test:

1. Full pages never change. Reordering rows moves tables and copies windows and open pages only.
2. Everything in a store is in the rotated basis: rotated at the door, queries once, outputs once.
3. Keys and values of a run share one page table and name the same tokens in the same order.
4. ``length`` counts tokens stored; ``start + length`` is the number of logical columns, padding included. A row that
   forgets e tokens has ``start`` greater and ``length`` smaller by e (see `hfkvq.caches.store.requantize`).
5. Codes are computed against scale and zero as stored.
6. A row's bytes depend on that row alone: its token 0 is its first real token, wherever the padding put it.
7. A format per channel, or a normed one, takes whole pages. `crop` reopens what it cuts, and a requantization makes
   other pages of what is left.
8. Leading padding is not stored at all; a padded column within a row holds the vector of a real neighbour that came
   with it and widens no scale. Columns that come without any real token of their row are stored as they are.

The host never asks the device how long a row is: it keeps the set of lengths that rows *may* have (one for every
amount of padding in the batch), which says whether a seal is due and how much room to reserve.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace as replaced
from typing import Any

import torch
from torch import Tensor

from hfkvq import kernels
from hfkvq.kernels.decode import LENGTH, START
from hfkvq.kernels.pages import Side
from hfkvq.kernels.step import StepState

from ..base.inference_mode import lasting
from .cropping import cropped
from .growth import grow_tail, in_buffer, tail_limits
from .packing import Packed, packed, unpacked
from .routing import ColumnTags, HostCounters, SealSource, SealStart
from .row_lengths import RowState
from .rows import reordered, selected
from .sealing import seal
from .state import EMPTY, SIDES, StoreState
from .view import StoreView
from .windows import Padding, Ragged, fill_windows


class KVStore(StoreView):
    """Storage of one layer: see `StoreView` for its arguments, and for what can be asked of it."""

    def adopt(self, state: StoreState) -> None:
        """Holds what another state of the same format holds; this one's tensors are given up."""
        self.state = state

    def note_states(self, states: frozenset[RowState]) -> None:
        """Notes what rows are like after recorded steps, which changed the tensors alone."""
        self.state = self.state.replace(states=states)

    def move_into(self, buffer: StepState, blocks: Sequence[int]) -> None:
        """Moves what the store holds into a buffer of recorded steps: see `hfkvq.caches.store.growth.in_buffer`."""
        self.state = in_buffer(self.state, buffer, blocks)

    def _rotated(self, x: Tensor, side: Side) -> Tensor:
        return kernels.hadamard(x, self.format.rotate_keys if side == "keys" else self.format.rotate_values)

    def _advance(self, tokens: int, padding: Padding | None) -> None:
        """Counts new tokens, on the device and among the host's states."""
        if padding is None:
            self.state = self.state.replace(states=self.forecast(tokens).appended)
            self.counters[LENGTH].add_(tokens)
            return
        states = frozenset(
            state._replace(length=state.length + tokens - (0 if state.length else lead))
            for state in self.states
            for lead in padding.amounts
        )
        # Which row has how much padding, the host does not know.
        self.state = self.state.replace(states=states, host_counters=None)
        self.counters[START].add_(padding.lead)
        self.counters[LENGTH].add_(tokens - padding.lead)

    def pack(self) -> Packed:
        """Contents for a file: see `packing.packed`."""
        return packed(self.state)

    def unpack(self, numbers: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Takes what another store of the same layout, rows and dtype has packed; the store is empty so far.

        Raises:
            ValueError: it does not fit.
        """
        self.state = unpacked(self.state, numbers, tensors)
        self._reserve()

    # Tokens arrive.

    def push(self, keys: Tensor, values: Tensor, padding: Padding | None = None) -> None:
        """Appends a few tokens to sink and tail; seals nothing. ``fits`` must hold.

        Args:
            keys: (B, H, t, Dk), t <= 16, not rotated.
            values: (B, H, t, Dv).
            padding: padding among them, or None.
        """
        self.grow_tails(keys.shape[2])
        if padding is None:
            # Counts on the device as well.
            kernels.append(keys, values, self.counters, self.windows, self.format)
            self.state = self.state.replace(states=self.forecast(keys.shape[2]).appended)
            return
        keys, values = self._rotated(keys, "keys"), self._rotated(values, "values")
        with self._counting() as old:
            self._advance(keys.shape[2], padding)
            fill_windows(self.state, keys, values, old[LENGTH], padding)

    @lasting
    def extend(
        self,
        keys: Tensor,
        values: Tensor,
        padding: Padding | None = None,
        hold: int = 0,
        q_abs: Tensor | None = None,
        tags: ColumnTags | None = None,
    ) -> None:
        """Takes a prompt: seals what may be sealed straight from it and keeps the rest in the windows.

        Args:
            keys: (B, H, t, Dk), not rotated.
            values: (B, H, t, Dv).
            padding: padding among them, or None.
            hold: newest tokens that must stay unsealed, beyond what the layout says (see `reserve_tail`).
            q_abs: f32 (B, H, Dk), see `Scheme.channel_bits`.
            tags: of the first logical columns; see `Scheme.token_bits`.
        """
        if padding is not None and padding.source is not None:
            source = padding.source[:, None, :, None]
            keys = keys.gather(2, source.expand_as(keys))
            values = values.gather(2, source.expand_as(values))
        keys, values = self._rotated(keys, "keys"), self._rotated(values, "values")
        fresh = self.longest == 0
        alike = fresh and padding is None and len(self.states) == 1

        def source_of(x: Tensor, tail: Tensor) -> SealSource:
            first = self.layout.sink if alike else None
            return SealSource(x if fresh else torch.cat([tail, x], 2), 0 if fresh else tail.shape[2], x.shape[2], first)

        with self._counting(fresh) as counters:
            start = None if tags is None else SealStart(counters, self.state.counted(), padding)
            self._advance(keys.shape[2], padding)
            seal(self, source_of(keys, self.windows[2]), source_of(values, self.windows[3]), hold, q_abs, tags, start)
            self.grow_tails(1, fresh)
            fill_windows(self.state, keys, values, counters[LENGTH], padding)

    @lasting
    def extend_ragged(self, keys: Tensor, values: Tensor, rows: Ragged, q_abs: Tensor | None = None) -> None:
        """`extend` for rows of any lengths, which hold nothing yet. The store gets other windows, as long as before.

        Args:
            keys: (1, H, n, Dk), not rotated: of all rows, one row behind another.
            values: (1, H, n, Dv), likewise.
            rows: where each row's tokens stand.
            q_abs: f32 (B, H, Dk), see `Scheme.channel_bits`.
        """
        assert not self.longest, "first tokens"
        keys, values = self._rotated(keys, "keys"), self._rotated(values, "values")
        with self._counting(empty=True):
            self.state = self.state.replace(
                states=frozenset(RowState(length, 0, 0) for length in rows.lengths), host_counters=None
            )
            self.counters[LENGTH].copy_(rows.length)
            first = rows.first[:, None] + self.layout.sink
            sources = [SealSource(x.expand(self.batch, -1, -1, -1), 0, x.shape[2], first) for x in (keys, values)]
            seal(self, sources[0], sources[1], 0, q_abs, None)
            self.state = self.state.replace(windows=rows.windows(self.state, keys, values))

    @contextlib.contextmanager
    def _counting(self, empty: bool = False) -> Iterator[Tensor]:
        """Tokens are counted and come into the windows in place, or do not, if anything fails; yields old counters.

        Out of memory, most likely. What was written besides lies in pages that nobody reads yet.

        Args:
            empty: whether nothing that the windows hold is wanted.
        """
        before, counters = self.state, self.counters.clone()
        # A window's pages may be filled anew.
        pages = [part for run in before.runs if before.format.ring for part in (*run.keys, *run.values)]
        parts = () if empty else (*before.windows, *pages)
        held = [part.clone() for part in parts]
        try:
            yield counters
        except BaseException:
            before.counters.copy_(counters)
            for part, was in zip(parts, held, strict=True):
                part.copy_(was)
            self.state = before
            raise

    def commit(self, hold: int = 0, q_abs: Tensor | None = None, tags: ColumnTags | None = None) -> bool:
        """Seals what has left the windows; does nothing, and asks the device nothing, when nothing is due.

        Args:
            hold: newest tokens that must stay unsealed, beyond what the layout says.
            q_abs: f32 (B, H, Dk), see `Scheme.channel_bits`.
            tags: of the first logical columns; see `Scheme.token_bits`.

        Returns:
            Whether a seal was due in some row.
        """
        if not self.is_due(hold):
            return False
        keys, values = (SealSource(tail, tail.shape[2]) for tail in self.windows[2:])
        return seal(self, keys, values, hold, q_abs, tags)

    @lasting
    def note_evicted(self, shorter: int, evicted: Tensor, settled: int, columns: Tensor | None = None) -> None:
        """Counts tokens of the prompt that has just come which were chosen not to be stored.

        Args:
            shorter: columns by which every row is shorter than the prompt.
            evicted: i32 (B,), tokens of each row that went.
            settled: column before which tokens cannot be taken back any more.
            columns: i64 (B, n), columns of the tokens that are stored, which those keep that are sealed to the last of
                several runs; rows are alike, and there is no sink. None for columns without gaps.
        """
        counters = self.counters.clone()
        counters[START] += shorter
        self.state = self.state.replace(counters=counters, dropped=self.dropped + evicted, settled=settled)
        if columns is not None:
            (row,), pos = self.states, self.runs[-1].pos
            assert pos is not None, "a run of several has positions"
            pos[:, : row.keys] = columns[:, : row.keys] - shorter

    # Room.

    def reserve_tail(self, hold: int) -> None:
        """Lets the tail grow to hold ``hold`` tokens that stay unsealed."""
        limits = tail_limits(self.layout, hold)
        self.tail_limit = {side: max(own, limits[side]) for side, own in self.tail_limit.items()}

    def grow_tails(self, tokens: int, empty: bool = False) -> None:
        """Makes room for ``tokens`` more; ``empty`` if nothing that the tails hold is wanted."""
        for side, need in zip(SIDES, self.forecast(tokens).tail_slots, strict=True):
            self.grow_tail(side, need, empty)

    def grow_tail(self, side: Side, need: int, empty: bool = False) -> None:
        """Makes the tail at least ``need`` slots long, up to its limit; see `hfkvq.caches.store.growth.grow_tail`."""
        self.state = grow_tail(self.state, side, need, self.tail_limit[side], empty)

    # Rows and lengths change. `write_pages` comes next; until then the state before could come back.

    def write_pages(self) -> None:
        """Writes the pages that the last change of rows or lengths has left to be written."""
        self.state = self.state.written()

    def crop(self, tokens: int, seen: int) -> None:
        """Forgets the newest ``tokens`` logical columns of ``seen``; see `hfkvq.caches.store.cropping.cropped`."""
        self.state = cropped(self, tokens, seen)

    def reorder(self, rows: Tensor) -> None:
        """Row b becomes what row ``rows[b]`` was (i64 (B',)). Full pages are shared, not copied."""
        self.state = reordered(self.state, self.layout, rows.to(self.device))

    def select(self, rows: Tensor) -> None:
        """Keeps rows ``rows`` (i64 (B',)) only, and gives the other rows' pages back."""
        self.state = selected(self.state, rows.to(self.device))

    @lasting
    def clear(self) -> None:
        """Forgets all tokens; keeps the allocation."""
        self.counters.zero_()
        self.dropped.zero_()
        known = HostCounters.empty(self.counters, EMPTY) if "tags" in self.scheme.needs else None
        state = self.state
        # No row's pages are another's, or lie behind those of a batch that was larger.
        runs = [replaced(view, table=state.own_table(view.table.shape[1])) for view in state.runs]
        self.state = self.state.replace(
            states=EMPTY, host_counters=known, wide_bound=(0, 0), settled=0, runs=runs, writes=()
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> None:
        """Moves every tensor."""
        self.state = self.state.map(lambda x: x.to(device, non_blocking=non_blocking))

    def __deepcopy__(self, memo: dict[int, object]) -> KVStore:
        """Independent tensors, outside of any buffer, shared layout and scheme."""
        new = copy.copy(self)
        new.tail_limit, new.state = dict(self.tail_limit), self.state.map(torch.clone)
        return new
