"""All that changes in a store, as one value: its tensors, and what the host knows of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from dataclasses import replace as replaced
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hfkvq.kernels.decode import RUNS
from hfkvq.kernels.pages import PageFormat, RunView, Side, StoreFormat

from ..base import outside_inference_mode
from ..schemes.base import Layout
from .host import hosted
from .row_lengths import RowState, WindowSizes, forecast

SIDES: tuple[Side, Side] = ("keys", "values")

EMPTY = frozenset({RowState(0, 0, 0)})
"""The states of rows that hold nothing."""


def as_bytes(part: Tensor) -> Tensor:
    """The same tensor, fp8 viewed as bytes: PyTorch indexes fp8 on some devices only."""
    return part.view(torch.uint8) if part.dtype == torch.float8_e4m3fn else part


def token_axis(name: str, fmt: PageFormat, side: Side) -> int:
    """The axis of a page's tensor (P, H, ...) that counts tokens, in formats per token."""
    return 3 if name in ("scale", "zero") or (name == "codes" and side == "values" and fmt.bits < 8) else 2


def in_turn(table: Tensor, blocks: int) -> Tensor:
    """A table of so many blocks, whose rows take the pages of a table i32 (B, n) in turn."""
    have = table.shape[1]
    return table if have == blocks else table[:, torch.arange(blocks, device=table.device) % have].contiguous()


class PageWrite(NamedTuple):
    """Pages that are to be written: ``pages`` (n, H, ...) come to ``part[target]``, target i64 (n,)."""

    part: Tensor
    target: Tensor
    pages: Tensor


