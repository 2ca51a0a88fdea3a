"""Claim on the GPU: one program for all requests and slots, since each decides for the others; others copy tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ._lib import power
from .compile import Wanted
from .launch import Launch

TILE = 8192
"""Pairs of a request and a slot that are compared at a time."""

COPIED = 512
"""Blocks of a table that are copied at a time."""

NEVER = tl.constexpr(2**62)


class State(NamedTuple):
    """Tensors of slots: see `hfkvq.kernels.claim.claim`."""

    last: Any
    first: Any
    used: Any
    now: Any
    lost: Any


@triton.jit
def store_list(p_list, o_r, m_r, D, BR: tl.constexpr):
    """Rows of a mask one after another, then -1: D in all."""
    b_place = tl.cumsum(m_r.to(tl.int32), 0)
    n_all = tl.sum(m_r.to(tl.int32), 0)
    tl.store(p_list + o_r, tl.full([BR], -1, tl.int32), mask=(o_r < D) & (o_r >= n_all))
    tl.store(p_list + b_place - 1, o_r, mask=m_r)


@triton.jit
def claim_slots(
    table, lengths, past, sealed, state, found, steps, R, D, N, S, P, F, PAGE: tl.constexpr, BR: tl.constexpr,
    BS: tl.constexpr,
):  # fmt: skip
    """Everything but the copy of tables. Slots are taken BS at a time, requests all at once."""
    o_r = tl.arange(0, BR)
    m_r = o_r < R
    p_table = table + o_r.to(tl.int64) * N
    b_total = tl.load(lengths + o_r, mask=m_r, other=0)
    b_head = tl.load(p_table, mask=m_r, other=0)
    b_past = tl.maximum(b_total - 1, 0)
    if past is not None:
        b_past = tl.load(past + o_r, mask=m_r, other=0)
    b_before = tl.load(p_table + tl.maximum(b_past - 1, 0) // PAGE, mask=m_r, other=0)
    b_after = tl.load(p_table + tl.maximum(b_total - 1, 0) // PAGE, mask=m_r, other=0)
    i_now = tl.load(state.now) + 1
    i_lost = tl.load(state.lost)
    m_real = (b_total > 0) & (b_head > 0)
    m_asks = m_real & (b_past > 0)
    m_fresh = m_real & (b_past == 0)

    # A slot goes to the first request that asks for its block, a request to the first of its slots.
    b_slot = tl.zeros([BR], tl.int32) + S
    for i_s in range(0, S, BS):
        o_s = i_s + tl.arange(0, BS)
        b_last = tl.load(state.last + o_s, mask=o_s < S, other=-1)
        # [BR, BS]
        m_same = (b_last[None, :] == b_before[:, None]) & m_asks[:, None]
        b_row = tl.min(tl.where(m_same, o_r[:, None], BR), 0)
        tl.store(state.used + o_s, i_now + tl.zeros([BS], tl.int64), mask=b_row < BR)
        b_slot = tl.minimum(b_slot, tl.min(tl.where(b_row[None, :] == o_r[:, None], o_s[None, :], S), 1))
    m_need = m_real & (b_slot == S)
    b_need = m_need.to(tl.int32)
    if tl.sum(b_need, 0) > 0:
        tl.debug_barrier()
        # Others take those that have been unused for longest, in turn.
        b_turn = tl.minimum(tl.cumsum(b_need, 0) - 1, S - 1)
        for i_s in range(0, S, BS):
            o_s = i_s + tl.arange(0, BS)
            b_used = tl.load(state.used + o_s, mask=o_s < S, other=NEVER)
            b_rank = tl.zeros([BS], tl.int32)
            for i_z in range(0, S, BR):
                o_z = i_z + o_r
                b_other = tl.load(state.used + o_z, mask=o_z < S, other=NEVER)[:, None]
                m_older = (b_other < b_used[None, :]) | ((b_other == b_used[None, :]) & (o_z[:, None] < o_s[None, :]))
                b_rank += tl.sum(m_older.to(tl.int32), 0)
            m_own = m_need[:, None] & (b_rank[None, :] == b_turn[:, None]) & (o_s < S)[None, :]
            b_slot = tl.minimum(b_slot, tl.min(tl.where(m_own, o_s[None, :], S), 1))
    # Every warp has read what is written now.
    tl.debug_barrier()
    tl.store(state.used + b_slot, i_now + tl.zeros([BR], tl.int64), mask=m_r)
    tl.store(state.now, i_now)
    tl.store(state.lost, i_lost + tl.sum((m_need & (b_past % PAGE > 0)).to(tl.int32), 0))

    # Blocks that are written now are in no other slot.
    for i_s in range(0, S, BS):
        o_s = i_s + tl.arange(0, BS)
        b_last = tl.load(state.last + o_s, mask=o_s < S, other=-1)
        b_first = tl.load(state.first + o_s, mask=o_s < S, other=-1)
        b_stale = tl.max(((b_last[None, :] == b_after[:, None]) & m_real[:, None]).to(tl.int32), 0)
        if sealed is not None:
            for i_p in range(0, P, BR):
                b_block = tl.load(sealed + i_p + o_r, mask=i_p + o_r < P, other=-2)
                b_stale = tl.maximum(b_stale, tl.max((b_last[None, :] == b_block[:, None]).to(tl.int32), 0))
        b_old = tl.max(((b_first[None, :] == b_head[:, None]) & m_fresh[:, None]).to(tl.int32), 0)
        tl.store(state.last + o_s, tl.full([BS], -1, tl.int32), mask=(o_s < S) & (b_stale > 0))
        tl.store(state.first + o_s, tl.full([BS], -1, tl.int32), mask=(o_s < S) & (b_old > 0))
    tl.debug_barrier()
    tl.store(state.last + b_slot, b_after, mask=m_real)
    tl.store(state.first + b_slot, tl.where(m_fresh, b_head, -1), mask=m_need)
    tl.debug_barrier()

    # A slot is a source if its first page is there, or is written in this batch.
    b_source = tl.zeros([BR], tl.int32) + S
    for i_s in range(0, S, BS):
        o_s = i_s + tl.arange(0, BS)
        b_first = tl.load(state.first + o_s, mask=o_s < S, other=-1)
        m_same = b_first[None, :] == b_head[:, None]
        b_source = tl.minimum(b_source, tl.min(tl.where(m_same, o_s[None, :], S), 1))
    tl.debug_barrier()
    m_due = m_need & (b_past > 0)
    tl.store(state.first + b_slot, b_head, mask=m_due)
    tl.store(found + o_r, b_slot, mask=m_r)
    tl.store(found + F + o_r, m_due.to(tl.int32), mask=m_r)
    tl.store(found + 2 * F + o_r, tl.where(b_source < S, b_source, -1), mask=m_r)

    m_d = o_r < D
    b_past = tl.maximum(b_total - 1, 0)
    b_start = b_past // PAGE * PAGE
    m_full = m_d & (b_total % PAGE == 0) & (b_slot < S)
    p_step = steps + o_r
    tl.store(p_step, tl.zeros([BR], tl.int32), mask=m_d)
    tl.store(p_step + D, b_past + 1, mask=m_d)
    tl.store(p_step + 2 * D, tl.maximum(b_start - PAGE, 0), mask=m_d)
    tl.store(p_step + 3 * D, tl.maximum(b_start - PAGE, 0), mask=m_d)
    tl.store(p_step + 4 * D, (b_past == b_start).to(tl.int32), mask=m_d)
    tl.store(p_step + 5 * D, b_start, mask=m_d)
    tl.store(p_step + 6 * D, tl.where(m_full, PAGE, 0), mask=m_d)
    store_list(steps + 7 * D, o_r, m_full, D, BR)
    store_list(steps + 8 * D, o_r, m_due & m_d, D, BR)


@triton.jit(do_not_specialize=["R", "D", "N", "S", "P", "F"])
def claim_kernel(
    table, lengths, past, sealed, state, found, steps, run, R, D, N, S, P, F,
    PAGE: tl.constexpr, BR: tl.constexpr, BS: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The first program claims, the others copy what a row's table has behind the first block."""
    i_p = tl.program_id(0)
    if i_p == 0:
        claim_slots(table, lengths, past, sealed, state, found, steps, R, D, N, S, P, F, PAGE, BR, BS)
    else:
        i_r = (i_p - 1).to(tl.int64)
        for i_n in range(0, N - 1, BN):
            o_n = i_n + tl.arange(0, BN)
            b_x = tl.load(table + i_r * N + 1 + o_n, mask=o_n < N - 1, other=0)
            tl.store(run + i_r * (N - 1) + o_n, b_x, mask=o_n < N - 1)


