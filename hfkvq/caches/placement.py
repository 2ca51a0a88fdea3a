"""Where the layers of a cache lie while its steps are replayed: in which buffers, and how they come there."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .buffers import BufferPool, BufferSet
from .layers.buffer import StepBuffer
from .layers.group import DeviceSync
from .layers.states import StatePlaces
from .once import say_once

LEAST_HEADROOM = 128
"""Tokens by which a buffer is ahead of need at the least: short contexts are not captured again at every page."""

MOST_HEADROOM = 4096
"""Tokens by which it is ahead at the most: so many steps take half a minute, and capturing a fraction of a second."""


def room_ahead(buffers: Sequence[StepBuffer], need: int, headroom: float) -> int:
    """Columns that buffers of a cache that grows are made for when so many need a place.

    Ahead by a share of what is held: of a long prompt that was evicted to a small budget, that is little.
    """
    held = [buffer.layer.held().longest for buffer in buffers if buffer.evicts_prompts_alone]
    share = int(max(held, default=need) * headroom)
    return need + max(LEAST_HEADROOM, min(share, MOST_HEADROOM))


class Placement:
    """Buffers for the layers of one cache.

    Args:
        sync: of the layers.
        buffers: of the layers.
        pool: of caches that may take over each other's buffers.
        headroom: share of what is needed by which buffers of a cache that grows are ahead.
        states: recurrent ones, of the cache.

    Attributes:
        moved: whether another cache has taken over what this one lay in: its next buffers are its own.
        last: thread and stream of the last step.
    """

    def __init__(self, sync: DeviceSync, pool: BufferPool, headroom: float, states: StatePlaces) -> None:
        self.sync, self.pool, self.headroom, self.states = sync, pool, headroom, states
        self.moved = False
        self.last: Any = None
        pool.caches += 1

    @property
    def buffers(self) -> list[StepBuffer]:
        """Of the layers, in the model's order."""
        return [steps.buffer for steps in self.sync.members]

    def release(self) -> None:
        """The cache is gone."""
        self.pool.caches -= 1
        if self.sync.buffers is not None:
            self.sync.buffers.last = self.last
        self.pool.vacate(self.sync.buffers)

    def find_room(self, tokens: int) -> BufferSet | None:
        """Buffers with room for so many tokens more; None where layers hold what no buffer has room for."""
        sync = self.sync
        sync.prepare(tokens)
        buffers = self.buffers
        need, found = sync.seen + tokens, sync.buffers
        self.last = _where(buffers[0].layer.device)
        if found is not None and need <= found.room and found.is_of(buffers) and self.states.move_in(found.states):
            return found
        sync.settle()
        sync.buffers = found = None
        # Of a fixed capacity, or what beams, say, have left.
        if any(buffer.tensor is None for buffer in buffers) or need > buffers[0].room:
            found = self._move(buffers, need)
        elif len({buffer.room for buffer in buffers}) == 1:
            found = BufferSet(buffers, self.states.tensors())
        if found is not None:
            sync.buffers = found
            self.pool.occupy(found, self)
        return found

    def _move(self, buffers: list[StepBuffer], need: int) -> BufferSet | None:
        if buffers[0].layer.capacity is None:
            found = None if self.moved else self._find(buffers, need)
            if found is not None:
                for buffer, allocation in zip(buffers, found.allocations, strict=True):
                    buffer.move_in(allocation, found.room)
                self.states.move_in(found.states)
                return found
            room = room_ahead(buffers, need, self.headroom)
            try:
                for buffer in buffers:
                    buffer.make_room(room)
            except torch.OutOfMemoryError:
                for buffer in buffers:
                    buffer.leave()
                say_once("There is not enough memory for the buffers of captured steps; this step runs without graphs.")
                return None
        else:
            for buffer in buffers:
                buffer.bind()
        lost = any(buffer.tensor is None for buffer in buffers)
        return None if lost else BufferSet(buffers, self.states.tensors())

    def _find(self, buffers: list[StepBuffer], need: int) -> BufferSet | None:
        """Buffers of another cache of this thread and stream that is not in use, made vacant."""
        vacant = self.pool.take_vacant()
        for found in [*([] if vacant is None else [vacant]), *self.pool.used]:
            owner = None if found.owner is None else found.owner()
            if owner is self or (owner is not None and (owner.last != self.last or owner.moved)):
                continue
            if (owner is None and found.last != self.last) or not found.suits(buffers, need):
                continue
            if not self.states.fit(found.states):
                continue
            if owner is not None:
                owner.give_up()
            return found
        return None

    def give_up(self) -> None:
        """Another cache takes over the buffers: tokens leave them."""
        self.moved = True
        self.sync.catch_up()
        for buffer in self.buffers:
            buffer.leave()
        self.states.leave()

    def before_prompt(self, keys: Tensor) -> None:
        """An empty cache is about to be filled: it moves into what another one has left, or that is given up."""
        sync, found, buffers = self.sync, self.pool.take_vacant(), self.buffers
        if found is None or found.last != _where(keys.device):
            return
        if sync.buffers is None and buffers[0].layer.capacity is None and found.suits_empty(keys):
            for buffer, allocation in zip(buffers, found.allocations, strict=True):
                buffer.take_over(allocation, found.room)
            sync.buffers = found
            self.pool.occupy(found, self)


def _where(device: torch.device) -> tuple[int, int]:
    """The current thread and stream: buffers pass from one cache to another only within them."""
    return threading.get_ident(), torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
