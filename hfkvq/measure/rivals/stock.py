"""Transformers' own `QuantizedCache`, at its default settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, QuantizedCache

from .base import Rival


@dataclass(frozen=True, kw_only=True)
class StockQuantized(Rival):
    """A `QuantizedCache`: groups of 64, the newest tokens (up to 127) whole, requantized with the rest when they leave.

    Attributes:
        backend: "quanto" or "hqq".
        bits_each: width of codes.
        axis: of keys and values, as Transformers recommends for the backend.
    """

    simulated = False
    about = (
        "quanto-* and hqq-* are Transformers' own QuantizedCache at its defaults, with every tensor that it holds "
        "counted; whenever 128 new tokens are there it dequantizes and quantizes all tokens anew."
    )

    backend: str
    bits_each: int
    axis: int

    def make(self, config: Any) -> Cache:
        """An empty cache of a model's config.

        Raises:
            ImportError: the backend's package is missing.
            ValueError: the model has layers that it cannot hold.
        """
        return QuantizedCache(self.backend, config, nbits=self.bits_each, axis_key=self.axis, axis_value=self.axis)

    def check(self, config: Any) -> None:
        """See `Rival.check`."""
        self.make(config.get_text_config(decoder=True))

    def prepare(self, model: Any, tokenizer: Any, tokens: Tensor) -> Callable[[], Cache]:
        """See `Rival.prepare`."""
        return lambda: self.make(model.config.get_text_config(decoder=True))

    def told(self, found: Iterator[Tensor], name: str) -> Iterator[Tensor]:
        """See `Rival.told`."""
        try:
            yield from found
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            whole = 8 // self.bits_each
            raise ValueError(
                f"schemes: {name} failed in its own package: {error}. HQQ packs {whole} groups a byte and pads "
                f"nothing; choose --prefill so that one token less is a multiple of {whole}, and --chunk likewise."
                if self.backend == "hqq"
                else f"schemes: {name} failed in its own package: {error}."
            ) from error

    def held_bytes(self, cache: Cache) -> float:
        """See `Rival.held_bytes`."""
        return sum(x.nbytes for layer in cache.layers for x in held_tensors(vars(layer)))

    def bits(self, cache: Cache) -> tuple[float, float]:
        """See `Rival.bits`."""
        return float(self.bits_each), math.nan


def held_tensors(x: Any) -> Iterator[Tensor]:
    """Every plain tensor in nested containers and in tensors that are made of others, such as quanto's."""
    if isinstance(x, Tensor) and type(x) not in (Tensor, torch.nn.Parameter):
        names, _ = x.__tensor_flatten__()  # type: ignore[attr-defined]
        yield from held_tensors([getattr(x, name) for name in names])
    elif isinstance(x, Tensor):
        yield x
    elif isinstance(x, dict):
        yield from held_tensors(list(x.values()))
    elif isinstance(x, (list, tuple)):
        for part in x:
            yield from held_tensors(part)


# The axes that Transformers recommends for each.
QUANTIZED = {
    f"{backend}-{bits}": StockQuantized(backend=backend, bits_each=bits, axis=axis)
    for backend, axis in (("quanto", 0), ("hqq", 1))
    for bits in (2, 4)
}
"""By the names that `hfkvq bench generate --engines` and `hfkvq kld --schemes` share."""
