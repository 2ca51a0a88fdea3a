"""A first prompt beyond its budget: cut before it is stored, and given its tiers with all layers' at once.

In each layer the host must not wait for the device, or the device waits for the host: some hundred small operations, as
`retier` takes, are as long as a layer's attention to a prompt of thirty thousand tokens. So here a layer keeps as many
tokens as it might, whole, a number that the host knows. When the last layer is done, the host asks once for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hfkvq import kernels
from hfkvq.kernels.decode import LENGTH, RUNS, START
from hfkvq.kernels.pages import PageFormat, RunView

from .headwise import HeadwiseStore
from .ranking import WHOLE, tier_widths
from .scheme import Layout
from .states import RowState
from .store import SIDES, KVStore

if TYPE_CHECKING:
    from .evict import EvictingLayer


class Cut(NamedTuple):
    """What `store_best` left, by which `Tiers` knows that nothing has moved since.

    Attributes:
        run: the whole run.
        table: of it.
        states: of the store.
        kept: older tokens of a row, all whole.
        tail: newer ones.
    """

    run: RunView
    table: Tensor
    states: frozenset[RowState]
    kept: int
    tail: int

    def stands(self, store: KVStore) -> bool:
        """Whether the store is as it was left."""
        return store.runs[-1] is self.run and self.run.table is self.table and store.states == self.states


class Tiers(NamedTuple):
    """Which of a cut's tokens get few bits, and which stay whole.

    Attributes:
        slots: i64 (B*H, n) for either, tokens in order, the row's own first.
        counts: i32 (2, B*H), how many are the row's own.
        told: the same on the host.
    """

    slots: tuple[Tensor, Tensor]
    counts: Tensor
    told: tuple[list[int], list[int]]

    def lengths(self, tail: int) -> list[int]:
        """Tokens of each row then."""
        return [low + whole + tail for low, whole in zip(*self.told, strict=True)]


def takes(layout: Layout) -> bool:
    """Whether stores of this layout can be cut here: a tier of few bits and a whole one, and all tokens may go."""
    runs = layout.store.runs
    plain = all(side.clip >= 1.0 for side in (layout.keys, layout.values))
    whole = all(fmt.bits == WHOLE and fmt.axis == "token" for fmt in runs[-1])
    return plain and whole and layout.sink == 0 and len(runs) == 2 and not any(fmt.whole for fmt in runs[0])


def _pages(tokens: Tensor, fmt: PageFormat, table: Tensor) -> Tensor:
    """Whole tokens (B, 1, n * G, D) as pages (B * n, 1, G, D) of a table of its own (B, n)."""
    return tokens.reshape(table.numel(), 1, fmt.page_size, tokens.shape[3])


def _padded(slots: Tensor, fmt: PageFormat) -> tuple[Tensor, Tensor]:
    """Slots (B, n) with the last page filled up, by the row's token 0, and a table of as many pages a row."""
    rows, count = slots.shape
    blocks = -(-count // fmt.page_size)
    table = torch.arange(rows * blocks, dtype=torch.int32, device=slots.device).view(rows, blocks)
    return pad(slots, (0, blocks * fmt.page_size - count)), table


def _gathered(tokens: Tensor, slots: Tensor) -> Tensor:
    """Tokens (B, 1, L, D) at slots (B, n): (B, 1, n, D)."""
    return tokens.gather(2, slots[:, None, :, None].expand(-1, 1, -1, tokens.shape[3]))


def store_best(store: HeadwiseStore, keys: Tensor, values: Tensor, best: Tensor, tail: int) -> Cut:
    """Fills an empty store with some of a prompt's tokens, whole, and its newest ones in the tail.

    Args:
        store: holds nothing, of a layout that `takes` is true of. What fails leaves it so.
        keys: (B*H, 1, T, D) in the basis of the store.
        values: (B*H, 1, T, Dv).
        best: i64 (B*H, n), columns of the older tokens that stay, in order.
        tail: newest tokens, which stay as they are.
    """
    kept, tokens = best.shape[1], keys.shape[2]
    evicted = tokens - kept - tail
    fmt = store.format.runs[-1][0]
    slots, table = _padded(best, fmt)
    sides = [[_pages(_gathered(x, slots), fmt, table)] for x in (keys, values)]
    run = RunView(table, (slots - evicted).to(torch.int32), *sides)
    before = store.states, store.windows
    store.states, store.windows = frozenset({RowState(kept + tail, kept, kept)}), list(store.windows)
    try:
        store._grow_tails(1, empty=True)
        store._copy_to_windows(keys[:, :, -tail:], values[:, :, -tail:])
    except BaseException:
        # Out of memory, most likely.
        store.states, store.windows = before
        raise
    store.runs = [*store.runs[:-1], run]
    store.counters[START].fill_(evicted)
    store.counters[LENGTH].fill_(kept + tail)
    store.counters[-2:].fill_(kept)
    store.dropped.fill_(evicted)
    store.know_wide(kept)
    return Cut(run, table, store.states, kept, tail)


def first_tiers(layers: Sequence[EvictingLayer]) -> list[Tiers | None]:
    """Tiers of the layers that hold a cut as it was left, now that every layer's share is final; None for the others.

    Asks each device once, however many layers there are.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, layer in enumerate(layers):
        if layer.first is not None and layer.store is not None and layer.first.stands(layer.store):
            kind = layer.device, id(layer.scheme), layer.batch_size, layer.heads, layer.first.kept, layer.costs
            groups.setdefault(kind, []).append(i)
    found: list[Tiers | None] = [None] * len(layers)
    for members in groups.values():
        for i, tiers in zip(members, _tiers([layers[i] for i in members]), strict=True):
            found[i] = tiers
    return found


def _tiers(layers: Sequence[EvictingLayer]) -> list[Tiers]:
    """Of layers that are alike."""
    one = layers[0]
    assert one.first is not None
    scheme, rows, kept = one.scheme, one.batch_size * one.heads, one.first.kept
    scores = torch.cat([layer.scores[:, :kept] for layer in layers if layer.scores is not None])
    strengths = [layer.strength for layer in layers if layer.strength is not None]
    most = one.peers.greatest(one.prompts, one.device)
    assert most is not None
    share = scheme.share(torch.cat(strengths), most.repeat(len(strengths))).repeat_interleave(one.heads)
    past = torch.full((scores.shape[0],), kept, device=scores.device)
    stay = scheme.kept(past, share, one.costs, torch.ones_like(past, dtype=torch.bool))
    is_whole = torch.ones_like(scores, dtype=torch.bool)
    bits = tier_widths(scores, stay, scheme.whole(stay, share), is_whole, scheme.low_bits)
    masks = bits == scheme.low_bits, bits == WHOLE
    counts = torch.stack([mask.sum(1, dtype=torch.int32) for mask in masks])
    slots = [mask.to(torch.int8).argsort(dim=1, descending=True, stable=True) for mask in masks]
    low, whole = counts.tolist()
    found = []
    for first in range(0, scores.shape[0], rows):
        own = slice(first, first + rows)
        told = low[own], whole[own]
        mine = [each[own, : max(count, default=0)] for each, count in zip(slots, told, strict=True)]
        found.append(Tiers((mine[0], mine[1]), counts[:, own], told))
    return found


def store_tiers(store: HeadwiseStore, cut: Cut, tiers: Tiers) -> None:
    """Gives a cut's tokens their tiers; tokens that are in neither are evicted. What fails leaves the store as it was.

    Args:
        store: as `store_best` left it.
        cut: what that returned.
        tiers: of it.
    """
    low, whole = tiers.told
    if not any(low) and min(whole) == cut.kept:
        return
    batch, device, dims = store.batch, store.device, store.dims
    gone = [cut.kept - a - b for a, b in zip(low, whole, strict=True)]
    evicted = cut.kept - tiers.counts.sum(0, dtype=torch.int32)
    held = [
        parts[0].view(batch, 1, -1, dims[side])
        for side, parts in zip(SIDES, (cut.run.keys, cut.run.values), strict=True)
    ]
    assert cut.run.pos is not None
    none, runs = torch.zeros_like(evicted), []
    for slots, count, formats in zip(tiers.slots, tiers.counts, store.format.runs, strict=True):
        padded, table = _padded(slots, formats[0])
        index = padded.to(torch.int32)
        sides = []
        for side, fmt, source in zip(SIDES, formats, held, strict=True):
            if fmt.bits == WHOLE:
                sides.append([_pages(_gathered(source, padded), fmt, table)])
                continue
            parts = fmt.allocate(side, table.numel(), 1, dims[side], store.dtype, device)
            if slots.shape[1]:
                kernels.seal(parts, table, none, count.contiguous(), source, index, None, fmt, side)
            sides.append(parts)
        pos = cut.run.pos.gather(1, padded)
        runs.append(RunView(table, pos - evicted[:, None] if any(gone) else pos, *sides))
    windows = list(store.windows)
    if any(gone):
        # Slots of the tail go by position, which is another now.
        ring, sealed = windows[2].shape[2], tiers.counts.sum(0, dtype=torch.int32)
        slot = torch.arange(ring, dtype=torch.int32, device=device)[None]
        token = sealed[:, None] + (slot - sealed[:, None]) % ring
        before = ((token + evicted[:, None]) % ring).long()[:, None, :, None]
        for at in (2, 3):
            windows[at] = windows[at].gather(2, before.expand(-1, 1, -1, windows[at].shape[3]))
    counters = store.counters.clone()
    counters[RUNS:] = tiers.counts.repeat_interleave(2, 0)
    counters[START] += evicted
    counters[LENGTH] -= evicted
    store.counters, store.windows, store.runs = counters, windows, runs
    store.dropped = store.dropped + evicted
    states = {RowState(a + b + cut.tail, a + b, a + b) for a, b in zip(low, whole, strict=True)}
    store.states = frozenset(states)
    store.know_wide(max(whole))
