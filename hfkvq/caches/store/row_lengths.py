"""States that a store's rows may be in, known to the host without asking the device, and their forecast.

A batch has rows of several lengths (padding), so the host keeps the set of lengths that occur, not which row has which.
From that set it works out what must be known before a step is launched: slots in the tails, and what is due to seal.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from hfkvq.kernels.decode import LENGTH, RUNS
from hfkvq.kernels.pages import Side
from hfkvq.kernels.windows import tokens_due

from ..schemes.base import Layout


class RowState(NamedTuple):
    """A row that there may be in the batch: tokens that it holds, and how many of its keys and values are sealed."""

    length: int
    keys: int
    values: int

    def sealed(self, side: Side) -> int:
        return self.keys if side == "keys" else self.values


def row_states(counters: Sequence[Sequence[int]]) -> frozenset[RowState]:
    """States of rows whose counters are known; see `hfkvq.kernels.decode`."""
    keys, values = ([sum(row) for row in zip(*counters[at::2], strict=True)] for at in (RUNS, RUNS + 1))
    return frozenset(RowState(*row) for row in zip(counters[LENGTH], keys, values, strict=True))


class WindowSizes(NamedTuple):
    """Sizes of the sink and of the local windows, and how many tokens are sealed together.

    Attributes:
        sink: first tokens of a row, which never seal.
        local: newest tokens that stay as they are, of keys and of values.
        unit: tokens that are sealed together.
    """

    sink: int
    local: tuple[int, int]
    unit: tuple[int, int]

    @classmethod
    def of(cls, layout: Layout) -> WindowSizes:
        keys, values = layout.keys, layout.values
        return cls(layout.sink, (keys.local, values.local), (keys.unit, values.unit))


class Forecast(NamedTuple):
    """Forecast of rows once some more tokens have come.

    Attributes:
        tail_slots: slots of the tails of keys and values in use once the tokens have joined them.
        appended: what rows may be like then, before anything is sealed.
        due: the most that any row has to seal then, of keys and of values.
        sealed: what rows may be like once what is due is sealed.
        most_sealed: the most tokens of a side that a row has sealed then.
    """

    tail_slots: tuple[int, int]
    appended: frozenset[RowState]
    due: tuple[int, int]
    sealed: frozenset[RowState]
    most_sealed: int


# A fifth of a layer's step on the host, where it is not remembered.
@lru_cache(maxsize=32)
def forecast(states: frozenset[RowState], windows: WindowSizes, tokens: int = 0, hold: int = 0) -> Forecast:
    """Forecast of rows with ``tokens`` more, of which ``hold`` must stay unsealed; layers of a step ask the same."""
    local = max(windows.local[0], hold), max(windows.local[1], hold)
    need_keys = need_values = due_keys = due_values = most = 0
    joined, sealed = [], []
    for length, keys, values in states:
        behind = max(length - windows.sink, 0) + tokens
        need_keys, need_values = max(need_keys, behind - keys), max(need_values, behind - values)
        rest = max(length + tokens - windows.sink, 0)
        new_keys = keys + tokens_due(rest, keys, local[0], windows.unit[0])
        new_values = values + tokens_due(rest, values, local[1], windows.unit[1])
        due_keys, due_values = max(due_keys, new_keys - keys), max(due_values, new_values - values)
        most = max(most, new_keys, new_values)
        joined.append(RowState(length + tokens, keys, values))
        sealed.append(RowState(length + tokens, new_keys, new_values))
    return Forecast(
        (need_keys, need_values),
        frozenset(joined),
        (due_keys, due_values),
        frozenset(sealed),
        most,
    )
