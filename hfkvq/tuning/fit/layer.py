"""Bytes that one layer will hold: a layer is fed over a store whose tokens have no heads."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hfkvq.caches.layer_state.query_statistics import QueryStatistics
from hfkvq.caches.layer_state.tags import TokenRecord
from hfkvq.caches.layers import KVLayer, PaddingReader
from hfkvq.caches.schemes.arkv import Arkv
from hfkvq.caches.schemes.base import Scheme
from hfkvq.caches.schemes.eviction import TokenEviction
from hfkvq.caches.steps.step_buffer import make_plan, room_ahead
from hfkvq.caches.store import MAX_STEP, SIDES, KVStore
from hfkvq.kernels.arguments import AttentionArguments
from hfkvq.kernels.step import buffer_bytes


@dataclass(frozen=True, slots=True)
class Arrival:
    """Lengths of prompt, chunks and generated tokens of a cache.

    Attributes:
        prompt: tokens that come before any is generated.
        generated: tokens that come one by one, behind the prompt.
        chunk: tokens of a piece of the prompt; None for one piece. A store that grows has room to spare.
        headroom: share by which buffers of steps are larger than needed; None if steps have no buffers.
        captured: whether steps are captured.
    """

    prompt: int
    generated: int = 0
    chunk: int | None = None
    headroom: float | None = None
    captured: bool = False

    def ends(self) -> list[int]:
        """Numbers of the prompt's tokens after each of its chunks."""
        step = max(self.prompt if self.chunk is None else self.chunk, 1)
        return [min(at + step, self.prompt) for at in range(0, self.prompt, step)]


class _Rooms(KVStore):
    """Store of one row without heads: it grows, counts and routes like any store, and writes nothing."""

    def skip(self, tokens: int) -> int:
        """Takes up to so many steps at once, as long as nothing has to grow, and returns their number."""
        sizes, view = self.sizes, self.runs[-1]
        if any(x.shape[2] < sum(own) for x, own in zip(self.windows[2:], zip(*sizes[1:], strict=True), strict=True)):
            return 0
        room = view.table.shape[1] * self.format.runs[-1][0].page_size + min(sizes.local) - self.state.wide_most
        count = max(min(tokens, room), 0)
        self._advance(count, None)
        self.commit()
        return count


@dataclass(frozen=True)
class _Kind:
    """Properties that determine a layer's bytes, except its heads and its tokens."""

    scheme: Any
    key_dim: int
    value_dim: int
    itemsize: int
    buffered: bool
    captured: bool
    place: tuple[int, int]
    window: int

    def tokens(self, count: int) -> list[Tensor]:
        """Keys and values of one row: with one head for schemes that evict, else without heads and bytes."""
        own, dtype = int(self.scheme.evicts), {2: torch.bfloat16, 4: torch.float32}[self.itemsize]
        return [torch.zeros(1, own, count, dim, dtype=dtype, device="cpu") for dim in (self.key_dim, self.value_dim)]

    def fresh(self) -> KVLayer:
        """An empty layer."""
        layer = KVLayer(self.scheme, PaddingReader(), recordable=self.buffered, window=self.window)
        if layer.eviction is not None:
            layer.eviction.place = self.place
            return layer
        keys, values = self.tokens(0)
        layout = self.scheme.layout(self.key_dim, self.value_dim)
        layout = layout.in_window(self.window) if self.window else layout
        store = layer.store = _Rooms(layout, self.scheme, keys, values)
        layer.dtype, layer.device, layer.heads, layer.batch_size = keys.dtype, keys.device, 0, 1
        layer.is_initialized = True
        for side in SIDES if self.captured else ():
            # Tails of captured layers have their final size from the beginning.
            store.grow_tail(side, store.tail_limit[side], True)
        if layer.reads_tags:
            # No token has a tag, and each gets the wider width.
            layer.record = TokenRecord(None)  # type: ignore[arg-type]
        return layer

    def feed(self, layer: KVLayer, count: int) -> None:
        """Gives a layer so many tokens at once."""
        keys, values = self.tokens(count)
        layer.update(keys, values)
        layer.begin(None, count)
        if self.scheme.evicts:
            # One query is enough: the number of kept tokens does not depend on attention.
            layer.finish(keys[:, :, -1:], AttentionArguments(1.0))
        else:
            # Cropping nothing seals due tokens.
            layer.crop(0)

    def shortened(self, come: Arrival) -> int:
        """Length of a shorter prompt that leaves the same bytes under a budget; whole chunks are left out."""
        if not isinstance(self.scheme, (Arkv, TokenEviction)):
            return come.prompt
        layout = self.scheme.layout(self.key_dim, self.value_dim)
        if isinstance(self.scheme, Arkv):
            costs = self.scheme.token_bytes(layout, self.key_dim, self.value_dim, self.itemsize)
            kept = self.scheme.most_kept(come.prompt, costs)
        elif self.scheme.budget_share is None:
            # Budgets of PyramidKV are the same from twice their mean on.
            kept = 2 * self.scheme.tokens
        else:
            return come.prompt
        enough = 2 * (kept + self.scheme.window + MAX_STEP)
        piece = math.lcm(layout.keys.unit, layout.values.unit) if come.chunk is None else come.chunk
        return come.prompt - max(come.prompt - enough - piece, 0) // piece * piece

    def steps(self, layer: KVLayer, come: Arrival) -> Iterator[None]:
        """Feeds generated tokens; yields at each moment when the layer may be fullest."""
        left, trims = come.generated, 0
        while left:
            if trims > 2:
                plan = None if layer.buffer is None else layer.buffer.plan
                widest = None if plan is None else make_plan(layer, 1 << 30, None, layer.eviction, 1)
                # The buffer has as many pages as it will have however many tokens come.
                if plan is None or widest is None or widest.blocks == plan.blocks:
                    break
            count = left
            if layer.buffer is not None and come.headroom is not None:
                if layer.seen == layer.buffer.room or not layer.buffer.room:
                    layer.buffer.make_room(room_ahead([layer.buffer], layer.seen + 1, come.headroom, come.captured))
                count = min(left, layer.buffer.room - layer.seen)
            if layer.eviction is not None and (layer.buffer is None or layer.eviction.trims_steps):
                # Steps up to a trim; from the third trim on, bytes repeat.
                at = layer.eviction.full_at
                count = min(count, MAX_STEP, max(at - 1 - layer.seen, 1))
                self.feed(layer, count)
                trims += layer.evicted and layer.eviction.full_at != at
            elif layer.buffer is not None:
                layer.buffer.note_steps(count, count)
            else:
                store = layer.held()
                tagged = layer.reads_tags and layer.may_seal_tagged()
                count = store.skip(left) if isinstance(store, _Rooms) and not tagged else 0
                layer.seen += count
                if not count:
                    self.feed(layer, count := 1)
            left -= count
            if self.scheme.evicts:
                yield
        yield

    def bytes_of(self, layer: KVLayer, batch: int, heads: int, share: int) -> int:
        """Bytes of a layer of so many rows, KV heads, and query heads of each."""
        store = layer.held()
        rows = batch * heads if self.scheme.evicts else batch
        if layer.buffer is not None and layer.buffer.plan is not None:
            if self.scheme.evicts:
                plan = replace(layer.buffer.plan, rows=rows, fold=heads, query_heads=heads * share)
            else:
                plan = replace(layer.buffer.plan, rows=rows, heads=heads)
            held = buffer_bytes(plan) + rows * store.state.dropped.nbytes
        else:
            own = 1 if self.scheme.evicts else heads
            # Tensors of more than two axes have the heads in the second.
            shapes = [
                (x.itemsize, (*x.shape[:1], own, *x.shape[2:]) if x.dim() > 2 else x.shape)
                for x in store.state.tensors()
            ]
            held = rows * sum(size * math.prod(shape) for size, shape in shapes)
        if layer.eviction is not None:
            for notes, count in zip(layer.eviction.notes(), (batch, rows), strict=True):
                held += count * sum(x.nbytes for x in notes)
        return held + batch * _notes(self.scheme, heads, self.key_dim)


