"""Sink and tail: tokens on their way in, and the tail's room."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hfkvq.kernels.decode import ABSENT, LENGTH, column_positions
from hfkvq.kernels.pages import Side

if TYPE_CHECKING:
    from .kvstore import KVStore


@dataclass(frozen=True, slots=True)
class Padding:
    """Padding among newly arrived tokens.

    Attributes:
        lead: i32 (B,), new columns before each row's first real token.
        amounts: the distinct values of ``lead``, on the host.
        source: i64 (B, t), new column whose vector each new column takes, or None if there are no holes.
    """

    lead: Tensor
    amounts: frozenset[int]
    source: Tensor | None


def fill_windows(store: KVStore, keys: Tensor, values: Tensor, old: Tensor, padding: Padding | None) -> None:
    """Writes new tokens into sink and tail: each slot looks up the new column it should hold, if any."""
    sink = store.layout.sink
    if padding is None and len(store.states) == 1:
        copy_to_windows(store, keys, values)
        return
    # Column of row token x among the new ones.
    shift = (0 if padding is None else padding.lead) - old
    rest = (store.counters[LENGTH] - sink)[:, None]
    found: dict[tuple[bool, int], tuple[Tensor, Tensor]] = {}
    for at, x in enumerate((keys, values, keys, values)):
        window = store.windows[at]
        # The same for keys and values, where their tails are of one length.
        kind = at >= 2, window.shape[2]
        if not window.shape[2] or not x.shape[2]:
            continue
        if kind not in found:
            token = slot = torch.arange(window.shape[2], dtype=torch.int32, device=store.device)[None]
            if at >= 2:
                behind = rest - 1 - (rest - 1 - slot) % window.shape[2]
                token = torch.where(behind >= 0, behind + sink, -1)
            column = token + shift[:, None]
            new = (token >= old[:, None]) & (column >= 0) & (column < x.shape[2])
            found[kind] = column.clamp(0, x.shape[2] - 1).long()[:, None, :, None], new[:, None, :, None]
        index, new = found[kind]
        picked = x.gather(2, index.expand(-1, store.heads, -1, x.shape[3]))
        window.copy_(torch.where(new, picked, window))


def copy_to_windows(store: KVStore, keys: Tensor, values: Tensor) -> None:
    """The same where all rows are alike, so that the host knows the slots: a few copies of what lies together."""
    (state,) = store.states
    sink, tokens = store.layout.sink, keys.shape[2]
    old, rest = state.length - tokens, state.length - sink
    for x, held, tail in ((keys, store.windows[0], store.windows[2]), (values, store.windows[1], store.windows[3])):
        if old < sink:
            held[:, :, old : state.length].copy_(x[:, :, : sink - old])
        ring = tail.shape[2]
        behind = max(rest - ring, old - sink, 0)
        while behind < rest:
            slot, column = behind % ring, behind + sink - old
            count = min(ring - slot, rest - behind)
            tail[:, :, slot : slot + count].copy_(x[:, :, column : column + count])
            behind += count


def grow_tail(store: KVStore, side: Side, need: int, empty: bool = False) -> None:
    """Makes the tail at least ``need`` slots long, by doubling, up to its limit; tokens move to their new slots."""
    at = 2 if side == "keys" else 3
    tail = store.windows[at]
    have = tail.shape[2]
    if need <= have:
        return
    # A crop may leave more in the tail than the layout would, hence the outer max.
    need = max(need, min(2 * have, store.tail_limit[side]))
    if empty:
        store.set_window(at, store.new_window(need, side))
        return
    where = column_positions(store.format, store.counters, store.runs, have, side)[:, -have:]
    # Slots that hold nothing share one target outside the window and are cut off with it.
    slot = torch.where(where > ABSENT, (where - store.layout.sink) % need, need).long()
    grown = torch.nn.functional.pad(store.new_window(need, side), (0, 0, 0, 1))
    grown.scatter_(2, slot[:, None, :, None].expand(-1, store.heads, -1, tail.shape[3]), tail)
    store.set_window(at, grown[:, :, :need].contiguous())
