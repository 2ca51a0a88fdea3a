"""Tokens of a store by column of `sink | runs | tail`: where they stand, and what pages have of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from hfkvq.kernels.decode import column_positions
from hfkvq.kernels.pages import PageFormat, RunView, Side
from hfkvq.kernels.quantize import dequantize_pages

from .state import SIDES, StoreState, as_bytes

if TYPE_CHECKING:
    from .kvstore import KVStore


def positions(store: KVStore | StoreState) -> Tensor:
    """Row position of every column of `sink | runs | tail`: i32 (B, N), `ABSENT` where there is no token."""
    return column_positions(store.format, store.counters, store.runs, store.windows[2].shape[2], "keys")


def run_columns(store: KVStore | StoreState) -> list[tuple[int, int]]:
    """First column of each run, and of the tail at last, with the number of columns."""
    found, at = [], store.format.sink
    for view, (fmt, _) in zip(store.runs, store.format.runs, strict=True):
        size = view.table.shape[1] * fmt.page_size
        found.append((at, size))
        at += size
    return [*found, (at, store.windows[2].shape[2])]


def gather(state: StoreState, side: Side, columns: Tensor, runs: Sequence[int]) -> Tensor:
    """Dequantized tokens of columns (B, m) of `sink | runs | tail`: (B, H, m, D), anything where there is none.

    In the model's dtype if all ``runs``, those of which tokens are wanted, are whole; else in f32.
    """
    spans, at, dim = run_columns(state), SIDES.index(side), state.dims[side]

    def picked(x: Tensor, slot: Tensor) -> Tensor:
        index = slot.clamp(0, max(x.shape[2] - 1, 0))[:, None, :, None]
        return x.gather(2, index.expand(-1, x.shape[1], -1, dim))

    out = picked(state.windows[2 + at], columns - spans[-1][0])
    if state.sizes.sink:
        sink = picked(state.windows[at], columns)
        out = torch.where((columns < state.sizes.sink)[:, None, :, None], sink, out)
    for i in runs:
        (first, size), view, fmt = spans[i], state.runs[i], state.format.runs[i][at]
        if not size:
            continue
        slots = (columns - first).clamp(0, size - 1)
        if fmt.whole:
            parts = [part[view.table.long()].flatten(0, 1) for part in (view.keys, view.values)[at]]
            dense = dequantize_pages(parts, fmt, side, dim).unflatten(0, view.table.shape)
            dense = picked(dense.transpose(1, 2).flatten(2, 3), slots)
        else:
            parts = take(view, fmt, side, slots)
            dense = parts[0] if fmt.bits == 16 else dequantize_pages(parts, fmt, side, dim)
        inside = (columns >= first) & (columns < first + size)
        out = torch.where(inside[:, None, :, None], dense, out)
    return out


def _token_axis(name: str, fmt: PageFormat, side: Side) -> int:
    """The axis of a page's tensor (P, H, ...) that counts tokens, in formats per token."""
    return 3 if name in ("scale", "zero") or (name == "codes" and side == "values" and fmt.bits < 8) else 2


def take(view: RunView, fmt: PageFormat, side: Side, slots: Tensor) -> list[Tensor]:
    """Tokens of a run, as pages have them, bit for bit.

    Args:
        view: the run.
        fmt: the side's format, per token.
        side: "keys" or "values".
        slots: i64 (B, m), run token of each; must exist in the row's table.

    Returns:
        The format's tensors as pages of m tokens: (B, H, ...).
    """
    page = view.table.gather(1, slots // fmt.page_size).long()
    slot = slots % fmt.page_size
    out = []
    for name, part in zip(fmt.names, view.keys if side == "keys" else view.values, strict=True):
        axis = _token_axis(name, fmt, side)
        tokens = as_bytes(part).movedim(axis, 1)[page, slot].movedim(1, axis)
        out.append(tokens.contiguous().view(part.dtype))
    return out


def as_pages(parts: Sequence[Tensor], fmt: PageFormat, side: Side, blocks: int) -> list[Tensor]:
    """Result of `take`, cut into ``blocks`` pages a row: (B * blocks, H, ...)."""
    out = []
    for name, part in zip(fmt.names, parts, strict=True):
        axis = _token_axis(name, fmt, side)
        tokens = as_bytes(part).movedim(axis, -1)
        tokens = pad(tokens, (0, blocks * fmt.page_size - tokens.shape[-1]))
        tokens = tokens.unflatten(-1, (blocks, fmt.page_size)).movedim(-2, 1).flatten(0, 1).movedim(-1, axis)
        out.append(tokens.contiguous().view(part.dtype))
    return out
