"""The newest tokens are taken back, pages that are cut included."""

from __future__ import annotations

import torch
from torch import Tensor

from hfkvq.kernels.decode import LENGTH, RUNS, START, dense_columns, run_count
from hfkvq.kernels.pages import Side

from ..row_states import RowState
from ..scheme import SideLayout
from .growth import grow_tail
from .rows import part_pages
from .state import SIDES
from .view import StoreView


def crop(store: StoreView, tokens: int, seen: int) -> None:
    """Forgets the newest ``tokens`` logical columns of ``seen``.

    Tokens of a page that is cut return to the tail as that page has them (exact for 16-bit pages).

    Raises:
        NotImplementedError: a requantization has forgotten or moved tokens from among them, or tokens have widths of
            their own and a page of several would be cut; nothing is changed then.
    """
    if seen - tokens < store.state.settled:
        raise NotImplementedError(
            f"crop: cannot remove {tokens} tokens, since a trim has evicted tokens from among them or before them; "
            "crop less, or start the conversation again from a copy (copy.deepcopy) of the cache."
        )
    sink = store.layout.sink
    length = (store.counters[LENGTH] - tokens).clamp(min=0)
    rest = (length - sink).clamp(min=0)
    states = set()
    for state in store.states:
        left = max(state.length - tokens, 0)
        behind = max(left - sink, 0)
        # One run reopens the unit that is cut. Several runs take no page apart: what stays sealed is just cut short.
        keys, values = (
            min(state.sealed(side), behind // layout.unit * layout.unit if store.format.ordered else behind)
            for side, layout in zip(SIDES, (store.layout.keys, store.layout.values), strict=True)
        )
        states.add(RowState(left, keys, values))
    reopens = any(max(state.length - tokens - sink, 0) < max(state[1:]) for state in store.states)
    wide = store.state.wide_most
    if reopens and not store.format.ordered:
        _drop_sealed(store, length)
    elif reopens:
        for side, layout in zip(SIDES, (store.layout.keys, store.layout.values), strict=True):
            _reopen(store, side, layout, rest)
    store.counters[LENGTH] = length
    store.counters[START] = store.counters[START].clamp(max=seen - tokens)
    store.state = store.state.replace(states=frozenset(states), host_counters=None)
    if reopens:
        # The tokens taken back may all have been in other runs, so the last one's bound cannot be lowered.
        store.state = store.state.replace(wide_bound=(wide, store.longest))
        # A page that was full, and so may be shared, takes new tokens again.
        store.state = part_pages(store.state, store.layout)


def _drop_sealed(store: StoreView, length: Tensor) -> None:
    """Takes tokens at row positions from ``length`` (i32 (B,)) on out of several runs, if all runs can do that.

    Each run has its tokens in order of position, or its pages in order of their newest tokens, so the first ones of
    each stay. Asks the device once.
    """
    counts, torn = [], torch.zeros((), dtype=torch.bool, device=store.device)
    for i, (view, (fmt, _)) in enumerate(zip(store.runs, store.format.runs, strict=True)):
        if view.pos is None:
            raise AssertionError("a run of several has positions")
        count = run_count(store.counters, i, "keys")
        slot = torch.arange(view.pos.shape[1], device=store.device)
        stays = (slot < count[:, None]) & (view.pos < length[:, None])
        left = stays.sum(1, dtype=torch.int32)
        counts.append(left)
        if fmt.whole:
            # Pages that a requantization has made may hold tokens on both sides of the cut.
            torn = torn | (left % fmt.page_size != 0).any() | (stays & (slot >= left[:, None])).any()
    if bool(torn):
        raise NotImplementedError(
            "crop: cannot remove tokens that are already sealed where tokens have widths of their own and a page "
            "per channel would be cut; crop less, or start the conversation again from a copy (copy.deepcopy) of "
            "the cache."
        )
    for i, left in enumerate(counts):
        store.counters[RUNS + 2 * i : RUNS + 2 * i + 2] = left


def _reopen(store: StoreView, side: Side, layout: SideLayout, rest: Tensor) -> None:
    """Puts the tokens of a page that is cut, all before ``rest`` (i32 (B,)), back into the tail."""
    at = 2 + SIDES.index(side)
    count = run_count(store.counters, 0, side)
    kept = torch.minimum(count, rest // layout.unit * layout.unit)
    pages = dense_columns(store.format, store.windows, store.runs, side)
    pages = pages[:, :, store.layout.sink : pages.shape[2] - store.windows[at].shape[2]]
    store.state = grow_tail(store.state, side, layout.unit, store.tail_limit[side])
    behind = kept[:, None] + torch.arange(layout.unit, dtype=torch.int32, device=store.device)
    index = behind.clamp(0, max(pages.shape[2] - 1, 0)).long()
    back = behind < torch.minimum(count, rest)[:, None]
    tail = store.windows[at]
    values = pages.gather(2, index[:, None, :, None].expand(-1, store.heads, -1, pages.shape[3])).to(store.dtype)
    padded = torch.nn.functional.pad(tail, (0, 0, 0, 1))
    slot = torch.where(back, behind % tail.shape[2], tail.shape[2]).long()
    padded.scatter_(2, slot[:, None, :, None].expand_as(values), values)
    store.state = store.state.with_window(at, padded[:, :, : tail.shape[2]].contiguous())
    store.counters[RUNS + (side == "values")] = kept
