"""Bytes and bits of what a store holds, and what became of its tokens."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from typing import NamedTuple

import torch

from hfkvq.kernels.decode import LENGTH, run_count

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
        size = 0
        for fmt, parts in zip(formats, (view.keys, view.values), strict=True):
            for name, part in zip(fmt.names, parts, strict=True):
                size += part.nbytes
                if name in ("codes", "high", "full"):
                    codes += part.nbytes
                else:
                    metadata += part.nbytes
        pages = view.keys[0].shape[0]
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
    """What became of the tokens that a layer was given, over its rows and KV heads; the three add up to 1.

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
    given, evicted, *sealed = torch.stack(rows).sum(1).tolist()
    if not given:
        return TokenShares(math.nan, math.nan, math.nan)
    quantized = sum(sealed) / 2
    return TokenShares((given - evicted - quantized) / given, quantized / given, evicted / given)


def elements(state: StoreState) -> int:
    """Key and value elements of all tokens, forgotten ones included (asks the device)."""
    tokens = int((state.counters[LENGTH] + state.dropped).sum())
    return tokens * state.heads * sum(state.dims.values())


def code_bits(state: StoreState) -> float:
    """Payload bits an element of sealed pages, weighted by tokens and sides (asks the device).

    While nothing is sealed: of the widest run.
    """
    own, dims = 8 * state.dtype.itemsize, state.dims
    total = bits = 0.0
    for i, formats in enumerate(state.format.runs):
        for side, fmt in zip(SIDES, formats, strict=True):
            dim = dims[side]
            weight = float(run_count(state.counters, i, side).sum()) * dim
            total += weight
            bits += weight * (own if fmt.bits == 16 else fmt.code_bits(dim))
    if total:
        return bits / total
    keys, values = state.format.runs[-1]
    width = [own if fmt.bits == 16 else fmt.code_bits(dims[s]) for s, fmt in zip(SIDES, (keys, values), strict=True)]
    return (width[0] * dims["keys"] + width[1] * dims["values"]) / sum(dims.values())
