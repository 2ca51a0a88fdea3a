"""What the evicting layers of a cache know of each other."""

from __future__ import annotations

import copy
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .first_prompt import first_tiers

if TYPE_CHECKING:
    from .evict import EvictingLayer


class Peers:
    """The evicting layers of a cache, which compare their strengths.

    Attributes:
        warned: whether it has been said that attention hides its queries.
    """

    def __init__(self, layers: list[EvictingLayer]) -> None:
        # Weakly: layers keep their peers, and nothing may keep a layer whose cache is gone.
        self._layers, self.warned = [weakref.ref(layer) for layer in layers], False
        for layer in layers:
            layer.peers = self

    @property
    def layers(self) -> list[EvictingLayer]:
        """In the model's order."""
        found = [ref() for ref in self._layers]
        return [layer for layer in found if layer is not None]

    def __deepcopy__(self, memo: dict[int, Any]) -> Peers:
        """The same layers' copies."""
        new = memo[id(self)] = copy.copy(self)
        new._layers = [weakref.ref(copy.deepcopy(layer, memo)) for layer in self.layers]
        return new

    def __getstate__(self) -> dict[str, Any]:
        """References that can be saved."""
        return self.__dict__ | {"_layers": self.layers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Inverse of `__getstate__`."""
        self.__dict__.update(state, _layers=[weakref.ref(layer) for layer in state["_layers"]])

    def greatest(self, prompts: int, device: torch.device) -> Tensor | None:
        """Greatest strength of the layers that have met as many prompts: f32 (B,), or None if none has."""
        known = [x.strength.to(device) for x in self.layers if x.strength is not None and x.prompts == prompts]
        return torch.stack(known).amax(0) if known else None

    def report(self, prompts: int) -> None:
        """A layer has seen its prompt. After the last one every share is final, and tiers are assigned."""
        if all(layer.prompts == prompts for layer in self.layers):
            waiting = [layer.waiting() for layer in self.layers]
            most = self.greatest(prompts, self.layers[0].device) if any(waiting) else None
            for layer, tiers in zip(self.layers, first_tiers(waiting, most), strict=True):
                layer.assign(tiers)