@lru_cache(maxsize=1024)
def _launch(
    rows: int,
    decodes: int,
    blocks: int,
    slots: int,
    page: int,
    sealed: int,
    mapped: bool,
    stride: int,
    device: torch.device,
) -> Launch:
    """Takes table, lengths, what is given of past and sealed blocks, five tensors of slots, and what is written."""
    # Few variants for all batches.
    size = 16 if rows <= 16 else 128 if rows <= 128 else power(rows)
    constants = {"PAGE": page, "BR": size, "BS": max(16, min(power(slots), TILE // size)), "BN": COPIED}

    def nest(given: Sequence[Any]) -> tuple[Any, ...]:
        table, lengths, *rest = given
        own, rest = rest[:-8], rest[-8:]
        past, done = own[0] if mapped else None, own[-1] if sealed else None
        return table, lengths, past, done, State(*rest[:5]), *rest[5:]

    numbers = {"R": rows, "D": decodes, "N": blocks, "S": slots, "P": sealed, "F": stride}
    grid = (1 + decodes * (blocks > 1),)
    return Launch(claim_kernel, grid, numbers, {**constants, "num_warps": 8 if size == 16 else 16}, device, nest)


def claim_wanted(slots: int, page: int, device: torch.device) -> Iterator[Wanted]:
    """Variants for batches with prompts: of few requests and of many, with pages that are sealed and without."""
    i32, i64 = torch.int32, torch.int64
    for rows in {min(rows, slots) for rows in (16, 128, slots)}:
        for sealed in (0, 1):
            made = _launch(rows, 0, 2, slots, page, sealed, True, 3, device)
            yield made.wanted([i32] * (3 + sealed) + [i32, i32, i64, i64, i32] + [i32] * 3)


def claim_triton(*given: Any) -> None:
    """Launcher of `hfkvq.kernels.claim.fill_claim`."""
    table, lengths, past, sealed, slots, found, steps, run, page = given
    (rows, blocks), decodes, done = table.shape, steps.shape[1], 0 if sealed is None else sealed.numel()
    if not rows:
        return
    launch = _launch(
        rows, decodes, blocks, len(slots[0]) - 1, page, done, past is not None, found.stride(0), table.device
    )
    more = [past] if past is not None else []
    more += [sealed] if sealed is not None and done else []
    launch(*[x.contiguous() for x in (table, lengths, *more)], *slots, found, steps, run)
