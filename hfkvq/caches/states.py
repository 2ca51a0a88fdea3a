"""What the host knows of a store's rows without asking the device: how long they may be, and what follows from that."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from hfkvq.kernels.decode import LENGTH, RUNS
from hfkvq.kernels.pages import Side
from hfkvq.kernels.windows import tokens_due

from .scheme import Layout


class RowState(NamedTuple):
    """One possible state of a row, as the host knows it."""

    length: int
    keys: int
    values: int

    def sealed(self, side: Side) -> int:
        """Tokens sealed on a side."""
        return self.keys if side == "keys" else self.values


def row_states(counters: Sequence[Sequence[int]]) -> frozenset[RowState]:
    """What rows are like whose counters are known; see `hfkvq.kernels.decode`."""
    keys, values = ([sum(row) for row in zip(*counters[at::2], strict=True)] for at in (RUNS, RUNS + 1))
    return frozenset(RowState(*row) for row in zip(counters[LENGTH], keys, values, strict=True))


class WindowSizes(NamedTuple):
    """What a layout says of windows.

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
        """Those of a layout."""
        keys, values = layout.keys, layout.values
        return cls(layout.sink, (keys.local, values.local), (keys.unit, values.unit))


class Ahead(NamedTuple):
    """What becomes of rows with some more tokens.

    Attributes:
        needs: slots of the tails of keys and values in use once the tokens have joined them.
        joined: the states then.
        due: the most that any row has to seal then, of keys and of values.
        sealed: the states once that is done.
        most: the most tokens of a side that a row has sealed then.
        longest: the most that a row has held before.
        shortest: the least.
    """

    needs: tuple[int, int]
    joined: frozenset[RowState]
    due: tuple[int, int]
    sealed: frozenset[RowState]
    most: int
    longest: int
    shortest: int


def target(rest: int, sealed: int, local: int, unit: int) -> int:
    """Tokens behind the sink that should be sealed when ``rest`` are there."""
    return sealed + tokens_due(rest, sealed, local, unit)


# The layers of a model ask the same, one after the other: it was a fifth of what a layer's step takes the host.
@lru_cache(maxsize=32)
def ahead(states: frozenset[RowState], windows: WindowSizes, tokens: int = 0, hold: int = 0) -> Ahead:
    """What ``tokens`` more lead to.

    Args:
        states: what rows may be like now.
        windows: of the store.
        tokens: new tokens of every row.
        hold: newest tokens that must stay unsealed, beyond what the layout says.
    """
    local = max(windows.local[0], hold), max(windows.local[1], hold)
    need_keys = need_values = due_keys = due_values = most = 0
    joined, sealed, lengths = [], [], []
    for length, keys, values in states:
        behind = max(length - windows.sink, 0) + tokens
        need_keys, need_values = max(need_keys, behind - keys), max(need_values, behind - values)
        rest = max(length + tokens - windows.sink, 0)
        new_keys = target(rest, keys, local[0], windows.unit[0])
        new_values = target(rest, values, local[1], windows.unit[1])
        due_keys, due_values = max(due_keys, new_keys - keys), max(due_values, new_values - values)
        most = max(most, new_keys, new_values)
        lengths.append(length)
        joined.append(RowState(length + tokens, keys, values))
        sealed.append(RowState(length + tokens, new_keys, new_values))
    return Ahead(
        (need_keys, need_values),
        frozenset(joined),
        (due_keys, due_values),
        frozenset(sealed),
        most,
        max(lengths),
        min(lengths),
    )
