"""Claim: slots of an engine's requests, found by their blocks, and rows of a step. The contract and its reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .dispatch import launched

ROWS = 9
"""Rows of what a step needs: four counters, then `Claimed`'s ``again``, ``start``, ``full``, ``fills`` and ``dues``."""


@launched("claim:claim_triton")
def fill_claim(
    table: Tensor,
    lengths: Tensor,
    past: Tensor | None,
    sealed: Tensor | None,
    slots: Sequence[Tensor],
    found: Tensor,
    steps: Tensor,
    run: Tensor,
    page: int,
) -> None:
    """Writes what `claim` finds into ``found``, ``steps`` and ``run``."""
    none, spare = -1, len(slots[0]) - 1
    all_last, all_first, all_used, now, lost = slots
    last, head, used = all_last[:spare], all_first[:spare], all_used[:spare]
    past = (lengths - 1).clamp(min=0) if past is None else past
    first = table[:, 0]
    real = (lengths > 0) & (first > 0)
    before, after = (
        table.gather(1, ((tokens - 1).clamp(min=0) // page)[:, None].long())[:, 0] for tokens in (past, lengths)
    )
    match = (last == before[:, None]) & (real & (past > 0))[:, None]
    match &= match.cumsum(0) == 1
    has = match.any(1)
    need, fresh = real & ~has, real & (past == 0)
    lost += (need & (past % page > 0)).sum(dtype=torch.int32)
    now += 1
    # The longest unused come first; all that go on have been used now.
    used.copy_(torch.where(match.any(0), now, used))
    taken = used.argsort(stable=True)[(need.cumsum(0) - 1).clamp(min=0, max=spare - 1)]
    slot = torch.where(has, match.int().argmax(1), torch.where(need, taken, spare))
    all_used[slot] = now
    # Blocks that are written now are in no other slot.
    stale = ((last == after[:, None]) & real[:, None]).any(0)
    if sealed is not None:
        stale |= torch.isin(last, sealed)
    last.masked_fill_(stale, none)
    all_last[slot] = torch.where(real, after, none)
    head.masked_fill_(((head == first[:, None]) & fresh[:, None]).any(0), none)
    all_first[torch.where(need, slot, spare)] = torch.where(fresh, first, none)
    # A slot is a source if its first page is there, or is written in this batch.
    due = need & (past > 0)
    same = head == first[:, None]
    source = torch.where(same.any(1), same.int().argmax(1), none)
    all_first[torch.where(due, slot, spare)] = torch.where(due, first, none)
    all_first[spare] = none
    found.copy_(torch.stack([slot, due, source]))

    count = steps.shape[1]
    past, slot = (lengths[:count] - 1).clamp(min=0), slot[:count]
    start = past // page * page
    before = (start - page).clamp(min=0)
    full = (lengths[:count] % page == 0) & (slot < spare)
    lists = []
    for chosen in (full, due[:count]):
        order = (~chosen).int().argsort(stable=True)
        lists.append(torch.where(chosen[order], order, none))
    # Rows that pad the batch have a token of their own, in the last slot.
    rows = [torch.zeros_like(past), past + 1, before, before, past == start, start, full * page, *lists]
    steps.copy_(torch.stack([row.int() for row in rows]))
    if run.shape[1] < table.shape[1]:
        run.copy_(table[:count, 1:])


class Claimed(NamedTuple):
    """Slots of a batch's requests, and rows of those with one token, which come first.

    Attributes:
        found: i32 (3, R): the slot, the last one for rows that pad the batch; whether the request is new to it and has
            tokens already, whose first page it lacks; the slot that has the same first page, -1 for none.
        steps: i32 (`ROWS`, D), all that follows but ``run``, behind four rows of ``counters``.
        again: i32 (D,), whether a page begins.
        start: i32 (D,), tokens before the page that is being filled.
        full: i32 (D,), its tokens if this one fills it, else 0.
        fills: i32 (D,), rows that fill one, then -1.
        dues: i32 (D,), rows that lack their first page, then -1.
        run: i32 (D, N - 1), blocks behind the first; (D, 1), the first, where there are no others.
    """

    found: Tensor
    steps: Tensor
    again: Tensor
    start: Tensor
    full: Tensor
    fills: Tensor
    dues: Tensor
    run: Tensor

    @property
    def counters(self) -> Tensor:
        """Counters i32 (4, D), as `decode_attention` wants them, for a sink of one page.

        No padding, tokens with the new one, and twice those of whole pages behind the first.
        """
        return self.steps[:4]


def new_slots(count: int, device: torch.device) -> list[Tensor]:
    """Slots that no request has: ``slots`` of `claim`, for so many requests at a time."""
    last, first = (torch.full((count + 1,), -1, dtype=torch.int32, device=device) for _ in range(2))
    used = torch.zeros(count + 1, dtype=torch.int64, device=device)
    now, lost = (torch.zeros(1, dtype=kind, device=device) for kind in (torch.int64, torch.int32))
    return [last, first, used, now, lost]


def claim(
    table: Tensor,
    lengths: Tensor,
    slots: Sequence[Tensor],
    page: int,
    decodes: int,
    past: Tensor | None = None,
    sealed: Tensor | None = None,
) -> Claimed:
    """Finds or gives slots of requests, once a batch; asks the device for nothing, so a graph can hold it.

    A slot belongs to the request whose last token is in the slot's block: a block that is being filled is one request's
    own. Of several requests that go on behind a full block that they share, the first has it, and others get the slots
    that have been unused for longest, as new requests do.

    Args:
        table: i32 (R, N), blocks of each request; block 0 belongs to none.
        lengths: i32 (R,), tokens of each, the new ones included; 0 for rows that pad the batch.
        slots: of `new_slots`, written: each slot's block of its request's last token, the request's first block, and
            the batch that used it last, (S + 1,) each, -1 for no block; the number of batches, and of requests in the
            middle of a page whose slot was another's, (1,).
        page: tokens of a block.
        decodes: D, requests with one new token: the first rows, and those that pad the batch.
        past: i32 (R,), tokens before the new ones; None where each request has one new token.
        sealed: i32 (P,), blocks that other rows fill.
    """
    rows, blocks = table.shape
    # Kernels have variants for addresses that are multiples of 16 bytes.
    found = table.new_empty((3, -(-rows // 4) * 4))[:, :rows]
    steps = table.new_empty((ROWS, decodes))
    # Blocks behind the first, side by side, since kernels read tables by their width.
    run = table[:decodes] if blocks == 1 else table.new_empty((decodes, blocks - 1))
    fill_claim(table, lengths, past, sealed, slots, found, steps, run, page)
    again, start, full, fills, dues = steps[4:].unbind()
    return Claimed(found, steps, again, start, full, fills, dues, run)
