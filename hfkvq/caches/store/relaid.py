"""Another layout for what a store holds: its tokens move into a new step buffer, some sides of them quantized anew.

A side whose page format, windows and basis stay keeps its bits: a copy for each of its tensors. The tokens of the other
side are dequantized some pages at a time, and sealed as a prompt of these tokens would be. Only the new buffer is
written, so that the old state still stands if anything fails, and beside the two there are never more bytes than
`relaid` is given, `relaid_scratch` at the least.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hfkvq import kernels
from hfkvq.kernels.decode import LENGTH, RUNS, START, run_count
from hfkvq.kernels.hadamard import hadamard
from hfkvq.kernels.pages import Side
from hfkvq.kernels.step import MAX_STEP, StepPlan, StepState
from hfkvq.kernels.windows import tokens_due, tokens_due_by_row

from ..base import outside_inference_mode
from ..schemes.base import Layout, Scheme
from .kvstore import write_pages
from .row_lengths import RowState, WindowSizes
from .state import SIDES, StoreState, as_bytes

MOST = 8192
"""Most tokens of each row that are dequantized at a time, in whole pages."""

COPIES = 4
"""Copies in f32, at the most, of the tokens that are at work: dequantized, unpacked, turned, sealed."""


def pages_at_a_time(blocks: int, page: int, tail: int) -> int:
    """Pages of each row for which scratch is reserved: as many as a tail is read from, or a small part of all."""
    return max(tail // page + 2, min(1024 // page, blocks // 32))


def relaid_scratch(plan: StepPlan) -> int:
    """Bytes that `relaid` needs at the least beside a new buffer of this plan."""
    # The tail that is read may be longer than the new one: as long as tails of captured steps are.
    longest = max(local + unit for local, unit in zip(plan.local, plan.unit, strict=True)) + MAX_STEP
    page, tail = plan.format.runs[0][0].page_size, max(*plan.tails, longest)
    tokens = pages_at_a_time(plan.blocks[0], page, tail) * page + plan.format.sink + tail
    # Columns of windows stay until all layers have moved.
    columns = 64 * plan.rows * tail + 4096
    return COPIES * 4 * plan.rows * plan.heads * max(plan.key_dim, plan.value_dim) * tokens + columns


class Kept(NamedTuple):
    """Pages of a store's only run that stay when others go, each KV head's own; see `hfkvq.caches.eviction.forgetting`.

    Attributes:
        pages: i64 (B, H, n), blocks of the row's table: those that stay, in order, and behind them those that go.
        gone: i64 (B,), tokens of each row that go: whole pages, as many of each head.
        states: rows that there may be then.
        settled: column before which tokens cannot be taken back then.
    """

    pages: Tensor
    gone: Tensor
    states: frozenset[RowState]
    settled: int


class Reader:
    """Reads one side of a state, a few pages at a time, in the basis of another layout.

    Args:
        change: keys or values (B, H, m, D) from the old basis to the new; None leaves them bit for bit.
        kept: pages that stay; others are passed over. None for all.
    """

    def __init__(
        self,
        state: StoreState,
        side: Side,
        change: Callable[[Tensor], Tensor] | None,
        kept: Kept | None = None,
    ) -> None:
        self.side: Side = side
        self.state, self.change, self.kept, self.at = state, change, kept, SIDES.index(side)
        self.view, self.fmt = state.runs[0], state.format.runs[0][self.at]
        self.parts = self.view.keys if side == "keys" else self.view.values
        self.sink, self.tail = state.windows[self.at], state.windows[2 + self.at]
        sealed = run_count(state.counters, 0, side)[:, None]
        self.sealed = sealed if kept is None else sealed - kept.gone[:, None]

    def turned(self, x: Tensor) -> Tensor:
        return x if self.change is None or not x.numel() else self.change(x)

    def _blocks(self, first: Tensor | int, count: int) -> Tensor:
        """Pages of ``count`` blocks of each row from block ``first`` (i64 (B, 1)) on: i32 (B, count)."""
        table = self.view.table
        if isinstance(first, int):
            return table[:, first : first + count]
        block = first + torch.arange(count, device=table.device)
        return table.gather(1, block.clamp(max=table.shape[1] - 1))

    def raw(self, first: Tensor | int, count: int) -> list[Tensor]:
        """Tensors of these blocks' pages, of those that stay, as bytes: (B * count, H, ...)."""
        if self.kept is None:
            ids = self._blocks(first, count).flatten()
            return [as_bytes(part).index_select(0, ids) for part in self.parts]
        table, pages, heads = self.view.table, self.kept.pages, self.tail.shape[1]
        block = (first + torch.arange(count, device=table.device)).expand(self.state.batch, -1)
        block = block.clamp(max=pages.shape[2] - 1)[:, None].expand(-1, heads, -1)
        own = pages.gather(2, block).clamp(max=table.shape[1] - 1)
        ids = table.long()[:, None].expand(-1, heads, -1).gather(2, own).transpose(1, 2).flatten(0, 1)
        return [as_bytes(part)[ids, torch.arange(heads, device=table.device)] for part in self.parts]

    def sealed_pages(self, first: Tensor | int, count: int) -> Tensor:
        """Tokens of these pages in the basis that they are stored in: (B, H, count * G, D); all of them sealed."""
        batch, parts = self.state.batch, self.parts
        if self.fmt.bits == 16:
            return self.raw(first, count)[0].unflatten(0, (batch, -1)).transpose(1, 2).flatten(2, 3)
        if self.kept is None:
            table = self._blocks(first, count)
        else:
            parts = [x.view(part.dtype) for x, part in zip(self.raw(first, count), parts, strict=True)]
            table = torch.arange(batch * count, dtype=torch.int32, device=self.tail.device).view(batch, count)
        return kernels.run_pages(table, None, parts, self.fmt, self.side, self.tail.shape[3], self.tail.dtype)

    def columns(self, first: Tensor | int, count: int) -> Tensor:
        """Sink, ``count`` pages of each row from block ``first`` (i64 (B, 1)) on, and tail: (B, H, n, D)."""
        pages = [self.sealed_pages(first, count)] if count and self.view.table.shape[1] else []
        x = torch.cat([self.sink, *pages, self.tail], 2)
        # Pages are in `x` now, and a change of basis makes copies of its own.
        del pages
        return self.turned(x)

    def column(self, token: Tensor, first: Tensor | int, count: int) -> Tensor:
        """Columns of `columns` that have these run tokens, i64 (B, m), of the pages that were read or behind them."""
        page, tail = self.fmt.page_size, self.tail.shape[2]
        slot = (token if self.kept is None else token + self.kept.gone[:, None]) % tail
        read = count * page if self.view.table.shape[1] else 0
        return self.sink.shape[2] + torch.where(token < self.sealed, token - first * page, slot + read)

    def pages(self, first: Tensor, count: int) -> Tensor:
        """Tokens of ``count`` pages of each row from block ``first`` (i64 (B, 1)) on: (B, H, count * G, D)."""
        page = self.fmt.page_size
        token = first * page + torch.arange(count * page, device=first.device)
        return taken(self.columns(first, count), self.column(token, first, count))


