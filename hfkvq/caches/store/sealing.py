"""Tokens leave the tail, or a prompt, for pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hfkvq import kernels
from hfkvq.kernels.decode import LENGTH, RUNS, run_count
from hfkvq.kernels.pages import PageFormat, Side

from ..schemes.base import Layout, Scheme
from .growth import grow, pages_for
from .routing import ColumnTags, HostCounters, Route, SealSource, SealStart, route_by_width, sealed_to_last_run
from .state import SIDES
from .view import StoreView


def seal(
    store: StoreView,
    keys: SealSource,
    values: SealSource,
    hold: int,
    q_abs: Tensor | None,
    tags: ColumnTags | None,
    start: SealStart | None = None,
) -> bool:
    """Seals what is due, from tails or from a prompt, into the runs that tokens belong in.

    Args:
        store: whose tokens they are.
        keys: where they are.
        values: likewise.
        hold: newest tokens that must stay unsealed, beyond what the layout says.
        q_abs: f32 (B, H, Dk), see `Scheme.channel_bits`.
        tags: of the first logical columns; see `Scheme.token_bits`.
        start: of tags, what was there before a prompt; None for what is there now.

    Returns:
        Whether a seal was due in some row; the host asks the device nothing where none is.
    """
    then = store.forecast(hold=hold)
    most = then.due
    if not any(most):
        return False
    from_tail = not keys.tokens
    plain = tags is None and store.seals_widely and (from_tail or keys.first is not None)
    if not store.format.ordered and not plain:
        route = seal_by_width(store, (keys, values), most[0], hold, tags, start)
        known = None if tags is None else HostCounters(route.after, then.sealed)
        store.state = store.state.replace(states=then.sealed, widest=route.held, host_counters=known)
        return True
    counted = store.state.counted()
    local = max(store.sizes.local[0], hold), max(store.sizes.local[1], hold)
    sealed = then.most_sealed
    if not store.format.ordered:
        # A row that seals keeps its newest tokens in the tail; others have room for what they hold.
        sealed = min(max(store.state.wide_most - local[0], 0), sealed)
    store.state = grow(store.state, len(store.runs) - 1, pages_for(store.format, -1, sealed), store.growth)
    seal_last(store, (keys, values), most, local, q_abs)
    known = None if counted is None else HostCounters(sealed_to_last_run(counted, store.sizes, hold), then.sealed)
    store.state = store.state.replace(states=then.sealed, host_counters=known)
    return True


def seal_last(
    store: StoreView,
    sources: tuple[SealSource, SealSource],
    most: tuple[int, int],
    local: tuple[int, int],
    q_abs: Tensor | None,
) -> None:
    """Seals what is due into the last run, which has room for it.

    Args:
        store: whose tokens they are.
        sources: where keys and values are.
        most: no row has more to seal, of keys and of values.
        local: newest tokens that stay unsealed, likewise.
        q_abs: see `seal`.
    """
    sink, _, unit = store.sizes
    counters, windows, view, from_tail = store.counters, store.windows, store.runs[-1], not sources[0].tokens
    # Tokens are counted as sealed before their pages are written; if that fails, they must not stay counted.
    before = counters.clone()
    try:
        # Slots of the tail, where it is tails that are sealed from.
        asked = most if from_tail else (0, 0)
        pos = view.pos if from_tail else None
        found = kernels.due(counters, sink, (windows[2].shape[2], windows[3].shape[2]), local, unit, asked, pos)
        for at, (side, source) in enumerate(zip(SIDES, sources, strict=True)):
            if most[at]:
                fmt, parts = store.format.runs[-1][at], (view.keys, view.values)[at]
                count, new, span, own = found.count[at], found.new[at], most[at], source
                room = store.format.ring * fmt.page_size
                if room and span > room and not from_tail:
                    # Tokens that a window will have let go of have no page: no launch writes two blocks of one page.
                    end = -(-(count + new) // fmt.page_size) * fmt.page_size
                    skipped = torch.minimum(new, (end - room - count).clamp(min=0))
                    count, new, span = count + skipped, new - skipped, room
                    if source.first is not None:
                        own = source._replace(first=source.first + skipped[:, None])
                index = found.index[at] if from_tail else own.oldest(count, span, counters[LENGTH], sink)
                pages = parts, view.table, count, new
                write_pages(pages, fmt, side, source.tensor, index, store.layout, store.scheme, q_abs)
        if view.pos is not None and not from_tail:
            view.pos[:, : most[0]] = torch.arange(sink, sink + most[0], device=store.device)
    except BaseException:
        counters.copy_(before)
        raise


def seal_by_width(
    store: StoreView,
    sources: tuple[SealSource, SealSource],
    bound: int,
    hold: int,
    tags: ColumnTags | None,
    start: SealStart | None,
) -> Route:
    """Sends the tokens that leave the tail to the run of their width; counts them when all are there."""
    if tags is None or store.scheme.reads_tokens:
        codes = None if tags is None else tags.codes
        route = route_by_width(store.counters, store.layout, store.scheme, sources, bound, hold, codes)
    else:
        start = SealStart(store.counters, store.state.counted(), None) if start is None else start
        route = tags.route(store.counters, store.layout, store.scheme, sources, bound, hold, start)
    for i, tokens in enumerate(route.runs):
        if tokens is None:
            continue
        store.state = grow(store.state, i, pages_for(store.format, i, tokens.held), store.growth)
        view, count = store.runs[i], run_count(store.counters, i, "keys")
        assert view.pos is not None, "a run of several has positions"
        view.pos.index_put_(tokens.place, tokens.position)
        for at, (side, source) in enumerate(zip(SIDES, sources, strict=True)):
            pages = (view.keys, view.values)[at], view.table, count, tokens.new
            fmt, index = store.format.runs[i][at], tokens.columns[at]
            write_pages(pages, fmt, side, source.tensor, index, store.layout, store.scheme)
    store.counters[RUNS:].add_(route.added)
    return route


Pages = tuple[Sequence[Tensor], Tensor, Tensor, Tensor]
"""Destination of tokens: tensors of one side's pages, their table, tokens there so far, and new ones."""


def write_pages(
    pages: Pages,
    fmt: PageFormat,
    side: Side,
    source: Tensor,
    index: Tensor,
    layout: Layout,
    scheme: Scheme,
    q_abs: Tensor | None = None,
) -> None:
    """Quantizes tokens as the layout and the scheme say.

    Args:
        pages: where they go: tensors in the order of ``fmt.names``, table i32 (B, n), tokens there and new ones (B,).
        fmt: the format of these pages.
        side: "keys" or "values".
        source: (B, H, L, D), in the basis of the store.
        index: i32 (B, m), column of each new token.
        layout: balances pages.
        scheme: raises channels.
        q_abs: f32 (B, H, D), see `Scheme.channel_bits`; of keys only.
    """
    if not source.shape[1]:
        # The stores by which memory is planned have no heads.
        return
    parts, table, count, new = pages
    own = layout.keys if side == "keys" else layout.values
    widths = rule = None
    if fmt.raised:
        rule = scheme.channel_rule
        if rule is None and (q_abs is not None or "query" not in scheme.needs):
            rule = scheme.step_rule(source.shape[3])
    if fmt.raised and rule is None:
        keys = source.gather(2, index.long()[:, None, :, None].expand(-1, source.shape[1], -1, source.shape[3]))
        widths = scheme.channel_bits(keys.unflatten(2, (-1, fmt.page_size)), q_abs)
    kernels.seal_side(parts, table, count, new, source, index, fmt, side, rule, q_abs, own.balance, widths)
