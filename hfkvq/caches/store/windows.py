"""Sink and tail: new tokens come in."""

from __future__ import annotations

from collections.abc import Sequence
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


class Ragged:
    """First tokens of rows of any lengths, which stand one row behind another in one row of columns.

    One object serves all layers of a forward, which share the columns that it works out.

    Args:
        first: column of each row's first token.
        lengths: tokens of each row, one at least.
        device: of the tokens.

    Attributes:
        first: i32 (B,).
        length: i32 (B,).
        lengths: the distinct lengths, on the host.
    """

    def __init__(self, first: Sequence[int], lengths: Sequence[int], device: torch.device) -> None:
        self.first, self.length = torch.tensor([first, lengths], dtype=torch.int32).to(device)
        self.lengths = frozenset(lengths)
        self._columns: dict[tuple[int, int], Tensor] = {}

    def windows(self, state: StoreState, keys: Tensor, values: Tensor) -> list[Tensor]:
        """Windows of an empty store that takes these rows; slots without a token hold any token of their row.

        Args:
            state: its windows say how long they are.
            keys: (1, H, n, Dk), in the basis of the store.
            values: (1, H, n, Dv), likewise.
        """
        found = []
        for at, x in enumerate((keys, values, keys, values)):
            columns = self._window_columns(state.sizes.sink, 0 if at < 2 else state.windows[at].shape[2])
            found.append(x[0][:, columns].transpose(0, 1))
        return found

    def _window_columns(self, sink: int, tail: int) -> Tensor:
        """Columns of the tokens in a tail of so many slots, or with 0 in the sink: i64 (B, n)."""
        if (sink, tail) not in self._columns:
            slot = torch.arange(tail or sink, dtype=torch.int32, device=self.first.device)
            length = self.length[:, None]
            if tail:
                newest = length - sink - 1
                slot = sink + (newest - (newest - slot) % tail).clamp(min=0)
            self._columns[sink, tail] = (self.first[:, None] + torch.minimum(slot, length - 1)).long()
        return self._columns[sink, tail]


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
