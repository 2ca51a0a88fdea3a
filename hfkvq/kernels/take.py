"""Take: a step's tokens join windows and pages of an engine, all in one launch. Contracts and torch references."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .append import append
from .claim import Claimed
from .dispatch import call, define, triton_slot
from .norms import Balance
from .pages import SIDES, StoreFormat
from .restore import restore
from .seal import seal_side
from .step.buffer import side_by_side
from .step.ops import observe


@define("take_token", mutates=("tails", "keys_parts", "values_parts"))
def _take_token(
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    tails: Sequence[Tensor],
    keys_parts: Sequence[Tensor],
    values_parts: Sequence[Tensor],
    table: Tensor,
    store: str,
) -> None:
    form, count = StoreFormat.parse(store), len(lengths)
    past, new = (lengths - 1).clamp(min=0), lengths.clamp(max=1)
    rows = torch.arange(count, dtype=torch.int32, device=keys.device)
    counters = torch.stack([torch.zeros_like(past), past + 1, past, past])
    windows = [*(tail[:, :, :0] for tail in tails), *tails]
    append(keys, values, counters, windows, form, rows)
    for parts, fmt, side, tail in zip((keys_parts, values_parts), form.runs[0], SIDES, tails, strict=True):
        seal_side(parts, table, past, new, tail[:count], (past % tail.shape[2])[:, None], fmt, side)


triton_slot("take_token", "take:take_token_triton")


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
    call(_take_token, keys, keys, values, lengths, list(tails), *map(list, parts), table, store.spec)


@define("take_page", mutates=("windows", "keys_parts", "values_parts", "sums"))
def _take_page(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    steps: Tensor,
    found: Tensor,
    windows: Sequence[Tensor],
    keys_parts: Sequence[Tensor],
    values_parts: Sequence[Tensor],
    table: Tensor,
    sums: Sequence[Tensor],
    store: str,
    rule: str,
    rounds: Sequence[int],
    key_balance: str,
    value_balance: str,
    restores: bool,
) -> None:
    form, half = StoreFormat.parse(store), windows[0].shape[0] // 2
    slot, due, source = found[:, : keys.shape[0]]
    again, start, full = steps[4:7]
    page = windows[0].shape[2]
    halves = [*(window[:half] for window in windows), *(window[half:] for window in windows)]
    append(keys, values, steps[:4], halves, form, slot)
    weight = None
    if sums:
        weight = query.new_empty((*keys.shape[:2], keys.shape[3]), dtype=torch.float32)
        observe(query, sums[0], sums[1], again, weight, slot)
    window = torch.where(start > 0, slot + half, slot)
    token = torch.arange(page, dtype=torch.int32, device=keys.device)
    columns = window[:, None] * (keys.shape[1] * page) + token
    balances = Balance(rounds[0], key_balance), Balance(rounds[1], value_balance)
    for at, parts in enumerate((keys_parts, values_parts)):
        rest = form.runs[0][at], SIDES[at], rule, (weight, None)[at], balances[at]
        seal_side(parts, table, start, full, side_by_side(windows[at], len(slot)), columns, *rest)
    if restores:
        restore(halves[:2], [table, *keys_parts, *values_parts], due, source, slot, form)


triton_slot("take_page", "take:take_page_triton")


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
    rounds, (key_balance, value_balance) = [each.rounds for each in balance], (each.rule for each in balance)
    rest = list(windows), *map(list, parts), table, list(sums), store.spec, rule, rounds, key_balance, value_balance
    call(_take_page, keys, query, keys, values, rows.steps, rows.found, *rest, restores)
