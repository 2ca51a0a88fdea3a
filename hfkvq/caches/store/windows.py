"""Sink and tail: new tokens come in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hfkvq.kernels.decode import LENGTH

from .state import StoreState


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


def fill_windows(state: StoreState, keys: Tensor, values: Tensor, old: Tensor, padding: Padding | None) -> None:
    """Writes new tokens into sink and tail: each slot looks up the new column it should hold, if any.

    Args:
        state: the store's, which counts the new tokens already.
        keys: (B, H, t, Dk), in the basis of the store.
        values: (B, H, t, Dv), likewise.
        old: i32 (B,), tokens that each row had before.
        padding: among the new tokens, or None.
    """
    sink = state.sizes.sink
    if padding is None and len(state.states) == 1:
        copy_to_windows(state, keys, values)
        return
    # Column of row token x among the new ones.
    shift = (0 if padding is None else padding.lead) - old
    rest = (state.counters[LENGTH] - sink)[:, None]
    found: dict[tuple[bool, int], tuple[Tensor, Tensor]] = {}
    for at, x in enumerate((keys, values, keys, values)):
        window = state.windows[at]
        # The same for keys and values, where their tails are of one length.
        kind = at >= 2, window.shape[2]
        if not window.shape[2] or not x.shape[2]:
            continue
        if kind not in found:
            token = slot = torch.arange(window.shape[2], dtype=torch.int32, device=state.device)[None]
            if at >= 2:
                behind = rest - 1 - (rest - 1 - slot) % window.shape[2]
                token = torch.where(behind >= 0, behind + sink, -1)
            column = token + shift[:, None]
            new = (token >= old[:, None]) & (column >= 0) & (column < x.shape[2])
            found[kind] = column.clamp(0, x.shape[2] - 1).long()[:, None, :, None], new[:, None, :, None]
        index, new = found[kind]
        picked = x.gather(2, index.expand(-1, state.heads, -1, x.shape[3]))
        window.copy_(torch.where(new, picked, window))


def copy_to_windows(state: StoreState, keys: Tensor, values: Tensor) -> None:
    """The same where all rows are alike, so that the host knows the slots: a few copies of what lies together."""
    (row,) = state.states
    sink, tokens = state.sizes.sink, keys.shape[2]
    old, rest = row.length - tokens, row.length - sink
    for x, held, tail in ((keys, state.windows[0], state.windows[2]), (values, state.windows[1], state.windows[3])):
        if old < sink:
            held[:, :, old : row.length].copy_(x[:, :, : sink - old])
        ring = tail.shape[2]
        behind = max(rest - ring, old - sink, 0)
        while behind < rest:
            slot, column = behind % ring, behind + sink - old
            count = min(ring - slot, rest - behind)
            tail[:, :, slot : slot + count].copy_(x[:, :, column : column + count])
            behind += count
