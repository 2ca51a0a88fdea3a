"""A layer's buffer: one tensor of bytes, and the views by which kernels write it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from ..decode import LENGTH, RUNS, START
from ..pages import SIDES, RunView, split_runs
from .plan import MAX_STEP, StepPlan

_ALIGNMENT = 256

_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64)}


@dataclass(eq=False)
class StepState:
    """A buffer's tensors: views of its storage.

    Attributes:
        counters: see `decode_attention`; counts of sealed tokens lack what the last step has sealed.
        windows: sink keys, sink values, tail keys, tail values.
        runs: the runs of pages.
        new: i32 (2, B), tokens of keys and values that the last step has sealed.
        sealed: i32 (B,), tokens of keys that the step before has sealed.
        index: i32 (B * m,) for keys and values: room for the slots that are due.
        flag: i32 (1,), 1 once a token found no room and was not stored.
        sums: f64 (B, H, Dk), sums of query magnitudes, or queries, since the last seal; empty unless the plan asks.
        counts: i32 (H, B), queries in ``sums``, which each head counts for itself.
        weight: f32 (B, H, Dk), their mean.
        query: (B / fold, Hq, 1, Dk), newest queries; empty unless the plan asks for it.
    """

    counters: Tensor
    windows: list[Tensor]
    runs: list[RunView]
    new: Tensor
    sealed: Tensor
    index: tuple[Tensor, Tensor]
    flag: Tensor
    sums: Tensor
    counts: Tensor
    weight: Tensor
    query: Tensor
    _slots: dict[int, list[Tensor]] = field(default_factory=dict)

    def flat_runs(self) -> list[Tensor]:
        """All runs' tensors in the order ops take them."""
        return self._flat

    @cached_property
    def _flat(self) -> list[Tensor]:
        return [tensor for run in self.runs for tensor in run.flat()]

    @cached_property
    def last_counts(self) -> tuple[Tensor, Tensor]:
        """i32 (B,): tokens of keys and of values that the last run has sealed."""
        keys, values = self.counters[-2:].unbind()
        return keys, values

    @cached_property
    def due_now(self) -> tuple[Tensor, Tensor]:
        """i32 (B,): tokens of keys and of values that the last step has sealed."""
        keys, values = self.new.unbind()
        return keys, values

    def due_slots(self, plan: StepPlan, tokens: int) -> list[Tensor]:
        """Room for the slots that are due after a step of ``tokens``: i32 (B, m) for keys and for values."""
        found = self._slots.get(tokens)
        if found is None:
            most = [plan.due(at, tokens) for at in (0, 1)]
            found = [x[: plan.rows * n].view(plan.rows, n) for x, n in zip(self.index, most, strict=True)]
            self._slots[tokens] = found
        return found


def _shapes(plan: StepPlan) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every tensor of a buffer, in order."""
    form, own = plan.format, _DTYPES[plan.dtype]
    rows, heads, dims = plan.rows, plan.heads, (plan.key_dim, plan.value_dim)
    found: list[tuple[tuple[int, ...], torch.dtype]] = [((RUNS + 2 * len(form.runs), rows), torch.int32)]
    found += [((rows, heads, form.sink, dim), own) for dim in dims]
    found += [((rows, heads, length, dim), own) for length, dim in zip(plan.tails, dims, strict=True)]
    for blocks, formats in zip(plan.blocks, form.runs, strict=True):
        found.append(((rows, blocks), torch.int32))
        if not form.ordered:
            found.append(((rows, blocks * formats[0].page_size), torch.int32))
        for side, fmt, dim in zip(SIDES, formats, dims, strict=True):
            found += [((rows * blocks, *shape), kind or own) for shape, kind in fmt.shapes(side, heads, dim).values()]
    found += [((2, rows), torch.int32), ((rows,), torch.int32)]
    found += [((rows * plan.due(side, MAX_STEP),), torch.int32) for side in (0, 1)]
    found.append(((1,), torch.int32))
    summed = (rows, heads, plan.key_dim) if plan.sums_queries else (0, heads, plan.key_dim)
    found += [(summed, torch.float64), ((heads, summed[0]), torch.int32), (summed, torch.float32)]
    kept = plan.rows // plan.fold if plan.query == "keep" else 0
    found.append(((kept, plan.query_heads, 1, plan.key_dim), own))
    return found


def _size(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-torch.Size(shape).numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


@lru_cache(maxsize=512)
def buffer_bytes(plan: StepPlan) -> int:
    """Size of a plan's buffer."""
    return sum(_size(*each) for each in _shapes(plan))


# Of layers that are there, for steps that are given the buffer alone.
_STATES: weakref.WeakValueDictionary[tuple[int, str], StepState] = weakref.WeakValueDictionary()


def views_of_buffer(buffer: Tensor, plan: StepPlan) -> StepState:
    """The tensors of a buffer.

    Args:
        buffer: u8 (buffer_bytes(plan),).
        plan: what it holds.

    Returns:
        Views that keep the storage alive, though not ``buffer`` itself.
    """
    key = (buffer.data_ptr(), plan.spec)
    known = _STATES.get(key)
    if known is not None and known.counters.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr():
        return known
    storage, at = buffer.untyped_storage(), buffer.storage_offset()
    views: list[Tensor] = []
    for shape, dtype in _shapes(plan):
        # fp8 views are made of bytes: not every PyTorch builds them of a storage.
        plain = torch.uint8 if dtype == torch.float8_e4m3fn else dtype
        stride = torch.empty(shape, device="meta").stride()
        view = torch.empty(0, dtype=plain, device=buffer.device)
        view.set_(storage, at // plain.itemsize, shape, stride)  # type: ignore[call-overload]
        views.append(view.view(dtype))
        at += _size(shape, dtype)
    counters, windows, runs = views[0], views[1:5], split_runs(plan.format, views[5:-9])
    new, sealed, index_keys, index_values, flag, sums, counts, weight, query = views[-9:]
    state = StepState(
        counters, windows, runs, new, sealed, (index_keys, index_values), flag, sums, counts, weight, query
    )
    _STATES[key] = state
    return state


def settle(state: StepState, plan: StepPlan) -> None:
    """Counts what the last step has sealed, as the next one would; without asking the device."""
    state.counters[-2:] += state.new
    if state.sums.numel() and plan.query != "total":
        sealed = state.new[0] > 0
        state.sums.masked_fill_(sealed[:, None, None], 0.0)
        state.counts.masked_fill_(sealed, 0)
    state.new.zero_()


@torch.library.custom_op("hfkvq::seen", mutates_args=())
def seen(buffer: Tensor, rows: int) -> Tensor:
    """Logical tokens that a layer has seen, on the device: i64 (1,).

    An operation, though it only reads: inductor does not know that a view in another dtype shares memory, and would
    read it again after a step has written there.

    Args:
        buffer: u8, the layer's buffer, which begins with the counters (see `views_of_buffer`).
        rows: B, its rows.
    """
    counters = buffer[: 4 * 2 * rows].view(torch.int32)
    start, length = (counters[at * rows : at * rows + 1] for at in (START, LENGTH))
    return (start + length).long()


@seen.register_fake
def _(buffer: Tensor, rows: int) -> Tensor:
    return buffer.new_empty((1,), dtype=torch.long)
