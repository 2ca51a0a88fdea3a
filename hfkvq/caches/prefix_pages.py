"""A packed cache cut into full pages, which other prompts may have as well, and the rest, which is its own."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hfkvq.bounded import parse_json
from hfkvq.kernels.decode import RUNS
from hfkvq.kernels.step import MAX_STEP

from .cache import MixedKVCache
from .cache_file import THREADS
from .layers.layer import KVLayer
from .store import KVStore
from .store.packing import Packed

Tensors = dict[str, Tensor]

PAGES = "pages"
"""Name of what a file holds of a piece: u8 (n,), tensor behind tensor; small files of hundreds are slow to read."""

_GROUP_BYTES = 2**27
"""Bytes of pieces that are moved at a time: they bound the memory for them, and a copy a layer is worth its call."""


class Part(NamedTuple):
    """Tensors of a piece that are alike: ``own`` of each of the layers, one behind the other."""

    own: str
    dtype: str
    shape: Sequence[int]
    layers: Sequence[str]


class Pieces:
    """Full pages of a run: a piece is as many of every layer as take the same number of tokens.

    Attributes:
        count: of pieces.
        layout: what a piece is made of, as JSON.
        nbytes: of a piece.

    Args:
        count: of pieces.
        parts: of a piece, the widest elements first, so that all are aligned.
        tensors: of each layer, by name; pages of all pieces, and maybe others behind.
    """

    def __init__(self, count: int, parts: Sequence[Part], tensors: Mapping[str, Tensor]) -> None:
        self.count, self.layout, self._parts = count, json.dumps(parts), parts
        *self._starts, self._used = itertools.accumulate(map(_part_bytes, parts), initial=0)
        self.nbytes = -(-self._used // 8) * 8
        self._views = []
        for part in parts:
            dim = _dim(part.own)
            step = part.shape[dim]
            own = [tensors[f"{layer}.{part.own}"].narrow(dim, 0, count * step) for layer in part.layers]
            self._views.append([x.unflatten(dim, (count, step)).movedim(dim, 0) for x in own])

    def groups(self) -> list[range]:
        """Numbers of pieces that are moved together."""
        most = max(_GROUP_BYTES // max(self.nbytes, 1), 1)
        return [range(i, min(i + most, self.count)) for i in range(0, self.count, most)]

    def gather(self, group: range, device: torch.device) -> Tensor:
        """Pieces as bytes: u8 (pieces, nbytes)."""
        rows = torch.empty(len(group), self.nbytes, dtype=torch.uint8, device=device)
        rows[:, self._used :] = 0
        for own, there in self._pairs(group, rows):
            there.copy_(own)
        return rows

    def scatter(self, group: range, rows: Tensor) -> None:
        """Takes in what `gather` gave."""
        for own, there in self._pairs(group, rows):
            own.copy_(there)

    def _pairs(self, group: range, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """For each layer and part, where pieces are in it, and where in the bytes."""
        for start, part, views in zip(self._starts, self._parts, self._views, strict=True):
            data = rows[:, start : start + _part_bytes(part)].view(_dtype(part))
            there = data.view(len(group), len(part.layers), *part.shape).unbind(1)
            yield from zip((view[group.start : group.stop] for view in views), there, strict=True)


def cut_pages(cache: MixedKVCache, tensors: Mapping[str, Tensor]) -> tuple[list[Pieces], Tensors]:
    """Full pages, and everything else.

    Args:
        cache: of one row.
        tensors: what it has packed.

    Returns:
        Pieces of each run, and the rest: views. `join_pages` is the inverse.
    """
    runs, rest = [], dict(tensors)
    own = {i: layer.held() for i, layer in enumerate(cache.layers) if isinstance(layer, KVLayer)}
    # A window's pages are filled again and again, so none stays that of a prompt.
    held = {i: store for i, store in own.items() if not store.format.window}
    for run in range(max((len(store.format.runs) for store in held.values()), default=0)):
        stores = {i: store for i, store in held.items() if run < len(store.format.runs)}
        unit = math.lcm(*(_unit(store, run) for store in stores.values()))
        # Blocks count on the side, keys or values, that has fewer.
        full = [int(tensors[f"layer{i}.store.counters"][RUNS + 2 * run :][:2].min()) for i in stores]
        count, alike = min(full) // unit, {}
        for i, store in stores.items():
            prefix, page = f"layer{i}.store.run{run}.", store.format.runs[run][0].page_size
            for name in [name for name in tensors if name.startswith(prefix)]:
                x, dim, shape = tensors[name], _dim(name), list(tensors[name].shape)
                # Positions are counted by token.
                shape[dim] = unit if dim else unit // page
                rest[name] = x.narrow(dim, count * shape[dim], x.shape[dim] - count * shape[dim])
                kind = (name.removeprefix(f"layer{i}."), str(x.dtype).removeprefix("torch."), *shape)
                alike.setdefault(kind, []).append(f"layer{i}")
        parts = [Part(own, dtype, shape, layers) for (own, dtype, *shape), layers in alike.items() if count]
        runs.append(Pieces(count, sorted(parts, key=lambda part: -_dtype(part).itemsize), tensors))
    return runs, rest


Read = Callable[[int], tuple[str, Tensors]]


def join_pages(counts: Sequence[int], read: Read, rest: Mapping[str, Tensor], device: torch.device) -> Tensors:
    """The tensors of a packed cache from what `cut_pages` returned.

    Args:
        counts: pieces of each run.
        read: gives layout and tensors of a piece, on the CPU, by its number among those of all runs; called by several
            threads.
        rest: everything else.
        device: of all tensors.

    Raises:
        ValueError: the pieces are no such.
    """
    joined, start = dict(rest), 0
    for count in filter(None, counts):
        found, beside = read(start)
        parts, first = [Part(*part) for part in parse_json(found)], beside.pop(PAGES)
        if first.dtype != torch.uint8 or first.dim() != 1 or -(-sum(map(_part_bytes, parts)) // 8) * 8 != len(first):
            raise ValueError(f"pages of {found} in {first.dtype} of {tuple(first.shape)}")
        for part in parts:
            for layer in part.layers:
                key = f"{layer}.{part.own}"
                joined[key] = _with_room(part, count, rest.get(key), device)

        def one(at: int, known: tuple[Any, ...] = (found, first.shape, first.dtype)) -> Tensor:
            layout, tensors = read(at)
            row = tensors[PAGES]
            if (layout, row.shape, row.dtype) != known:
                raise ValueError("pages of one run are unlike each other")
            return row

        pieces = Pieces(count, parts, joined)
        with ThreadPoolExecutor(THREADS) as pool:
            for group in pieces.groups():
                rows = torch.stack(list(pool.map(one, range(start + group.start, start + group.stop))))
                pieces.scatter(group, rows.to(device))
        joined |= {name: x.to(device) for name, x in beside.items()}
        start += count
    return joined


def _with_room(part: Part, count: int, behind: Tensor | None, device: torch.device) -> Tensor:
    """A layer's tensor for pieces, and with what is behind them."""
    dim, shape = _dim(part.own), list(part.shape)
    shape[dim] *= count
    if behind is None:
        return torch.empty(shape, dtype=_dtype(part), device=device)
    room = shape[dim]
    shape[dim] += behind.shape[dim]
    if list(behind.shape) != [*shape[:dim], behind.shape[dim], *shape[dim + 1 :]] or behind.dtype != _dtype(part):
        raise ValueError(f"{part.own} of {behind.dtype} and {tuple(behind.shape)} behind pages of {part}")
    found = torch.empty(shape, dtype=_dtype(part), device=device)
    found.narrow(dim, room, behind.shape[dim]).copy_(behind)
    return found


