"""What a graph of a cache finds allocated when it is recorded."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

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
