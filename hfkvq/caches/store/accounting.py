"""Bytes and bits of what a store holds, what became of its tokens, and faults of its contents."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hfkvq.kernels.decode import ABSENT, LENGTH, RUNS, START, column_positions, run_count
from hfkvq.kernels.pages import PageFormat, RunView

from .host import is_hosted
from .routing import read_counters
from .row_lengths import row_states
from .state import SIDES, StoreState, in_turn


@dataclass(frozen=True, slots=True)
class StoreBytes:
    """Bytes a store holds, by kind; their sum is the sum of its tensors.

    Attributes:
        codes: payload of pages, raised channels included.
        metadata: scales, zeros and channel indices.
        windows: sink and tail.
        tables: page tables, positions and counters.
        reserved: the part of codes and metadata in pages that hold no token yet.
    """

    codes: int = 0
    metadata: int = 0
    windows: int = 0
    tables: int = 0
    reserved: int = 0

    @property
    def total(self) -> int:
        """All bytes."""
        return self.codes + self.metadata + self.windows + self.tables

    def __add__(self, other: StoreBytes) -> StoreBytes:
        """Sum by kind."""
        return StoreBytes(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


def nbytes(state: StoreState) -> StoreBytes:
    """Exact bytes by kind (asks the device for the rows' lengths)."""
    codes = metadata = tables = 0
    reserved = 0.0
    for i, (view, formats) in enumerate(zip(state.runs, state.format.runs, strict=True)):
        tables += view.table.nbytes + (0 if view.pos is None else view.pos.nbytes)
        size, pages = 0, view.keys[0].shape[0]
        for fmt, parts in zip(formats, (view.keys, view.values), strict=True):
            for name, part in zip(fmt.names, parts, strict=True):
                size += part.nbytes
                if name in ("codes", "high", "full"):
                    codes += part.nbytes
                else:
                    metadata += part.nbytes
        if pages:
            held = torch.maximum(run_count(state.counters, i, "keys"), run_count(state.counters, i, "values"))
            blocks = -(-held // formats[0].page_size)
            inside = torch.arange(view.table.shape[1], device=state.counters.device) < blocks[:, None]
            used = view.table[inside].unique().numel()
            reserved += size * (pages - used) / pages
    windows = sum(window.nbytes for window in state.windows)
    tables += state.counters.nbytes + state.dropped.nbytes
    return StoreBytes(codes, metadata, windows, tables, round(reserved))


class TokenShares(NamedTuple):
    """Shares of a layer's tokens that are whole, quantized and evicted, over its rows and KV heads; they add up to 1.

    Attributes:
        original: share that is held whole, in pages of 16 bits, the sink or the tail.
        quantized: share in pages of fewer bits, the mean of keys and values.
        evicted: share that was forgotten.
    """

    original: float
    quantized: float
    evicted: float


def token_shares(state: StoreState) -> TokenShares:
    """Shares of what the rows were given (asks the device); NaN of nothing."""
    rows = [state.counters[LENGTH] + state.dropped, state.dropped]
    rows += [
        run_count(state.counters, i, side)
        for i, formats in enumerate(state.format.runs)
        for side, fmt in zip(SIDES, formats, strict=True)
        if fmt.bits < 16
    ]
    if state.format.window:
        # Only tokens inside the sliding window count; unsealed tokens are the newest.
        beyond = (state.counters[LENGTH] - state.format.window).clamp(min=0)
        rows = [rows[0] - beyond, rows[1], *((row - beyond).clamp(min=0) for row in rows[2:])]
    given, evicted, *sealed = torch.stack(rows).sum(1).tolist()
    if not given:
        return TokenShares(math.nan, math.nan, math.nan)
    quantized = sum(sealed) / 2
    return TokenShares((given - evicted - quantized) / given, quantized / given, evicted / given)


def elements(state: StoreState) -> int:
    """Key and value elements of all tokens, forgotten ones included, or of those in a window (asks the device)."""
    given = state.counters[LENGTH] + state.dropped
    if state.format.window:
        given = given.clamp(max=state.format.window)
    return int(given.sum()) * state.heads * sum(state.dims.values())


class PayloadBits(NamedTuple):
    """Payload bits per element of sealed pages, weighted by tokens and sides.

    Attributes:
        room: codes, and all room for raised channels.
        used: without the room that holds nothing but zeros, as where no channel was raised.
        keys: of keys alone, without such room: the mean of their channels' widths (MixKVQ's equation 17).
    """

    room: float
    used: float
    keys: float


def payload_bits(state: StoreState) -> PayloadBits:
    """Payload bits of what a store holds (asks the device); while nothing is sealed, of its widest run."""
    own, dims = 8 * state.dtype.itemsize, state.dims
    sizes, room, used = dict.fromkeys(SIDES, 0.0), dict.fromkeys(SIDES, 0.0), dict.fromkeys(SIDES, 0.0)
    for i, (view, formats) in enumerate(zip(state.runs, state.format.runs, strict=True)):
        for side, fmt in zip(SIDES, formats, strict=True):
            dim, counts = dims[side], run_count(state.counters, i, side)
            if state.format.ring:
                counts = counts.clamp(max=state.format.ring * fmt.page_size)
            size = float(counts.sum()) * dim
            sizes[side] += size
            room[side] += size * _width(fmt, dim, own)
            used[side] += size * _width(fmt, dim, own)
            if fmt.raised and size and not fmt.trellis:
                used[side] -= _unused(fmt, view, counts) * fmt.page_size
    if not sum(sizes.values()):
        for side, fmt in zip(SIDES, state.format.runs[-1], strict=True):
            sizes[side] = float(dims[side])
            room[side] = used[side] = dims[side] * _width(fmt, dims[side], own)
    total = sum(sizes.values())
    keys = used["keys"] / sizes["keys"] if sizes["keys"] else math.nan
    return PayloadBits(sum(room.values()) / total, sum(used.values()) / total, keys)


def _width(fmt: PageFormat, dim: int, own: int) -> float:
    return own if fmt.bits == 16 else fmt.code_bits(dim)


def _unused(fmt: PageFormat, view: RunView, counts: Tensor) -> float:
    """Bits of a token, summed over sealed pages and averaged over heads, of room for raised keys that holds zeros."""
    parts = dict(zip(fmt.names, view.keys, strict=True))
    pages = view.table[torch.arange(view.table.shape[1], device=counts.device) < counts[:, None] // fmt.page_size]
    unused = 0.0
    for width, name in ((4, "high"), (16, "full")):
        if name in parts:
            # (P, H, rows, room): a channel that was raised has a code, or a key, that is not 0.
            taken = parts[name].any(2).sum(-1).float().mean(1)[pages.long()]
            unused += (width - fmt.bits) * float((fmt.raised_count(width) - taken).sum())
    return unused


def contradictions(state: StoreState, columns: int) -> Iterator[str]:
    """Faults of a store whose rows were given so many logical columns, padding included, in words; asks the device."""
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
