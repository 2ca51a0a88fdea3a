"""A layer's buffer: one tensor of bytes, two where pages lie elsewhere, and the views by which kernels write it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..decode import LENGTH, RUNS, START
from ..dispatch import Keep, is_direct
from ..pages import SIDES, RunView, split_runs
from .plan import MAX_STEP, StepPlan

_ALIGNMENT = 256

_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64)}


@dataclass(eq=False)
class Ahead:
    """Prefetch of offloaded pages to the device, a layer ahead, in captured steps.

    Attributes:
        source: u8, all pages, in pinned memory of the host.
        target: u8, memory of the device that every other layer takes.
        runs: flat tensors of all runs, whose pages are those in ``target``.
        mark: f32 (1,), which a kernel writes that waits for the copy: see `hfkvq.kernels.step.ops`.
        leads: whether the layer is the first that is offloaded.
        following: the next one's, weakly; None of the last.
    """

    source: Tensor
    target: Tensor
    runs: list[Tensor]
    mark: Tensor
    leads: bool
    following: weakref.ref[Ahead] | None = None


@dataclass(eq=False)
class StepState:
    """A buffer's tensors: views of its storage.

    Attributes:
        counters: see `decode_attention`; counts of sealed tokens lack what the last step has sealed.
        windows: sink keys, sink values, tail keys, tail values.
        new: i32 (2, B), tokens of keys and values that the last step has sealed.
        sealed: i32 (B,), tokens of keys that the step before has sealed.
        index: i32 (B * m,) for keys and values: room for the slots that are due.
        flag: i32 (1,), 1 once a token found no room and was not stored.
        sums: f64 (B, H, Dk), sums of query magnitudes, or queries, since the last seal; empty unless the plan asks.
        counts: i32 (H, B), queries in ``sums``, which each head counts for itself.
        weight: f32 (B, H, Dk), their mean.
        query: (B / fold, Hq, 1, Dk), newest queries; empty unless the plan asks for it.
        ahead: how offloaded pages come to the device; None where they are read in place.
        rows: i32 (B,), where windows and sums have other rows than the batch: that of each row; None in a buffer. The
            index is of `side_by_side` then.
        memo: calls that are `ready`.
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
    ahead: Ahead | None = None
    rows: Tensor | None = None
    memo: dict[Any, Any] = field(default_factory=dict, init=False)

    def ready(self, key: Any, first: Tensor) -> Callable[..., Any] | None:
        """The call that was kept under a key, for a tensor that comes with it; None where it must go the whole way."""
        found = self.memo.get(key)
        return found if found is not None and is_direct(first) else None

    def keep(self, key: Any) -> Keep | None:
        """Keeps a call under a key; None where tensors are made anew in each step."""
        return partial(self.memo.__setitem__, key) if self.rows is None else None

    @cached_property
    def flat_runs(self) -> list[Tensor]:
        """All runs' tensors in the order ops take them."""
        return [tensor for run in self.runs for tensor in run.flat()]

    def due_slots(self, plan: StepPlan, tokens: int, at: int) -> Tensor:
        """Room for the slots of keys (0) or values (1) that are due after a step of ``tokens``: i32 (B, m)."""
        most = plan.due(at, tokens)
        return self.index[at][: plan.rows * most].view(plan.rows, most)


class Allocation(NamedTuple):
    """A buffer with its views and layout.

    Attributes:
        tensor: u8 (buffer_bytes(plan),).
        pages: u8 (buffer_bytes(plan, True),), where offloaded pages lie; None where they lie in ``tensor``.
    """

    tensor: Tensor
    pages: Tensor | None
    state: StepState
    plan: StepPlan


def side_by_side(tail: Tensor, batch: int) -> Tensor:
    """The tails of all rows as every row's columns: a view (batch, H, L, D) of a tail (N, H, W, D).

    Column ``(n * H) * W + w`` is slot w of row n: a row of the batch names another's tail by its index alone.
    """
    rows, heads, slots, dim = tail.shape
    return tail.as_strided((batch, heads, ((rows - 1) * heads + 1) * slots, dim), (0, slots * dim, dim, 1))


