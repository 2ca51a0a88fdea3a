"""What the evicting layers of a cache know of each other."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .cut import first_tiers

if TYPE_CHECKING:
    from .evict import EvictingLayer


class Peers:
    """The evicting layers of a cache, which compare their strengths.

    Attributes:
        layers: in the model's order.
        warned: whether it has been said that attention hides its queries.
    """

    def __init__(self, layers: list[EvictingLayer]) -> None:
        self.layers, self.warned = layers, False
        for layer in layers:
            layer.peers = self

    def __deepcopy__(self, memo: dict[int, Any]) -> Peers:
        """The same layers' copies."""
        new = memo[id(self)] = copy.copy(self)
        new.layers = [copy.deepcopy(layer, memo) for layer in self.layers]
        return new

    def greatest(self, prompts: int, device: torch.device) -> Tensor | None:
        """Greatest strength of the layers that have met as many prompts: f32 (B,), or None if none has."""
        known = [x.strength.to(device) for x in self.layers if x.strength is not None and x.prompts == prompts]
        return torch.stack(known).amax(0) if known else None

    def report(self, prompts: int) -> None:
        """A layer has seen its prompt. After the last one every share is final, and tiers are assigned."""
        if all(layer.prompts == prompts for layer in self.layers):
            for layer, tiers in zip(self.layers, first_tiers(self.layers), strict=True):
                layer.assign(tiers)
