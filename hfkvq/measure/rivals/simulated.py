"""A cache for measuring methods that our pages cannot hold: full precision, rounded as a method would round it."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from hfkvq.kernels.hadamard import hadamard

from .base import Rival

Quantizer = Callable[[Tensor], Tensor]
"""Tokens (B, H, n, D) of any dtype, in the model's basis, to what a method would read back, f32, likewise."""


@dataclass(frozen=True)
class LayerFormat:
    """How a method holds one layer.

    Attributes:
        keys: quantizes keys.
        values: quantizes values.
        bits: per element of quantized tokens, keys and values, metadata included.
        code_bits: of that the codes.
        sink: first tokens that stay whole.
        recent: newest tokens that stay whole.
        unit: tokens are quantized in whole multiples of so many.
        step_reads_stored: whether a step of one token reads that token as it is stored, not as it came.
    """

    keys: Quantizer
    values: Quantizer
    bits: float
    code_bits: float
    sink: int = 0
    recent: int = 0
    unit: int = 1
    step_reads_stored: bool = False


class SimulatedLayer(DynamicLayer):
    """Rounds each token once, when it leaves the window: what it is read as from the next forward on."""

    def __init__(self, form: LayerFormat) -> None:
        super().__init__()
        self.form, self.rounded = form, 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keys and values (B, H, T, D), the new ones as they came; they leave the window after this forward."""
        form = self.form
        before = super().update(key_states, value_states, *args, **kwargs)
        due = max(0, before[0].shape[-2] - form.sink - form.recent) // form.unit * form.unit
        if due <= self.rounded:
            return before
        first, last = form.sink + self.rounded, form.sink + due
        self.keys, self.values = (
            torch.cat([x[..., :first, :], rounds(x[..., first:last, :]).to(x.dtype), x[..., last:, :]], -2)
            for x, rounds in zip(before, (form.keys, form.values), strict=True)
        )
        self.rounded = due
        return (self.keys, self.values) if form.step_reads_stored and key_states.shape[-2] == 1 else before

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Refused: a token that was rounded could not be given back."""
        raise NotImplementedError("A simulated cache is for measuring only: it cannot be cropped.")


class SimulatedCache(Cache):
    """A `DynamicCache` whose layers of full attention round what leaves their windows.

    For measuring only: it holds everything in full precision.
    """

    def __init__(self, config: Any, forms: Sequence[LayerFormat | None]) -> None:
        """Makes an empty cache.

        Args:
            config: the model's.
            forms: of the layers of full attention, in order; None rounds nothing.
        """
        layers, rest = DynamicCache(config=config).layers, iter(forms)
        super().__init__(layers=[form_layer(x, next(rest)) if type(x) is DynamicLayer else x for x in layers])

    @property
    def full(self) -> list[DynamicLayer]:
        """The layers of full attention."""
        return [x for x in self.layers if type(x) in (DynamicLayer, SimulatedLayer)]  # type: ignore[misc]


def form_layer(layer: DynamicLayer, form: LayerFormat | None) -> DynamicLayer:
    """The layer that holds a form; the stock one if there is none."""
    return layer if form is None else SimulatedLayer(form)


def full_layers(config: Any) -> int:
    """How many layers of a model have full attention."""
    return sum(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)


@dataclass(frozen=True, kw_only=True)
class Simulated(Rival):
    """A method that rounds as its paper says."""

    simulated = True

    def check(self, config: Any) -> None:
        """See `Rival.check`; all of these methods rotate by a Hadamard matrix."""
        dim = head_dim(config)
        if dim & (dim - 1):
            raise ValueError(
                f"schemes: {type(self).__name__} (simulated) rotates heads by a Hadamard matrix, and so takes heads of "
                f"a power of two channels; the model's have {dim}."
            )
        if not full_layers(config):
            raise ValueError(f"schemes: {type(self).__name__} (simulated) takes layers of full attention; got none.")

    @abstractmethod
    def forms(self, model: Any, tokenizer: Any, tokens: Tensor) -> Sequence[LayerFormat | None]:
        """The formats of a model's layers of full attention; see `Rival.prepare`."""

    def prepare(self, model: Any, tokenizer: Any, tokens: Tensor) -> Callable[[], Cache]:
        """See `Rival.prepare`."""
        self.check(model.config)
        forms = self.forms(model, tokenizer, tokens)
        return lambda: SimulatedCache(model.config, forms)

    def held_bytes(self, cache: Cache) -> float:
        """See `Rival.held_bytes`."""
        return math.nan

    def bits(self, cache: Cache) -> tuple[float, float]:
        """See `Rival.bits`; tokens that stay whole count in the dtype that they have."""
        assert isinstance(cache, SimulatedCache)
        total = codes = elements = rounded = 0.0
        for layer in cache.full:
            assert layer.keys is not None
            assert layer.values is not None
            tokens, size = layer.keys.shape[-2], layer.keys[..., :1, :].numel() + layer.values[..., :1, :].numel()
            done = layer.rounded if isinstance(layer, SimulatedLayer) else 0
            total += size * (tokens - done) * 8 * layer.keys.element_size()
            if isinstance(layer, SimulatedLayer):
                total += size * done * layer.form.bits
                codes += size * done * layer.form.code_bits
            elements, rounded = elements + size * tokens, rounded + size * done
        return codes / rounded if rounded else math.nan, total / elements


def head_dim(config: Any) -> int:
    """Channels of a head."""
    text = config.get_text_config(decoder=True)
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def rotated(x: Tensor) -> Tensor:
    """Channels multiplied by the Hadamard matrix of their number, f32; it is its own inverse."""
    return hadamard(x.float().contiguous(), x.shape[-1])
