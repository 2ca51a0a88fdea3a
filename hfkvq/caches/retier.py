"""Retier: every token of a store gets a width again, or is forgotten."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hfkvq import kernels
from hfkvq.kernels.decode import ABSENT, LENGTH, RUNS, START, column_positions
from hfkvq.kernels.pages import PageFormat, RunView, Side
from hfkvq.kernels.quantize import dequantize_pages

from .states import RowState
from .store import SIDES, KVStore, clipped

EVICT, STAY = -1, -2
"""Targets of `retier` beside the number of a run."""


def positions(store: KVStore) -> Tensor:
    """Row position of every column of `sink | runs | tail`: i32 (B, N), `ABSENT` where there is no token."""
    return column_positions(store.format, store.counters, store.runs, store.windows[2].shape[2], "keys")


def run_columns(store: KVStore) -> list[tuple[int, int]]:
    """First column of each run, and of the tail at last, with the number of columns."""
    found, at = [], store.layout.sink
    for view, (fmt, _) in zip(store.runs, store.format.runs, strict=True):
        size = view.table.shape[1] * fmt.page_size
        found.append((at, size))
        at += size
    return [*found, (at, store.windows[2].shape[2])]


def _token_axis(name: str, fmt: PageFormat, side: Side) -> int:
    """The axis of a page's tensor (P, H, ...) that counts tokens, in formats per token."""
    return 3 if name in ("scale", "zero") or (name == "codes" and side == "values" and fmt.bits < 8) else 2


def _bytes(part: Tensor) -> Tensor:
    """Not every device indexes fp8."""
    return part.view(torch.uint8) if part.dtype == torch.float8_e4m3fn else part


