"""A budget in bytes: a cache in 16 bits while there is room, whose layers' keys or values then go down a ladder.

The budget decides before tokens come, and before rows or lengths change. Each layer lies in one step buffer, so that
what the cache holds is known beforehand, to the byte: `Budget.peak`. Where that would pass the limit, the sides that
cost least go down a rung, a layer at a time: beside the layers there is never more than one further buffer. Where all
have gone down and the cache may forget, each KV head lets its pages go that the newest queries attend to least.
"""

from __future__ import annotations

import copy
import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace as replaced
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from hfkvq.kernels.pages import Side
from hfkvq.kernels.step import MAX_STEP, Allocation, StepPlan, buffer_bytes, views_of_buffer
from hfkvq.sizes import parse_size

from .base.capture import RECORDERS
from .base.config_switch import NAME
from .compile import compile_rungs
from .eviction.forgetting import kept_pages, page_size, pages_to_spare, score_bytes
from .layer_state.base import unchanged_on_error
from .layer_state.smoothing import KeySmoothing, measure, of_keys
from .layers.layer import KVLayer
from .layers.memory import format_bytes, held_bytes
from .schemes.base import Scheme, get_scheme
from .schemes.eviction import SnapKV
from .schemes.preset import Preset
from .schemes.sides import Sides
from .steps.step_buffer import LEAST_HEADROOM, plan_of_layout, room_ahead
from .store import SIDES
from .store.relaid import Reader, basis_change, relaid, relaid_scratch
from .store.windows import tail_limits
from .tags.bit_table import read_json

LADDER = ("full", "best-4.3", "trellis-2.5")
"""Schemes that layers go down by: 16 bits, 4 bits, and 2 bits, keys with the strongest channels in 4, values in trellis
codes; these take heads of a multiple of 8 channels, others end at ``best-2.5``."""

MARGIN = 0.9
"""Share of the device's free memory that ``memory="auto"`` takes: what attention computes needs some of it."""

AHEAD = 0.125
"""Share of its tokens by which a cache that steps down, or forgets, makes room: few changes in all."""

LEAST_STEPS = 1024
"""Fewest captured steps that a step down makes room for, so that a change of all layers is a small share of them."""

logger = logging.getLogger(__name__)

ORDER_KIND = "hfkvq order"
"""Kind of a file with an order, as `evals/budget.py` writes it."""

Rungs = tuple[tuple[int, int], ...]
"""Rung of each layer's keys and values."""

Place = Literal["here", "below", "end"]
"""Where buffers stand on the ladder: on the rungs of now, below them, or at its end."""

Rooms = Callable[[Place], Sequence[int]]
"""Tokens of a row to try to have room for, the best first."""


class Shape(NamedTuple):
    """Shape of the layers' stores.

    Attributes:
        captured: whether steps over the buffers are captured; then tails are as long as they may become.
        hold: newest tokens that stay unsealed, beyond what the layout says.
        gone: columns that have no room any longer, since their tokens were forgotten; see `KVLayer.gone`.
        queries: query heads of which the newest queries are kept, by which tokens are forgotten, times how many.
    """

    rows: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: str
    captured: bool
    hold: int
    gone: int = 0
    queries: int = 0

    @property
    def shown(self) -> int:
        """Bytes of the newest queries of one layer and all rows."""
        return self.rows * self.queries * self.key_dim * self.itemsize

    @property
    def itemsize(self) -> int:
        return getattr(torch, self.dtype.removeprefix("torch.")).itemsize

    @property
    def token(self) -> int:
        """Bytes of a token's keys and values in the model's dtype, of one layer and all rows."""
        return self.rows * self.heads * (self.key_dim + self.value_dim) * self.itemsize


