"""Buffers of a cache's layers, and the graphs that were captured over them.

A graph writes to addresses, so a capture is good for whichever cache lies there. Caches of one config and preset share
a `BufferPool`: a new cache moves into the buffers that another one has left, or takes them over from one that is not in
use, which then gets its tokens back as a copy. See `hfkvq.caches.placement`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hfkvq.kernels.decode import LENGTH, START
from hfkvq.kernels.step import Ahead, StepPlan, StepState, buffer_bytes, copied_runs

from .store import KVStore
from .store.host import pinned

if TYPE_CHECKING:
    from .layers.buffer import StepBuffer


class Allocation(NamedTuple):
    """A layer's buffer."""

    tensor: Tensor
    pages: Tensor | None
    state: StepState
    plan: StepPlan


class Recording(NamedTuple):
    """A captured step.

    Attributes:
        graph: runs it; see `hfkvq.caches.capture.CapturedGraph`.
        inputs: what the graph reads, by argument.
        model: whose step it is, weakly.
        fingerprint: of the model when it was captured; see `hfkvq.caches.model_calls.CallInterceptor.fingerprint`.
    """

    graph: Any
    inputs: dict[str, Tensor]
    model: weakref.ref[Any]
    fingerprint: Any

    def replay(self, given: dict[str, Tensor], cache: Any) -> Any:
        """One step with these arguments: what the model would return."""
        if given:
            own = [self.inputs[name] for name in given]
            torch._foreach_copy_(own, list(given.values()))  # pyright: ignore[reportPrivateImportUsage]
        return self.graph.replay(cache)


class BufferSet:
    """Buffers of all layers of a cache, and what was captured over them.

    Args:
        buffers: of the layers.
        states: recurrent ones, of all layers: tensors that steps write into.

    Attributes:
        allocations: of the layers, in their order.
        states: see there.
        room: most logical columns.
        recordings: captured steps.
        runs: how often each step has run in Python, or failed to be captured.
        owner: the `Placement` of the cache that lies here, weakly; None if nobody does.
        last: thread and stream of the last cache that has.
    """

    def __init__(self, buffers: Sequence[StepBuffer], states: Sequence[Tensor] = ()) -> None:
        self.states = list(states)
        self.allocations = [_allocation(buffer) for buffer in buffers]
        self.room = buffers[0].room
        self.recordings: dict[Any, Recording] = {}
        self.runs: dict[Any, int] = {}
        self.owner: weakref.ref[Any] | None = None
        self.last: Any = None
        if buffers[0].layer.capacity is None:
            # All of a buffer is copied, and those of a fixed capacity may be nearly empty.
            _fetch_ahead([each for each in self.allocations if each.pages is not None])
        # i32 (B,) in all layers, parts of the buffers.
        self.lengths = [each.state.counters[LENGTH] for each in self.allocations]
        self._visible: tuple[Any, Tensor, bool] | None = None
        self._shown: Tensor | None = None

    def is_of(self, buffers: Sequence[StepBuffer]) -> bool:
        """Whether all these layers lie here."""
        return all(own.tensor is each.tensor for own, each in zip(buffers, self.allocations, strict=True))

    def has_room(self, need: int) -> bool:
        """Whether so many columns have room here, and do not waste too much of it."""
        return need <= self.room <= 2 * need + 512

    def suits(self, buffers: Sequence[StepBuffer], need: int) -> bool:
        """Whether layers that hold tokens could lie here."""
        return self.has_room(need) and all(
            own.layer.device == each.tensor.device and own.fits(each.plan, self.room)
            for own, each in zip(buffers, self.allocations, strict=True)
        )

    def suits_empty(self, keys: Tensor) -> bool:
        """Whether layers could lie here that are about to get a prompt's keys (B, H, T, D)."""
        tensor, _, _, plan = self.allocations[0]
        rows, heads, tokens, dim = keys.shape
        alike = plan.rows == rows * plan.fold and plan.heads == heads // plan.fold and plan.key_dim == dim
        return alike and plan.dtype == str(keys.dtype) and tensor.device == keys.device and self.has_room(tokens + 1)

    def all_shown(self, batch: int) -> Tensor:
        """A padding mask, bool (B, room), that hides nothing; the same tensor every time."""
        if self._shown is None:
            self._shown = torch.ones((batch, self.room), dtype=torch.bool, device=self.allocations[0].tensor.device)
        return self._shown

    def hides_padding_only(self, mask: Tensor, store: KVStore, edition: int) -> tuple[bool, bool]:
        """Whether a mask hides nothing but leading padding, and whether any row has such padding. Asks the device.

        Args:
            mask: (B, L).
            store: of the first layer.
            edition: of the first layer, by which what was found before is good.
        """
        known, kind = self._visible, (edition, mask.device)
        if known is None or known[0] != kind:
            # Tokens that have been evicted are before a row's start, as padding is.
            start = (store.counters[START] - store.dropped)[:: self.allocations[0].plan.fold].to(mask.device)
            column = torch.arange(self.room, dtype=torch.int32, device=mask.device)
            known = self._visible = (kind, column >= start[:, None], bool((start > 0).any()))
        _, visible, padded = known
        shown = mask if mask.dtype == torch.bool else mask != 0
        return torch.equal(shown, visible[:, : mask.shape[1]]), padded