@dataclass(frozen=True, eq=False)
class StoreState:
    """Contents of a store. Steps and seals write into the tensors; all else goes by `replace`.

    Attributes:
        counters: i32 (2 + 2*runs, B).
        dropped: i32 (B,), tokens of each row that were forgotten.
        windows: sink keys, sink values, tail keys, tail values: (B, H, n, D).
        states: what rows may be like.
        history: see `hfkvq.caches.store.routing`; None where the host does not know, or need not.
        wide_bound: of several runs: when no row had more tokens than the second number, no row had more than the first
            number in its last run and its tail. Tokens that came since may be there as well.
        settled: logical columns before this one cannot be taken back: some of their tokens were forgotten, or moved to
            runs where they are not in order.
        writes: what is to be written before anything is read: until then, the pages are those of the state before, so
            that an operation which fails in another layer can be taken back.
        offloaded: whether pages lie in the host's memory, wherever an operation has made them.
    """

    format: StoreFormat
    sizes: WindowSizes
    counters: Tensor
    dropped: Tensor
    windows: tuple[Tensor, ...]
    runs: tuple[RunView, ...]
    states: frozenset[RowState]
    history: object = None
    wide_bound: tuple[int, int] = (0, 0)
    settled: int = 0
    writes: tuple[PageWrite, ...] = ()
    offloaded: bool = False

    @classmethod
    @outside_inference_mode
    def empty(
        cls, layout: Layout, keys: Tensor, values: Tensor, tail: int, routed: bool, offloaded: bool = False
    ) -> StoreState:
        """A state without tokens or pages; ``routed``: layers may share routes of tokens to runs.

        Raises:
            ValueError: pages are to lie in the host's memory, and the device does not reach it.
        """
        form, (batch, heads), device = layout.store, keys.shape[:2], keys.device
        if offloaded and device.type not in ("cpu", "cuda"):
            raise ValueError(
                f"offloading: got tensors on {device}, allowed CUDA GPUs and the CPU; make the cache "
                "without offloading."
            )

        def window(length: int, x: Tensor) -> Tensor:
            return torch.zeros(batch, heads, length, x.shape[-1], dtype=keys.dtype, device=device)

        counters = torch.zeros(RUNS + 2 * len(form.runs), batch, dtype=torch.int32, device=device)
        windows = tuple(window(length, x) for length in (layout.sink, tail) for x in (keys, values))
        dropped = torch.zeros(batch, dtype=torch.int32, device=device)
        state = cls(form, WindowSizes.of(layout), counters, dropped, windows, (), EMPTY, offloaded=offloaded)
        table = state.own_table(0)
        pos = None if form.ordered else table.new_zeros(batch, 0)
        runs = [
            RunView(table, pos, state.pages(own, "keys", 0), state.pages(other, "values", 0))
            for own, other in form.runs
        ]
        return state.replace(runs=runs, history=EMPTY if routed else None)

    def own_table(self, blocks: int, rows: int | None = None) -> Tensor:
        """i32 (B, blocks): pages row by row, which blocks of a row take in turn where there is a window."""
        rows, pages = self.batch if rows is None else rows, self.format.pages(blocks)
        table = torch.arange(rows * pages, dtype=torch.int32, device=self.device)
        return in_turn(table.view(rows, pages), blocks)

    def pages(self, fmt: PageFormat, side: Side, count: int) -> list[Tensor]:
        """Tensors of so many pages; see `PageFormat.allocate`."""
        return fmt.allocate(side, count, self.heads, self.dims[side], self.dtype, self.device)

    def replace(self, widest: int | None = None, **changes: Any) -> StoreState:
        """The same but for some fields.

        Args:
            widest: tokens have come to other runs, and no row's last one holds more than so many now. The history is
                gone then, unless another is given.
        """
        for name in ("windows", "runs"):
            if name in changes:
                changes[name] = tuple(changes[name])
                if name == "runs" and self.offloaded:
                    changes["runs"] = tuple(map(hosted, changes["runs"]))
        if widest is not None:
            states = changes.get("states", self.states)
            longest = max(state.length for state in states)
            changes["wide_bound"] = widest + max(forecast(states, self.sizes).tail_slots), longest
            changes.setdefault("history", None)
        # `dataclasses.replace` takes several times as long, which steps without graphs feel.
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

    def written(self) -> StoreState:
        """The same with its pages written; may be repeated if it was interrupted."""
        for part, target, pages in self.writes:
            part[target] = pages
        return self.replace(writes=()) if self.writes else self

    @outside_inference_mode
    def map(self, change: Callable[[Tensor], Tensor]) -> StoreState:
        """The same with every tensor changed."""

        def run(view: RunView) -> RunView:
            pos = None if view.pos is None else change(view.pos)
            return RunView(change(view.table), pos, [change(x) for x in view.keys], [change(x) for x in view.values])

        return self.replace(
            counters=change(self.counters),
            dropped=change(self.dropped),
            windows=[change(window) for window in self.windows],
            runs=[run(view) for view in self.runs],
        )

    def flat_runs(self) -> list[Tensor]:
        """All runs' tensors in the order ops take them."""
        return [tensor for run in self.runs for tensor in run.flat()]

    @property
    def batch(self) -> int:
        return self.counters.shape[1]

    @property
    def device(self) -> torch.device:
        return self.counters.device

    @property
    def heads(self) -> int:
        return self.windows[0].shape[1]

    @property
    def dims(self) -> dict[Side, int]:
        """Dimension of a head, by side."""
        return {"keys": self.windows[0].shape[3], "values": self.windows[1].shape[3]}

    @property
    def dtype(self) -> torch.dtype:
        return self.windows[0].dtype

    @property
    def longest(self) -> int:
        """Most tokens that a row may hold."""
        return max(state.length for state in self.states)

    @property
    def known(self) -> object:
        """All that the counters follow from, of a store of one layout; None where the host does not know."""
        return None if self.history is None else (self.history, self.states)

    @property
    def wide_most(self) -> int:
        """The most tokens that any row has in its last run and its tail; its first ones are in the sink."""
        held, longest = self.wide_bound
        return min(held + self.longest - longest, max(self.longest - self.sizes.sink, 0))

    def tensors(self) -> Sequence[Tensor]:
        return [self.counters, self.dropped, *self.windows, *self.flat_runs()]
