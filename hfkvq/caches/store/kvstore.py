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

The host never asks the device how long a row is: see `hfkvq.caches.store.row_lengths`.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace as replaced

import torch
from torch import Tensor

from hfkvq import kernels
from hfkvq.kernels.arguments import AttentionArguments
from hfkvq.kernels.decode import LENGTH, RUNS, START, run_count
from hfkvq.kernels.masks import fold_mask
from hfkvq.kernels.pages import PageFormat, RunView, Side
from hfkvq.kernels.step import MAX_STEP

from ..base import outside_inference_mode
from ..schemes.base import Layout, Scheme, warn_of_unseen
from .routing import (
    ColumnTags,
    Route,
    SealSource,
    SealStart,
    followed,
    route_by_width,
)
from .row_lengths import Forecast, RowState, WindowSizes, forecast
from .rows import cropped, reordered, selected
from .state import EMPTY, SIDES, StoreState
from .windows import (
    EVICTING_GROWTH,
    GROWTH,
    Padding,
    Ragged,
    fill_windows,
    grow,
    grow_tail,
    pages_for,
    tail_limits,
)

Pages = tuple[Sequence[Tensor], Tensor, Tensor, Tensor]
"""Destination of tokens: tensors of one side's pages, their table, tokens there so far, and new ones."""


def write_pages(
    pages: Pages,
    fmt: PageFormat,
    side: Side,
    source: Tensor,
    index: Tensor,
    layout: Layout,
    scheme: Scheme,
    q_abs: Tensor | None = None,
) -> None:
    """Quantizes tokens as the layout and the scheme say.

    Args:
        pages: where they go: tensors in the order of ``fmt.names``, table i32 (B, n), tokens there and new ones (B,).
        source: (B, H, L, D), in the basis of the store.
        index: i32 (B, m), column of each new token.
        q_abs: f32 (B, H, D), see `Scheme.channel_bits`; of keys only.
    """
    if not source.shape[1]:
        # The stores by which memory is planned have no heads.
        return
    parts, table, count, new = pages
    own = layout.keys if side == "keys" else layout.values
    widths = rule = None
    if fmt.raised:
        unseen = q_abs is None and "query" in scheme.needs
        rule = scheme.step_rule(source.shape[3], not unseen)
        if unseen:
            warn_of_unseen(scheme)
    if fmt.raised and rule is None:
        keys = source.gather(2, index.long()[:, None, :, None].expand(-1, source.shape[1], -1, source.shape[3]))
        widths = scheme.channel_bits(keys.unflatten(2, (-1, fmt.page_size)), q_abs)
    kernels.seal_side(parts, table, count, new, source, index, fmt, side, rule, q_abs, own.balance, widths)


