"""What the static layers of a cache know together: whether steps have passed that the host did not see."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .static import StaticKVLayer


class Clock:
    """What the static layers of a cache share: whether steps have passed that the host did not see.

    Attributes:
        layers: in the model's order.
        stale: whether a compiled step has run since the host last asked the device.
        steps: tokens announced since then, by which rows are longer at the most.
        ready: whether every row has a token that is no padding; from then on a step needs no mask.
        holes: whether columns within a row are padding, which are stored: from then on every step needs one.
    """

    def __init__(self, layers: list[StaticKVLayer]) -> None:
        self.layers, self.stale, self.steps, self.ready, self.holes = layers, False, 0, False, False
        for i, layer in enumerate(layers):
            layer.clock, layer.leads = self, i == 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Clock:
        """Of the same layers' copies."""
        new = memo[id(self)] = copy.copy(self)
        new.layers = [copy.deepcopy(layer, memo) for layer in self.layers]
        return new

    def catch_up(self) -> None:
        """Asks the device how long rows are, if steps have passed unseen, and does what they have left to do.

        One transfer a device.

        Raises:
            ValueError: tokens of these steps found no room and were not stored.
        """
        if not self.stale:
            return
        self.stale, self.steps = False, 0
        held = [layer for layer in self.layers if layer.state is not None]
        by_device: dict[torch.device, list[StaticKVLayer]] = {}
        for layer in held:
            by_device.setdefault(layer.device, []).append(layer)
        lost = False
        for layers in by_device.values():
            for layer in layers:
                layer.open = True
                layer.close()
            parts = [part for layer in layers for part in layer.told()]
            numbers = torch.cat(parts).tolist()
            for layer in layers:
                size = sum(part.numel() for part in layer.told())
                lost = layer.learn(numbers[:size]) or lost
                numbers = numbers[size:]
        for layer in held:
            layer.between_steps()
        if lost:
            first = held[0]
            where = f"max_cache_len: compiled steps went on beyond the capacity of {first.capacity} tokens"
            remedy = "Make the cache with a larger max_cache_len."
            if first.capacity is not None and first.seen < first.capacity:
                where = "budget: compiled steps went on beyond the room for a budget"
                remedy = "Call the cache's between_steps() before each step, as generate does."
            raise ValueError(f"{where}; the cache holds {first.seen}, and what came later was not stored. {remedy}")

    def announce(self, tokens: int) -> None:
        """A forward of so many tokens is about to come, as far as the host can know.

        Raises:
            ValueError: it would exceed the capacity. Nothing is changed then.
        """
        first = self.layers[0]
        if not self.stale:
            first.check_capacity(tokens)
            for layer in self.layers:
                layer.finish_update()
            self.steps = tokens
            return
        self.steps += tokens
        bound = first.seen + self.steps
        assert first.capacity is not None, "static layers have one"
        if bound > first.capacity or any(layer.wants_host(bound) for layer in self.layers):
            self.catch_up()
            first.check_capacity(tokens)
            # What has been asked for is what the coming step will make stale again.
            self.stale, self.steps = True, tokens
