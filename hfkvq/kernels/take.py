"""Take: a step's tokens join windows and pages of an engine, all in one launch. Contracts and torch references."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .append import append
from .claim import Claimed
from .dispatch import launched
from .norms import Balance
from .pages import SIDES, StoreFormat
from .restore import restore
from .seal import seal_side
from .step.buffer import side_by_side
from .step.ops import observe


@launched("take:take_token_triton")
def take_token(
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    tails: Sequence[Tensor],
    parts: Sequence[Sequence[Tensor]],
    table: Tensor,
    store: StoreFormat,
) -> None:
    """One token of each row joins its tail, and its page quantized.

    Args:
        keys: (B, H, 1, D), after RoPE, not rotated, any strides.
        values: (B, H, 1, D), likewise.
        lengths: i32 (B,), tokens of each row, the new one included; 0 for rows that have none, whose pages stay.
        tails: keys and values (N, H, W, D), of row b that of the batch's; token x goes to slot ``x mod W``.
        parts: tensors of keys' pages and of values', written.
        table: i32 (B, n), pages of each row.
        store: with one run, quantized by token, and no sink.
    """
    count = len(lengths)
    past, new = (lengths - 1).clamp(min=0), lengths.clamp(max=1)
    rows = torch.arange(count, dtype=torch.int32, device=keys.device)
    counters = torch.stack([torch.zeros_like(past), past + 1, past, past])
    windows = [*(tail[:, :, :0] for tail in tails), *tails]
    append(keys, values, counters, windows, store, rows)
    for own, fmt, side, tail in zip(parts, store.runs[0], SIDES, tails, strict=True):
        seal_side(own, table, past, new, tail[:count], (past % tail.shape[2])[:, None], fmt, side)


@launched("take:take_page_triton")
def take_page(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Claimed,
    windows: Sequence[Tensor],
    parts: Sequence[Sequence[Tensor]],
    table: Tensor,
    sums: Sequence[Tensor],
    store: StoreFormat,
    rule: str,
    balance: Sequence[Balance],
    restores: bool,
) -> None:
    """One token of each row joins its window, and pages that are full then are sealed from there.

    Args:
        query: (B, Hq, 1, D), after RoPE.
        keys: (B, H, 1, D), likewise, any strides.
        values: (B, H, 1, D).
        rows: of `claim`, for a page of G tokens: the first B of them.
        windows: keys and values (2 S + 2, H, G, D), written: first pages of all slots, then those that are being
            filled.
        parts: tensors of keys' pages and of values', written.
        table: i32 (B, n), pages of each row.
        sums: f64 (S + 1, H, D) and i32 (H, S + 1), see `step.observe`, written, by whose means ``rule`` weighs keys'
            channels; nothing where it does not.
        store: with one run and a sink of a page.
        rule: by which raised channels are chosen, or "", see `seal_side`.
        balance: of normed pages, for keys and values.
        restores: whether rows that lack their first page get it, see `restore`. It may be filled in this step.
    """
    half, (slot, due, source) = windows[0].shape[0] // 2, rows.found[:, : keys.shape[0]]
    page = windows[0].shape[2]
    halves = [*(window[:half] for window in windows), *(window[half:] for window in windows)]
    append(keys, values, rows.counters, halves, store, slot)
    weight = None
    if sums:
        weight = query.new_empty((*keys.shape[:2], keys.shape[3]), dtype=torch.float32)
        observe(query, sums[0], sums[1], rows.again, weight, slot)
    window = torch.where(rows.start > 0, slot + half, slot)
    token = torch.arange(page, dtype=torch.int32, device=keys.device)
    columns = window[:, None] * (keys.shape[1] * page) + token
    for at, own in enumerate(parts):
        rest = store.runs[0][at], SIDES[at], rule, (weight, None)[at], balance[at]
        seal_side(own, table, rows.start, rows.full, side_by_side(windows[at], len(slot)), columns, *rest)
    if restores:
        restore(due, source, slot, halves[:2], [table, *parts[0], *parts[1]], store)