class KVStore:
    """Storage of one layer. What changes is `state`, which only this package gives another value.

    With ``headwise``, every KV head of a row has tokens of its own: heads are folded into rows, so that the store has
    B*H rows of one head each, and row ``b*H + h`` is KV head h of the layer's row b. What comes in and goes out has the
    layer's shapes (B, H, ...); counters, tables, windows and pages are folded. Tokens seal as in any store until a
    requantization gives each row tokens and tiers of its own.

    Arguments of methods mean the same everywhere. ``hold``: newest tokens that must stay unsealed, beyond what the
    layout says. ``q_abs``: f32 (B, H, Dk), see `Scheme.channel_bits`. ``tags``: of the first logical columns, see
    `Scheme.token_bits`. ``keys`` (B, H, t, Dk) and ``values`` (B, H, t, Dv) are not rotated.

    Attributes:
        growth: factor by which runs that have no room grow.
        fold: rows of the store for each of the layer's: KV heads of a headwise store, else 1.

    Args:
        keys: any tensor of the shape, dtype and device to come; so are ``values``.
        offloaded: whether pages lie in the host's memory.
    """

    def __init__(
        self,
        layout: Layout,
        scheme: Scheme,
        keys: Tensor,
        values: Tensor,
        offloaded: bool = False,
        headwise: bool = False,
    ) -> None:
        layout.check(keys.shape[-1], values.shape[-1])
        self.fold, self.growth = (keys.shape[1], EVICTING_GROWTH) if headwise else (1, GROWTH)
        self.layout, self.format, self.scheme = layout, layout.store, scheme
        self.sizes = WindowSizes.of(layout)
        self.seals_widely = scheme.seals_widely(layout)
        self.state = StoreState.empty(
            layout, self.folded(keys), self.folded(values), MAX_STEP, "tags" in scheme.needs, offloaded
        )
        self.heads, self.dims, self.dtype = self.state.heads, self.state.dims, self.state.dtype
        # Tails grow up to this, so that short contexts do not pay for windows they cannot fill.
        self.tail_limit: dict[Side, int] = tail_limits(layout, 0)

    # A headwise store's rows are heads.

    def folded(self, x: Tensor) -> Tensor:
        """(B, H*n, ...) of the layer's rows as (B*H, n, ...) of a headwise store's; as it is for any other."""
        if self.fold == 1:
            return x
        rows, heads, *rest = x.shape
        return x.reshape(rows * self.fold, heads // self.fold, *rest)

    def unfolded(self, x: Tensor) -> Tensor:
        """Inverse of `folded`: (B*H, n, ...) as (B, H*n, ...)."""
        if self.fold == 1:
            return x
        rows, heads, *rest = x.shape
        return x.reshape(rows // self.fold, heads * self.fold, *rest)

    def rows_of(self, rows: Tensor) -> Tensor:
        """Rows of the store that belong to rows of the layer: i64 (B',) to (B' * fold,)."""
        if self.fold == 1:
            return rows
        return (rows[:, None] * self.fold + torch.arange(self.fold, device=rows.device)).flatten()

    # Contents, read.

    @property
    def batch(self) -> int:
        return self.state.counters.shape[1]

    @property
    def device(self) -> torch.device:
        return self.state.counters.device

    @property
    def counters(self) -> Tensor:
        return self.state.counters

    @property
    def windows(self) -> tuple[Tensor, ...]:
        return self.state.windows

    @property
    def runs(self) -> tuple[RunView, ...]:
        return self.state.runs

    @property
    def states(self) -> frozenset[RowState]:
        return self.state.states

    @property
    def longest(self) -> int:
        return self.state.longest

    @property
    def row_lengths(self) -> Tensor:
        """i32 (B,): tokens that each of the layer's rows holds (the same in all heads)."""
        return self.state.counters[LENGTH, :: self.fold]

    def forecast(self, tokens: int = 0, hold: int = 0) -> Forecast:
        return forecast(self.state.states, self.sizes, tokens, hold)

    def fits(self, tokens: int) -> bool:
        """True if ``tokens`` more are a step, and can join the tail before anything is sealed."""
        needs, limit = self.forecast(tokens).tail_slots, self.tail_limit
        return tokens <= MAX_STEP and needs[0] <= limit["keys"] and needs[1] <= limit["values"]

    def attend(self, query: Tensor, arguments: AttentionArguments) -> Tensor:
        """Attention of the newest queries (B, Hq, Q, D) over everything held; see `kernels.decode_attention`.

        A bias has to be a part of the mask, see `AttentionArguments.biased`.
        """
        state, (scaling, mask, softcap, sinks, *_) = self.state, arguments
        if self.fold > 1:
            # The layer's list of sinks has those of each head in turn: rows here take turns with it.
            mask, query = fold_mask(mask, query.shape[0], self.fold), self.folded(query)
        out = kernels.decode_attention(
            query, state.counters, state.windows, state.flat_runs(), mask, sinks, scaling, softcap, self.format
        )
        return self.unfolded(out)

    def dense(self, side: Side, columns: int, back: bool = True) -> Tensor:
        """(B, H, columns, D) in logical order, 0 at padding and evicted tokens; not ``back``: in the store's basis."""
        state, form = self.state, self.format if back else replaced(self.format, rotate_keys=0, rotate_values=0)
        return self.unfolded(kernels.gather_rows(state.counters, state.windows, state.flat_runs(), columns, form, side))

    def dense_before(self, new: Tensor, side: Side, columns: int, back: bool = True) -> Tensor:
        """(B, H, columns, D): everything held, as `dense` has it, and ``new`` (B, H, t, D) in the last columns.

        Written where it belongs: to join the two would copy all that has been dequantized.
        """
        dense = self.dense(side, columns, back=back)
        dense[:, :, columns - new.shape[2] :] = new if back else self._rotated(new, side)
        return dense

    def adopt(self, state: StoreState) -> None:
        """Holds what another state of the same format holds; this one's tensors are given up."""
        self.state = state

    def laid_out(self, layout: Layout, scheme: Scheme, state: StoreState, hold: int) -> KVStore:
        """The store of another layout that holds ``state``, of which ``hold`` newest tokens stay unsealed."""
        made = copy.copy(self)
        made.layout, made.format, made.scheme, made.sizes = layout, layout.store, scheme, state.sizes
        made.seals_widely = scheme.seals_widely(layout)
        made.tail_limit, made.state = tail_limits(layout, hold), state
        return made

    def note_states(self, states: frozenset[RowState], foreseen: bool = True) -> None:
        """Notes what rows are like after recorded steps, which changed the tensors alone; ``foreseen``: as they do."""
        self.state = self.state.replace(states=states, history=followed(self.state.known, states) if foreseen else None)

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
        self.state = self.state.replace(states=states, history=None)
        self.counters[START].add_(padding.lead)
        self.counters[LENGTH].add_(tokens - padding.lead)

    # Tokens arrive.

    def push(self, keys: Tensor, values: Tensor) -> None:
        """Appends up to 16 tokens to sink and tail; seals nothing. ``fits`` must hold."""
        self.grow_tails(keys.shape[2])
        # Counts on the device as well.
        kernels.append(self.folded(keys), self.folded(values), self.counters, self.windows, self.format)
        self.state = self.state.replace(states=self.forecast(keys.shape[2]).appended)

    @outside_inference_mode
    def extend(
        self,
        keys: Tensor,
        values: Tensor,
        padding: Padding | None = None,
        hold: int = 0,
        q_abs: Tensor | None = None,
        tags: ColumnTags | None = None,
    ) -> None:
        """Takes a prompt: seals what may be sealed straight from it and keeps the rest in the windows."""
        keys, values = self.folded(keys), self.folded(values)
        if padding is not None and self.fold > 1:
            each = None if padding.source is None else padding.source.repeat_interleave(self.fold, 0)
            padding = Padding(padding.lead.repeat_interleave(self.fold), padding.amounts, each)
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
            start = None if tags is None else SealStart(counters, self.state.known, padding)
            self._advance(keys.shape[2], padding)
            self._seal(source_of(keys, self.windows[2]), source_of(values, self.windows[3]), hold, q_abs, tags, start)
            self.grow_tails(1, fresh)
            fill_windows(self.state, keys, values, counters[LENGTH], padding)

    @outside_inference_mode
    def extend_ragged(self, keys: Tensor, values: Tensor, rows: Ragged, q_abs: Tensor | None = None) -> None:
        """`extend` for rows of any lengths, which hold nothing yet. The store gets other windows, as long as before.

        Args:
            keys: (1, H, n, Dk), of all rows, one row behind another; so are ``values``.
            rows: where each row's tokens stand.
        """
        assert not self.longest, "first tokens"
        keys, values = self._rotated(keys, "keys"), self._rotated(values, "values")
        with self._counting(empty=True):
            self.state = self.state.replace(
                states=frozenset(RowState(length, 0, 0) for length in rows.lengths), history=None
            )
            self.counters[LENGTH].copy_(rows.length)
            first = rows.first[:, None] + self.layout.sink
            sources = [SealSource(x.expand(self.batch, -1, -1, -1), 0, x.shape[2], first) for x in (keys, values)]
            self._seal(sources[0], sources[1], 0, q_abs, None)
            self.state = self.state.replace(windows=rows.windows(self.state, keys, values))

    @contextlib.contextmanager
    def _counting(self, empty: bool = False) -> Iterator[Tensor]:
        """Tokens are counted and come into the windows in place, or do not, if anything fails; yields old counters.

        Out of memory, most likely. What was written besides lies in pages that nobody reads yet. ``empty``: nothing of
        what the windows hold is wanted.
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
        """Seals what has left the windows; whether a seal was due in some row. Asks the device nothing if none was."""
        keys, values = (SealSource(tail, tail.shape[2]) for tail in self.windows[2:])
        return self._seal(keys, values, hold, q_abs, tags)

    # Tokens leave the tail, or a prompt, for pages.

    def _seal(
        self,
        keys: SealSource,
        values: SealSource,
        hold: int,
        q_abs: Tensor | None,
        tags: ColumnTags | None,
        start: SealStart | None = None,
    ) -> bool:
        """`commit`, from tails or from a prompt; ``start`` is what was there before the prompt."""
        then = self.forecast(hold=hold)
        most = then.due
        if not any(most):
            return False
        if self.fold > 1:
            # Weights of channels are the layer's, and so are tags, which do not hold for folded rows.
            q_abs, tags = None if q_abs is None else self.folded(q_abs), None
        from_tail = not keys.tokens
        plain = tags is None and self.seals_widely and (from_tail or keys.first is not None)
        if not self.format.ordered and not plain:
            route = self._seal_by_width((keys, values), most[0], hold, tags, start)
            history = None if tags is None else route.history
            self.state = self.state.replace(states=then.sealed, widest=route.held, history=history)
            return True
        local = max(self.sizes.local[0], hold), max(self.sizes.local[1], hold)
        sealed = then.most_sealed
        if not self.format.ordered:
            # A row that seals keeps its newest tokens in the tail; others have room for what they hold.
            sealed = min(max(self.state.wide_most - local[0], 0), sealed)
        self.state = grow(self.state, len(self.runs) - 1, pages_for(self.format, -1, sealed), self.growth)
        self._seal_last((keys, values), most, local, q_abs)
        self.state = self.state.replace(states=then.sealed, history=followed(self.state.known, then.sealed))
        return True

    def _seal_last(
        self,
        sources: tuple[SealSource, SealSource],
        most: tuple[int, int],
        local: tuple[int, int],
        q_abs: Tensor | None,
    ) -> None:
        """Seals what is due into the last run, which has room for it; no row has more than ``most`` to seal."""
        sink, _, unit = self.sizes
        counters, windows, view, from_tail = self.counters, self.windows, self.runs[-1], not sources[0].tokens
        # Tokens are counted as sealed before their pages are written; if that fails, they must not stay counted.
        before = counters.clone()
        try:
            # Slots of the tail, where it is tails that are sealed from.
            asked = most if from_tail else (0, 0)
            pos = view.pos if from_tail else None
            found = kernels.due(counters, sink, (windows[2].shape[2], windows[3].shape[2]), local, unit, asked, pos)
            for at, (side, source) in enumerate(zip(SIDES, sources, strict=True)):
                if most[at]:
                    fmt, parts = self.format.runs[-1][at], (view.keys, view.values)[at]
                    count, new, span, own = found.count[at], found.new[at], most[at], source
                    room = self.format.ring * fmt.page_size
                    if room and span > room and not from_tail:
                        # Tokens that leave the window at once have no page: no launch writes two blocks of one page.
                        end = -(-(count + new) // fmt.page_size) * fmt.page_size
                        skipped = torch.minimum(new, (end - room - count).clamp(min=0))
                        count, new, span = count + skipped, new - skipped, room
                        if source.first is not None:
                            own = source._replace(first=source.first + skipped[:, None])
                    index = found.index[at] if from_tail else own.oldest(count, span, counters[LENGTH], sink)
                    pages = parts, view.table, count, new
                    write_pages(pages, fmt, side, source.tensor, index, self.layout, self.scheme, q_abs)
            if view.pos is not None and not from_tail:
                view.pos[:, : most[0]] = torch.arange(sink, sink + most[0], device=self.device)
        except BaseException:
            counters.copy_(before)
            raise

    def _seal_by_width(
        self,
        sources: tuple[SealSource, SealSource],
        bound: int,
        hold: int,
        tags: ColumnTags | None,
        start: SealStart | None,
    ) -> Route:
        """Sends the tokens that leave the tail to the run of their width; counts them when all are there."""
        if tags is None or self.scheme.reads_tokens:
            codes = None if tags is None else tags.codes
            route = route_by_width(self.counters, self.layout, self.scheme, sources, bound, hold, codes)
        else:
            start = SealStart(self.counters, self.state.known, None) if start is None else start
            route = tags.route(self.counters, self.layout, self.scheme, sources, bound, hold, start)
        for i, tokens in enumerate(route.runs):
            if tokens is None:
                continue
            self.state = grow(self.state, i, pages_for(self.format, i, tokens.held), self.growth)
            view, count = self.runs[i], run_count(self.counters, i, "keys")
            assert view.pos is not None, "a run of several has positions"
            view.pos.index_put_(tokens.place, tokens.position)
            for at, (side, source) in enumerate(zip(SIDES, sources, strict=True)):
                pages = (view.keys, view.values)[at], view.table, count, tokens.new
                fmt, index = self.format.runs[i][at], tokens.columns[at]
                write_pages(pages, fmt, side, source.tensor, index, self.layout, self.scheme)
        self.counters[RUNS:].add_(route.added)
        return route

    @outside_inference_mode
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
        self.state = self.state.replace(counters=counters, dropped=self.state.dropped + evicted, settled=settled)
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
        self.state = grow_tail(self.state, side, need, self.tail_limit[side], empty)

    # Rows and lengths change. `write_pages` comes next; until then the state before could come back.

    def write_pages(self) -> None:
        """Writes the pages that the last change of rows or lengths has left to be written."""
        self.state = self.state.written()

    def crop(self, tokens: int, seen: int) -> None:
        """Forgets the newest ``tokens`` logical columns of ``seen``; see `hfkvq.caches.store.rows.cropped`."""
        self.state = cropped(self.state, self.layout, self.tail_limit, tokens, seen)

    def reorder(self, rows: Tensor) -> None:
        """Row b becomes what row ``rows[b]`` was (i64 (B',)). Full pages are shared, not copied."""
        self.state = reordered(self.state, self.layout, self.rows_of(rows.to(self.device)))

    def select(self, rows: Tensor) -> None:
        """Keeps rows ``rows`` (i64 (B',)) only, and gives the other rows' pages back."""
        self.state = selected(self.state, self.rows_of(rows.to(self.device)))

    @outside_inference_mode
    def clear(self) -> None:
        """Forgets all tokens; keeps the allocation."""
        state = self.state
        state.counters.zero_()
        state.dropped.zero_()
        history = EMPTY if "tags" in self.scheme.needs else None
        # No row's pages are another's, or lie behind those of a batch that was larger.
        runs = [replaced(view, table=state.own_table(view.table.shape[1])) for view in state.runs]
        self.state = state.replace(states=EMPTY, history=history, wide_bound=(0, 0), settled=0, runs=runs, writes=())

    def __deepcopy__(self, memo: dict[int, object]) -> KVStore:
        """Independent tensors, outside of any buffer, shared layout and scheme."""
        new = copy.copy(self)
        new.tail_limit, new.state = dict(self.tail_limit), self.state.map(torch.clone)
        return new
