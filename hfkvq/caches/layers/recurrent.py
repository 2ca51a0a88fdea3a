"""Recurrent states: of layers with Mamba, linear attention or a short convolution, with attention beside or without.

Their shapes do not depend on how many tokens came, so nothing of them is compressed. Steps write into them in place.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from ..base import outside_inference_mode
from ..layer_state.base import unchanged_on_error
from ..store.packing import Packed
from .layer import KVLayer

_KINDS = ("conv", "recurrent")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class RecurrentLayer(LinearAttentionLayer):
    """Transformers' layer of states, which can be saved.

    Attributes:
        invalid: whether a step was interrupted that may have written some states and others not.
    """

    invalid = False

    @outside_inference_mode
    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Allocates as Transformers does; a prompt in inference mode may be followed by steps in another."""
        super().lazy_initialization(*args, **kwargs)

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, *args: Any, **kwargs: Any) -> Tensor:
        """Adds columns (B, C, t) to a convolution's state; see Transformers."""
        held = self.conv_states[state_idx]
        if held is not None and not self.has_previous_state[state_idx] and held.shape[0] != conv_states.shape[0]:
            # States of before a reset, and of another batch, are not kept.
            self.is_conv_states_initialized[state_idx] = False
        return super().update_conv_state(conv_states, state_idx, *args, **kwargs)

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Replaces a state (B, ...), in place; see Transformers."""
        held = self.recurrent_states[state_idx]
        if held is not None and held.shape != recurrent_states.shape:
            self.is_recurrent_states_initialized[state_idx] = False
        return super().update_recurrent_state(recurrent_states, state_idx, **kwargs)

    def reset(self) -> None:
        """Forgets everything, and keeps the allocation."""
        super().reset()
        self.invalid = False

    def reorder_cache(self, beam_idx: Tensor) -> None:  # type: ignore[override]
        for _, held, i in slots_of([self]):
            held[i] = held[i].index_select(0, beam_idx.to(held[i].device))

    # Files.

    def pack(self) -> Packed:
        states = {name: held[i] for name, held, i in slots_of([self])}
        numbers = {
            "states": sorted(states),
            "begun": [index for index, begun in self.has_previous_state.items() if begun],
            "widths": [self.conv_kernel_size[index] for index in range(self.number_of_states)],
        }
        return numbers, states

    def unpack(self, found: Mapping[str, Any], tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """Gives an empty layer what another one has packed, or raises ValueError; it takes tensors over."""
        held = {name: tensors[name] for name in found["states"]}
        rows = {x.shape[0] if x.dim() > 1 and x.dtype in _DTYPES and x.numel() else 0 for x in held.values()}
        if len(held) != len(tensors) or 0 in rows or len(rows) > 1:
            raise ValueError(f"states {sorted(tensors)} of different rows, or of none")
        widths, begun = found["widths"], found["begun"]
        numbers = range(self.number_of_states)
        whole = all(x is None or (type(x) is int and x > 0) for x in widths)
        if len(widths) != len(numbers) or not whole or not all(type(x) is int and x in numbers for x in begun):
            raise ValueError(f"{len(widths)} recurrent states of widths {widths}, where the model has {len(numbers)}")
        places = {f"{kind}{i}": (kind, i) for kind in _KINDS for i in numbers}
        for name, tensor in held.items():
            kind, index = places[name]
            if kind == "conv" and (tensor.dim() != 3 or (tensor.shape[-1] != widths[index] and not self.record_past)):
                raise ValueError(f"state {name} of shape {tuple(tensor.shape)}, and {widths[index]} columns")
            own = tensor.to(device)
            if kind == "conv":
                self.conv_states[index], self.is_conv_states_initialized[index] = own, True
                self.conv_kernel_size[index] = widths[index]
                self.dtype, self.device = own.dtype, own.device
            else:
                self.recurrent_states[index], self.is_recurrent_states_initialized[index] = own, True
        for index in begun:
            self.has_previous_state[index] = True

    @property
    def rows(self) -> int | None:
        """Rows of what it holds; None of nothing."""
        return next((held[i].shape[0] for _, held, i in slots_of([self])), None)


def slots_of(layers: Sequence[RecurrentLayer]) -> list[tuple[str, dict[int, Any], int]]:
    """All states (B, ...) that layers hold, in an order that does not change: name, and dict and key where it is."""
    return [
        (f"{kind}{index}", held, index)
        for layer in layers
        for kind, held in zip(_KINDS, (layer.conv_states, layer.recurrent_states), strict=True)
        for index, x in held.items()
        if x is not None
    ]


class StatePlaces:
    """The states of a cache's layers, where recorded steps look for them."""

    def __init__(self, layers: Sequence[RecurrentLayer]) -> None:
        self.layers = list(layers)

    def tensors(self) -> list[Tensor]:
        # Names are left out: every step asks for this list.
        kinds = [held for layer in self.layers for held in (layer.conv_states, layer.recurrent_states)]
        return [x for held in kinds for x in held.values() if x is not None]

    @property
    def reason(self) -> str | None:
        """Why no step can be recorded now; None where it can."""
        if any(layer.record_past for layer in self.layers):
            return "convolutions keep their past, so that tokens can be taken back"
        if any(layer.rows is None for layer in self.layers):
            # Checked once a prompt has come. RecurrentGemma binds new tensors, at each step, to modules of its own.
            return "the model keeps recurrent states in its own modules"
        return None

    def copy_in(self, tensors: Sequence[Tensor]) -> bool:
        """Brings all states into these tensors; False, and nothing is changed, if they do not fit."""
        if self.are_in(tensors):
            return True
        states = self.tensors()
        kinds = ([(x.shape, x.dtype, x.device) for x in xs] for xs in (states, tensors))
        if next(kinds) != next(kinds):
            return False
        moved = [(own, x) for own, x in zip(tensors, states, strict=True) if x is not own]
        torch._foreach_copy_([own for own, _ in moved], [x for _, x in moved])  # pyright: ignore[reportPrivateImportUsage]
        for own, (_, held, i) in zip(tensors, slots_of(self.layers), strict=True):
            held[i] = own
        return True

    def are_in(self, tensors: Sequence[Tensor]) -> bool:
        """True if the states are these tensors."""
        own = self.tensors()
        return len(own) == len(tensors) and all(x is y for x, y in zip(own, tensors, strict=True))

    @contextlib.contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """If anything fails, states are what they were: a step writes into them, and would do so twice."""
        with torch.inference_mode(False), torch.no_grad():
            saved = [(x, x.clone()) for x in self.tensors()]
        with unchanged_on_error(self.layers):
            try:
                yield
            except BaseException:
                for x, was in saved:
                    x.copy_(was)
                raise

    @contextlib.contextmanager
    def invalidated_on_error(self) -> Iterator[None]:
        """If anything fails, nobody knows whether states have been written; `check` says so from then on."""
        try:
            yield
        except BaseException:
            self.invalidate()
            raise

    @contextlib.contextmanager
    def invalidated_on_partial_write(self, passed: Callable[[], bool]) -> Iterator[None]:
        """If a forward fails that has written some states, and not all that it writes, `check` says so from then on.

        PyTorch counts what its operations write. Kernels of others may write a convolution's state uncounted; the
        recurrent one beside it is counted. ``passed`` says whether attention has the forward's tokens in all layers.
        """
        # They are held until then: their ids are not given to others.
        held = self.tensors()
        before = {id(x): _version(x) for x in held}
        try:
            yield
        except BaseException:
            written = [before.get(id(x), -1) != _version(x) for x in self.tensors()]
            if any(written) and not (all(written) and passed()):
                self.invalidate()
            raise

    def invalidate(self) -> None:
        """Notes that states may be ahead of the tokens that the cache says it holds."""
        for layer in self.layers:
            layer.invalid = True

    def check(self) -> None:
        """Raises RuntimeError if states are not known."""
        if any(layer.invalid for layer in self.layers):
            raise RuntimeError(
                "A step was interrupted while it wrote recurrent states, which cannot be taken back: nobody knows "
                "whether they have its token. Call reset() and begin again."
            )


