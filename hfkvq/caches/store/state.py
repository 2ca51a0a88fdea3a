"""All that changes in a store, as one value: its tensors, and what the host knows of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from dataclasses import replace as replaced
from typing import Any

from torch import Tensor

from hfkvq.kernels.pages import RunView, Side, StoreFormat
from hfkvq.kernels.step_tensors import StepTensors

from ..routing import Tally
from ..states import RowState, WindowSizes, ahead

SIDES: tuple[Side, Side] = ("keys", "values")

_TENSORS = frozenset({"counters", "windows", "runs"})


@dataclass(frozen=True, eq=False)
class StoreState:
    """What a store holds. Steps write into the tensors; all else goes by `replace`.

    Attributes:
        format: the store's.
        sizes: of its windows.
        counters: i32 (2 + 2*runs, B).
        dropped: i32 (B,), tokens of each row that a trim has evicted.
        windows: sink keys, sink values, tail keys, tail values.
        runs: pages of each run.
        states: what rows may be like.
        tally: the counters, where the host has an exact copy of them.
        wide_bound: of several runs: no row had more tokens in its last run and its tail than the first number when the
            longest row had the second. What came since may be there as well.
    """

    format: StoreFormat
    sizes: WindowSizes
    counters: Tensor
    dropped: Tensor
    windows: tuple[Tensor, ...]
    runs: tuple[RunView, ...]
    states: frozenset[RowState]
    tally: Tally | None = None
    wide_bound: tuple[int, int] = (0, 0)
    _held: StepTensors | None = field(default=None, repr=False)

    def replace(self, widest: int | None = None, **changes: Any) -> StoreState:
        """The same but for some fields.

        What steps remember of tensors is forgotten with them.

        Args:
            widest: tokens have come to other runs, and no row's last one holds more than so many now. The host's copy
                of the counters is gone then, unless another is given.
            **changes: fields by name.
        """
        for name in ("windows", "runs"):
            if name in changes:
                changes[name] = tuple(changes[name])
        if widest is not None:
            states = changes.get("states", self.states)
            longest = max(state.length for state in states)
            changes["wide_bound"] = widest + max(ahead(states, self.sizes).needs), longest
            changes.setdefault("tally", None)
        if not _TENSORS.isdisjoint(changes):
            changes["_held"] = None
        # Not that of `dataclasses`, which takes several times as long: steps without graphs come by.
        new = object.__new__(StoreState)
        new.__dict__.update(self.__dict__)
        new.__dict__.update(changes)
        return new

    def with_window(self, at: int, window: Tensor) -> StoreState:
        """The same with one other window."""
        return self.replace(windows=[*self.windows[:at], window, *self.windows[at + 1 :]])

    def with_run(self, run: int, **parts: Any) -> StoreState:
        """The same with other parts of one run."""
        return self.replace(runs=[*self.runs[:run], replaced(self.runs[run], **parts), *self.runs[run + 1 :]])

    @property
    def held(self) -> StepTensors:
        """Counters, windows and runs, with what steps remember of them."""
        held = self._held
        if held is None:
            runs = [tensor for run in self.runs for tensor in run.flat()]
            held = StepTensors(self.counters, self.windows, runs, self.format)
            self.__dict__["_held"] = held
        return held

    @property
    def longest(self) -> int:
        """Most tokens that a row may hold."""
        return max(state.length for state in self.states)

    @property
    def wide_most(self) -> int:
        """The most tokens that any row has in its last run and its tail."""
        held, longest = self.wide_bound
        return held + self.longest - longest

    def tensors(self) -> Sequence[Tensor]:
        """All of them."""
        return [self.counters, self.dropped, *self.windows, *self.held.runs]

    def __getstate__(self) -> dict[str, Any]:
        """Everything but what is remembered of tensors' addresses."""
        return self.__dict__ | {"_held": None}
