"""A layer for a file, whether ours or Transformers': plain data, and tensors by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..layer_state.smoothing import KeySmoothing
from ..store.packing import Packed
from .layer import KVLayer
from .recurrent import RecurrentLayer

Tensors = Mapping[str, Tensor]

_STOCK = ("DynamicLayer", "DynamicSlidingWindowLayer")
"""Layers of Transformers that can be saved: their state is keys, values, and how many tokens came."""

STATES = "states"
"""Prefix of the names of a layer's recurrent states, among its numbers and tensors."""


def packed_layer(i: int, layer: Any, seen: int) -> Packed:
    """Contents of the cache's layer ``i``, which has seen so many tokens.

    Raises:
        ValueError: it cannot be saved.
    """
    numbers, tensors = _packed_pages(layer) if isinstance(layer, KVLayer) else _packed_stock(i, layer)
    states = _states_of(layer)
    if states is not None:
        if seen and states.rows is None:
            raise ValueError(
                f"path: the model keeps the recurrent states of layer {i} in its own modules, so no file can hold "
                "them; compute the prompt again."
            )
        own, held = states.pack()
        numbers, tensors = numbers | {STATES: own}, tensors | {f"{STATES}.{name}": x for name, x in held.items()}
    return numbers | {"record_past": getattr(layer, "record_past", False)}, tensors


def unpack_layer(i: int, layer: Any, numbers: Mapping[str, Any], tensors: Tensors, device: torch.device) -> None:
    """Gives an empty layer what another one of the same scheme and capacity has packed; it takes tensors over.

    Raises:
        ValueError: it does not fit.
    """
    # This comes first: tails are longer, so that tokens can be taken back.
    layer.record_past = numbers["record_past"] is True
    states = _states_of(layer)
    if (states is None) == (STATES in numbers):
        raise ValueError(f"layer {i}: recurrent states in the file or in the model, not in both")
    if states is not None:
        states.record_past = layer.record_past
        states.unpack(numbers[STATES], below(STATES, tensors), device)
        tensors = {name: x for name, x in tensors.items() if not name.startswith(f"{STATES}.")}
    unpack = _unpack_pages if isinstance(layer, KVLayer) else _unpack_stock
    unpack(layer, numbers, tensors, device)


def below(name: str, tensors: Tensors) -> dict[str, Tensor]:
    """Tensors whose names begin with ``name`` and a dot, by the rest of their names."""
    return {key.removeprefix(f"{name}."): x for key, x in tensors.items() if key.startswith(f"{name}.")}


def _packed_pages(layer: KVLayer) -> Packed:
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


def _unpack_pages(layer: KVLayer, found: Mapping[str, Any], tensors: Tensors, device: torch.device) -> None:
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
    layer.held().unpack(found["store"], below("store", tensors))
    layer.seen, layer.evicted = int(found["seen"]), found["evicted"] is True
    vectors = tensors["smoothing"] if "smoothing" in found else None
    if vectors is not None and (vectors.dtype != torch.float32 or vectors.shape != (3, heads, dims[0])):
        raise ValueError(f"smoothing vectors of {vectors.dtype} and shape {tuple(vectors.shape)}")
    layer.smoothing = None if vectors is None else KeySmoothing(vectors.to(device).contiguous())
    for name, part in (("queries", layer.queries), ("eviction", layer.eviction)):
        if part is not None:
            part.unpack(found[name], {key: x.to(device) for key, x in below(name, tensors).items()})
    layer.edition += 1


def _states_of(layer: Any) -> RecurrentLayer | None:
    """A layer's recurrent states, or None: it is nothing else, or has attention beside."""
    states = getattr(layer, "states", layer)
    return states if isinstance(states, RecurrentLayer) else None


def _packed_stock(i: int, layer: Any) -> Packed:
    if isinstance(layer, RecurrentLayer) or type(layer).__name__ == "DummyLayer":
        return {}, {}
    if type(layer).__name__ not in _STOCK:
        raise ValueError(
            f"path: layer {i} is a {type(layer).__name__}, which cannot be saved; allowed are pages and layers that "
            "grow. Make the cache without max_cache_len, or compute the prompt again."
        )
    if not layer.is_initialized:
        return {}, {}
    count = getattr(layer, "cumulative_length", None)
    return {"came": None if count is None else int(count)}, {"keys": layer.keys, "values": layer.values}


def _unpack_stock(layer: Any, numbers: Mapping[str, Any], tensors: Tensors, device: torch.device) -> None:
    if isinstance(layer, RecurrentLayer) or type(layer).__name__ == "DummyLayer":
        return
    if type(layer).__name__ not in _STOCK:
        raise ValueError(f"a layer is a {type(layer).__name__} here, which cannot be loaded")
    if "came" in numbers:
        keys, values = (tensors[side].to(device) for side in ("keys", "values"))
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        if numbers["came"] is not None:
            layer.cumulative_length = int(numbers["came"])