def _version(x: Tensor) -> int:
    """Number of writes to a tensor, as far as PyTorch counts them."""
    return 0 if x.is_inference() else x._version


class HybridLayer(KVLayer):
    """`KVLayer` whose model keeps states beside keys and values (Falcon-H1, Zamba).

    Args:
        *options: of `KVLayer`; there is no window.
        number_of_states: how many the model keeps of each kind.

    Attributes:
        states: a layer of its own.
    """

    def __init__(self, *options: Any, number_of_states: int = 1) -> None:
        super().__init__(*options)
        self.states = RecurrentLayer(number_of_states)

    @property
    def parts(self) -> list[Any]:
        return [self, self.states]

    # Transformers reads these of a layer that has states, and may ask whether tokens can be taken back: they can from
    # states of convolutions alone.
    number_of_states = property(attrgetter("states.number_of_states"))
    conv_states = property(attrgetter("states.conv_states"))
    recurrent_states = property(attrgetter("states.recurrent_states"))
    has_previous_state = property(attrgetter("states.has_previous_state"))
    is_croppable = property(attrgetter("states.is_croppable"))  # type: ignore[assignment]

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        return self.states.update_conv_state(conv_states, state_idx, **kwargs)

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        return self.states.update_recurrent_state(recurrent_states, state_idx, **kwargs)

    def activate_past_recording(self) -> None:
        super().activate_past_recording()
        self.states.activate_past_recording()

    def reset(self) -> None:
        self.states.reset()
        super().reset()

    def __deepcopy__(self, memo: dict[int, Any]) -> HybridLayer:
        """An independent layer; see `KVLayer`."""
        new: Any = super().__deepcopy__(memo)
        new.states = copy.deepcopy(self.states, memo)
        return new


# Transformers asks for its class: `Cache.update_conv_state`, say, and masks do.
LinearAttentionAndFullAttentionLayer.register(HybridLayer)