@lru_cache(maxsize=256)
def _notes(scheme: Scheme, heads: int, key_dim: int) -> int:
    """Bytes of a row's query statistics in a layer."""
    if "query" not in scheme.needs:
        return 0
    statistics = QueryStatistics()
    statistics.observe(torch.zeros(1, heads, 1, key_dim, dtype=torch.float32, device="cpu"), 1, heads, None, 1)
    return sum(x.nbytes for x in (statistics.sums, statistics.counts) if x is not None)


class _Prompts:
    """Layers of a kind after prompts in chunks of ``chunk`` tokens; a longer prompt goes on from a shorter one."""

    def __init__(self, kind: _Kind, chunk: int) -> None:
        self.kind, self.chunk = kind, chunk
        self._after: dict[int, KVLayer] = {}

    def layer(self, prompt: int) -> KVLayer:
        """Layer after a prompt, the caller's own."""
        whole, rest = divmod(prompt, self.chunk)
        near = max((pieces for pieces in self._after if pieces <= whole), default=0)
        layer = self._after.pop(near, None) or self.kind.fresh()
        self._after[near] = copy.deepcopy(layer)
        for _ in range(near, whole):
            self.kind.feed(layer, self.chunk)
        self._after[whole] = copy.deepcopy(layer)
        while len(self._after) > 3:
            # Layers used least recently go first: a bisection comes back to the others.
            del self._after[next(iter(self._after))]
        if rest:
            self.kind.feed(layer, rest)
        return layer


_prompts = lru_cache(maxsize=32)(_Prompts)


@lru_cache(maxsize=4096)
def layer_bytes(
    scheme: Scheme,
    heads: int,
    key_dim: int,
    value_dim: int,
    itemsize: int,
    batch: int,
    come: Arrival,
    share: int = 1,
    place: tuple[int, int] = (0, 1),
    window: int = 0,
) -> int:
    """Bytes that one layer holds when all tokens have come: pages, windows, tables and notes.

    Schemes that evict are counted with the greatest share of whole tokens that they allow, and at the fullest moment
    between two trims if tokens are generated. Rows are taken to be equally long.

    Args:
        heads: KV heads.
        itemsize: bytes of an element of the model's dtype.
        batch: rows.
        come: how the tokens come.
        share: query heads of a KV head.
        place: of a scheme that evicts, index of the layer in the model and the model's layers.
        window: tokens that a query sees; 0 for all.
    """
    scheme.layout(key_dim, value_dim).check(key_dim, value_dim)
    kind = _Kind(scheme, key_dim, value_dim, itemsize, come.headroom is not None, come.captured, place, window)
    with torch.no_grad():
        prompt = kind.shortened(come)
        layer = kind.fresh() if come.chunk is None else _prompts(kind, come.chunk).layer(prompt)
        if come.chunk is None and prompt:
            kind.feed(layer, prompt)
        held = kind.bytes_of(layer, batch, heads, share) if layer.store is not None else 0
        for _ in kind.steps(layer, come):
            held = max(held, kind.bytes_of(layer, batch, heads, share))
    return held
