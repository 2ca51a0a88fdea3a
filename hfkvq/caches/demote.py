"""Demote: tokens whose tags have aged get fewer bits, from what is stored of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from hfkvq import kernels
from hfkvq.kernels.decode import RUNS, START, run_count
from hfkvq.kernels.pages import RunView
from hfkvq.kernels.quantize import dequantize_pages

from .retier import as_pages, take
from .store import SIDES, KVStore


def demote(store: KVStore, tags: Tensor) -> bool:
    """Moves tokens of the wide run to the narrow one where their tags now say so, and gives the pages they leave back.

    Each row by itself: as many of its tokens as fill whole pages, the oldest first, are dequantized and quantized
    again; the others keep their bits, and no token goes the other way. The narrow run's pages are put in order of their
    newest tokens, so that `KVStore.crop` finds those it may cut behind all others. A store of fixed capacity keeps its
    allocation. Nothing is changed if anything fails. Asks the device once.

    Args:
        store: a store with two runs, the wide one per token. Its scheme has ``tag_bits``, u8 codes of tags to their
            bits, of any shape.
        tags: u8 (B, n), tag of each of the first n logical columns; later ones stay as they are.

    Returns:
        Whether any token has moved.

    Raises:
        NotImplementedError: factors along a second axis, raised channels, or other runs than a narrow one with keys per
            channel and a wide one per token.
    """
    formats, scheme = store.format.runs, cast(Any, store.scheme)
    plain = all(not fmt.normed and not fmt.raised for pair in formats for fmt in pair)
    if len(formats) != 2 or not plain or not formats[0][0].whole or any(fmt.whole for fmt in formats[1]):
        raise NotImplementedError(
            f"demote: got {store.format.spec}, allowed two runs without factors or raised channels, the narrow one "
            "with keys per channel and the wide one per token."
        )
    (narrow, wide), page, device = store.runs, formats[0][0].page_size, store.device
    assert wide.pos is not None, "a run of several has positions"
    have, count = (run_count(store.counters, run, "keys") for run in (0, 1))
    if not wide.pos.shape[1] or not tags.shape[1]:
        return False

    column = store.counters[START][:, None] + wide.pos
    bits = scheme.tag_bits(tags.gather(1, column.clamp(0, tags.shape[1] - 1).long()))
    held = torch.arange(wide.pos.shape[1], device=device) < count[:, None]
    goes = held & (column < tags.shape[1]) & (bits == formats[0][0].bits)
    gone = goes.sum(1, dtype=torch.int32) // page * page
    # Slots of the wide run are in order of position.
    goes = goes & (goes.cumsum(1) <= gone[:, None])
    left = count - gone
    most, need, most_left = torch.stack([gone.max(), (have + gone).max(), left.max()]).tolist()
    if not most:
        return False

    leaving = goes.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :most]
    staying = (held & ~goes).to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :most_left]
    grown = _grown(store, narrow, -(-need // page))
    index = torch.arange(most, dtype=torch.int32, device=device).expand(store.batch, -1).contiguous()
    blocks = -(-most_left // formats[1][0].page_size) if store.capacity is None else wide.table.shape[1]
    rebuilt = []
    for side, small, large in zip(SIDES, *formats, strict=True):
        source = dequantize_pages(take(wide, large, side, leaving), large, side, store.dims[side])
        parts = grown.keys if side == "keys" else grown.values
        kernels.seal(parts, grown.table, have, gone, source, index, None, small, side)
        rebuilt.append(as_pages(take(wide, large, side, staying), large, side, blocks))
    table = torch.arange(store.batch * blocks, dtype=torch.int32, device=device).view(store.batch, blocks)
    room = blocks * formats[1][0].page_size - most_left
    pos = torch.nn.functional.pad(wide.pos.gather(1, staying), (0, room))
    grown = _place(grown, wide.pos.gather(1, leaving), have, gone, page)
    store.counters[RUNS : RUNS + 2] += gone
    store.counters[RUNS + 2 : RUNS + 4] -= gone
    store.replace(runs=[grown, RunView(table, pos, *rebuilt)], widest=most_left)
    return True


def _grown(store: KVStore, view: RunView, blocks: int) -> RunView:
    """The narrow run with room for ``blocks`` pages a row, in a view of its own: what it shares nobody reads yet."""
    have = view.table.shape[1]
    extra = max(blocks - have, 0)
    first, more = view.keys[0].shape[0], store.batch * extra
    ids = torch.arange(first, first + more, dtype=torch.int32, device=store.device).view(store.batch, -1)
    fmt = store.format.runs[0]
    assert view.pos is not None
    pos = torch.nn.functional.pad(view.pos, (0, extra * fmt[0].page_size))
    sides = []
    for side, own, parts in zip(SIDES, fmt, (view.keys, view.values), strict=True):
        fresh = own.allocate(side, more, store.heads, store.dims[side], store.dtype, store.device)
        sides.append([torch.cat(pair) for pair in zip(parts, fresh, strict=True)] if extra else list(parts))
    return RunView(torch.cat([view.table, ids], 1), pos, *sides)


def _place(view: RunView, moved: Tensor, have: Tensor, new: Tensor, page: int) -> RunView:
    """The view with positions ``moved`` (B, m) behind the ``have`` tokens of each row, and its pages in order."""
    assert view.pos is not None
    slot = torch.arange(view.pos.shape[1], device=moved.device) - have[:, None]
    inside = (slot >= 0) & (slot < new[:, None])
    pos = torch.where(inside, moved.gather(1, slot.clamp(0, moved.shape[1] - 1)), view.pos)
    paged = pos.unflatten(1, (-1, page))
    full = torch.arange(paged.shape[1], device=moved.device) < ((have + new) // page)[:, None]
    # Free blocks stay behind.
    newest = torch.where(full, paged.amax(2), torch.iinfo(torch.int32).max)
    order = newest.argsort(dim=1, stable=True)
    table = view.table.gather(1, order)
    return replace(view, table=table, pos=paged.gather(1, order[:, :, None].expand_as(paged)).flatten(1))
