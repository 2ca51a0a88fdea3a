"""What eager steps are given: a store's tensors, what is sealed, and where queries are added."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from .pages import StoreFormat


class Sealing(NamedTuple):
    """What a step seals once it has attended; see `seal_tail`.

    Attributes:
        local: newest tokens that stay as they are, of keys and of values.
        unit: tokens that are sealed together.
        most: the most that any row will have to seal; 0 for nothing.
    """

    local: tuple[int, int]
    unit: tuple[int, int]
    most: tuple[int, int]


class Observing(NamedTuple):
    """Where a step adds its queries; see `hfkvq.kernels.step.observe`.

    Attributes:
        sums: f64 (B, H, D), written in place.
        counts: i32 (H, B), likewise.
        signed: whether queries are added as they are; else their magnitudes.
    """

    sums: Tensor
    counts: Tensor
    signed: bool = False


class StepTensors:
    """What a store holds, as steps take it, and what their launches remember of it.

    Launches note once where the tensors lie: a store makes another of these when one of its tensors is replaced.

    Attributes:
        counters: i32 (2 + 2*runs, B).
        windows: sink keys, sink values, tail keys, tail values.
        runs: flat tensors of all runs.
        store: the format.
        tails: slots of the tails of keys and of values.
        blocks: pages a row that the first run has.
        noted: what launches remember; None before the first step.
    """

    __slots__ = ("blocks", "counters", "noted", "runs", "store", "tails", "windows")

    def __init__(self, counters: Tensor, windows: Sequence[Tensor], runs: Sequence[Tensor], store: StoreFormat) -> None:
        self.counters, self.windows, self.runs, self.store = counters, tuple(windows), tuple(runs), store
        self.tails = windows[2].shape[2], windows[3].shape[2]
        self.blocks = runs[0].shape[1]
        self.noted: Any = None
