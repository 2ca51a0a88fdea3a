"""Work that compiled models leave to Python: allocation before a graph is recorded, and caches that grow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..base.warn_once import say_once
from .handle import dense_of
from .layer import KVLayer


@torch.compiler.disable  # pyright: ignore[reportUntypedFunctionDecorator]
def allocate(layers: Iterable[KVLayer], keys: Tensor, values: Tensor) -> None:
    """Allocates every layer of fixed capacity before a graph is recorded."""
    for layer in layers:
        if layer.buffer is not None and layer.buffer.tensor is None:
            if layer.store is None:
                layer.lazy_initialization(keys, values)
            layer.prefetch()
            layer.buffer.bind()


@torch.compiler.disable  # pyright: ignore[reportUntypedFunctionDecorator]
def update_outside(cache: Any, keys: Tensor, values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
    """An update of a cache that grows, by a compiled model: plain tensors, since its compiler follows no handles."""
    say_once(
        "A compiled model dequantizes a growing cache in each step, which is correct but slow; make the cache with "
        "max_cache_len, or do not compile the model."
    )
    keys, values = cache.update(keys, values, layer_idx)
    return dense_of(keys), dense_of(values)
