"""Recorded steps: their definition, the test of a running forward, and what a cache's layers know of them together.

A recorded step runs once in Python and then again and again without it: as a compiled graph of `torch.compile`, or as
a CUDA graph (see `hfkvq.caches.step_graphs`). So it may use nothing that the host knows of lengths: layers
answer with numbers on the device, masks are of one shape, and attention is one operation a layer over the layer's
buffer.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch


class _State(threading.local):
    recording = False


_STATE = _State()


def is_recorded() -> bool:
    """True if the running forward is a recorded step, traced by the compiler or run within `recording`."""
    return torch.compiler.is_compiling() or _STATE.recording


def is_captured() -> bool:
    """True if the running forward is a step for a CUDA graph, which the compiler does not trace."""
    return not torch.compiler.is_compiling() and _STATE.recording


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Forwards of this thread are recorded steps within this context."""
    _STATE.recording = True
    try:
        yield
    finally:
        _STATE.recording = False


def uneven(first: int | None, last: int | None) -> RuntimeError:
    """Error for layers of a cache that hold different tokens."""
    return RuntimeError(
        f"The cache's first layer has seen {first} tokens and its last one {last}: a forward was interrupted, or the "
        "cache was made for a model with more layers. Call reset() to begin again, or level() to take back what came "
        "since the last forward that reached every layer."
    )


class Group:
    """Parts of layers, known weakly: they keep their group, and nothing may keep a layer whose cache is gone."""

    def __init__(self, members: Sequence[Any]) -> None:
        self._members = [weakref.ref(member) for member in members]

    @property
    def members(self) -> list[Any]:
        found = [ref() for ref in self._members]
        return [member for member in found if member is not None]

    @property
    def first(self) -> Any:
        member = self._members[0]()
        assert member is not None, "asked by a layer of the group"
        return member

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Group of the same layers' copies."""
        new = memo[id(self)] = copy.copy(self)
        new._members = [weakref.ref(copy.deepcopy(member, memo)) for member in self.members]
        return new


class DeviceSync(Group):
    """Host's record of steps that did not pass through Python.

    Steps of CUDA graphs are counted here and told to the layers only when one of them is asked for more than its
    length. Of steps that `torch.compile` runs, the host knows nothing but that there were some: then the device is
    asked.

    Attributes:
        stale: whether the host must ask the device how long rows are.
        steps: tokens announced since then, by which rows are longer at the most.
        ahead: tokens of graph steps that the layers have not been told of.
        peak: the most that ``ahead`` has been; what was taken back since may have been sealed for.
        ready: whether every row has a token that is no padding; from then on a step needs no mask.
        holes: whether columns within a row are padding, which are stored: from then on every step needs one.
        buffers: of all layers, with the graphs that were captured over them: a `BufferSet`; None without, and once a
            layer has another buffer.
        headroom: share of what is needed by which buffers of a cache that grows are ahead.
        room: columns that the newest buffers of captured steps were needed for, and that they have.
    """

    def __init__(self, members: Sequence[Any]) -> None:
        super().__init__(members)
        self.buffers: Any = None
        self.captured = False
        self.headroom = 0.25
        self.room: tuple[int, int] = (0, 0)
        self.forget()
        for i, member in enumerate(members):
            member.sync, member.leads = self, i == 0

    def forget(self) -> None:
        self.stale = self.ready = self.holes = False
        self.steps = self.ahead = self.peak = 0

    @property
    def seen(self) -> int:
        """Logical tokens of every layer; right unless ``stale``."""
        return self.first.layer.seen + self.ahead

    def has_passed(self, before: int) -> bool:
        """True if a forward in Python, which began at so many tokens, has reached every layer."""
        seen = {member.layer.seen for member in self.members}
        return len(seen) == 1 and seen.pop() > before

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceSync:
        """Everything but graphs, of the same layers' copies."""
        new = super().__deepcopy__(memo)
        new.buffers = None
        return new

    def apply_graph_steps(self) -> None:
        """Tells the layers of graph steps; asks the device nothing."""
        if self.peak:
            ahead, peak = self.ahead, self.peak
            self.ahead = self.peak = 0
            members = self.members
            for member in members:
                member.note_steps(ahead, peak)
            # Work that the last step has left to the host.
            for member in members:
                member.between_steps()

    def catch_up(self) -> None:
        """Lets the layers know how long rows are, and does what steps have left to do.

        Where the host has not counted the steps, one transfer a device. Tokens that found no room and were not stored
        raise ValueError.
        """
        if not self.stale:
            self.apply_graph_steps()
            return
        self.stale, self.steps = False, 0
        self.ahead = self.peak = 0
        bound = [member for member in self.members if member.state is not None]
        by_device: dict[torch.device, list[Any]] = {}
        for member in bound:
            by_device.setdefault(member.layer.device, []).append(member)
        lost = False
        for members in by_device.values():
            counts = [member.device_counts() for member in members]
            numbers = torch.cat([part for parts in counts for part in parts]).tolist()
            for member, parts in zip(members, counts, strict=True):
                size = sum(part.numel() for part in parts)
                lost = member.learn(numbers[:size]) or lost
                numbers = numbers[size:]
        for member in bound:
            member.between_steps()
        if lost:
            first = bound[0].layer
            where = f"max_cache_len: compiled steps went on beyond the capacity of {first.capacity} tokens"
            remedy = "Make the cache with a larger max_cache_len."
            if first.capacity is None or first.seen < first.capacity:
                where = "budget: compiled steps went on beyond the room for a budget"
                remedy = "Call the cache's between_steps() before each step, as generate does."
            raise ValueError(f"{where}; the cache holds {first.seen}, and what came later was not stored. {remedy}")

    def announce(self, tokens: int) -> None:
        """A forward of so many tokens is about to come; see `MixedKVCache.between_steps`."""
        members = self.members
        first = members[0].layer
        if not self.stale:
            self.apply_graph_steps()
            first.check_capacity(tokens)
            for member in members:
                member.layer.settle()
            self.steps = tokens
            return
        self.steps += tokens
        bound = first.seen + self.steps
        full = first.capacity is not None and bound > first.capacity
        if full or any(member.wants_host(bound) for member in members):
            self.catch_up()
            first.check_capacity(tokens)
            # The answer becomes stale with the coming step.
            self.stale, self.steps = True, tokens

    def prepare(self, tokens: int) -> None:
        """Makes ready for a graph step of so many tokens: what an update or the budget has left to do.

        One that would exceed the capacity raises ValueError, and changes nothing.
        """
        members = self.members
        if self.stale:
            self.catch_up()
        first, last = members[0].layer, members[-1].layer
        if first.seen != last.seen:
            raise uneven(first.seen, last.seen)
        first.check_capacity(self.ahead + tokens)
        if not self.ahead:
            for member in members:
                member.layer.settle()
        bound = first.seen + self.ahead + tokens
        if any(member.wants_host(bound) for member in members):
            self.apply_graph_steps()
            for member in members:
                member.between_steps()