def sinks_of(tensors: Mapping[str, Tensor]) -> Tensors:
    """Contents of `first_border`'s caches beside pages, wherever they stop."""
    return {name: x for name, x in tensors.items() if name.endswith((".window0", ".window1", ".smoothing"))}


def _part_bytes(part: Part) -> int:
    if min(part.shape) < 0:
        raise ValueError(f"pages of the shape {part.shape}")
    return len(part.layers) * math.prod(part.shape) * _dtype(part).itemsize


def _dtype(part: Part) -> torch.dtype:
    found = getattr(torch, part.dtype)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"pages of {part.dtype}")
    return found


def _unit(store: KVStore, run: int) -> int:
    """Tokens that whole pages and whole units of sealing have in common."""
    return math.lcm(store.format.runs[run][0].page_size, store.layout.keys.unit, store.layout.values.unit)


def _dim(name: str) -> int:
    # Positions lie beside each other, of pages that hold them.
    return 1 if name.endswith(".pos") else 0


# Borders of pages, at which some caches could have stopped just as well.


def first_border(cache: MixedKVCache) -> tuple[int, int] | None:
    """Tokens before the first page, and tokens of a piece, where any number of full pages is a cache of its own.

    So it is where no token is kept whole for being new, and nothing but its own tokens decides what a page holds.
    """
    layers = cache.compressed_layers
    sinks = {layer.held().layout.sink for layer in layers}
    if not _in_pages_alone(cache) or len(sinks) != 1 or not all(map(_stands_alone, layers)):
        return None
    rope = json.dumps(getattr(cache.config, "rope_parameters", None), default=str)
    if "dynamic" in rope or "longrope" in rope:
        # Keys are rotated by the length of the prompt that they came in.
        return None
    return sinks.pop(), math.lcm(*(_unit(layer.held(), 0) for layer in layers))


def _in_pages_alone(cache: MixedKVCache) -> bool:
    """True if nothing is held but pages: recurrent states are of the last token alone, and cannot be taken back."""
    return len(cache.compressed_layers) == len(cache.layers) and not cache.states.layers


def _stands_alone(layer: KVLayer) -> bool:
    layout = layer.held().layout
    plain = not layer.scheme.evicts and not layer.scheme.needs and layout.store.ordered
    return plain and not layout.keys.local and not layout.values.local and not layout.window


def packed_at(border: int, tensors: Mapping[str, Tensor]) -> Packed:
    """Packed form of a cache of `first_border` that was given ``border`` tokens.

    Args:
        border: tokens before the first page, and those of the pages.
        tensors: pages, joined, and `sinks_of`.
    """
    found, numbers = dict(tensors), []
    for i in range(sum(name.endswith(".window0") for name in tensors)):
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
            | ({"smoothing": True} if f"layer{i}.smoothing" in tensors else {})
        )
    return {"tokens": border, "holes": False, "layers": numbers, "beside": {}}, found


def _tail(sink: Tensor) -> Tensor:
    return sink.new_zeros(*sink.shape[:2], MAX_STEP, sink.shape[3])


def gives_back(cache: MixedKVCache) -> bool:
    """True if the newest token can be taken back without loss: it was not quantized together with others.

    Its query stays among those that weigh channels; evictions and tags that it had a say in cannot be undone.
    """
    return _in_pages_alone(cache) and all(map(_layer_gives_back, cache.compressed_layers))


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
