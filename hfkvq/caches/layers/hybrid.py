"""Layers with attention and recurrent states in one: compressed pages, and states as Transformers has them."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor
from transformers.cache_utils import LinearAttentionAndFullAttentionLayer

from ..layer_state.base import PaddingReader
from ..schemes.base import Scheme
from .layer import KVLayer
from .recurrent import RecurrentLayer


class HybridLayer(KVLayer):
    """`KVLayer` whose model keeps states beside keys and values (Falcon-H1, Zamba).

    Args:
        scheme: see `PagedLayer`.
        reader: see `PagedLayer`.
        capacity: see `PagedLayer`.
        defer: see `PagedLayer`.
        debug: see `PagedLayer`.
        recordable: see `PagedLayer`.
        number_of_states: how many the model keeps of each kind.

    Attributes:
        states: a layer of its own.
    """

    def __init__(
        self,
        scheme: Scheme,
        reader: PaddingReader,
        capacity: int | None = None,
        defer: bool = False,
        debug: bool = False,
        recordable: bool = False,
        number_of_states: int = 1,
    ) -> None:
        super().__init__(scheme, reader, capacity, defer, debug, recordable)
        self.states = RecurrentLayer(number_of_states)

    @property
    def parts(self) -> list[Any]:
        """Parts that change together: the layer of pages and that of states."""
        return [self, self.states]

    # Transformers reads these of a layer that has states.

    @property
    def number_of_states(self) -> int:
        """Number of states of each kind."""
        return self.states.number_of_states

    @property
    def conv_states(self) -> dict[int, Tensor | None]:
        """States of convolutions (B, C, width), by number."""
        return self.states.conv_states

    @property
    def recurrent_states(self) -> dict[int, Tensor | None]:
        """States (B, ...), by number."""
        return self.states.recurrent_states

    @property
    def has_previous_state(self) -> dict[int, bool]:
        """True if a token came, by number of the state."""
        return self.states.has_previous_state

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """See `RecurrentLayer.update_conv_state`."""
        return self.states.update_conv_state(conv_states, state_idx, **kwargs)

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """See `RecurrentLayer.update_recurrent_state`."""
        return self.states.update_recurrent_state(recurrent_states, state_idx, **kwargs)

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """True if tokens can be taken back: from states of convolutions alone."""
        return self.states.is_croppable

    def activate_past_recording(self) -> None:
        """See `KVLayer.activate_past_recording`; convolutions keep their past as well."""
        super().activate_past_recording()
        self.states.activate_past_recording()

    def reset(self) -> None:
        """Forgets everything."""
        self.states.reset()
        super().reset()

    def offload(self) -> None:
        """Moves everything to the CPU."""
        self.states.offload()
        super().offload()

    def prefetch(self) -> None:
        """Moves everything back."""
        self.states.prefetch()
        super().prefetch()

    def __deepcopy__(self, memo: dict[int, Any]) -> HybridLayer:
        """An independent layer; see `PagedLayer`."""
        new: Any = super().__deepcopy__(memo)
        new.states = copy.deepcopy(self.states, memo)
        return new


# Transformers asks for its class: `Cache.update_conv_state`, say, and masks do.
LinearAttentionAndFullAttentionLayer.register(HybridLayer)
