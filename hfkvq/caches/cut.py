"""A first prompt beyond its budget: cut before it is stored, and given its tiers with all layers' at once.

In each layer the host must not wait for the device, or the device waits for the host: some hundred small operations, as
`retier` takes, are as long as a layer's attention to a prompt of thirty thousand tokens. So here a layer keeps as many
tokens as it might, whole, a number that the host knows. When the last layer is done, the host asks once for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from hfkvq import kernels
from hfkvq.kernels.decode import LENGTH, RUNS, START
from hfkvq.kernels.pages import PageFormat, RunView

from .headwise import HeadwiseStore
from .ranking import WHOLE, tier_widths
from .retier import moved_slots
from .scheme import Layout
from .states import RowState
from .store import SIDES
from .store.windows import copy_to_windows


class Cut(NamedTuple):
    """What `store_best` left, by which it is known later that nothing has come or gone since.

    Attributes:
        run: the whole run as it was stored. A cache of fixed capacity has copied it into its buffer by then.
        states: of the store.
        kept: older tokens of a row, all whole.
        tail: newer ones.
        edition: of the layer.
    """

    run: RunView
    states: frozenset[RowState]
    kept: int
    tail: int
    edition: int = -1

    def stands(self, layer: Any) -> bool:
        """Whether the layer holds what it did."""
        store = layer.store
        same = store is not None and store.states == self.states and store.device == self.run.table.device
        return same and layer.edition == self.edition


class CutLayer(Protocol):
    """What is asked here of a layer that evicts; see `hfkvq.caches.layers.eviction.Eviction`."""

    scheme: Any
    budget: Any
    group: Any
    first_cut: Cut | None
    scores: Tensor | None
    strength: Tensor | None
    prompts: int

    @property
    def layer(self) -> Any: ...

    def store(self) -> HeadwiseStore: ...


class Tiers(NamedTuple):
    """What becomes of a cut's tokens: few bits, or whole as they are; those that are in neither are evicted.

    Attributes:
        kept: tokens of each row in few bits, and whole.
        counters: the store's counters then.
        runs: the store's runs then; None if nothing changes.
        windows: the tails of keys and of values then; None if they stay.
        evicted: i32 (B*H,); None if none is.
    """

    kept: tuple[list[int], list[int]]
    counters: Tensor
    runs: list[RunView] | None
    windows: list[Tensor] | None
    evicted: Tensor | None

    def lengths(self, tail: int) -> list[int]:
        """Tokens of each row then."""
        return [low + whole + tail for low, whole in zip(*self.kept, strict=True)]


def takes(layout: Layout) -> bool:
    """Whether stores of this layout can be cut here: a tier of few bits and a whole one, and all tokens may go."""
    runs = layout.store.runs
    plain = all(side.clip >= 1.0 for side in (layout.keys, layout.values))
    whole = all(fmt.bits == WHOLE and fmt.axis == "token" for fmt in runs[-1])
    return plain and whole and layout.sink == 0 and len(runs) == 2 and not any(fmt.whole for fmt in runs[0])


def older_that_stay(scheme: Any, layout: Layout, costs: tuple[int, int], tokens: int, newest: int) -> int:
    """Tokens that a first prompt beyond its budget is cut to, beside the newest; 0 where it has to go the general way.

    Args:
        scheme: of the layer, one that evicts.
        layout: of the layer.
        costs: bytes of a token in few bits and whole.
        tokens: of the prompt.
        newest: tokens that stay as they are.
    """
    past = tokens - newest
    if past <= 0 or scheme.beta > 0 or not takes(layout):
        return 0
    # As many as the budget could hold in few bits.
    best = int(scheme.kept(torch.tensor([past]), torch.zeros(1), costs, torch.ones(1, dtype=torch.bool)))
    # All whole, they would be many bytes where a whole token takes more than two in few bits.
    budget, held = scheme.budget_bytes, (best + newest) * costs[1]
    return 0 if budget is not None and held >= 2 * budget else best


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
    before = store.state
    store.replace(states=frozenset({RowState(kept + tail, kept, kept)}))
    try:
        store.grow_tails(1, empty=True)
        copy_to_windows(store, keys[:, :, -tail:], values[:, :, -tail:])
    except BaseException:
        # Out of memory, most likely.
        store.replace(states=before.states, windows=before.windows)
        raise
    store.counters[START].fill_(evicted)
    store.counters[LENGTH].fill_(kept + tail)
    store.counters[-2:].fill_(kept)
    store.dropped.fill_(evicted)
    store.replace(runs=[*store.runs[:-1], run], widest=kept)
    return Cut(run, store.states, kept, tail)


def first_tiers(layers: Sequence[CutLayer]) -> list[Tiers | None]:
    """Tiers of the layers that hold a cut as it was left, now that every layer's share is final; None for the others.

    Asks each device once, and makes pages of layers that are alike together: what a layer takes the host by itself is
    waited for, when a prompt's last layer is done.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, layer in enumerate(layers):
        cut = layer.first_cut
        if cut is not None and cut.stands(layer.layer):
            store = layer.store()
            kind = store.device, store.dtype, tuple(store.dims.values()), store.batch, store.windows[2].shape[2]
            groups.setdefault((*kind, cut.kept, cut.tail, layer.scheme, layer.budget), []).append(i)
    found: list[Tiers | None] = [None] * len(layers)
    for members in groups.values():
        for i, tiers in zip(members, _tiers([layers[i] for i in members]), strict=True):
            found[i] = tiers
    return found


