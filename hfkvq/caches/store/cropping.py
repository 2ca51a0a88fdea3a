"""The newest tokens are taken back, pages that are cut included."""

from __future__ import annotations

import torch
from torch import Tensor

from hfkvq.kernels.decode import LENGTH, RUNS, START, run_count
from hfkvq.kernels.pages import Side
from hfkvq.kernels.products import table_pages

from ..schemes.base import SideLayout
from .growth import grow_tail
from .row_lengths import RowState
from .rows import part_pages
from .state import SIDES, StoreState
from .view import StoreView


def cropped(store: StoreView, tokens: int, seen: int) -> StoreState:
    """The state without the newest ``tokens`` logical columns of ``seen``.

    Tokens of a page that is cut return to the tail as that page has them (exact for 16-bit pages).

    Raises:
        NotImplementedError: a requantization has forgotten or moved tokens from among them, tokens have widths of
            their own and a page of several would be cut, or a window's pages have been filled again since.
    """
    ring = store.format.ring > 0
    held = _held_from(store.state, seen) if ring and seen > tokens else 0
    if tokens and seen - tokens < held:
        raise NotImplementedError(
            f"crop: cannot remove {tokens} tokens, since a window of {store.format.window} tokens has let go of what "
            "would be in sight then; crop less, or start the conversation again from a copy (copy.deepcopy) of the "
            "cache."
        )
    if not ring and seen - tokens < store.state.settled:
        raise NotImplementedError(
            f"crop: cannot remove {tokens} tokens, since a trim has evicted tokens from among them or before them; "
            "crop less, or start the conversation again from a copy (copy.deepcopy) of the cache."
        )
    sink = store.layout.sink
    length = (store.counters[LENGTH] - tokens).clamp(min=0)
    rest = (length - sink).clamp(min=0)
    state = store.state
    reopens = any(max(row.length - tokens - sink, 0) < max(row[1:]) for row in state.states)
    states = set()
    for row in store.states:
        left = max(row.length - tokens, 0)
        behind = max(left - sink, 0)
        # One run reopens the unit that is cut. Several runs take no page apart: what stays sealed is just cut short.
        # An eviction may have left a unit that is not full, which stays if nothing is cut.
        keys, values = (
            min(row.sealed(side), behind // layout.unit * layout.unit if reopens and store.format.ordered else behind)
            for side, layout in zip(SIDES, (store.layout.keys, store.layout.values), strict=True)
        )
        states.add(RowState(left, keys, values))
    counters = state.counters.clone()
    if reopens and not store.format.ordered:
        counters[RUNS:] = _sealed_before(state, length)
    elif reopens:
        for side, layout in zip(SIDES, (store.layout.keys, store.layout.values), strict=True):
            state = _reopened(state, side, layout, rest, store.tail_limit[side])
            kept = torch.minimum(run_count(counters, 0, side), rest // layout.unit * layout.unit)
            counters[RUNS + (side == "values")] = kept
    counters[LENGTH] = length
    counters[START] = counters[START].clamp(max=seen - tokens)
    # Pages that have been cut are lost for good.
    wide, settled = state.wide_most, held if ring else state.settled
    state = state.replace(counters=counters, states=frozenset(states), host_counters=None, settled=settled)
    if reopens:
        # The tokens taken back may all have been in other runs, so the last one's bound cannot be lowered. A page that
        # was full, and so may be shared, takes new tokens again.
        state = part_pages(state.replace(wide_bound=(wide, state.longest)), store.layout)
    return state


def _held_from(state: StoreState, seen: int) -> int:
    """Fewest of ``seen`` logical columns that may be left, so that a ring of pages holds what is in sight then."""
    form, held = state.format, state.settled
    page = form.runs[0][0].page_size
    for row in state.states:
        first = (-(-max(row[1:]) // page) - form.ring) * page
        if first > 0:
            held = max(held, seen - row.length + form.sink + first + form.window - 1)
    return held


def _sealed_before(state: StoreState, length: Tensor) -> Tensor:
    """Counters of several runs without tokens at row positions from ``length`` (i32 (B,)) on: i32 (2*runs, B).

    Each run has its tokens in order of position, or its pages in order of their newest tokens, so the first ones of
    each stay. Asks the device once.
    """
    counts, torn = [], torch.zeros((), dtype=torch.bool, device=state.device)
    for i, (view, (fmt, _)) in enumerate(zip(state.runs, state.format.runs, strict=True)):
        if view.pos is None:
            raise AssertionError("a run of several has positions")
        count = run_count(state.counters, i, "keys")
        slot = torch.arange(view.pos.shape[1], device=state.device)
        stays = (slot < count[:, None]) & (view.pos < length[:, None])
        left = stays.sum(1, dtype=torch.int32)
        counts += [left, left]
        if fmt.whole:
            # Pages that a requantization has made may hold tokens on both sides of the cut.
            torn = torn | (left % fmt.page_size != 0).any() | (stays & (slot >= left[:, None])).any()
    if bool(torn):
        raise NotImplementedError(
            "crop: cannot remove tokens that are already sealed where tokens have widths of their own and a page "
            "per channel would be cut; crop less, or start the conversation again from a copy (copy.deepcopy) of "
            "the cache."
        )
    return torch.stack(counts)


def _reopened(state: StoreState, side: Side, layout: SideLayout, rest: Tensor, limit: int) -> StoreState:
    """The tokens of a page that is cut, all before ``rest`` (i32 (B,)), are in the tail again; nothing is counted."""
    at = 2 + SIDES.index(side)
    count, view, fmt = run_count(state.counters, 0, side), state.runs[0], state.format.runs[0][at - 2]
    kept = torch.minimum(count, rest // layout.unit * layout.unit)
    # The blocks alone that the unit which is cut may stand in.
    blocks = torch.arange(1 + -(-layout.unit // fmt.page_size), dtype=torch.int32, device=state.device)
    first = kept // fmt.page_size
    table = view.table.gather(1, (first[:, None] + blocks).clamp(max=view.table.shape[1] - 1).long())
    pages = table_pages(view.keys if side == "keys" else view.values, table, fmt, side, state.dims[side])
    pages = pages.transpose(1, 2).flatten(2, 3)
    state = grow_tail(state, side, layout.unit, limit)
    behind = kept[:, None] + torch.arange(layout.unit, dtype=torch.int32, device=state.device)
    index = (behind - (first * fmt.page_size)[:, None]).long()
    back = behind < torch.minimum(count, rest)[:, None]
    tail = state.windows[at]
    values = pages.gather(2, index[:, None, :, None].expand(-1, state.heads, -1, pages.shape[3])).to(state.dtype)
    padded = torch.nn.functional.pad(tail, (0, 0, 0, 1))
    slot = torch.where(back, behind % tail.shape[2], tail.shape[2]).long()
    padded.scatter_(2, slot[:, None, :, None].expand_as(values), values)
    return state.with_window(at, padded[:, :, : tail.shape[2]].contiguous())
