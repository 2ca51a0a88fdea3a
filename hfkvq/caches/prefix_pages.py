"""A packed cache cut into full pages, which other prompts may have as well, and the rest, which is its own."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hfkvq.kernels.decode import RUNS

from .layers.layer import KVLayer
from .saved import SavedCache
from .store import KVStore
from .store.growth import MAX_STEP
from .store.packing import Packed

Tensors = dict[str, Tensor]


def cut_pages(cache: SavedCache, tensors: Mapping[str, Tensor]) -> tuple[list[Tensors], Tensors]:
    """Full pages, and everything else.

    Args:
        cache: of one row.
        tensors: what it has packed, on the CPU.

    Returns:
        Pieces, in order: as many pages of a run of every layer as take the same number of tokens. `join_pages` is the
        inverse.
    """
    rest, pieces = dict(tensors), []
    held = {i: layer.held() for i, layer in enumerate(cache.layers) if isinstance(layer, KVLayer)}
    for run in range(max(len(store.format.runs) for store in held.values())):
        stores = {i: store for i, store in held.items() if run < len(store.format.runs)}
        unit = math.lcm(*(_unit(store, run) for store in stores.values()))
        # Of keys and values, whichever has fewer.
        full = [int(tensors[f"layer{i}.store.counters"][RUNS + 2 * run :][:2].min()) for i in stores]
        count = min(full) // unit
        own: list[Tensors] = [{} for _ in range(count)]
        for i, store in stores.items():
            prefix, page = f"layer{i}.store.run{run}.", store.format.runs[run][0].page_size
            for name in [name for name in tensors if name.startswith(prefix)]:
                dim, step = _measure(name, unit, page)
                x, cut = tensors[name], count * step
                rest[name] = x.narrow(dim, cut, x.shape[dim] - cut)
                for k, piece in enumerate(own):
                    piece[name] = x.narrow(dim, k * step, step)
        pieces += map(_stacked, own)
    return pieces, rest


def join_pages(pieces: Sequence[Mapping[str, Tensor]], rest: Mapping[str, Tensor]) -> Tensors:
    """The tensors of a packed cache from those that `cut_pages` returned."""
    parts: dict[str, list[Tensor]] = {}
    joined: Tensors = {}
    for tensors in (*pieces, rest):
        for name, x in _by_layer(tensors):
            if ".store.run" in name:
                parts.setdefault(name, []).append(x)
            else:
                joined[name] = x
    return joined | {name: torch.cat(found, _dim(name)) for name, found in parts.items()}


def _stacked(piece: Mapping[str, Tensor]) -> Tensors:
    """Tensors that are alike in several layers as one: small files of hundreds are slow to read."""
    alike: dict[Any, list[str]] = {}
    for name, x in piece.items():
        layer, _, own = name.partition(".")
        alike.setdefault((own, x.shape, x.dtype), []).append(layer)
    found = {}
    for (own, *_), layers in alike.items():
        parts = [piece[f"{layer}.{own}"] for layer in layers]
        found[f"{','.join(layers)}.{own}"] = torch.stack(parts) if len(parts) > 1 else parts[0]
    return found


def _by_layer(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Inverse of `_stacked`, which what belongs to one layer, or to none, passes unchanged."""
    for name, x in tensors.items():
        layers, _, own = name.partition(".")
        if "," in layers:
            yield from zip((f"{layer}.{own}" for layer in layers.split(",")), x, strict=True)
        else:
            yield name, x


def _unit(store: KVStore, run: int) -> int:
    """Tokens that whole pages and whole units of sealing have in common."""
    return math.lcm(store.format.runs[run][0].page_size, store.layout.keys.unit, store.layout.values.unit)


def _dim(name: str) -> int:
    # Positions lie beside each other, of pages that hold them.
    return 1 if name.endswith(".pos") else 0


def _measure(name: str, unit: int, page: int) -> tuple[int, int]:
    """Dimension along which a tensor of pages is cut, and its length in a piece."""
    return (1, unit) if _dim(name) else (0, unit // page)


# Borders of pages, at which some caches could have stopped just as well.


def first_border(cache: SavedCache) -> tuple[int, int] | None:
    """Tokens before the first page, and tokens of a piece, where any number of full pages is a cache of its own.

    So it is where no token is kept whole for being new, and nothing but its own tokens decides what a page holds.
    """
    layers = cache.compressed_layers
    sinks = {layer.held().layout.sink for layer in layers}
    if len(layers) < len(cache.layers) or len(sinks) != 1 or not all(map(_stands_alone, layers)):
        return None
    rope = json.dumps(getattr(cache.config, "rope_parameters", None), default=str)
    if "dynamic" in rope or "longrope" in rope:
        # Keys are rotated by the length of the prompt that they came in.
        return None
    return sinks.pop(), math.lcm(*(_unit(layer.held(), 0) for layer in layers))


def _stands_alone(layer: KVLayer) -> bool:
    layout = layer.held().layout
    plain = not layer.scheme.evicts and not layer.scheme.needs and layout.store.ordered
    return plain and not layout.keys.local and not layout.values.local


def sinks_of(tensors: Mapping[str, Tensor]) -> Tensors:
    """What the caches of `first_border` hold beside pages, wherever they stop."""
    return {name: x for name, x in tensors.items() if name.endswith((".window0", ".window1"))}


def packed_at(border: int, tensors: Mapping[str, Tensor]) -> Packed:
    """What a cache of `first_border` packs when it was given ``border`` tokens.

    Args:
        border: tokens before the first page, and those of the pages.
        tensors: pages, joined, and `sinks_of`.
    """
    found, numbers = dict(tensors), []
    for i in range(len(sinks_of(tensors)) // 2):
        name = f"layer{i}.store"
        keys, values = sinks = [tensors[f"{name}.window{side}"] for side in (0, 1)]
        sealed = border - keys.shape[2]
        found[f"{name}.counters"] = torch.tensor([[0], [border], [sealed], [sealed]], dtype=torch.int32)
        found[f"{name}.dropped"] = torch.zeros(1, dtype=torch.int32)
        found |= {f"{name}.window{2 + side}": _tail(sink) for side, sink in enumerate(sinks)}
        numbers.append(
            {
                "seen": border,
                "shape": [*keys.shape[:2], keys.shape[3], values.shape[3]],
                "dtype": str(keys.dtype).removeprefix("torch."),
                "evicted": False,
                "record_past": False,
                "store": {"rows": [[border, sealed, sealed]], "wide_bound": [0, 0], "settled": 0},
            }
        )
    return {"tokens": border, "holes": False, "layers": numbers, "beside": {}}, found


def _tail(sink: Tensor) -> Tensor:
    return sink.new_zeros(*sink.shape[:2], MAX_STEP, sink.shape[3])


def gives_back(cache: SavedCache) -> bool:
    """Whether the newest token can be taken back without loss: it was not quantized together with others.

    Its query stays among those that weigh channels; evictions and tags that it had a say in cannot be undone.
    """
    return len(cache.compressed_layers) == len(cache.layers) and all(map(_layer_gives_back, cache.compressed_layers))


def _layer_gives_back(layer: KVLayer) -> bool:
    store = layer.held()
    if layer.eviction is not None or layer.tags is not None or not store.format.ordered:
        return False
    units = (store.layout.keys.unit, store.layout.values.unit)
    return all(
        count == 0 or min(count, left) <= left // unit * unit
        for length, *sealed in store.states
        for left in [length - 1 - store.layout.sink]
        for count, unit in zip(sealed, units, strict=True)
    )
