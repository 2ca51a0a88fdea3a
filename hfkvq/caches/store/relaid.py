"""Another layout for what a store holds: its tokens move into a new step buffer, some sides of them quantized anew.

A side whose page format, windows and basis stay keeps its bits. The tokens of the other side are dequantized a few
pages at a time, and sealed as a prompt of these tokens would be. Only the new buffer is written, so that the old state
still stands if anything fails, and beside the two there is never more than `relaid_scratch` bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hfkvq.kernels.decode import LENGTH, RUNS, run_count
from hfkvq.kernels.hadamard import hadamard
from hfkvq.kernels.pages import Side
from hfkvq.kernels.quantize import dequantize_pages
from hfkvq.kernels.step import StepPlan, StepState
from hfkvq.kernels.windows import tokens_due_by_row

from ..base import outside_inference_mode
from ..schemes.base import Layout, Scheme
from .kvstore import write_pages
from .row_lengths import RowState, WindowSizes, sealed_target
from .state import SIDES, StoreState, as_bytes

MOST = 1024
"""Most tokens of each row that are dequantized at a time, in whole pages."""

COPIES = 8
"""Copies in f32, at the most, of the tokens that are at work: dequantized, unpacked, turned, sealed."""


def pages_at_a_time(blocks: int, page: int, tail: int) -> int:
    """Pages of each row that are dequantized at a time: as many as a tail is read from, or a small part of all."""
    return max(tail // page + 2, min(MOST // page, blocks // 32))


def relaid_scratch(plan: StepPlan) -> int:
    """Most bytes that `relaid` allocates beside a new buffer of this plan."""
    page = plan.format.runs[0][0].page_size
    pages = pages_at_a_time(plan.blocks[0], page, max(plan.tails))
    return COPIES * 4 * plan.rows * plan.heads * max(plan.key_dim, plan.value_dim) * pages * page + 4096


class Reader:
    """Reads one side of a state, a few pages at a time, in the basis of another layout.

    Args:
        change: keys or values (B, H, m, D) from the old basis to the new; None leaves them bit for bit.
    """

    def __init__(self, state: StoreState, side: Side, change: Callable[[Tensor], Tensor] | None) -> None:
        self.side: Side = side
        self.state, self.change, self.at = state, change, SIDES.index(side)
        self.view, self.fmt = state.runs[0], state.format.runs[0][self.at]
        self.parts = self.view.keys if side == "keys" else self.view.values
        self.tail, self.sealed = state.windows[2 + self.at], run_count(state.counters, 0, side)

    def turned(self, x: Tensor) -> Tensor:
        return x if self.change is None or not x.numel() else self.change(x)

    def pages(self, first: Tensor, count: int) -> Tensor:
        """Tokens of ``count`` pages of each row from block ``first`` (i64 (B,)) on: (B, H, count * G, D)."""
        page, rows, table = self.fmt.page_size, self.state.batch, self.view.table
        token = first[:, None] * page + torch.arange(count * page, device=first.device)
        ring = self.tail.shape[2]
        index = (token % ring)[:, None, :, None].expand(-1, self.tail.shape[1], -1, self.tail.shape[3])
        found = self.tail.gather(2, index)
        if table.shape[1]:
            block = (first[:, None] + torch.arange(count, device=first.device)).clamp(0, table.shape[1] - 1)
            ids = table.gather(1, block).flatten().long()
            parts = [as_bytes(part)[ids].view(part.dtype) for part in self.parts]
            dense = parts[0]
            if self.fmt.bits < 16:
                dense = dequantize_pages(parts, self.fmt, self.side, self.tail.shape[3]).to(self.tail.dtype)
            dense = dense.unflatten(0, (rows, count)).transpose(1, 2).flatten(2, 3)
            found = torch.where((token < self.sealed[:, None])[:, None, :, None], dense, found)
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
    before, after = (own.keys.rotation if side == "keys" else own.values.rotation for own in (old, new))
    if before == after and raw is smooth is None:
        return None

    def change(x: Tensor) -> Tensor:
        x = hadamard(x, before, True)
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
    hold: int = 0,
    q_abs: Tensor | None = None,
) -> StoreState:
    """Tokens of a store in the tensors of ``buffer``, as ``new`` lays them out, without a transfer to the host.

    Args:
        state: of one run of pages, with nothing left to be written; it is not changed.
        buffer: an empty one of the new layout, with room for all tokens.
        changes: of each side that is quantized anew, the change of its basis. Other sides keep their bits.
        hold: newest tokens that stay unsealed, beyond what the layout says.
        q_abs: f32 (B, H, Dk), see `Scheme.channel_bits`.
    """
    form, sizes, sink = new.store, WindowSizes.of(new), new.sink
    counters, table = buffer.counters, buffer.runs[0].table
    counters.copy_(state.counters)
    table.copy_(torch.arange(table.numel(), dtype=torch.int32, device=table.device).view_as(table))
    rest = (state.counters[LENGTH] - sink).clamp(min=0)
    longest, page = max(state.longest - sink, 0), form.runs[0][0].page_size
    states = list(state.states)
    for at, (side, own) in enumerate(zip(SIDES, (new.keys, new.values), strict=True)):
        reader = Reader(state, side, changes.get(side))
        fmt, run = own.formats[0], buffer.runs[0]
        parts, local = (run.keys, run.values)[at], max(own.local, hold)
        chunk = pages_at_a_time(table.shape[1], page, max(tail.shape[2] for tail in buffer.windows[2:]))
        if side in changes:
            sealed = tokens_due_by_row(rest, 0, local, own.unit)
            counters[RUNS + at] = sealed
            most = sealed_target(longest, 0, local, own.unit)
            for first in range(0, -(-most // page), chunk):
                count = min(chunk, -(-most // page) - first)
                tokens = reader.pages(torch.full_like(rest, first, dtype=torch.long), count)
                done = sealed.clamp(max=first * page)
                coming = (sealed - first * page).clamp(0, count * page)
                index = torch.arange(count * page, dtype=torch.int32, device=rest.device).expand(state.batch, -1)
                pages, weights = (parts, table, done, coming), q_abs if side == "keys" else None
                write_pages(pages, fmt, side, tokens, index.contiguous(), new, scheme, weights)
            target = [sealed_target(max(row.length - sink, 0), 0, local, own.unit) for row in states]
            states = [
                RowState(row.length, *((n, row.values) if at == 0 else (row.keys, n)))
                for row, n in zip(states, target, strict=True)
            ]
        else:
            blocks = min(state.runs[0].table.shape[1], table.shape[1], -(-longest // page))
            for first in range(0, blocks, chunk):
                span = slice(first, min(first + chunk, blocks))
                target, source = (x[:, span].flatten().long() for x in (table, state.runs[0].table))
                for part, held in zip(parts, reader.parts, strict=True):
                    as_bytes(part)[target] = as_bytes(held)[source]
        if sink:
            buffer.windows[at].copy_(reader.turned(state.windows[at]))
        buffer.windows[2 + at].copy_(reader.window(buffer.windows[2 + at].shape[2], rest.long()))
    return state.replace(
        format=form, sizes=sizes, counters=counters, windows=buffer.windows, runs=buffer.runs, states=frozenset(states)
    )
