"""What one layer holds: `sink | runs of pages | tail`, keys beside values, in place and with counters on the device.

Invariants, each with a test:

1. Full pages never change. Reordering rows moves tables and copies windows and open pages only.
2. Everything in a store is in the rotated basis: rotated at the door, queries once, outputs once.
3. Keys and values of a run share one page table and name the same tokens in the same order.
4. ``length`` counts tokens stored; ``start + length`` is the number of logical columns, padding included.
5. Codes are computed against scale and zero as stored.
6. A row's bytes depend on that row alone: its token 0 is its first real token, wherever the padding put it.
7. A format per channel, or a normed one, takes whole pages and gives none back, but for `crop`, which reopens what it
   cuts.
8. Leading padding is not stored at all; a padded column within a row holds the vector of a real neighbour that came
   with it and widens no scale. Columns that come without any real token of their row are stored as they are.

The host never asks the device how long a row is: it keeps the set of lengths that rows *may* have (one for every
amount of padding in the batch), which says whether a seal is due and how much room to reserve.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hfkvq import kernels
from hfkvq.kernels.decode import LENGTH, RUNS, START
from hfkvq.kernels.pages import PageFormat, RunView, Side
from hfkvq.kernels.step_tensors import Observing, Sealing, StepTensors

from ..routing import ColumnTags, Counters, Ground, Source, Tally
from ..scheme import Layout, Scheme
from ..states import Ahead, RowState, WindowSizes, ahead
from . import accounting
from .accounting import StoreBytes
from .cropping import crop
from .reading import dense_alike
from .rows import pages_of, share_pages, take_rows
from .sealing import seal, seal_last, seals_plainly, seals_widely
from .state import SIDES, StoreState
from .windows import Padding, fill_windows, grow_tail

MAX_STEP = 16
"""Most tokens that a step may append to the tail before attention; longer input is a prompt."""

GROWTH = 1.25
"""Factor by which pages grow in eager use: amortized like doubling, with a fifth of the unused room at the most."""


class KVStore:
    """Storage of one layer.

    Args:
        layout: static layout of both sides.
        scheme: decides widths at sealing.
        keys: (B, H, t, Dk), any tensor of the shape, dtype and device to come.
        values: (B, H, t, Dv), likewise.
        capacity: most tokens of a row, allocated at once; None grows.
    """

    def __init__(
        self, layout: Layout, scheme: Scheme, keys: Tensor, values: Tensor, capacity: int | None = None
    ) -> None:
        layout.check(keys.shape[-1], values.shape[-1])
        self.layout, self.format, self.scheme = layout, layout.store, scheme
        self.sizes = WindowSizes.of(layout)
        self.seals_plainly, self.seals_widely = seals_plainly(layout, scheme), seals_widely(layout, scheme)
        batch, self.heads = keys.shape[:2]
        self.dims = {"keys": keys.shape[-1], "values": values.shape[-1]}
        self.dtype, self.capacity = keys.dtype, capacity
        runs, device = self.format.runs, keys.device

        def window(length: int, dim: int) -> Tensor:
            return torch.zeros(batch, self.heads, length, dim, dtype=self.dtype, device=device)

        def empty(formats: Sequence[PageFormat]) -> RunView:
            table = torch.empty(batch, 0, dtype=torch.int32, device=device)
            parts = [
                fmt.allocate(side, 0, self.heads, self.dims[side], self.dtype, device)
                for side, fmt in zip(SIDES, formats, strict=True)
            ]
            return RunView(table, None if self.format.ordered else table.clone(), *parts)

        counters = torch.zeros(RUNS + 2 * len(runs), batch, dtype=torch.int32, device=device)
        states = frozenset({RowState(0, 0, 0)})
        self.state = StoreState(
            self.format,
            self.sizes,
            counters,
            torch.zeros(batch, dtype=torch.int32, device=device),
            tuple(window(length, dim) for length in (layout.sink, MAX_STEP) for dim in self.dims.values()),
            tuple(empty(formats) for formats in runs),
            states,
            self._empty_tally(counters, states),
        )
        # Tails grow up to this, so that short contexts do not pay for windows they cannot fill.
        self.tail_limit: dict[Side, int] = {"keys": 0, "values": 0}
        self.reserve_tail(0)
        if capacity is not None:
            for side in ("keys", "values"):
                self.grow_tail(side, self.tail_limit[side])
            for run in range(len(runs)):
                self.grow(run, -(-max(capacity - layout.sink, 0) // runs[run][0].page_size))

    def new_window(self, length: int, side: Side) -> Tensor:
        """An empty window of so many slots."""
        return torch.zeros(self.batch, self.heads, length, self.dims[side], dtype=self.dtype, device=self.device)

    def replace(self, widest: int | None = None, **changes: Any) -> None:
        """Gives the store other tensors, or another view of its rows: see `StoreState.replace`."""
        self.state = self.state.replace(widest, **changes)

    @property
    def batch(self) -> int:
        """Rows."""
        return self.state.counters.shape[1]

    @property
    def device(self) -> torch.device:
        """Of all tensors."""
        return self.state.counters.device

    @property
    def counters(self) -> Tensor:
        """i32 (2 + 2*runs, B)."""
        return self.state.counters

    @property
    def dropped(self) -> Tensor:
        """i32 (B,): tokens of each row that a trim has evicted."""
        return self.state.dropped

    @property
    def windows(self) -> tuple[Tensor, ...]:
        """Sink keys, sink values, tail keys, tail values."""
        return self.state.windows

    @property
    def runs(self) -> tuple[RunView, ...]:
        """Pages of each run."""
        return self.state.runs

    @property
    def states(self) -> frozenset[RowState]:
        """What rows may be like, as the host knows them."""
        return self.state.states

    @property
    def tally(self) -> Tally | None:
        """The counters, where the host has an exact copy of them."""
        return self.state.tally

    @property
    def held(self) -> StepTensors:
        """Counters, windows and runs, with what steps remember of them."""
        return self.state.held

    def set_window(self, at: int, window: Tensor) -> None:
        """Gives the store another sink or tail."""
        self.state = self.state.with_window(at, window)

    def _set_run(self, run: int, **parts: Any) -> None:
        self.state = self.state.with_run(run, **parts)

    def flat_runs(self) -> list[Tensor]:
        """All runs' tensors in the order ops take them."""
        return [*self.held.runs]

    def tensors(self) -> list[Tensor]:
        """Every tensor the store holds."""
        return [*self.state.tensors()]

    @property
    def longest(self) -> int:
        """Most tokens that a row may hold."""
        return self.state.longest

    @property
    def row_lengths(self) -> Tensor:
        """i32 (B,): tokens that each row holds."""
        return self.counters[LENGTH]

    # Tokens arrive and leave the tail.

    def ahead(self, tokens: int = 0, hold: int = 0) -> Ahead:
        """What becomes of the rows with ``tokens`` more; see `hfkvq.caches.states.ahead`."""
        return ahead(self.states, self.sizes, tokens, hold)

    def fits(self, tokens: int) -> bool:
        """Whether ``tokens`` more can join the tail before anything is sealed."""
        return self._is_room(tokens, self.ahead(tokens).needs)

    def _is_room(self, tokens: int, needs: tuple[int, int]) -> bool:
        limit = self.tail_limit
        return tokens <= MAX_STEP and needs[0] <= limit["keys"] and needs[1] <= limit["values"]

    def _rotated(self, x: Tensor, side: Side) -> Tensor:
        return kernels.hadamard(x, self.format.rotate_keys if side == "keys" else self.format.rotate_values)

    def _later(self, tokens: int, padding: Padding | None) -> frozenset[RowState]:
        """What the host's states become with new tokens."""
        if padding is None:
            return self.ahead(tokens).joined
        return frozenset(
            state._replace(length=state.length + tokens - (0 if state.length else lead))
            for state in self.states
            for lead in padding.amounts
        )

    def _empty_tally(self, counters: Tensor, states: frozenset[RowState]) -> Tally | None:
        """Of an empty store; None where nobody asks for it: routing by tags alone does."""
        return Tally.empty(counters, states) if "tags" in self.scheme.needs else None

    def counted(self) -> Counters | None:
        """The counters, if the host knows them."""
        return None if self.tally is None else self.tally.now(self.states, self.sizes)

    def _advance(self, tokens: int, padding: Padding | None) -> None:
        """Counts new tokens, on the device and among the host's states."""
        self.replace(states=self._later(tokens, padding))
        if padding is None:
            self.counters[LENGTH].add_(tokens)
        else:
            # Which row has how much of it, the host does not know.
            self.replace(tally=None)
            self.counters[START].add_(padding.lead)
            self.counters[LENGTH].add_(tokens - padding.lead)

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
            self.replace(states=self._later(keys.shape[2], None))
            return
        keys, values = self._rotated(keys, "keys"), self._rotated(values, "values")
        old = self.counters[LENGTH].clone()
        self._advance(keys.shape[2], padding)
        self._fill_windows(keys, values, old, padding)

    def step(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        scaling: float,
        softcap: float,
        mask: Tensor | None = None,
        seals: bool = False,
        observing: Observing | None = None,
    ) -> tuple[Tensor, bool] | None:
        """`push` without padding, then `attend`, and perhaps what comes then.

        Args:
            query: (B, Hq, t, D), t <= 16.
            keys: (B, H, t, Dk), not rotated.
            values: (B, H, t, Dv).
            scaling: factor on the logits.
            softcap: 0 for none.
            mask: see `decode_attention`; None is causal.
            seals: whether what is due may be sealed as well, as by `commit` without arguments.
            observing: where the queries are added; None for nowhere.

        Returns:
            (B, t, Hq, Dv), and whether anything is due now; None where it takes `push` and `attend` themselves, or the
            tokens do not fit: nothing is done then.
        """
        tokens, held = keys.shape[2], self.held
        then = ahead(self.states, self.sizes, tokens)
        # What a row begins with may be padding, if there is a mask.
        if not self._is_room(tokens, then.needs) or not (then.longest if mask is None else then.shortest):
            return None
        if then.needs[0] > held.tails[0] or then.needs[1] > held.tails[1]:
            self.grow_tails(tokens)
            held = self.held
        due, sealing = then.due != (0, 0), None
        if seals and due and self.seals_plainly:
            # With more pages attention would share them out in another way, and `commit` makes them afterwards.
            room = held.blocks >= self.blocks(then.most)
            if room and kernels.fused_step.seals_with_steps(self.format, then.due):
                sealing = Sealing(self.sizes.local, self.sizes.unit, then.due)
        out = kernels.append_attend(query, keys, values, held, scaling, softcap, sealing, observing, mask)
        if out is None:
            return None
        self.replace(states=then.joined if sealing is None else then.sealed)
        return out, due and sealing is None

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
        counters, states, tally, fresh = self.counters.clone(), self.states, self.tally, self.longest == 0
        ground = None if tags is None else Ground(counters, self.counted(), padding)
        self._advance(keys.shape[2], padding)
        alike = fresh and padding is None and len(states) == 1

        def source_of(x: Tensor, tail: Tensor) -> Source:
            first = self.layout.sink if alike else None
            return Source(x if fresh else torch.cat([tail, x], 2), 0 if fresh else tail.shape[2], x.shape[2], first)

        try:
            seal(self, source_of(keys, self.windows[2]), source_of(values, self.windows[3]), hold, q_abs, tags, ground)
            self.grow_tails(1, fresh)
        except BaseException:
            # Out of memory, most likely. What was written lies in pages that nobody reads yet.
            self.counters.copy_(counters)
            self.replace(states=states, tally=tally)
            raise
        self._fill_windows(keys, values, counters[LENGTH], padding)

    def commit(self, hold: int = 0, q_abs: Tensor | None = None, tags: ColumnTags | None = None) -> bool:
        """Seals what has left the windows; does nothing, and asks the device nothing, when nothing is due.

        Args:
            hold: newest tokens that must stay unsealed, beyond what the layout says.
            q_abs: f32 (B, H, Dk), see `Scheme.channel_bits`.
            tags: of the first logical columns; see `Scheme.token_bits`.

        Returns:
            Whether a seal was due in some row.
        """
        keys, values = (Source(tail, tail.shape[2]) for tail in self.windows[2:])
        return seal(self, keys, values, hold, q_abs, tags)

    # What writes tokens.

    def _fill_windows(self, keys: Tensor, values: Tensor, old: Tensor, padding: Padding | None) -> None:
        fill_windows(self, keys, values, old, padding)

    def seal_last(
        self, sources: tuple[Source, Source], most: tuple[int, int], local: tuple[int, int], q_abs: Tensor | None
    ) -> None:
        """See `sealing.seal_last`."""
        seal_last(self, sources, most, local, q_abs)

    def is_due(self, hold: int = 0) -> bool:
        """Whether some row has something to seal now."""
        return any(self.ahead(hold=hold).due)

    # Room.

    def blocks(self, tokens: int) -> int:
        """Pages that so many tokens of a row take in the last run, which often is the only one."""
        return -(-tokens // self.format.runs[-1][0].page_size)

    def grow(self, run: int, blocks: int) -> None:
        """Reserves at least ``blocks`` pages a row; existing pages keep their numbers."""
        view = self.runs[run]
        have = view.table.shape[1]
        if blocks <= have:
            return
        if have:
            blocks = max(blocks, int(have * GROWTH) + 1)
        first, extra = view.keys[0].shape[0], self.batch * (blocks - have)
        ids = torch.arange(first, first + extra, dtype=torch.int32, device=self.device).view(self.batch, -1)
        table, pos = torch.cat([view.table, ids], 1) if have else ids, view.pos
        if pos is not None:
            more = pos.new_zeros(self.batch, (blocks - have) * self.format.runs[run][0].page_size)
            pos = torch.cat([pos, more], 1) if have else more
        self._enlarge(run, extra)
        # Last: if there was no memory, nobody counts on the room.
        self._set_run(run, table=table, pos=pos)

    def _enlarge(self, run: int, pages: int) -> None:
        view, grown = self.runs[run], []
        for side, fmt, parts in zip(SIDES, self.format.runs[run], (view.keys, view.values), strict=True):
            extra = fmt.allocate(side, pages, self.heads, self.dims[side], self.dtype, self.device)
            grown.append([torch.cat([x, more]) if x.shape[0] else more for x, more in zip(parts, extra, strict=True)])
        self._set_run(run, keys=grown[0], values=grown[1])

    def reserve_tail(self, hold: int) -> None:
        """Lets the tail grow to hold ``hold`` tokens that stay unsealed."""
        for side in SIDES:
            layout = self.layout.keys if side == "keys" else self.layout.values
            limit = max(layout.local, hold) + layout.unit - 1 + MAX_STEP
            self.tail_limit[side] = max(self.tail_limit[side], limit)

    def grow_tails(self, tokens: int, empty: bool = False) -> None:
        """Makes room for ``tokens`` more; ``empty`` if nothing that the tails hold is wanted."""
        for side, need in zip(SIDES, self.ahead(tokens).needs, strict=True):
            self.grow_tail(side, need, empty)

    def grow_tail(self, side: Side, need: int, empty: bool = False) -> None:
        """Makes the tail at least ``need`` slots long, by doubling, up to its limit; tokens move to their new slots.

        Args:
            side: "keys" or "values".
            need: slots.
            empty: whether nothing that the tail holds is wanted.
        """
        grow_tail(self, side, need, empty)

    # Reading.

    def attend(
        self,
        query: Tensor,
        mask: Tensor | None,
        scaling: float,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention of the newest queries over everything held; see `kernels.decode_attention`."""
        return kernels.decode_attention(
            query, self.counters, self.windows, self.flat_runs(), mask, sinks, scaling, softcap, self.format
        )

    def dense(self, side: Side, columns: int, plain: bool = False) -> Tensor:
        """(B, H, columns, D) in logical order, rotated back; 0 at padding; by PyTorch's operations if ``plain``."""
        alike = len(self.states) == 1 and self.longest == columns
        if plain and alike and self.format.ordered:
            return dense_alike(self, side)
        return kernels.gather_rows(self.counters, self.windows, self.flat_runs(), columns, self.format, side, plain)

    # Rows and lengths change.

    def crop(self, tokens: int, seen: int) -> None:
        """Forgets the newest ``tokens`` logical columns of ``seen``.

        Tokens of a page that is cut return to the tail as that page has them (exact for 16-bit pages).
        """
        crop(self, tokens, seen)

    def reorder(self, rows: Tensor) -> None:
        """Row b becomes what row ``rows[b]`` was (i64 (B',)). Full pages are shared, not copied."""
        rows = rows.to(self.device)
        grown = rows.shape[0] - self.batch
        for run in range(len(self.runs)):
            if grown > 0:
                self._enlarge(run, grown * self.runs[run].table.shape[1])
            self.state = share_pages(self.state, run, rows, self._slack)
            pos = self.runs[run].pos
            if pos is not None:
                self._set_run(run, pos=pos[rows])
        self.state = take_rows(self.state, rows)

    def part_pages(self) -> None:
        """Gives every page that is not full to one row only."""
        rows = torch.arange(self.batch, device=self.device)
        for run in range(len(self.runs)):
            self.state = share_pages(self.state, run, rows, self._slack)

    @property
    def _slack(self) -> int:
        """Tokens by which keys are ahead of values at the most: the local window and a seal unit."""
        keys, values = self.layout.keys, self.layout.values
        return max(keys.local, values.local) + max(keys.unit, values.unit)

    def select(self, rows: Tensor) -> None:
        """Keeps rows ``rows`` (i64 (B',)) only, and gives the other rows' pages back."""
        rows = rows.to(self.device)
        # One side after the other, and no longer name for what is given back.
        for run in range(len(self.runs)):
            ids = self.runs[run].table[rows].flatten().long()
            for name in SIDES:
                self._set_run(run, **{name: [pages_of(part, ids) for part in getattr(self.runs[run], name)]})
            table, pos = self.runs[run].table, self.runs[run].pos
            own = torch.arange(ids.shape[0], dtype=torch.int32, device=self.device)
            own = own.view(rows.shape[0], table.shape[1])
            self._set_run(run, table=own, pos=None if pos is None else pos[rows])
        self.state = take_rows(self.state, rows)

    def clear(self) -> None:
        """Forgets all tokens; keeps the allocation."""
        self.counters.zero_()
        self.dropped.zero_()
        states = frozenset({RowState(0, 0, 0)})
        self.replace(states=states, tally=self._empty_tally(self.counters, states), wide_bound=(0, 0))
        self.part_pages()

    def to(self, device: torch.device | str, non_blocking: bool = False) -> None:
        """Moves every tensor."""
        self.replace(
            counters=self.counters.to(device, non_blocking=non_blocking),
            dropped=self.dropped.to(device, non_blocking=non_blocking),
            windows=[window.to(device, non_blocking=non_blocking) for window in self.windows],
        )
        for run in range(len(self.runs)):
            table, pos = self.runs[run].table, self.runs[run].pos
            table, pos = (None if x is None else x.to(device, non_blocking=non_blocking) for x in (table, pos))
            self._set_run(run, table=table, pos=pos)
            for name in ("keys", "values"):
                parts = [part.to(device, non_blocking=non_blocking) for part in getattr(self.runs[run], name)]
                self._set_run(run, **{name: parts})

    def __deepcopy__(self, memo: dict[int, object]) -> KVStore:
        """Independent tensors, shared layout and scheme."""
        new = copy.copy(self)
        new.tail_limit = dict(self.tail_limit)
        new.replace(
            counters=self.counters.clone(),
            dropped=self.dropped.clone(),
            windows=[window.clone() for window in self.windows],
            runs=[
                RunView(
                    view.table.clone(),
                    None if view.pos is None else view.pos.clone(),
                    [part.clone() for part in view.keys],
                    [part.clone() for part in view.values],
                )
                for view in self.runs
            ],
        )
        return new

    def __getstate__(self) -> dict[str, Any]:
        """Everything, with fp8 codes as bytes: PyTorch cannot unpickle them."""

        def plain(parts: Sequence[Tensor]) -> list[Tensor]:
            return [part.view(torch.uint8) if part.dtype == torch.float8_e4m3fn else part for part in parts]

        runs = [RunView(view.table, view.pos, plain(view.keys), plain(view.values)) for view in self.runs]
        return self.__dict__ | {"state": self.state.replace(runs=runs)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Inverse of `__getstate__`."""
        self.__dict__.update(state)
        for run, formats in enumerate(self.format.runs):
            for fmt, name in zip(formats, ("keys", "values"), strict=True):
                if fmt.bits == 8:
                    codes, *others = getattr(self.runs[run], name)
                    self._set_run(run, **{name: [codes.view(torch.float8_e4m3fn), *others]})

    # Accounting.

    def nbytes(self) -> StoreBytes:
        """Exact bytes by kind (asks the device for the rows' lengths)."""
        return accounting.nbytes(self.state)

    def elements(self) -> int:
        """Key and value elements of all tokens, those that a trim has evicted included (asks the device)."""
        return accounting.elements(self.state, self.heads, self.dims)

    def code_bits(self) -> float:
        """Payload bits an element of sealed pages, weighted by tokens and sides (asks the device).

        While nothing is sealed: of the widest run.
        """
        return accounting.code_bits(self.state, self.dims, self.dtype)
