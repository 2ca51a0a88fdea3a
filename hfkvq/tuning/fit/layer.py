"""Bytes that one layer of pages will hold, counted as `hfkvq.caches.store` allocates them, without allocating."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from hfkvq.caches.cut import older_that_stay
from hfkvq.caches.scheme import Layout, Scheme, SideLayout
from hfkvq.caches.store import GROWTH, MAX_STEP, SIDES
from hfkvq.kernels.decode import RUNS
from hfkvq.kernels.pages import PageFormat, Side


@dataclass(frozen=True, slots=True)
class Arrival:
    """How tokens come to a cache.

    Attributes:
        prompt: tokens that come before any is generated.
        generated: tokens that come one by one, behind the prompt.
        chunk: tokens of a piece of the prompt; None for one piece. A store that grows has room to spare.
        narrow: share of the prompt's tokens that get the narrow width, where a scheme gives tokens widths by tags.
    """

    prompt: int
    generated: int = 0
    chunk: int | None = None
    narrow: float = 0.0


def _page_bytes(fmt: PageFormat, side: Side, head_dim: int, itemsize: int) -> int:
    """Of one page of one KV head."""
    shapes = fmt.shapes(side, 1, head_dim).values()
    return sum(math.prod(shape) * (itemsize if own is None else own.itemsize) for shape, own in shapes)


class _Room:
    """Counts of a row, as `KVStore` comes by them."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.pages = [keys.page_size for keys, _ in layout.store.runs]
        self.sides: dict[Side, SideLayout] = {"keys": layout.keys, "values": layout.values}
        self.length = 0
        self.sealed: dict[Side, int] = {"keys": 0, "values": 0}
        self.counts = [0] * len(self.pages)
        self.blocks = [0] * len(self.pages)
        self.tails: dict[Side, int] = {"keys": MAX_STEP, "values": MAX_STEP}

    def _target(self, side: Side, length: int) -> int:
        own = self.sides[side]
        behind = max(length - self.layout.sink, 0) - own.local
        return max(self.sealed[side], max(behind, 0) // own.unit * own.unit)

    def _grow(self, run: int, blocks: int) -> None:
        have = self.blocks[run]
        if blocks > have:
            self.blocks[run] = max(blocks, int(have * GROWTH) + 1) if have else blocks

    def _seal(self, narrow: float) -> None:
        before = self.sealed["keys"]
        self.sealed = {side: self._target(side, self.length) for side in SIDES}
        most = max(self.sealed.values())
        if len(self.pages) == 1:
            self.counts = [most]
        else:
            new, page = self.sealed["keys"] - before, self.pages[0]
            whole = page if self.layout.keys.formats[0].axis == "channel" else 1
            few = int(narrow * new) // whole * whole
            self.counts[0] += few
            self.counts[-1] += new - few
        for run, (count, page) in enumerate(zip(self.counts, self.pages, strict=True)):
            self._grow(run, -(-count // page))

    def _grow_tail(self, side: Side, need: int) -> None:
        own, have = self.sides[side], self.tails[side]
        if need > have:
            self.tails[side] = max(need, min(2 * have, own.local + own.unit - 1 + MAX_STEP))

    def extend(self, tokens: int, narrow: float = 0.0) -> None:
        """A prompt, or a piece of one."""
        self.length += tokens
        self._seal(narrow)
        for side in SIDES:
            self._grow_tail(side, max(self.length - self.layout.sink, 0) + 1 - self.sealed[side])

    def steps(self, tokens: int) -> None:
        """Tokens that come one by one."""
        end = self.length + tokens
        while self.length < end:
            # Nothing new happens to pages until some run is full, nor to tails after a whole unit.
            room = self.blocks[-1] * self.pages[-1] - self.counts[-1]
            idle = max(side.local + 2 * side.unit for side in self.sides.values()) + self.layout.sink
            quiet = min(end - self.length, room) - 2 * idle
            if quiet > 2 * idle and self._tails_are_full():
                unit = math.lcm(*(side.unit for side in self.sides.values()))
                self._skip(quiet // unit * unit)
                continue
            for side in SIDES:
                self._grow_tail(side, max(self.length - self.layout.sink, 0) + 1 - self.sealed[side])
            self.length += 1
            self._seal(0.0)

    def _tails_are_full(self) -> bool:
        return all(self.tails[side] >= own.local + own.unit for side, own in self.sides.items())

    def _skip(self, tokens: int) -> None:
        self.length += tokens
        self._seal(0.0)

    def cut(self, scheme: Any, costs: tuple[int, int], share: float, tokens: int) -> None:
        """A first prompt that is cut before it is stored; see `hfkvq.caches.cut`."""
        self.length = tokens
        self.trim(scheme, costs, share, prompt=True)
        for side in SIDES:
            self._grow_tail(side, self.length + 1 - self.sealed[side])

    def trim(self, scheme: Any, costs: tuple[int, int], share: float, prompt: bool) -> None:
        """What an evicting scheme keeps of a row that has outgrown its budget; see `hfkvq.caches.evict`."""
        past = torch.tensor([max(self.length - scheme.window, 0)])
        rho = torch.tensor([share])
        kept = scheme.kept(past, rho, costs, torch.tensor([prompt]))
        whole = int(scheme.whole(kept, rho))
        low = int(kept) - whole
        self.counts = [low, whole]
        self.blocks = [-(-count // page) for count, page in zip(self.counts, self.pages, strict=True)]
        self.length = int(kept) + min(scheme.window, self.length)
        self.sealed = {"keys": int(kept), "values": int(kept)}


def _over(scheme: Any, costs: tuple[int, int], length: int, low: int = 0) -> bool:
    """Whether a row of so many tokens, some in few bits, has outgrown its budget."""
    if scheme.budget_bytes is None:
        return length > scheme.tokens
    return length * costs[1] - low * (costs[1] - costs[0]) > scheme.budget_bytes


def _evicting(room: _Room, scheme: Any, costs: tuple[int, int], come: Arrival, pieces: list[int]) -> Iterator[None]:
    """Takes the tokens under a budget, with the greatest share of whole tokens; stops where a layer may be fullest."""
    share = 0.0 if scheme.tiers == "quant" else 1.0
    for tokens in pieces:
        first = not room.length and _over(scheme, costs, tokens)
        if first and older_that_stay(scheme, room.layout, costs, tokens, scheme.window):
            room.cut(scheme, costs, share, tokens)
            continue
        room.extend(tokens)
        if _over(scheme, costs, room.length, room.counts[0]):
            room.trim(scheme, costs, share, prompt=True)
    yield
    trims = 0
    for _ in range(come.generated):
        room.steps(1)
        yield
        if _over(scheme, costs, room.length, room.counts[0]):
            room.trim(scheme, costs, share, prompt=False)
            trims += 1
        if trims == 3:
            # From here on it repeats itself.
            break
    yield


@lru_cache(maxsize=4096)
def layer_bytes(
    scheme: Scheme, heads: int, key_dim: int, value_dim: int, itemsize: int, batch: int, come: Arrival
) -> int:
    """Bytes that one layer holds when all tokens have come: pages, windows, tables and notes.

    Of schemes that evict, with the greatest share of whole tokens that the scheme allows, and at the fullest moment
    between two trims if tokens are generated. Rows are taken to be equally long.

    Args:
        scheme: of the layer.
        heads: KV heads.
        key_dim: D of the keys.
        value_dim: D of the values.
        itemsize: bytes of an element of the model's dtype.
        batch: rows.
        come: how the tokens come.
    """
    layout = scheme.layout(key_dim, value_dim)
    layout.check(key_dim, value_dim)
    room = _Room(layout)
    step = come.prompt if come.chunk is None else come.chunk
    pieces = [min(step, come.prompt - at) for at in range(0, come.prompt, max(step, 1))]
    if "probs" in scheme.needs:
        # Each KV head is a row of its own, and a layer remembers the strength of each of its rows.
        policy: Any = scheme
        costs = policy.token_bytes(layout, key_dim, value_dim, itemsize)
        fullest = 0
        for _ in _evicting(room, policy, costs, come, pieces):
            scores = 4 * heads * room.length if policy.beta > 0 else 0
            fullest = max(fullest, _held(room, 1, key_dim, value_dim, itemsize) * heads + scores)
        return batch * (fullest + 4)
    for tokens in pieces:
        room.extend(tokens, come.narrow)
    room.steps(come.generated)
    # Sums of |q| in f64, and their number.
    notes = 8 * heads * key_dim + 8 if "query" in scheme.needs else 0
    return batch * (_held(room, heads, key_dim, value_dim, itemsize) + notes)


def _held(room: _Room, heads: int, key_dim: int, value_dim: int, itemsize: int) -> int:
    """Bytes of a row's pages, windows and tables."""
    layout, held = room.layout, 0
    dims: dict[Side, int] = {"keys": key_dim, "values": value_dim}
    for blocks, formats in zip(room.blocks, layout.store.runs, strict=True):
        page = sum(_page_bytes(fmt, side, dims[side], itemsize) for side, fmt in zip(SIDES, formats, strict=True))
        table = 4 + (0 if layout.store.ordered else 4 * formats[0].page_size)
        held += blocks * (heads * page + table)
    for side in SIDES:
        held += heads * (layout.sink + room.tails[side]) * dims[side] * itemsize
    # Counters, and tokens dropped.
    return held + 4 * (RUNS + 2 * len(room.pages) + 1)
