"""Buffers in which the layers of a cache lie while its steps are replayed, and the graphs that were captured over them.

A graph writes to addresses, so a cache owns its buffers and graphs together. An empty cache takes over those that the
last cache of its kind has left; every other cache makes its own.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hfkvq.kernels.decode import LENGTH, START
from hfkvq.kernels.step import Ahead, Allocation, buffer_bytes, copied_runs

from ..base.warn_once import say_once
from ..layer_state.group import DeviceSync
from ..layers.recurrent import StatePlaces
from ..steps.step_buffer import StepBuffer
from ..store import KVStore
from ..store.host import pinned


class Recording(NamedTuple):
    """A captured step.

    Attributes:
        graph: runs the step; see `hfkvq.caches.base.capture.CapturedGraph`.
        inputs: tensors that the graph reads, by argument.
        model: whose step it is, weakly.
        fingerprint: of the model when it was captured; see `hfkvq.caches.base.model_calls.CallInterceptor.fingerprint`.
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
    """Buffers of all layers of a cache, and the steps that were captured over them.

    Args:
        buffers: of the layers.
        states: recurrent ones, of all layers: tensors that steps write into.

    Attributes:
        allocations: of the layers, in their order.
        states: see there.
        room: most logical columns.
        recordings: captured steps.
        runs: how often each step has run in Python, or failed to be captured.
        last: thread and stream of the last step.
    """

    def __init__(self, buffers: Sequence[StepBuffer], states: Sequence[Tensor] = ()) -> None:
        self.states = list(states)
        self.allocations = [buffer.allocation for buffer in buffers]
        self.room = buffers[0].room
        self.recordings: dict[Any, Recording] = {}
        self.runs: dict[Any, int] = {}
        self.last: Any = None
        if buffers[0].layer.capacity is None:
            # Buffers are copied whole, and those of a fixed capacity may be nearly empty.
            _fetch_ahead([each for each in self.allocations if each.pages is not None])
        # i32 (B,) in all layers, parts of the buffers.
        self.lengths = [each.state.counters[LENGTH] for each in self.allocations]
        self._visible: tuple[Any, Tensor, bool] | None = None

    def is_of(self, buffers: Sequence[StepBuffer]) -> bool:
        """True if all these layers lie here."""
        return all(own.tensor is each.tensor for own, each in zip(buffers, self.allocations, strict=True))

    def suits(self, keys: Tensor) -> bool:
        """True if empty layers that are about to get keys (B, H, T, D) have room here, and waste little of it."""
        tensor, _, _, plan = self.allocations[0]
        rows, heads, tokens, dim = keys.shape
        alike = plan.rows == rows * plan.fold and plan.heads == heads // plan.fold and plan.key_dim == dim
        alike = alike and plan.dtype == str(keys.dtype) and tensor.device == keys.device
        return alike and tokens < self.room <= 2 * (tokens + 1) + 512 and self.last == _where(keys.device)

    def hides_padding_only(self, mask: Tensor, store: KVStore, edition: int) -> tuple[bool, bool]:
        """True if a mask hides nothing but leading padding, and whether any row has such padding. Asks the device.

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


def _fetch_ahead(offloaded: Sequence[Allocation]) -> None:
    """Gives layers whose pages are offloaded memory on the device, to which captured steps copy them a layer ahead."""
    if len({each.tensor.device for each in offloaded}) != 1:
        # Pages are read in place if no layer is offloaded, or layers lie on several devices.
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


class SpareBuffers:
    """Buffers that the last of several caches of one config and preset has left, for the next empty one.

    The caches keep this, so the buffers go with the last cache.

    Attributes:
        left: the buffers; None if no cache has left any.
    """

    def __init__(self, config: Any) -> None:
        self._config = weakref.ref(config)
        self.left: BufferSet | None = None

    @classmethod
    def of(cls, config: Any, kind: str) -> SpareBuffers:
        """The one of all caches of this kind over this config."""
        found = _SPARE.get((id(config), kind))
        if found is None or found._config() is not config:
            found = _SPARE[id(config), kind] = cls(config)
        return found


_SPARE: weakref.WeakValueDictionary[tuple[int, str], SpareBuffers] = weakref.WeakValueDictionary()


class Placement:
    """Buffers for the layers of one cache.

    Args:
        sync: of the layers.
        spare: buffers of caches of the same kind that are gone.
        states: recurrent ones, of the cache.
    """

    def __init__(self, sync: DeviceSync, spare: SpareBuffers, states: StatePlaces) -> None:
        self.sync, self.spare, self.states = sync, spare, states

    @property
    def buffers(self) -> list[StepBuffer]:
        """Stores of the layers, in the model's order."""
        return [steps.buffer for steps in self.sync.members]

    def before_prompt(self, keys: Tensor) -> None:
        """Lets an empty cache that is about to be filled take over the spare buffers; they are freed otherwise."""
        found, self.spare.left = self.spare.left, None
        if found is not None and self.sync.buffers is None and found.suits(keys):
            for buffer, allocation in zip(self.buffers, found.allocations, strict=True):
                buffer.take_over(allocation, found.room)
            # The padding noted is that of the deleted cache.
            found._visible = None
            self.sync.buffers = found

    def release(self) -> None:
        """Leaves the buffers of a cache that is gone to the next one."""
        if self.sync.buffers is not None:
            self.spare.left = self.sync.buffers

    def find_room(self, tokens: int) -> BufferSet | None:
        """Buffers with room for so many tokens more; None where layers hold what no buffer has room for."""
        sync = self.sync
        sync.prepare(tokens)
        buffers, found = self.buffers, sync.buffers
        need = sync.seen + tokens
        if found is None or need > found.room or not found.is_of(buffers) or not self.states.move_in(found.states):
            sync.settle()
            # Buffers that have no use any more free their memory for others.
            sync.buffers = found = self.spare.left = None
            found = sync.buffers = self._made(buffers, need)
        if found is not None:
            found.last = _where(buffers[0].layer.device)
        return found

    def _made(self, buffers: list[StepBuffer], need: int) -> BufferSet | None:
        # Caches of fixed capacity have buffers from the first update on, unless an operation on rows has left them.
        grows = buffers[0].layer.capacity is None
        if any(buffer.tensor is None for buffer in buffers) or need > buffers[0].room:
            room = buffers[0].room_for(need) if grows else 0
            try:
                for buffer in buffers:
                    if grows:
                        buffer.make_room(room)
                    else:
                        buffer.bind()
            except torch.OutOfMemoryError:
                if not grows:
                    raise
                for buffer in buffers:
                    buffer.leave()
                say_once("There is not enough memory for the buffers of captured steps; this step runs without graphs.")
                return None
        lost = any(buffer.tensor is None for buffer in buffers) or len({buffer.room for buffer in buffers}) > 1
        return None if lost else BufferSet(buffers, self.states.tensors())


def _where(device: torch.device) -> tuple[int, int]:
    """The current thread and stream: buffers pass from one cache to another only within them."""
    return threading.get_ident(), torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
