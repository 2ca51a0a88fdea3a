"""Bytes and bits of what a store holds, and what became of its tokens."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hfkvq.kernels.decode import LENGTH, run_count
from hfkvq.kernels.pages import PageFormat, RunView

from .state import SIDES, StoreState


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
            if fmt.raised and size:
                used[side] -= _unused(fmt, view, counts, dim) * fmt.page_size
    if not sum(sizes.values()):
        for side, fmt in zip(SIDES, state.format.runs[-1], strict=True):
            sizes[side] = float(dims[side])
            room[side] = used[side] = dims[side] * _width(fmt, dims[side], own)
    total = sum(sizes.values())
    keys = used["keys"] / sizes["keys"] if sizes["keys"] else math.nan
    return PayloadBits(sum(room.values()) / total, sum(used.values()) / total, keys)


def _width(fmt: PageFormat, dim: int, own: int) -> float:
    return own if fmt.bits == 16 else fmt.code_bits(dim)


def _unused(fmt: PageFormat, view: RunView, counts: Tensor, dim: int) -> float:
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