def _allocation(buffer: StepBuffer) -> Allocation:
    if buffer.tensor is None or buffer.state is None or buffer.plan is None:
        raise AssertionError("asked of layers that have a buffer")
    return Allocation(buffer.tensor, buffer.pages, buffer.state, buffer.plan)


def _fetch_ahead(offloaded: Sequence[Allocation]) -> None:
    """Gives layers whose pages are offloaded memory on the device, to which captured steps copy them a layer ahead."""
    if len({each.tensor.device for each in offloaded}) != 1:
        # None, or on several devices: then pages are read in place.
        return
    device, size = offloaded[0].tensor.device, max(buffer_bytes(each.plan, True) for each in offloaded)
    try:
        with torch.inference_mode(False):
            memory = [torch.empty(size, dtype=torch.uint8, device=device) for _ in offloaded[:2]]
            mark = torch.zeros(1, device=device)
    except torch.OutOfMemoryError:
        # Pages are read in place.
        return
    before = None
    for i, (_, pages, state, plan) in enumerate(offloaded):
        assert pages is not None, "of layers that are offloaded"
        source, target = pinned(pages), memory[i % 2][: pages.numel()]
        state.ahead = Ahead(source, target, copied_runs(state, plan, target), mark, before is None)
        if before is not None:
            before.following = weakref.ref(state.ahead)
        before = state.ahead


class BufferPool:
    """Buffers of caches of one config and preset, which may take over each other's.

    Attributes:
        caches: how many there are.
        vacant: the buffers that the last cache to go has left, while there are others.
        used: those that caches lie in.
    """

    def __init__(self, config: Any) -> None:
        self._config = weakref.ref(config)
        self.caches = 0
        self.vacant: BufferSet | None = None
        self.used: weakref.WeakSet[BufferSet] = weakref.WeakSet()

    @classmethod
    def of(cls, config: Any, kind: Any) -> BufferPool:
        """The pool of this kind of caches over this config."""
        key = (id(config), kind)
        found = _POOLS.get(key)
        if found is None or found._config() is not config:
            found = _POOLS[key] = cls(config)
        return found

    def take_vacant(self) -> BufferSet | None:
        """The vacant buffers, which are given up if whoever takes them does not use them."""
        found, self.vacant = self.vacant, None
        return found

    def occupy(self, buffers: BufferSet, owner: Any) -> None:
        """Notes who lies where."""
        buffers.owner = weakref.ref(owner)
        # Another owner's padding.
        buffers._visible = None
        self.used.add(buffers)
        if self.vacant is buffers:
            self.vacant = None

    def vacate(self, buffers: BufferSet | None) -> None:
        """The cache that lay there is gone; while there are others of its pool, the next one may want its buffers."""
        if buffers is not None and self.caches > 0:
            buffers.owner = None
            self.used.discard(buffers)
            self.vacant = buffers


_POOLS: weakref.WeakValueDictionary[Any, BufferPool] = weakref.WeakValueDictionary()