def _tiers(layers: Sequence[CutLayer]) -> list[Tiers]:
    """Of layers that are alike."""
    one, stores = layers[0], [x.store() for x in layers]
    cuts = [x.first_cut for x in layers if x.first_cut is not None]
    scheme, kept, rows = one.scheme, cuts[0].kept, stores[0].batch
    scores = torch.cat([layer.scores[:, :kept] for layer in layers if layer.scores is not None])
    strengths = [layer.strength for layer in layers if layer.strength is not None]
    most = one.group.greatest_strength(one.prompts, one.layer.device)
    assert most is not None
    share = scheme.share(torch.cat(strengths), most.repeat(len(strengths))).repeat_interleave(one.layer.heads)
    past = torch.full((scores.shape[0],), kept, device=scores.device)
    stay = scheme.kept(past, share, one.budget.costs, torch.ones_like(past, dtype=torch.bool))
    is_whole = torch.ones_like(scores, dtype=torch.bool)
    bits = tier_widths(scores, stay, scheme.whole(stay, share), is_whole, scheme.low_bits)
    masks = bits == scheme.low_bits, bits == WHOLE
    counts = torch.stack([mask.sum(1, dtype=torch.int32) for mask in masks])
    low, whole = counts.tolist()
    evicted = None
    if min(a + b for a, b in zip(low, whole, strict=True)) < kept:
        evicted = kept - counts.sum(0, dtype=torch.int32)
    counters = torch.cat([store.counters for store in stores], 1)
    counters[RUNS:] = counts.repeat_interleave(2, 0)
    if evicted is not None:
        counters[START] += evicted
        counters[LENGTH] -= evicted
    runs: list[list[RunView]] | None = None
    if any(low) or evicted is not None:
        runs = _runs(stores, cuts, masks, counts, (low, whole), evicted)
    tails = None if evicted is None else [_moved_tails(stores, at, counts, evicted) for at in (2, 3)]
    found = []
    for i, own in enumerate(counters.split(rows, 1)):
        mine = slice(i * rows, (i + 1) * rows)
        found.append(
            Tiers(
                (low[mine], whole[mine]),
                own,
                None if runs is None else [run[i] for run in runs],
                None if tails is None else [tail[i] for tail in tails],
                None if evicted is None else evicted[mine],
            )
        )
    return found


