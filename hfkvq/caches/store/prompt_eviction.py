"""A first prompt beyond its budget: a layer stores its best tokens whole, and all layers' get their tiers at once.

In each layer the host must not wait for the device, or the device waits for the host: some hundred small operations,
which a requantization takes, are as long as a layer's attention to a prompt of thirty thousand tokens. So here a layer
keeps as many tokens as it might, whole, a number that the host knows. When the last layer is done, the rows of all
layers are requantized as if they were of one store, and the host asks once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hfkvq.kernels.decode import LENGTH, START
from hfkvq.kernels.pages import RunView

from ..lasting import lasting
from ..row_states import RowState, forecast
from ..scheme import Layout, Scheme
from .growth import grow_tail, pages_for
from .moves import STAY
from .requantize import Requantized, requantized
from .state import SIDES, StoreState, as_bytes
from .view import StoreView
from .windows import copy_to_windows


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

    def stands(self, state: StoreState, edition: int) -> bool:
        """Whether the layer holds what it did."""
        return state.states == self.states and state.device == self.run.table.device and edition == self.edition


class Tiers(NamedTuple):
    """What becomes of a cut's tokens: few bits, or whole as they are; those that are in neither are evicted.

    Attributes:
        kept: tokens of each row in few bits, and whole.
        state: of the store then; None if nothing changes.
    """

    kept: tuple[list[int], list[int]]
    state: StoreState | None

    def lengths(self, tail: int) -> list[int]:
        """Tokens of each row then."""
        return [low + whole + tail for low, whole in zip(*self.kept, strict=True)]


def takes(layout: Layout) -> bool:
    """Whether stores of this layout can be cut here: a run of few bits and a whole one, and all tokens may go."""
    runs = layout.store.runs
    plain = all(side.clip >= 1.0 for side in (layout.keys, layout.values))
    whole = all(fmt.bits == 16 and fmt.axis == "token" for fmt in runs[-1])
    return plain and whole and layout.sink == 0 and len(runs) == 2 and not any(fmt.whole for fmt in runs[0])


def _gathered(tokens: Tensor, slots: Tensor) -> Tensor:
    """Tokens (B, 1, L, D) at slots (B, n): (B, 1, n, D)."""
    return tokens.gather(2, slots[:, None, :, None].expand(-1, 1, -1, tokens.shape[3]))


@lasting
def store_best(store: StoreView, keys: Tensor, values: Tensor, best: Tensor, tail: int) -> Cut:
    """Fills an empty store with some of a prompt's tokens, whole, and its newest ones in the tail.

    Args:
        store: holds nothing, of a layout that `takes` is true of, one head a row. What fails leaves it so.
        keys: (B*H, 1, T, D) in the basis of the store.
        values: (B*H, 1, T, Dv).
        best: i64 (B*H, n), columns of the older tokens that stay, in order.
        tail: newest tokens, which stay as they are.
    """
    (rows, kept), tokens = best.shape, keys.shape[2]
    evicted, fmt = tokens - kept - tail, store.format.runs[-1][0]
    blocks = pages_for(store.format, -1, kept)
    table = torch.arange(rows * blocks, dtype=torch.int32, device=store.device).view(rows, blocks)
    # The last page is filled up with the row's token 0.
    slots = pad(best, (0, blocks * fmt.page_size - kept))
    sides = [[_gathered(x, slots).reshape(table.numel(), 1, fmt.page_size, x.shape[3])] for x in (keys, values)]
    run = RunView(table, (slots - evicted).to(torch.int32), *sides)
    state = store.state.replace(states=frozenset({RowState(kept + tail, kept, kept)}))
    for side, need in zip(SIDES, forecast(state.states, state.sizes, 1).tail_slots, strict=True):
        state = grow_tail(state, side, need, store.tail_limit[side], empty=True)
    copy_to_windows(state, keys[:, :, -tail:], values[:, :, -tail:])
    counters = torch.zeros_like(state.counters)
    counters[START], counters[LENGTH], counters[-2:] = evicted, kept + tail, kept
    changes = {"counters": counters, "dropped": torch.full_like(state.dropped, evicted)}
    # Not earlier: if there was no memory, the store is empty still.
    store.state = state.replace(runs=[*state.runs[:-1], run], widest=kept, settled=tokens - tail, **changes)
    return Cut(run, state.states, kept, tail)


@lasting
def tiers_of(
    states: Sequence[StoreState], cuts: Sequence[Cut], layout: Layout, scheme: Scheme, target: Tensor
) -> list[Tiers]:
    """Tiers of the tokens that several stores have kept of a prompt, made as if all rows were of one store.

    Args:
        states: of the stores, which are alike and hold what ``cuts`` say.
        cuts: what `store_best` returned of each.
        layout: of all.
        scheme: likewise.
        target: i8 (N, kept), of the kept tokens of all stores' rows: `STAY`, 0 for few bits, or `EVICT`.
    """
    one, rows = states[0], states[0].batch
    merged = one.replace(
        counters=torch.cat([state.counters for state in states], 1),
        dropped=torch.cat([state.dropped for state in states]),
        windows=[torch.cat(windows) for windows in zip(*(state.windows for state in states), strict=True)],
    )
    pages = [torch.cat([getattr(cut.run, side)[0] for cut in cuts]) for side in SIDES]
    table = torch.arange(pages[0].shape[0], dtype=torch.int32, device=one.device).view(merged.batch, -1)
    pos = torch.cat([cut.run.pos for cut in cuts if cut.run.pos is not None])
    merged = merged.replace(runs=[merged.empty_run(0), RunView(table, pos, *([part] for part in pages))])
    room = pos.shape[1] + one.windows[2].shape[2] - target.shape[1]
    done = requantized(merged, layout, scheme, pad(target, (0, room), value=STAY))
    if done is None:
        return [Tiers(([0] * rows, [cut.kept] * rows), None) for cut in cuts]
    found = []
    for i, state in enumerate(states):
        low, whole = (held[i * rows : (i + 1) * rows] for held in done.held)
        found.append(Tiers((low, whole), _own(i, state, done)))
    return found


def _own(i: int, state: StoreState, done: Requantized) -> StoreState:
    """The i-th store's part: tensors of its own, with runs as long as its longest row."""
    rows = state.batch
    mine, runs = slice(i * rows, (i + 1) * rows), []
    for run, view in enumerate(done.state.runs):
        every, page = view.table.shape[1], done.state.format.runs[run][0].page_size
        blocks = pages_for(done.state.format, run, max(done.held[run][mine]))
        table = torch.arange(rows * blocks, dtype=torch.int32, device=state.device).view(rows, blocks)

        def own(part: Tensor, every: int = every, blocks: int = blocks) -> Tensor:
            raw = as_bytes(part)
            pages = raw.view(-1, every, *raw.shape[1:])[mine, :blocks] if every else raw[:0]
            pages = pages.clone(memory_format=torch.contiguous_format)
            return pages.view(rows * blocks, *raw.shape[1:]).view(part.dtype)

        assert view.pos is not None, "a run of several has positions"
        # Not the memory of all stores.
        pos = view.pos[mine, : blocks * page].clone(memory_format=torch.contiguous_format)
        runs.append(RunView(table, pos, [own(part) for part in view.keys], [own(part) for part in view.values]))
    return state.replace(
        counters=done.state.counters[:, mine].clone(memory_format=torch.contiguous_format),
        dropped=done.state.dropped[mine].clone(),
        windows=[window[mine].clone() for window in done.state.windows],
        runs=runs,
        states=frozenset(done.rows[mine]),
        widest=max(done.held[-1][mine]),
    )


def store_tiers(store: StoreView, tiers: Tiers) -> None:
    """Gives a cut's tokens their tiers; the store is as `store_best` left it."""
    if tiers.state is not None:
        store.state = tiers.state
