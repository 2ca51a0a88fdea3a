"""A layer for a file: plain data, and tensors by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..layer_state.smoothing import KeySmoothing
from ..store.packing import Packed
from .layer import KVLayer

Parts = Mapping[str, Tensor]


def packed_layer(layer: KVLayer) -> Packed:
    """Contents of a settled layer; an empty one has none."""
    if layer.store is None:
        return {}, {}
    layer.settle()
    store = layer.store
    numbers, tensors = store.pack()
    found = {
        "seen": layer.seen,
        "shape": [layer.batch_size, layer.heads, *(store.dims[side] for side in ("keys", "values"))],
        "dtype": str(layer.dtype).removeprefix("torch."),
        "evicted": layer.evicted,
        "store": numbers,
    }
    if store.format.window:
        found["window"] = store.format.window
    own = {f"store.{name}": tensor for name, tensor in tensors.items()}
    if layer.smoothing is not None:
        found["smoothing"], own["smoothing"] = True, layer.smoothing.vectors
    for name, part in (("queries", layer.queries), ("eviction", layer.eviction)):
        if part is not None:
            found[name], held = part.pack()
            own |= {f"{name}.{key}": tensor for key, tensor in held.items()}
    return found, own


def unpack_layer(layer: KVLayer, found: Mapping[str, Any], tensors: Parts, device: torch.device) -> None:
    """Gives an empty layer what another one of the same scheme and capacity has packed; it takes tensors over.

    Raises:
        ValueError: it does not fit.
    """
    if "came" in found:
        raise ValueError("a layer that is held in pages here was not in the file")
    if "store" not in found:
        return
    rows, heads, *dims = map(int, found["shape"])
    dtype = getattr(torch, found["dtype"])
    if dtype not in (torch.float32, torch.float16, torch.bfloat16) or min(rows, heads, *dims) < 1:
        raise ValueError(f"a layer of {found['dtype']} and shape {found['shape']}")
    # Meta tensors suffice: only shapes are read.
    keys, values = (torch.empty(1, 1, 1, 1, dtype=dtype, device=device).expand(rows, heads, 1, dim) for dim in dims)
    layer.lazy_initialization(keys, values)
    layer.held().unpack(found["store"], _below("store", tensors))
    layer.seen, layer.evicted = int(found["seen"]), found["evicted"] is True
    vectors = tensors["smoothing"] if "smoothing" in found else None
    if vectors is not None and (vectors.dtype != torch.float32 or vectors.shape != (3, heads, dims[0])):
        raise ValueError(f"smoothing vectors of {vectors.dtype} and shape {tuple(vectors.shape)}")
    layer.smoothing = None if vectors is None else KeySmoothing(vectors.to(device).contiguous())
    for name, part in (("queries", layer.queries), ("eviction", layer.eviction)):
        if part is not None:
            part.unpack(found[name], {key: x.to(device) for key, x in _below(name, tensors).items()})
    layer.edition += 1


def _below(name: str, tensors: Parts) -> dict[str, Tensor]:
    return {key.removeprefix(f"{name}."): x for key, x in tensors.items() if key.startswith(f"{name}.")}