def taken(x: Tensor, columns: Tensor) -> Tensor:
    """Columns i64 (B, m) of tokens (B, H, n, D), of each row its own."""
    return x.gather(2, columns[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def basis_change(old: Layout, new: Layout, side: Side, raw: Any, smooth: Any) -> Callable[[Tensor], Tensor] | None:
    """The change from one layout's basis to another's, of one side.

    Args:
        raw: undoes the smoothing of keys, or None.
        smooth: smooths keys, or None.
    """
    before, after = (own.keys.rotate if side == "keys" else own.values.rotate for own in (old, new))
    if before == after and raw is smooth is None:
        return None

    def change(x: Tensor) -> Tensor:
        x = hadamard(x, before)
        x = x if raw is None else raw(x)
        x = x if smooth is None else smooth(x)
        return hadamard(x, after)

    return change


@outside_inference_mode
def relaid(
    state: StoreState,
    buffer: StepState,
    old: Layout,
    new: Layout,
    scheme: Scheme,
    changes: dict[Side, Callable[[Tensor], Tensor] | None],
    most: int,
    known: dict[Any, Tensor],
    hold: int = 0,
    q_abs: Tensor | None = None,
    kept: Kept | None = None,
) -> StoreState:
    """Tokens of a store in the tensors of ``buffer``, as ``new`` lays them out, without a transfer to the host.

    Args:
        state: of one run of pages, with nothing left to be written; it is not changed.
        buffer: an empty one of the new layout, with room for all tokens.
        changes: of each side that is quantized anew, the change of its basis. Other sides keep their bits.
        most: bytes that may be allocated beside the buffer; the more, the more pages are sealed at a time.
        known: columns of windows, for layers one after the other: of rows that are alike they follow from numbers.
        hold: see `KVStore`; so is ``q_abs``.
        kept: pages that stay; None for all.
    """
    before = state
    form, sizes, sink = new.store, WindowSizes.of(new), new.sink
    counters, table = buffer.counters, buffer.runs[0].table
    counters.copy_(state.counters)
    if kept is not None:
        gone = kept.gone.int()
        counters[START] += gone
        # The length is followed by counts of what is sealed.
        counters[LENGTH:] -= gone
        dropped, settled = state.dropped + gone, max(state.settled, kept.settled)
        state = state.replace(states=kept.states, dropped=dropped, settled=settled)
    torch.arange(table.numel(), device=table.device, out=table.view(-1))
    page, batch, device = form.runs[0][0].page_size, state.batch, table.device
    blocks, states = table.shape[1], list(state.states)
    rests = [max(row.length - sink, 0) for row in states]
    rest = (counters[LENGTH] - sink).clamp(min=0)
    # Where all rows are alike, nothing has to be computed of them on the device.
    alike = len(states) == 1 and kept is None
    held = before.runs[0].table
    # Blocks that have no page yet get any.
    ids = held if blocks == held.shape[1] else pad(held[:, :blocks], (0, max(blocks - held.shape[1], 0)))
    # A token of each row, as `relaid_scratch` counts it.
    work = 4 * COPIES * batch * state.heads * max(state.dims.values())
    windows = sink + max(buffer.windows[2].shape[2], buffer.windows[3].shape[2])
    chunk = max(1, min(MOST, most // work - windows) // page) if work else 1
    index = torch.arange(chunk * page, dtype=torch.int32, device=device).expand(batch, -1)
    for at, (side, own) in enumerate(zip(SIDES, (new.keys, new.values), strict=True)):
        reader = Reader(before, side, changes.get(side), kept)
        fmt, run, tail = own.formats[0], buffer.runs[0], buffer.windows[2 + at]
        parts, local = (run.keys, run.values)[at], max(own.local, hold)
        had, slots = [row.sealed(side) for row in states], tail.shape[2]
        if side in changes:
            due, sealed = [tokens_due(each, 0, local, own.unit) for each in rests], counters[RUNS + at]
            sealed.copy_(tokens_due_by_row(rest, 0, local, own.unit)) if len(due) > 1 else sealed.fill_(due[0])
            states = [
                RowState(row.length, *((n, row.values) if at == 0 else (row.keys, n)))
                for row, n in zip(states, due, strict=True)
            ]
            covered, end = min(had) // page, -(-max(due) // page)
            steps = torch.arange(0, (end + chunk) * page, chunk * page, dtype=torch.int32, device=device)
            done = steps[:, None].minimum(sealed)
            coming, weights = done[1:] - done[:-1], q_abs if side == "keys" else None
            for n, first in enumerate(range(0, end, chunk)):
                count = min(chunk, end - first)
                if first + count <= covered:
                    tokens = reader.turned(reader.sealed_pages(first, count))
                else:
                    tokens = reader.pages(torch.full((batch, 1), first, dtype=torch.long, device=device), count)
                pages = parts, table, done[n], coming[n]
                write_pages(pages, fmt, side, tokens, index[:, : count * page].contiguous(), new, scheme, weights)
                # Tokens of these pages go before those of the next are made, since scratch is counted for one of them.
                del tokens
        elif kept is not None:
            for first in range(0, min(held.shape[1], blocks, -(-max(rests) // page)), chunk):
                target = table[:, first : first + chunk].flatten().long()
                for part, pages in zip(parts, reader.raw(first, len(target) // batch), strict=True):
                    as_bytes(part)[target] = pages
        elif held.shape[1]:
            for part, old_part in zip(parts, reader.parts, strict=True):
                torch.index_select(as_bytes(old_part), 0, ids.flatten(), out=as_bytes(part))
        if side not in changes and kept is None and slots == reader.tail.shape[2]:
            buffer.windows[at].copy_(reader.sink)
            tail.copy_(reader.tail)
            continue
        # Slot s has the newest run token t with ``t % slots == s``.
        if alike:
            first = max(rests[0] - slots, 0) // page
            count = max(-(-had[0] // page) - first, 0)
        else:
            first, count = ((rest - slots).clamp(min=0) // page)[:, None].long(), slots // page + 2
        key = side, rests[0], had[0], slots, reader.tail.shape[2]
        columns = known.get(key) if alike else None
        if columns is None:
            newest = (rest - 1)[:, None].long()
            token = (newest - (newest - torch.arange(slots, device=device)) % slots).clamp(min=0)
            columns = reader.column(token, first, count)
            if alike:
                known[key] = columns
        x = reader.columns(first, count)
        buffer.windows[at].copy_(x[:, :, :sink])
        tail.copy_(taken(x, columns))
    return state.replace(
        format=form, sizes=sizes, counters=counters, windows=buffer.windows, runs=buffer.runs, states=frozenset(states)
    )