def take(view: RunView, fmt: PageFormat, side: Side, slots: Tensor) -> list[Tensor]:
    """Tokens of a run, as pages have them, bit for bit.

    Args:
        view: the run.
        fmt: the side's format, per token.
        side: "keys" or "values".
        slots: i64 (B, m), run token of each; must exist in the row's table.

    Returns:
        The format's tensors as pages of m tokens: (B, H, ...).
    """
    page = view.table.gather(1, slots // fmt.page_size).long()
    slot = slots % fmt.page_size
    out = []
    for name, part in zip(fmt.names, view.keys if side == "keys" else view.values, strict=True):
        axis = _token_axis(name, fmt, side)
        tokens = _bytes(part).movedim(axis, 1)[page, slot].movedim(1, axis)
        out.append(tokens.contiguous().view(part.dtype))
    return out


def as_pages(parts: Sequence[Tensor], fmt: PageFormat, side: Side, blocks: int) -> list[Tensor]:
    """What `take` gave, cut into ``blocks`` pages a row: (B * blocks, H, ...)."""
    out = []
    for name, part in zip(fmt.names, parts, strict=True):
        axis = _token_axis(name, fmt, side)
        tokens = _bytes(part).movedim(axis, -1)
        tokens = torch.nn.functional.pad(tokens, (0, blocks * fmt.page_size - tokens.shape[-1]))
        tokens = tokens.unflatten(-1, (blocks, fmt.page_size)).movedim(-2, 1).flatten(0, 1).movedim(-1, axis)
        out.append(tokens.contiguous().view(part.dtype))
    return out


def _gather(store: KVStore, side: Side, columns: Tensor) -> Tensor:
    """Dequantized tokens of columns (B, m) of `sink | runs | tail`: f32 (B, H, m, D), anything where there is none."""
    spans, dim = run_columns(store), store.dims[side]
    at, size = spans[-1]
    tail = store.windows[2 if side == "keys" else 3]
    slot = (columns - at).clamp(0, size - 1)[:, None, :, None].expand(-1, store.heads, -1, dim)
    out = tail.gather(2, slot).float()
    for (first, length), view, formats in zip(spans[:-1], store.runs, store.format.runs, strict=True):
        if not length:
            continue
        fmt = formats[side == "values"]
        inside = (columns >= first) & (columns < first + length)
        parts = take(view, fmt, side, (columns - first).clamp(0, length - 1))
        dense = dequantize_pages(parts, fmt, side, dim)
        out = torch.where(inside[:, None, :, None], dense, out)
    return out


def moved_slots(sealed: Tensor, evicted: Tensor, ring: int) -> Tensor:
    """i64 (B, ring): the slot of the tail that each slot takes its token from once tokens before the tail are gone.

    Slots go by position, which is less by the tokens evicted.

    Args:
        sealed: i32 (B,), tokens before the tail then.
        evicted: i32 (B,), those that are gone.
        ring: slots of the tail.
    """
    slot = torch.arange(ring, dtype=torch.int32, device=sealed.device)[None]
    token = sealed[:, None] + (slot - sealed[:, None]) % ring
    return ((token + evicted[:, None]) % ring).long()


def retier(store: KVStore, target: Tensor, where: Tensor | None = None) -> None:
    """Moves every token to the run that it is to be in; the pages that it leaves are given back.

    A token that stays in its run keeps its bits. One that comes from elsewhere is dequantized and quantized again, from
    what the store holds of it. A row that forgets e tokens has ``start`` greater and positions smaller by e, so that
    logical columns stay what they were and those of the forgotten tokens are empty. Tokens of a run need not be in
    order of position afterwards, which `KVStore.crop` of sealed tokens counts on. Asks the device once.

    Args:
        store: a store with several runs, all per token.
        target: i8 (B, N) over the columns of `positions`: number of a run, `EVICT`, or `STAY`. Columns without a token
            count for nothing. Sink tokens stay; of the tail, those that do not stay must be older than those that do.
        where: `positions`, if they are known already.

    Raises:
        NotImplementedError: a store of one run, or formats per channel, whose pages cannot be taken apart.
    """
    formats = store.format.runs
    if store.format.ordered or any(fmt.whole for pair in formats for fmt in pair):
        raise NotImplementedError("retier: only runs that have positions and scales per token can be taken apart.")
    where, spans = positions(store) if where is None else where, run_columns(store)
    held, batch, device = where > ABSENT, store.batch, store.device
    evicted = (held & (target == EVICT)).sum(1, dtype=torch.int32)
    plans, counts = [], []
    for i, (first, length) in enumerate(spans[:-1]):
        own = torch.zeros_like(held)
        own[:, first : first + length] = True
        stays = held & own & ((target == STAY) | (target == i))
        comes = held & ~own & (target == i)
        plans.append((stays, comes))
        counts += [stays.sum(1, dtype=torch.int32), comes.sum(1, dtype=torch.int32)]
    length = store.counters[LENGTH] - evicted
    sealed = torch.stack(counts).sum(0, dtype=torch.int32)
    told = torch.stack([length, sealed, *counts]).tolist()

    runs, counters, most = [], store.counters.clone(), 0
    counters[START] += evicted
    counters[LENGTH] = length
    for i, ((stays, comes), view, pair) in enumerate(zip(plans, store.runs, formats, strict=True)):
        kept, new = counts[2 * i], counts[2 * i + 1]
        most = max((a + b for a, b in zip(told[2 + 2 * i], told[3 + 2 * i], strict=True)), default=0)
        most_kept, most_new = max(told[2 + 2 * i], default=0), max(told[3 + 2 * i], default=0)
        page = pair[0].page_size
        blocks = -(-most // page)
        old, fresh = (
            x.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :amount]
            for x, amount in ((stays, most_kept), (comes, most_new))
        )
        table = torch.arange(batch * blocks, dtype=torch.int32, device=device).view(batch, blocks)
        sides: list[list[Tensor]] = []
        for side, fmt in zip(SIDES, pair, strict=True):
            if most_kept:
                slots = (old - spans[i][0]).clamp(0, spans[i][1] - 1)
                parts = as_pages(take(view, fmt, side, slots), fmt, side, blocks)
            else:
                parts = fmt.allocate(side, batch * blocks, store.heads, store.dims[side], store.dtype, device)
            if most_new:
                index = torch.arange(most_new, dtype=torch.int32, device=device).expand(batch, -1)
                source, share = _gather(store, side, fresh), getattr(store.layout, side).clip
                source = clipped(source, index, share) if share < 1.0 else source
                kernels.seal(parts, table, kept, new, source, index.contiguous(), None, fmt, side)
            sides.append(parts)
        # Behind those that stayed, those that came.
        slot = torch.arange(blocks * page, device=device)[None]
        both = torch.cat([old, fresh], 1)
        pick = torch.where(slot < kept[:, None], slot, slot - kept[:, None] + most_kept).clamp(
            max=max(both.shape[1], 1) - 1
        )
        pos = where.gather(1, both.gather(1, pick)) - evicted[:, None] if most else where[:, :0]
        runs.append(RunView(table, pos.to(torch.int32).contiguous(), *sides))
        counters[RUNS + 2 * i : RUNS + 2 * i + 2] = kept + new

    windows = list(store.windows)
    before = moved_slots(sealed, evicted, windows[2].shape[2])[:, None, :, None]
    for at in (2, 3):
        windows[at] = windows[at].gather(2, before.expand(-1, store.heads, -1, windows[at].shape[3]))
    store.replace(
        counters=counters,
        windows=windows,
        runs=runs,
        dropped=store.dropped + evicted,
        states=frozenset(RowState(a, b, b) for a, b in zip(told[0], told[1], strict=True)),
        # Of the last run.
        widest=most,
    )
