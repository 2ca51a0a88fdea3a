"""What the layers of a cache hold, in bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..memory import MemoryReport
from ..store import StoreBytes
from .layer import KVLayer


def memory_of(layers: Sequence[KVLayer], stock: Iterable[Any], seen: int) -> MemoryReport:
    """Exact memory of layers: every tensor that they hold is counted (asks the device for the rows' lengths).

    Args:
        layers: those that are held in pages.
        stock: the others.
        seen: logical tokens of the cache.
    """
    stores = [layer.store for layer in layers if layer.store is not None]
    parts = sum((store.nbytes() for store in stores), StoreBytes())
    elements = [store.elements() for store in stores]
    bits = sum(store.code_bits() * n for store, n in zip(stores, elements, strict=True))
    staged = [layer.staged for layer in layers if layer.staged is not None]
    # Layers share some of them.
    small = {id(tensor): tensor.nbytes for layer in layers for tensor in layer.tensors()}
    own = sum(layer.buffer.own_bytes() for layer in layers if layer.buffer is not None)
    parts += StoreBytes(tables=sum(small.values()) + own)
    # By storage: after a prompt, a sliding window is a view of all of it.
    other: dict[int, int] = {}
    for layer in stock:
        for x in vars(layer).values():
            # Linear attention keeps its states in dicts.
            held = x.values() if isinstance(x, dict) else (x,)
            storages = [tensor.untyped_storage() for tensor in held if isinstance(tensor, torch.Tensor)]
            other.update({storage.data_ptr(): storage.nbytes() for storage in storages})
    return MemoryReport(
        compressed=parts,
        staged=sum(tensor.nbytes for pair in staged for tensor in pair),
        stock=sum(other.values()),
        elements=sum(elements) + sum(tensor.numel() for pair in staged for tensor in pair),
        code_bits=bits / sum(elements) if sum(elements) else float("nan"),
        seen=seen,
    )


def described(cache: Any) -> str:
    """Scheme, tokens and memory in a line."""
    used = [layer for layer in cache.compressed_layers if layer.store is not None]
    others = "".join(f", {which}: {scheme!r}" for which, scheme in cache.preset.layers)
    head = f"{type(cache).__name__}({cache.scheme!r}{others}, layers={len(cache.compressed_layers)}/{len(cache.layers)}"
    if not used:
        return f"{head}, empty)"
    memory = cache.memory()
    return (
        f"{head}, batch={used[0].batch_size}, seen={cache.get_seq_length()}, "
        f"{memory.ratio:.2f}x smaller than bf16, {memory.total_bits:.2f} total bits)"
    )