class _Part(NamedTuple):
    """A tensor of a buffer, and whether it lies in the memory that offloaded pages have of their own."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    offloaded: bool = False

    @property
    def size(self) -> int:
        return -(-torch.Size(self.shape).numel() * self.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


@lru_cache(maxsize=512)
def _parts(plan: StepPlan) -> list[_Part]:
    """Every tensor of a buffer, in order."""
    form, own = plan.format, _DTYPES[plan.dtype]
    rows, heads, dims = plan.rows, plan.heads, (plan.key_dim, plan.value_dim)
    found: list[tuple[Any, ...]] = [((RUNS + 2 * len(form.runs), rows), torch.int32)]
    found += [((rows, heads, form.sink, dim), own) for dim in dims]
    found += [((rows, heads, length, dim), own) for length, dim in zip(plan.tails, dims, strict=True)]
    for blocks, formats in zip(plan.blocks, form.runs, strict=True):
        found.append(((rows, blocks), torch.int32))
        if not form.ordered:
            found.append(((rows, blocks * formats[0].page_size), torch.int32))
        for side, fmt, dim in zip(SIDES, formats, dims, strict=True):
            shapes = fmt.shapes(side, heads, dim).values()
            pages = rows * form.pages(blocks)
            found += [((pages, *shape), kind or own, plan.offloaded) for shape, kind in shapes]
    found += [((2, rows), torch.int32), ((rows,), torch.int32)]
    found += [((rows * plan.due(side, MAX_STEP),), torch.int32) for side in (0, 1)]
    found.append(((1,), torch.int32))
    summed = (rows, heads, plan.key_dim) if plan.sums_queries else (0, heads, plan.key_dim)
    found += [(summed, torch.float64), ((heads, summed[0]), torch.int32), (summed, torch.float32)]
    kept = plan.rows // plan.fold if plan.query == "keep" else 0
    found.append(((kept, plan.query_heads, 1, plan.key_dim), own))
    return [_Part(*each) for each in found]


@lru_cache(maxsize=512)
def buffer_bytes(plan: StepPlan, offloaded: bool = False) -> int:
    """Size of a plan's buffer, or of the memory that its offloaded pages have of their own."""
    return sum(part.size for part in _parts(plan) if part.offloaded == offloaded)


# Prefetches of living layers, for steps that are given the buffer alone.
_STATES: weakref.WeakValueDictionary[tuple[int, str], StepState] = weakref.WeakValueDictionary()


def views_of_buffer(buffer: Tensor, plan: StepPlan, pages: Tensor | None = None) -> StepState:
    """The tensors of a buffer.

    Args:
        buffer: u8 (buffer_bytes(plan),).
        pages: u8 (buffer_bytes(plan, True),), where offloaded pages lie; None where they lie in the buffer.

    Returns:
        Views that keep the storage alive, though not ``buffer`` itself.
    """
    key = (buffer.data_ptr(), plan.spec)
    known = _STATES.get(key)
    if known is not None and known.counters.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr():
        return known
    views = _views(_parts(plan), buffer, buffer if pages is None else pages)
    counters, windows, runs = views[0], views[1:5], split_runs(plan.format, views[5:-9])
    new, sealed, index_keys, index_values, flag, sums, counts, weight, query = views[-9:]
    state = StepState(
        counters, windows, runs, new, sealed, (index_keys, index_values), flag, sums, counts, weight, query
    )
    _STATES[key] = state
    return state


def _views(parts: Sequence[_Part], *memory: Tensor) -> list[Tensor]:
    """Tensors one behind the other, in the first memory, or in the second one if they are offloaded."""
    storages, at = [x.untyped_storage() for x in memory], [x.storage_offset() for x in memory]
    views: list[Tensor] = []
    for part in parts:
        shape, dtype, which = part
        # fp8 views are made of bytes: not every PyTorch builds them of a storage.
        plain = torch.uint8 if dtype == torch.float8_e4m3fn else dtype
        stride = [math.prod(max(n, 1) for n in shape[i + 1 :]) for i in range(len(shape))]
        view = torch.empty(0, dtype=plain, device=memory[which].device)
        view.set_(storages[which], at[which] // plain.itemsize, shape, stride)  # type: ignore[call-overload]
        views.append(view if plain is dtype else view.view(dtype))
        at[which] += part.size
    return views


def copied_runs(state: StepState, plan: StepPlan, memory: Tensor) -> list[Tensor]:
    """Flat tensors of all runs, as `StepState.flat_runs`, with pages in a copy of the offloaded ones."""
    parts = iter(_views([part for part in _parts(plan) if part.offloaded], memory, memory))
    runs: list[Tensor] = []
    for run in state.runs:
        runs += [run.table, *([] if run.pos is None else [run.pos])]
        runs += [next(parts) for _ in (*run.keys, *run.values)]
    return runs


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