@lru_cache(maxsize=4096)
def plan_of(scheme: Scheme, shape: Shape, room: int) -> StepPlan:
    """The plan of a layer's buffer for so many tokens; that of `step_buffer.make_plan`, before there is a store."""
    layout = scheme.layout(shape.key_dim, shape.value_dim)
    behind = max(room - shape.gone - layout.sink, 0)
    limits = tail_limits(layout, shape.hold)
    keys, values = (limits[side] if shape.captured else min(limits[side], max(behind, MAX_STEP)) for side in SIDES)
    blocks = (-(-behind // layout.keys.formats[0].page_size),)
    return plan_of_layout(scheme, layout, shape[:5], blocks, (keys, values), room, shape.hold)


@lru_cache(maxsize=4096)
def layer_bytes(scheme: Scheme, shape: Shape, room: int) -> int:
    """Bytes of a layer's buffer for so many tokens."""
    return buffer_bytes(plan_of(scheme, shape, room))


@lru_cache(maxsize=4096)
def window_bytes(scheme: Scheme, shape: Shape, room: int) -> int:
    """Most bytes that a change of rows or lengths copies of a layer: its windows, and pages that are not full."""
    plan = plan_of(scheme, shape, room)
    page = plan.format.runs[0][0].page_size
    tokens = plan.format.sink + sum(plan.tails)
    copies = shape.token * (tokens + 4 * page + max(plan.local)) + 8 * shape.rows * (plan.blocks[0] + 64)
    return 2 * (copies + shape.shown)


def default_order(layers: int, rungs: int) -> list[tuple[int, Side]]:
    """Sides of layers in the order in which they go down, where none was measured: by depth.

    Values go before keys, whose errors the softmax magnifies, and layers near both ends before those in the middle,
    whose values the presets hold in more bits.
    """

    def inner(layer: int) -> float:
        return abs((layer + 0.5) / layers - 0.575)

    outside_in = sorted(range(layers), key=inner, reverse=True)
    sides: tuple[Side, Side] = ("values", "keys")
    return [(layer, side) for _ in range(1, rungs) for side in sides for layer in outside_in]


def read_order(order: Iterable[tuple[int, str]] | str | Path) -> list[tuple[int, str]]:
    """An order, or what a file holds of one.

    Raises:
        ValueError: there is no such file, or it holds something else.
    """
    given: Any = order
    if isinstance(order, (str, Path)):
        given = read_json(Path(order), ORDER_KIND, "order", "evals/budget.py --order measure").get("order")
    try:
        return [(layer, side) for layer, side in given]
    except (TypeError, ValueError):
        raise ValueError(
            f"order: got {order!r}, allowed (layer, side) pairs such as [(0, 'values')], or a file of them as "
            "evals/budget.py writes it."
        ) from None


def parse_memory(memory: Any, device: torch.device) -> int:
    """Bytes of a budget as users write it.

    Args:
        memory: a number of bytes, a size ("6GiB"), or "auto".
        device: of the model, whose free memory "auto" takes.

    Raises:
        ValueError: anything else; "auto" without a GPU.
    """
    if memory == "auto":
        if device.type != "cuda":
            raise ValueError(f"memory: got 'auto' on {device}, allowed where the model is on a GPU; say how much.")
        free, _ = torch.cuda.mem_get_info(device)
        # Memory that PyTorch has and does not use is free as well.
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(MARGIN * free)
    if isinstance(memory, bool) or not isinstance(memory, (int, str)):
        each = "; every cache has a budget of its own" if isinstance(memory, Budget) else ""
        raise ValueError(f"memory: got {memory!r}, allowed bytes, a size like '6GiB', or 'auto'{each}.")
    return parse_size(memory, "memory")


class Budget:
    """The budget of one cache, and where each layer stands on the ladder.

    Attributes:
        limit: most bytes that the cache holds.
        evict: scheme by which tokens are forgotten once the ladder ends; None where an error is raised then.
        ladder: schemes, widest first.
        moves: steps down, in the order in which they are made: layer, "keys" or "values", and rung to come to.
        rungs: where each layer's keys and values stand.
    """

    def __init__(
        self,
        limit: int,
        layers: int,
        dim: int,
        order: Iterable[tuple[int, str]] | str | Path | None = None,
        evict: str | None = None,
    ) -> None:
        if evict not in (None, "snapkv"):
            raise ValueError(
                f"evict: got {evict!r}, allowed 'snapkv', or None for a cache that keeps all tokens and raises an "
                "error where they do not fit; other schemes that evict are presets of their own, without memory=."
            )
        self.limit, self.layers, self.dim, self.evict = limit, layers, dim, SnapKV() if evict else None
        self.ladder = [get_scheme(scheme) for scheme in (LADDER if dim % 8 == 0 else (*LADDER[:-1], "best-2.5"))]
        self.sink = max(scheme.layout(dim, dim).sink for scheme in self.ladder)
        self.rungs: Rungs = ((0, 0),) * layers
        # Equal schemes are one object, so that their bytes are asked for once.
        self._known: dict[Any, Scheme] = {}
        self.moves = self._moves(default_order(layers, len(self.ladder)) if order is None else read_order(order))

    def __repr__(self) -> str:
        return f"Budget({format_bytes(self.limit)})"

    def _moves(self, order: Sequence[tuple[int, str]]) -> list[tuple[int, Side, int]]:
        """Moves of an order; a rung of no fewer bits than the one above is passed over."""
        found: list[tuple[int, Side, int]] = []
        stand: dict[tuple[int, str], int] = {}
        for layer, side in order:
            if side not in SIDES or type(layer) is not int or not 0 <= layer < self.layers:
                raise ValueError(
                    f"order: got {(layer, side)!r}, allowed pairs of a layer from 0 to {self.layers - 1} and 'keys' or "
                    "'values'."
                )
            now = stand.get((layer, side), 0)
            width = self.bits(layer, side, now)
            down = next((r for r in range(now + 1, len(self.ladder)) if self.bits(layer, side, r) < width), None)
            if down is not None:
                found.append((layer, side, down))
                stand[layer, side] = down
        return found

    def bits(self, layer: int, side: str, rung: int) -> float:
        """Payload bits of an element of a layer's side on a rung."""
        layout = self.ladder[rung].in_layer(layer, self.layers).layout(self.dim, self.dim)
        fmt = (layout.keys if side == "keys" else layout.values).formats[0]
        return 16.0 if fmt.bits == 16 else fmt.code_bits(self.dim)

    def scheme(self, layer: int, rungs: tuple[int, int]) -> Scheme:
        """The scheme of a layer on these rungs."""
        found = self._known.get((layer, rungs))
        if found is None:
            own = [self.ladder[rung].in_layer(layer, self.layers) for rung in rungs]
            made = Sides(keys=own[0], values=own[1], sink_length=self.sink)
            found = self._known[layer, rungs] = self._known.setdefault(made, made)
        return found

    def schemes(self, rungs: Rungs | None = None) -> list[Scheme]:
        """Schemes of all layers."""
        return [self.scheme(i, own) for i, own in enumerate(self.rungs if rungs is None else rungs)]

    def preset(self) -> Preset:
        """The preset of what the layers are now: neighbours of one scheme are named together."""
        return Preset.of_layers(self.scheme(0, (0, 0)), self.schemes())

    def adopt(self, schemes: Sequence[Scheme]) -> None:
        """Stands where layers of these schemes do.

        Raises:
            ValueError: a scheme that is on no rung.
        """
        every = [(keys, values) for keys in range(len(self.ladder)) for values in range(len(self.ladder))]
        found: list[tuple[int, int]] = []
        for i, scheme in enumerate(schemes):
            own = next((rungs for rungs in every if self.scheme(i, rungs) == scheme), None)
            if own is None:
                raise ValueError(
                    f"scheme: got {scheme.name!r} in layer {i}, which is no rung of the ladder; leave the scheme out: "
                    "with memory= the cache chooses."
                )
            found.append(own)
        self.rungs = tuple(found)

    def down(self) -> Iterator[Rungs]:
        """Rungs of all layers now, and after each further step down."""
        now = list(self.rungs)
        yield self.rungs
        for layer, side, rung in self.moves:
            keys, values = now[layer]
            if rung > (keys if side == "keys" else values):
                now[layer] = (rung, values) if side == "keys" else (keys, rung)
                yield tuple(now)

    def peak(
        self, rungs: Rungs, shape: Shape, room: int, tokens: int, extra: str = "", old: Shape | None = None
    ) -> int:
        """Most bytes that the cache holds at any time with buffers for ``room`` tokens a row.

        All layers' buffers, their small tensors, and what there is beside for a time: tokens of a forward that are not
        stored yet (those of one layer), or another buffer of the largest layer and what fills it.

        Args:
            tokens: of a forward that comes.
            extra: "windows" for a change of rows or lengths, which copies windows and pages that are not full; "cut"
                for a first prompt of which those tokens are copied that have room.
            old: of other rows, from whose buffers these are gathered, before they are bound to their own.
        """
        schemes = self.schemes(rungs)
        # A layer may come to longer tails than any has now.
        ends = [self.scheme(0, (rung, rung)) for rung in range(len(self.ladder))]
        known = {id(scheme): scheme for scheme in (*schemes, *ends)}
        sizes = {at: layer_bytes(scheme, shape, room) for at, scheme in known.items()}
        held = [sizes[id(scheme)] for scheme in schemes]
        plans = [plan_of(scheme, shape, room) for scheme in known.values()]
        scratch, beside = max(map(relaid_scratch, plans)), max(held)
        if shape.queries:
            # Pages are scored before there is another buffer.
            beside = max(beside, *(score_bytes(plan) for plan in plans))
        staged = shape.token * max(tokens, MAX_STEP)
        staged += shape.token * (room - shape.gone) if extra == "cut" else 0
        copies = sum(window_bytes(scheme, shape, room) for scheme in schemes) if extra == "windows" else 0
        if old is not None:
            copies += sum(layer_bytes(x, each, room) + each.shown for x in schemes for each in (old, shape))
        return sum(held) + self._small(shape, tokens) + max(staged, beside + scratch) + copies

    def _small(self, shape: Shape, tokens: int) -> int:
        """Most bytes of what layers keep beside their buffers, and of positions of a forward of so many tokens."""
        own = shape.rows * (shape.heads * (8 * shape.key_dim + 16) + 64) * self.layers
        return own + 32 * shape.rows * tokens + shape.shown * (self.layers + 1)

    def choose(
        self,
        shape: Shape,
        need: int,
        tokens: int,
        rooms: Rooms,
        extra: str = "",
        old: Shape | None = None,
        spare: tuple[int, int] = (0, 1),
    ) -> tuple[Shape, Rungs, int]:
        """Shape, rungs and room that fit: as few steps down as possible, then as much room, then fewer tokens.

        Args:
            need: tokens of a row that must have a place.
            rooms: rooms to try, the best first, by `Place`.
            extra: see `peak`; so is ``old``.
            spare: pages that may be forgotten and tokens of a page, see `_pages_to_spare`.

        Raises:
            ValueError: the whole ladder is not enough. Nothing is changed then.
        """
        every = list(self.down())
        last, below = every[-1], list[Place](["below"]) * (len(every) - 1)
        places: list[Place] = ["here", *below, "end"]
        # The ladder ends there, so there is no use in room ahead.
        for rungs, place in zip([*every, last], places, strict=True):
            for room in rooms(place):
                if self.peak(rungs, shape, room, tokens, extra, old) <= self.limit:
                    return shape, rungs, room
        pages, page = spare

        def without(count: int) -> Shape:
            return shape._replace(gone=shape.gone + count * page)

        def fits(count: int) -> bool:
            return self.peak(last, without(count), need, tokens, "cut" if need == tokens else extra) <= self.limit

        fewest = 1 + bisect_left(range(1, pages + 1), True, key=fits)
        if fewest <= pages:
            ahead = min(pages - fewest, max(1, int(AHEAD * (pages - fewest))))
            return without(fewest + ahead), last, need + ahead * page
        least = self.peak(last, shape, rooms("end")[-1], tokens, extra, old)
        forget = ", or let a new cache forget tokens (evict='snapkv')" if self.evict is None else ""
        raise ValueError(
            f"memory: {need} tokens in {shape.rows} rows need {format_bytes(least)} in the narrowest pages, but the "
            f"budget is {format_bytes(self.limit)}; nothing was changed. Give the cache more "
            "(cache.memory_limit = ...), use fewer rows or a shorter text, or pass a long prompt in chunks "
            f"(prefill_chunk_size){forget}."
        )

    def _pages_to_spare(self, cache: Any, shape: Shape, need: int = 0) -> tuple[int, int]:
        """Pages of each row that may be forgotten, in every layer, and tokens of a page."""
        found, page = [], 1
        if self.evict is not None and not cache._sync.seen:
            page = self.ladder[-1].layout(self.dim, self.dim).keys.formats[0].page_size
            return max(need - self.sink - self.evict.window - page, 0) // page, page
        for layer in cache.compressed_layers:
            if self.evict is None or cache._sync.holes or layer.store is None:
                # Columns have a meaning of their own where padding stands among tokens.
                return 0, page
            state = layer.store.state
            page, longest = page_size(state), layer.seen - layer.gone
            # A layer is ahead of the others where an attempt has failed half-way.
            before = (layer.gone - shape.gone) // page
            found += [
                pages_to_spare(row, state, self.evict.window) + (longest - row.length) // page + before
                for row in state.states
            ]
        return min(found), page

    # Calls of the cache.

    def reserve(self, cache: Any, tokens: int, keys: Tensor | None = None) -> None:
        """Makes room for ``tokens`` more of each row, before any of them comes.

        Args:
            keys: (B, H, t, D), of the first layer, by which an empty cache learns its shape.

        Raises:
            ValueError: the budget is not enough. Nothing is changed then.
            torch.OutOfMemoryError: the device has less than the budget. Each layer is as before or as after.
        """
        sync = cache._sync
        if keys is None and sync.buffers is not None and sync.seen + tokens <= sync.buffers.room and not sync.stale:
            # A captured step, whose buffers have room.
            return
        layers: list[Any] = cache.compressed_layers
        if sync.stale:
            sync.catch_up()
        empty = not sync.seen
        if empty and keys is None:
            return
        need = sync.seen + tokens
        has_room = not empty and all(x.buffer.tensor is not None and need <= x.buffer.room for x in layers)
        if has_room and tokens <= MAX_STEP:
            return
        shape = self._shape(cache, keys)
        rooms = self._rooms(cache, need, shape, tokens)
        if empty:
            self._begin(cache, shape, need, tokens, rooms)
            return
        if has_room and self.peak(self.rungs, shape, layers[0].buffer.room, tokens) <= self.limit:
            return
        _settle(cache)
        # Tokens are taken back between steps where they are recorded as past; by then no room can be made.
        extra = "windows" if self.evict is not None and layers[0].record_past else ""
        spare = self._pages_to_spare(cache, shape)
        shape, rungs, room = self.choose(shape, need, tokens, rooms, extra, spare=spare)
        self._go(cache, shape, rungs, room)

    def before_change(self, cache: Any, rows: int | None = None, copies: bool = False, crops: int = 0) -> None:
        """Makes room for a change of rows or lengths, which holds the old and the new windows for a time.

        Args:
            rows: rows there will be; None for as many as there are.
            copies: whether pages are copied, though rows are as many.
            crops: newest tokens that are taken back.

        Raises:
            ValueError: the budget is not enough. Nothing is changed then.
        """
        layers: list[Any] = cache.compressed_layers
        if not layers[0].seen and not cache._sync.seen:
            return
        _settle(cache)
        # A fixed capacity stays what it is.
        shape, need = self._shape(cache, None), layers[0].capacity or layers[0].seen
        room = max(need, *(x.buffer.room for x in layers))
        held = [room] if room == need else [room, need]
        if rows is not None and (copies or rows != shape.rows):
            # Other rows are in memory of their own, until the old ones have gone.
            held = [need]
            _, rungs, _ = self.choose(shape._replace(rows=rows), need, 0, lambda _: held, old=shape)
        else:
            # Tokens older than the window could not be taken back once others are forgotten.
            keeps = self.evict is None or crops > self.evict.window
            spare, before = (0, 1) if keeps else self._pages_to_spare(cache, shape), shape
            shape, rungs, room = self.choose(shape, need, 0, lambda _: held, "windows", spare=spare)
            held = held if shape == before else [room]
        if rungs != self.rungs or any(x.buffer.room > held[0] or x.buffer.tensor is None for x in layers):
            self._go(cache, shape, rungs, held[0])

    def set_limit(self, cache: Any, limit: int) -> None:
        """Another limit; a smaller one takes the cache down at once.

        Raises:
            ValueError: what the cache holds cannot be made so small. Nothing is changed then.
        """
        before, self.limit = self.limit, limit
        layers: list[Any] = cache.compressed_layers
        try:
            cache._catch_up()
            if limit >= before:
                return
            if not layers[0].seen:
                # Buffers that a reset has left may be larger.
                if cache.memory().total > limit:
                    for layer in layers:
                        _drop(layer)
                return
            _settle(cache)
            shape, need = self._shape(cache, None), layers[0].capacity or layers[0].seen
            room = max(need, *(x.buffer.room for x in layers))
            shape, rungs, room = self.choose(
                shape,
                need,
                0,
                lambda place: [need] if place == "below" else [room, need],
                spare=self._pages_to_spare(cache, shape),
            )
            self._go(cache, shape, rungs, room)
        except BaseException:
            self.limit = before
            raise

    def _shape(self, cache: Any, keys: Tensor | None) -> Shape:
        first: KVLayer = cache.compressed_layers[0]
        hold, buffer = first.hold, first.buffer
        assert buffer is not None, "a cache with a budget has buffers"
        gone = min(layer.gone for layer in cache.compressed_layers)
        shown = 0 if self.evict is None else buffer.queries_per_head * self.evict.window
        if keys is not None:
            rows, heads, _, dim = keys.shape
            captured = cache._sync.captured and keys.device.type in RECORDERS
            return Shape(rows, heads, dim, dim, str(keys.dtype), captured, hold, gone, shown * heads)
        store = first.held()
        rows, heads, dims, dtype = first.batch_size, store.heads, store.dims, str(store.dtype)
        return Shape(rows, heads, dims["keys"], dims["values"], dtype, buffer.replays, hold, gone, shown * heads)

    def _rooms(self, cache: Any, need: int, shape: Shape, tokens: int) -> Rooms:
        """Rooms to try for so many tokens, ``tokens`` of which come now; the largest first.

        Captured steps go down for as much room as buffers of presets have, since a change is captured anew. Buffers of
        no more than these tokens are a prompt's, or what the ladder's end leaves: others would move with every token,
        which takes longer than to go down.
        """
        capacity = cache.compressed_layers[0].capacity
        if capacity is not None:
            return lambda stays: [capacity]
        page = max(scheme.layout(self.dim, self.dim).keys.formats[0].page_size for scheme in self.ladder)
        headroom = cache._sync.headroom
        least = need + (min(LEAST_HEADROOM, page) if shape.captured and headroom else page)

        # A page has its bytes from its first token on. A cache that may forget does so before it moves for every page.
        behind = self.sink + shape.gone
        full = behind + -(-max(need - behind, 0) // page) * page
        exactly = [least] if self.evict is not None else [least, *([full] if full < least else []), need]

        def rooms(place: Place) -> Sequence[int]:
            tight = place == "end" or (place == "here" and not cache._sync.seen)
            if not (shape.captured and headroom):
                return exactly if tight else [least]
            steps, below = tokens <= MAX_STEP, place == "below"
            share = min(headroom, AHEAD) if below and not steps else headroom
            most = shape.gone + room_ahead([], need - shape.gone, share, True)
            if below:
                return [max(most, need + LEAST_STEPS) if steps else most]
            # Halving what is ahead; exactly what is needed comes last.
            ahead = [x for x in (need + ((most - need) >> n) for n in range(4)) if x > least]
            if steps and not tight and any(map(any, self.rungs)):
                # Layers go down rather than move for a few steps.
                return [x for x in ahead if x >= min(most, need + LEAST_STEPS)]
            return [*ahead, *(exactly if tight else [least])]

        return rooms

    def _begin(self, cache: Any, shape: Shape, need: int, tokens: int, rooms: Rooms) -> None:
        """Chooses rungs and room of an empty cache, from the top of the ladder."""
        before, self.rungs = self.rungs, ((0, 0),) * self.layers
        try:
            spare = self._pages_to_spare(cache, shape, need)
            shape, rungs, room = self.choose(shape, need, tokens, rooms, spare=spare)
            own = cache.config._attn_implementation_internal
            if shape.gone and own not in (NAME, "sdpa"):
                raise ValueError(
                    f"evict: got a first prompt of {need} tokens, of which some have to go, but the cache is detached "
                    f"and {own!r} attention does not show which; nothing was changed. Call cache.attach(model), give "
                    "the cache more (cache.memory_limit = ...), or pass the prompt in chunks."
                )
        except ValueError:
            self.rungs = before
            raise
        self.rungs = rungs
        cuts = None
        if shape.gone and self.evict is not None:
            self._warn(need)
            cuts = get_scheme(self.evict, budget_tokens=need - shape.gone, sink_length=self.sink)
        for i, (layer, scheme) in enumerate(zip(cache.compressed_layers, self.schemes(), strict=True)):
            buffer = layer.buffer
            same = buffer.tensor is not None and buffer.plan == plan_of(scheme, shape, buffer.room)
            if not same or buffer.room < room or layer.scheme != scheme:
                _drop(layer)
                buffer.room = room
            layer.scheme, layer.gone, layer.cuts = scheme, shape.gone, cuts
            layer.smoothing = self._smoothing(cache, i, layer, scheme, None)
            layer.smooths_by_prompt = scheme.smooths_keys and layer.smoothing is None
            if layer.queries is not None:
                layer.queries.always = "query" not in scheme.needs
        cache.preset, cache._compiled = self.preset(), None

    def _go(self, cache: Any, shape: Shape, rungs: Rungs, room: int) -> None:
        """Takes all layers to these rungs, and to buffers of this room; those that become smaller go first."""
        schemes = self.schemes(rungs)
        # Kernels that a step would compile one by one; mostly they are there already.
        new = [x for x, layer in zip(schemes, cache.compressed_layers, strict=True) if x != layer.scheme]
        self.compile_ladder(cache, cache.compressed_layers[0].held().windows[2], new)
        layers = list(enumerate(zip(cache.compressed_layers, schemes, strict=True)))
        if shape.gone and not any(layer.gone for layer in cache.compressed_layers):
            self._warn(cache._sync.seen)

        held = [held_bytes(layer.held().state.tensors()) for layer in cache.compressed_layers]
        now = sum(held) + self._small(shape, 0)

        def growth(each: tuple[int, tuple[KVLayer, Scheme]]) -> int:
            i, (_, scheme) = each
            return layer_bytes(scheme, shape, room) - held[i]

        known: dict[Any, Tensor] = {}
        try:
            for i, (layer, scheme) in sorted(layers, key=growth):
                own = shape._replace(gone=max(shape.gone, layer.gone))
                plan, forgets = plan_of(scheme, own, room), own.gone > layer.gone
                if layer.buffer.tensor is None or layer.buffer.plan != plan or layer.scheme != scheme or forgets:
                    size = buffer_bytes(plan)
                    most = max(self.limit - now - size, relaid_scratch(plan))
                    self._move(cache, i, layer, scheme, plan, own.gone, most, known)
                    now += size - held[i]
        finally:
            # Should a layer fail, each is where it was or where it was to go.
            ends = zip(cache.compressed_layers, schemes, rungs, self.rungs, strict=True)
            self.rungs = tuple(to if layer.scheme == scheme else here for layer, scheme, to, here in ends)
            cache.preset = self.preset()

    def compile_ladder(self, cache: Any, keys: Tensor, schemes: Iterable[Scheme] | None = None) -> None:
        """Compiles kernels of schemes; None for the rungs to come, in their order, by a thread while there is room.

        Args:
            keys: (B, H, t, D) of the first layer.
        """
        fused, later = cache.graphs is not None and cache.graphs.fuses, schemes is None
        schemes = (x for rungs in self.down() for x in self.schemes(rungs)) if schemes is None else schemes
        compile_rungs(cache.config, schemes, keys, cache.compressed_layers[0].record_past, fused, later=later)

    def _warn(self, tokens: int) -> None:
        """Says that a cache begins to forget."""
        logger.warning(
            "memory: the narrowest pages of more than %d tokens do not fit in %s, so the cache begins to forget "
            "(evict='snapkv'): the tokens that the newest queries attend to least are gone for good, and answers that "
            "need them will be wrong. Give it more memory, or leave evict= out to get an error.",
            tokens - 1,
            format_bytes(self.limit),
        )

    def _smoothing(
        self, cache: Any, index: int, layer: KVLayer, scheme: Scheme, keys: Callable[[], Tensor] | None
    ) -> KeySmoothing | None:
        """Vectors of a layer of this scheme: those it has, the model's, or those of its own keys."""
        if not scheme.smooths_keys:
            return None
        if layer.smoothing is not None:
            return layer.smoothing
        model = cache._model()
        found: Mapping[int, Any] = {} if model is None else measure(model, cache.config)
        number = cache._compressed[index]
        if number in found:
            made = found[number].smoothing(scheme)
        elif keys is None:
            return None
        else:
            made = of_keys(keys())
        return made.centred_at_zero() if layer._keeps_logits else made

    def _move(
        self,
        cache: Any,
        index: int,
        layer: KVLayer,
        scheme: Scheme,
        plan: StepPlan,
        gone: int,
        most: int,
        known: dict[Any, Tensor],
    ) -> None:
        """Takes a layer to another scheme, another room, or fewer tokens, or leaves it as it was.

        Args:
            gone: columns that have no room then; see `KVLayer.gone`.
            most: bytes that may be taken beside the new buffer.
            known: see `relaid`.
        """
        store, buffer, queries = layer.held(), layer.buffer, layer.queries
        assert buffer is not None, "a cache with a budget has buffers"
        layer.close()
        old, new = store.layout, scheme.layout(plan.key_dim, plan.value_dim)
        before, kept = layer.smoothing, None
        if gone > layer.gone:
            assert self.evict is not None, "asked before"
            assert queries is not None, "of every layer with a budget"
            kept = kept_pages(layer, queries, layer.seen - gone, self.evict.window)

        def keys() -> Tensor:
            """Some of the layer's keys, as the model made them."""
            plain = replaced(old, keys=replaced(old.keys, rotate=0))
            raw = basis_change(old, plain, "keys", None if before is None else before.raw, None)
            first = torch.zeros(store.batch, 1, dtype=torch.long, device=store.device)
            return Reader(store.state, "keys", raw).pages(first, 4)

        smoothing = self._smoothing(cache, index, layer, scheme, keys)
        smoothing = None if smoothing is None else smoothing.to(layer.device)
        changes: dict[Side, Any] = {}
        same_basis = before is smoothing
        if old.keys != new.keys or not same_basis:
            raw, smooth = (None, None) if same_basis else (before and before.raw, smoothing and smoothing.keys)
            changes["keys"] = basis_change(old, new, "keys", raw, smooth)
        if old.values != new.values:
            changes["values"] = basis_change(old, new, "values", None, None)
        q_abs, sums = None, None
        if queries is not None and queries.sums is not None:
            sums = queries.sums
            if not same_basis:
                sums = sums if before is None else sums * before.vectors[1]
                sums = sums if smoothing is None else sums * smoothing.vectors[2]
            if "query" in scheme.needs:
                scaled = copy.copy(queries)
                scaled.sums = sums
                q_abs = scaled.mean()
        with torch.inference_mode(False):
            tensor = torch.zeros(buffer_bytes(plan), dtype=torch.uint8, device=store.device)
            views = views_of_buffer(tensor, plan)
        state = relaid(store.state, views, old, new, scheme, changes, most, known, layer.hold, q_abs, kept)
        with unchanged_on_error([x for x in (layer, buffer, buffer.sync, queries) if x is not None]):
            layer.store, layer.scheme, layer.smoothing = (
                store.laid_out(new, scheme, state, layer.hold),
                scheme,
                smoothing,
            )
            layer.smooths_by_prompt = False
            layer.gone, layer.evicted = gone, layer.evicted or kept is not None
            layer.edition += 1
            if queries is not None:
                queries.sums, queries.always = sums, "query" not in scheme.needs
                queries.newest = queries.real = None
            buffer.take_over(Allocation(tensor, None, views, plan), plan.capacity)
            buffer.sync.buffers = None
            buffer._write_queries()


def _settle(cache: Any) -> None:
    """Does what a cache's steps and updates have left."""
    cache._catch_up()
    for layer in cache.compressed_layers:
        layer.settle()


def _drop(layer: KVLayer) -> None:
    """Frees an empty layer's memory."""
    assert layer.buffer is not None, "a cache with a budget has buffers"
    layer.store, layer.is_initialized = None, False
    layer.buffer.drop()
