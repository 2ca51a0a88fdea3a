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

from hfkvq.kernels.decode import LENGTH, RUNS, START, run_count
from hfkvq.kernels.hadamard import hadamard
from hfkvq.kernels.pages import Side
from hfkvq.kernels.quantize import dequantize_pages
from hfkvq.kernels.step import StepPlan, StepState
from hfkvq.kernels.windows import tokens_due, tokens_due_by_row

from ..base import outside_inference_mode
from ..schemes.base import Layout, Scheme
from .kvstore import write_pages
from .row_lengths import RowState, WindowSizes
from .state import SIDES, StoreState, as_bytes

MOST = 8192
"""Most tokens of each row that are dequantized at a time, in whole pages."""

COPIES = 8
"""Copies in f32, at the most, of the tokens that are at work: dequantized, unpacked, turned, sealed."""


def pages_at_a_time(blocks: int, page: int, tail: int) -> int:
    """Pages of each row for which scratch is reserved: as many as a tail is read from, or a small part of all."""
    return max(tail // page + 2, min(1024 // page, blocks // 32))


def relaid_scratch(plan: StepPlan) -> int:
    """Bytes that `relaid` needs at the least beside a new buffer of this plan."""
    page = plan.format.runs[0][0].page_size
    pages = pages_at_a_time(plan.blocks[0], page, max(plan.tails))
    return COPIES * 4 * plan.rows * plan.heads * max(plan.key_dim, plan.value_dim) * pages * page + 4096


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
        self.tail, self.sealed = state.windows[2 + self.at], run_count(state.counters, 0, side)
        self.gone = torch.zeros_like(self.sealed) if kept is None else kept.gone
        self.sealed = self.sealed - self.gone

    def turned(self, x: Tensor) -> Tensor:
        return x if self.change is None or not x.numel() else self.change(x)

    def raw(self, first: Tensor | int, count: int) -> list[Tensor]:
        """Tensors of ``count`` pages of each row from block ``first`` (i64 (B,)) on, as bytes: (B * count, H, ...)."""
        table, last = self.view.table, self.view.table.shape[1] - 1
        if isinstance(first, int) and self.kept is None:
            ids = table[:, first : first + count].flatten()
            return [as_bytes(part).index_select(0, ids) for part in self.parts]
        step = torch.arange(count, device=table.device)
        block = (first[:, None] if isinstance(first, Tensor) else first) + step.expand(self.state.batch, -1)
        if self.kept is None:
            ids = table.gather(1, block.clamp(0, last)).flatten()
            return [as_bytes(part).index_select(0, ids) for part in self.parts]
        heads, pages = self.tail.shape[1], self.kept.pages
        own = pages.gather(2, block.clamp(0, pages.shape[2] - 1)[:, None].expand(-1, heads, -1)).clamp(max=last)
        ids = table.long()[:, None].expand(-1, heads, -1).gather(2, own).transpose(1, 2).flatten(0, 1)
        return [as_bytes(part)[ids, torch.arange(heads, device=table.device)] for part in self.parts]

    def sealed_pages(self, first: Tensor | int, count: int) -> Tensor:
        """Tokens of ``count`` pages as `pages` has them, in the basis that they are stored in; all of them sealed."""
        parts = [x.view(part.dtype) for x, part in zip(self.raw(first, count), self.parts, strict=True)]
        dense = parts[0]
        if self.fmt.bits < 16:
            dense = dequantize_pages(parts, self.fmt, self.side, self.tail.shape[3])
        dense = dense.unflatten(0, (self.state.batch, count)).transpose(1, 2)
        return torch.empty(dense.shape, dtype=self.tail.dtype, device=dense.device).copy_(dense).flatten(2, 3)

    def pages(self, first: Tensor, count: int) -> Tensor:
        """Tokens of ``count`` pages of each row from block ``first`` (i64 (B,)) on: (B, H, count * G, D)."""
        page = self.fmt.page_size
        token = first[:, None] * page + torch.arange(count * page, device=first.device)
        slot = (token + self.gone[:, None]) % self.tail.shape[2]
        index = slot[:, None, :, None].expand(-1, self.tail.shape[1], -1, self.tail.shape[3])
        found = self.tail.gather(2, index)
        if self.view.table.shape[1]:
            is_sealed = (token < self.sealed[:, None])[:, None, :, None]
            found = torch.where(is_sealed, self.sealed_pages(first, count), found)
        return self.turned(found)

    def window(self, slots: int, rest: Tensor) -> Tensor:
        """The tail of so many slots, of which slot s holds the newest run token t with ``t % slots == s``."""
        page = self.fmt.page_size
        first = (rest - slots).clamp(min=0) // page
        tokens = self.pages(first, slots // page + 2)
        slot = torch.arange(slots, device=rest.device)[None]
        newest = rest[:, None] - 1
        token = (newest - (newest - slot) % slots).clamp(min=0)
        index = (token - first[:, None] * page).clamp(0, tokens.shape[2] - 1)
        return tokens.gather(2, index[:, None, :, None].expand(-1, tokens.shape[1], -1, tokens.shape[3]))


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
        hold: newest tokens that stay unsealed, beyond what the layout says.
        q_abs: f32 (B, H, Dk), see `Scheme.channel_bits`.
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
    rest = (counters[LENGTH] - sink).clamp(min=0)
    longest, page = max(state.longest - sink, 0), form.runs[0][0].page_size
    blocks, states = table.shape[1], list(state.states)
    for at, (side, own) in enumerate(zip(SIDES, (new.keys, new.values), strict=True)):
        reader = Reader(before, side, changes.get(side), kept)
        fmt, run, tail = own.formats[0], buffer.runs[0], buffer.windows[2 + at]
        parts, local, held = (run.keys, run.values)[at], max(own.local, hold), reader.view.table
        # A page of each row, as `relaid_scratch` counts it.
        work = 4 * COPIES * state.batch * tail.shape[1] * page * tail.shape[3]
        chunk = max(1, min(MOST // page, most // work)) if work else 1
        if side in changes:
            counters[RUNS + at] = sealed = tokens_due_by_row(rest, 0, local, own.unit)
            covered = min(row.sealed(side) for row in states) // page
            first, end = 0, -(-tokens_due(longest, 0, local, own.unit) // page)
            while first < end:
                count = min(chunk, end - first, covered - first if first < covered else end)
                if first < covered:
                    tokens = reader.turned(reader.sealed_pages(first, count))
                else:
                    tokens = reader.pages(torch.full_like(rest, first, dtype=torch.long), count)
                done = sealed.clamp(max=first * page)
                coming = (sealed - first * page).clamp(0, count * page)
                index = torch.arange(count * page, dtype=torch.int32, device=rest.device).expand(state.batch, -1)
                pages, weights = (parts, table, done, coming), q_abs if side == "keys" else None
                write_pages(pages, fmt, side, tokens, index.contiguous(), new, scheme, weights)
                first += count
            target = [tokens_due(max(row.length - sink, 0), 0, local, own.unit) for row in states]
            states = [
                RowState(row.length, *((n, row.values) if at == 0 else (row.keys, n)))
                for row, n in zip(states, target, strict=True)
            ]
        elif kept is not None:
            for first in range(0, min(held.shape[1], blocks, -(-longest // page)), chunk):
                target = table[:, first : first + chunk].flatten().long()
                for part, pages in zip(parts, reader.raw(first, len(target) // state.batch), strict=True):
                    as_bytes(part)[target] = pages
        elif held.shape[1]:
            # Blocks that have no page yet get any.
            ids = pad(held[:, :blocks], (0, max(blocks - held.shape[1], 0))).flatten()
            for part, old_part in zip(parts, reader.parts, strict=True):
                torch.index_select(as_bytes(old_part), 0, ids, out=as_bytes(part))
        if sink:
            buffer.windows[at].copy_(reader.turned(state.windows[at]))
        same = side not in changes and kept is None and tail.shape == reader.tail.shape
        tail.copy_(reader.tail if same else reader.window(tail.shape[2], rest.long()))
    return state.replace(
        format=form, sizes=sizes, counters=counters, windows=buffer.windows, runs=buffer.runs, states=frozenset(states)
    )
