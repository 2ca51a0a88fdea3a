"""Bytes that the layers of a cache hold."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..store import StoreBytes
from ..store.accounting import token_shares
from ..store.host import is_hosted
from .layer import KVLayer
from .memory_report import MemoryReport
from .recurrent import RecurrentLayer, places_of


def held_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the memory that tensors keep, however little of it they show, and however many share it."""
    storages = {storage._cdata: storage.nbytes() for storage in (x.untyped_storage() for x in tensors)}
    return sum(storages.values())


def memory_of(pieces: Sequence[Any], seen: int) -> MemoryReport:
    """Exact memory of layers: every tensor that they hold is counted (asks the device for the rows' lengths).

    Args:
        pieces: layers of a cache, and the recurrent states of those with attention beside.
        seen: logical tokens of the cache.
    """
    layers = [layer for layer in pieces if isinstance(layer, KVLayer)]
    stores = [layer.store for layer in layers if layer.store is not None]
    parts = sum((store.nbytes() for store in stores), StoreBytes())
    elements = [store.elements() for store in stores]
    payload = [store.payload_bits() for store in stores]

    def mean(bits: Iterable[float]) -> float:
        pairs = [(each, n) for each, n in zip(bits, elements, strict=True) if n and not math.isnan(each)]
        return sum(each * n for each, n in pairs) / sum(n for _, n in pairs) if pairs else math.nan

    staged = [layer.staged for layer in layers if layer.staged is not None]
    # Layers share some of them.
    small = {id(tensor): tensor for layer in layers for tensor in layer.tensors()}
    buffers = [x for layer in layers if layer.buffer is not None for x in layer.buffer.memory()]
    ours = [*(x for store in stores for x in store.tensors()), *small.values(), *buffers]
    # Scratch of steps, statistics, and memory of which tensors show a part.
    parts += StoreBytes(tables=held_bytes(ours) - parts.total)
    states = [place.tensor for place in places_of([layer for layer in pieces if isinstance(layer, RecurrentLayer)])]
    stock = [layer for layer in pieces if not isinstance(layer, (KVLayer, RecurrentLayer))]
    # Windows with recurrent states beside them keep these in dicts.
    others = [
        each for layer in stock for x in vars(layer).values() for each in (x.values() if type(x) is dict else [x])
    ]
    return MemoryReport(
        compressed=parts,
        offloaded=held_bytes(x for x in ours if is_hosted(x)),
        staged=held_bytes(tensor for pair in staged for tensor in pair),
        stock=held_bytes(x for x in others if isinstance(x, torch.Tensor)),
        elements=sum(elements) + sum(tensor.numel() for pair in staged for tensor in pair),
        code_bits=mean(bits.room for bits in payload),
        used_bits=mean(bits.used for bits in payload),
        key_bits=mean(bits.keys for bits in payload),
        seen=seen,
        tokens=tuple(token_shares(store.state) for store in stores),
        states=held_bytes(states),
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
