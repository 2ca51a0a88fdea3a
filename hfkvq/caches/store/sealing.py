"""Tokens leave the tail, or a prompt, for pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hfkvq import kernels
from hfkvq.kernels.decode import LENGTH, RUNS, run_count
from hfkvq.kernels.pages import Side

from ..routing import ColumnTags, Ground, Route, Source, Tally, sealed_widely, work_out
from ..scheme import Layout, Scheme
from .state import SIDES

if TYPE_CHECKING:
    from .kvstore import KVStore


def clipped(source: Tensor, index: Tensor, share: float) -> Tensor:
    """Vectors ``index`` of a source, each clipped at the entry of rank ``floor(share * D)`` among its magnitudes.

    Args:
        source: (B, H, T, D).
        index: i32 (B, m), columns of the source.
        share: 0 < share <= 1.

    Returns:
        (B, H, m, D).
    """
    x = source.gather(2, index.long()[:, None, :, None].expand(-1, source.shape[1], -1, source.shape[3]))
    rank = max(1, int(share * x.shape[-1]))
    limit = x.abs().float().kthvalue(rank, dim=-1, keepdim=True).values.to(x.dtype)
    return torch.minimum(torch.maximum(x, -limit), limit)


def seals_plainly(layout: Layout, scheme: Scheme) -> bool:
    """Whether sealing takes nothing but the tokens and, perhaps, a rule."""
    store = layout.store
    plain = all(
        side.clip >= 1.0 and not fmt.normed and (not fmt.raised or scheme.channel_rule)
        for side, fmt in zip((layout.keys, layout.values), store.runs[0], strict=True)
    )
    return plain and store.ordered


def seals_widely(layout: Layout, scheme: Scheme) -> bool:
    """Whether tokens without a tag go to the last of several runs, and nothing else has to be known of them."""
    plain = all(
        side.clip >= 1.0 and not fmt.normed and not fmt.raised and not fmt.whole
        for side, fmt in zip((layout.keys, layout.values), layout.store.runs[-1], strict=True)
    )
    return plain and scheme.untagged_is_wide


def seal(
    store: KVStore,
    keys: Source,
    values: Source,
    hold: int,
    q_abs: Tensor | None,
    tags: ColumnTags | None,
    ground: Ground | None = None,
) -> bool:
    """Seals what is due, from tails or from a prompt, into the runs that tokens belong in.

    Args:
        store: whose tokens they are.
        keys: where they are.
        values: likewise.
        hold: newest tokens that must stay unsealed, beyond what the layout says.
        q_abs: f32 (B, H, Dk), see `Scheme.channel_bits`.
        tags: of the first logical columns; see `Scheme.token_bits`.
        ground: of tags, what was there before a prompt; None for what is there now.

    Returns:
        Whether a seal was due in some row; the host asks the device nothing where none is.
    """
    then = store.ahead(hold=hold)
    most = then.due
    if not any(most):
        return False
    from_tail = not keys.tokens
    plain = tags is None and store.seals_widely and (from_tail or keys.first is not None)
    if not store.format.ordered and not plain:
        route = seal_by_width(store, (keys, values), most[0], hold, tags, ground)
        tally = None if tags is None else Tally(route.after, then.sealed)
        store.replace(states=then.sealed, widest=route.held, tally=tally)
        return True
    known = store.counted()
    local = max(store.sizes.local[0], hold), max(store.sizes.local[1], hold)
    sealed = then.most
    if not store.format.ordered:
        # A row that seals keeps its newest tokens in the tail; others have room for what they hold.
        sealed = min(max(store.state.wide_most - local[0], 0), sealed)
    store.grow(len(store.runs) - 1, store.blocks(sealed))
    store.seal_last((keys, values), most, local, q_abs)
    tally = None if known is None else Tally(sealed_widely(known, store.sizes, hold), then.sealed)
    store.replace(states=then.sealed, tally=tally)
    return True


def seal_last(
    store: KVStore,
    sources: tuple[Source, Source],
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
    run, from_tail = len(store.runs) - 1, not sources[0].tokens
    view = store.runs[run]
    if from_tail and (not store.format.ordered or (q_abs is None and store.seals_plainly)):
        rule = store.scheme.channel_rule
        kernels.seal_tail(store.counters, store.windows, view, local, unit, most, store.format, rule)
    else:
        # Slots of the tail, where it is tails that are sealed from.
        asked = most if from_tail else (0, 0)
        tails = (store.windows[2].shape[2], store.windows[3].shape[2])
        found = kernels.due(store.counters, sink, tails, local, unit, asked)
        try:
            for at, (side, source) in enumerate(zip(SIDES, sources, strict=True)):
                if most[at]:
                    count = found.count[at]
                    length = store.counters[LENGTH]
                    index = found.index[at] if from_tail else source.oldest(count, most[at], length, sink)
                    _seal_run(store, run, side, count, found.new[at], source.tensor, index, q_abs)
            if view.pos is not None:
                view.pos[:, : most[0]] = torch.arange(sink, sink + most[0], device=store.device)
        except BaseException:
            found.take_back(store.counters)
            raise


def _seal_run(
    store: KVStore,
    run: int,
    side: Side,
    count: Tensor,
    new: Tensor,
    source: Tensor,
    index: Tensor,
    q_abs: Tensor | None = None,
) -> None:
    fmt = store.format.runs[run][side == "values"]
    view = store.runs[run]
    layout = store.layout.keys if side == "keys" else store.layout.values
    if layout.clip < 1.0:
        source = clipped(source, index, layout.clip)
        index = torch.arange(index.shape[1], dtype=torch.int32, device=store.device).expand_as(index)
    widths, rule = None, store.scheme.channel_rule if fmt.raised else None
    if fmt.raised and rule is None:
        pages = source.gather(2, index.long()[:, None, :, None].expand(-1, store.heads, -1, source.shape[3]))
        widths = store.scheme.channel_bits(pages.unflatten(2, (-1, fmt.page_size)), q_abs)
    parts = view.keys if side == "keys" else view.values
    norm = kernels.page_norms(source, index, fmt.axis, fmt.page_size, layout.balance) if fmt.normed else None
    weight = q_abs if rule else None
    kernels.seal(parts, view.table, count, new, source, index, widths, fmt, side, rule, weight, norm)


def seal_by_width(
    store: KVStore,
    sources: tuple[Source, Source],
    bound: int,
    hold: int,
    tags: ColumnTags | None,
    ground: Ground | None,
) -> Route:
    """Sends the tokens that leave the tail to the run of their width; counts them when all are there."""
    if tags is None or store.scheme.reads_tokens:
        codes = None if tags is None else tags.codes
        route = work_out(store.counters, store.layout, store.scheme, sources, bound, hold, codes)
    else:
        ground = Ground(store.counters, store.counted(), None) if ground is None else ground
        route = tags.route(store.counters, store.layout, store.scheme, sources, bound, hold, ground)
    for i, path in enumerate(route.paths):
        if path is None:
            continue
        store.grow(i, -(-path.held // store.format.runs[i][0].page_size))
        view, count = store.runs[i], run_count(store.counters, i, "keys")
        if view.pos is None:
            raise AssertionError("a run of several has positions")
        view.pos.index_put_(path.place, path.position)
        for side, source, index in zip(SIDES, sources, path.columns, strict=True):
            _seal_run(store, i, side, count, path.taken, source.tensor, index)
    store.counters[RUNS:].add_(route.added)
    return route