def _runs(
    stores: Sequence[HeadwiseStore],
    cuts: Sequence[Cut],
    masks: Sequence[Tensor],
    counts: Tensor,
    kept: Sequence[list[int]],
    evicted: Tensor | None,
) -> list[list[RunView]]:
    """Runs of few bits and whole ones, of each store: their pages are made as if all stores' rows were one store's."""
    one, device = stores[0], stores[0].device
    held = [torch.cat([getattr(cut.run, side)[0] for cut in cuts]) for side in SIDES]
    # (rows, 1, n * G, D)
    held = [codes.view(counts.shape[1], 1, -1, codes.shape[3]) for codes in held]
    positions = torch.cat([cut.run.pos for cut in cuts if cut.run.pos is not None])
    found = []
    for mask, count, told, formats in zip(masks, counts, kept, one.format.runs, strict=True):
        # Tokens in order, the row's own first.
        slots = mask.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, : max(told)]
        padded, table = _padded(slots, formats[0])
        index, none = padded.to(torch.int32), torch.zeros_like(count)
        sides = []
        for side, fmt, source in zip(SIDES, formats, held, strict=True):
            if fmt.bits == WHOLE:
                parts = [_pages(_gathered(source, padded), fmt, table)]
            else:
                parts = fmt.allocate(side, table.numel(), 1, one.dims[side], one.dtype, device)
                if table.numel():
                    kernels.seal(parts, table, none, count.contiguous(), source, index, None, fmt, side)
            sides.append(parts)
        pos = positions.gather(1, padded)
        pos = pos if evicted is None else pos - evicted[:, None]
        found.append([_own(i, one.batch, told, table, pos, sides, formats[0]) for i in range(len(stores))])
    return found


def _own(
    i: int, rows: int, told: list[int], table: Tensor, pos: Tensor, sides: Sequence[Sequence[Tensor]], fmt: PageFormat
) -> RunView:
    """The i-th store's part of a run: its own tensors, as long as its longest row."""
    mine, every = slice(i * rows, (i + 1) * rows), table.shape[1]
    blocks = -(-max(told[mine]) // fmt.page_size)
    ids = torch.arange(rows * blocks, dtype=torch.int32, device=table.device).view(rows, blocks)
    parts = []
    for side in sides:
        parts.append([])
        for part in side:
            # Not every device copies fp8.
            raw = part.view(torch.uint8) if part.dtype == torch.float8_e4m3fn else part
            pages = raw.view(-1, every, *raw.shape[1:])[mine, :blocks] if every else raw[:0]
            own = pages.clone(memory_format=torch.contiguous_format)
            parts[-1].append(own.view(rows * blocks, *raw.shape[1:]).view(part.dtype))
    return RunView(ids, pos[mine, : blocks * fmt.page_size].contiguous(), *parts)


def _moved_tails(stores: Sequence[HeadwiseStore], at: int, sealed: Tensor, evicted: Tensor) -> Sequence[Tensor]:
    """Tails of all stores where ``evicted`` tokens before them are gone."""
    tails = torch.cat([store.windows[at] for store in stores])
    moved = _gathered(tails, moved_slots(sealed.sum(0, dtype=torch.int32), evicted, tails.shape[2]))
    return [tail.clone() for tail in moved.split(stores[0].batch)]


def store_tiers(store: HeadwiseStore, cut: Cut, tiers: Tiers) -> None:
    """Gives a cut's tokens their tiers.

    Args:
        store: as `store_best` left it.
        cut: what that returned.
        tiers: of it.
    """
    store.counters.copy_(tiers.counters)
    changes: dict[str, Any] = {} if tiers.runs is None else {"runs": tiers.runs}
    if tiers.windows is not None:
        changes["windows"] = [*store.windows[:2], *tiers.windows]
    if tiers.evicted is not None:
        changes["dropped"] = store.dropped + tiers.evicted
    low, whole = tiers.kept
    states = {RowState(a + b + cut.tail, a + b, a + b) for a, b in zip(low, whole, strict=True)}
    store.replace(states=frozenset(states), widest=max(whole), **changes)
