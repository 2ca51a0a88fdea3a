"""A step's beginning on the GPU: a row's counters, its new tokens and what will be due, in one program."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import windows
from ..decode import LENGTH, RUNS, START
from ..windows import Sealing
from ._lib import overlap, power
from .append import NewTokens, append_constants, append_numbers, append_side, new_rows, new_tokens
from .launch import Launch
from .pair_format import Row
from .tiles import INTERPRETED

I_START, I_LENGTH, I_RUNS = tl.constexpr(START), tl.constexpr(LENGTH), tl.constexpr(RUNS)

# Triton compiles `max` as its own `maximum`. The interpreter calls what is Python as it is.
tokens_due = windows.tokens_due if INTERPRETED.value else triton.jit(windows.tokens_due)


class Scratch(NamedTuple):
    """Tensors that `hfkvq.kernels.step.advance` writes; ``pos`` is None where runs have no positions."""

    new: Any
    sealed: Any
    index_k: Any
    index_v: Any
    flag: Any
    pos: Any


@triton.jit
def store_slots(index, i_b, i_total, W, M, BM: tl.constexpr):
    """Slots of the tail that hold the oldest M tokens of a side."""
    o_j = tl.arange(0, BM)
    tl.store(index + i_b * M + o_j, (i_total + o_j) % W, mask=o_j < M)


@triton.jit(do_not_specialize=["S", "WK", "WV", "B", "capacity", "room", "N"])
def advance_kernel(
    keys, values, row, scratch, s_k, s_v, factors, H, T, S, WK, WV, B, capacity, room, N, R: tl.constexpr,
    SEALING: tl.constexpr, BMK: tl.constexpr, BMV: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One row of B; of R runs the last takes what is sealed."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        # Attention comes next, and waits for this kernel itself; what came before is there by now.
        tl.extra.cuda.gdc_launch_dependents()
    i_b = tl.program_id(0).to(tl.int64)
    # The loads start together with the counters'.
    b_k = new_rows(keys, 0, i_b, s_k, H, T, KEYS)
    b_v = new_rows(values, 0, i_b, s_v, H, T, VALUES)
    p_count = row.counters + i_b
    p_last = p_count + (I_RUNS + 2 * R - 2) * B
    i_start = tl.load(p_count + I_START * B)
    i_length = tl.load(p_count + I_LENGTH * B)
    i_newk = tl.load(scratch.new + i_b)
    i_ck = tl.load(p_last) + i_newk
    i_cv = tl.load(p_last + B) + tl.load(scratch.new + B + i_b)
    i_tk = i_ck
    i_tv = i_cv
    for i in tl.static_range(R - 1):
        i_tk += tl.load(p_count + (I_RUNS + 2 * i) * B)
        i_tv += tl.load(p_count + (I_RUNS + 2 * i + 1) * B)
    i_rest = tl.maximum(i_length + T - S, 0)
    i_duek = tokens_due(i_rest, i_tk, SEALING.local[0], SEALING.unit[0])
    i_duev = tokens_due(i_rest, i_tv, SEALING.local[1], SEALING.unit[1])
    m_fits = (i_start + i_length + T <= capacity) & (i_rest - i_tk <= WK) & (i_rest - i_tv <= WV)
    m_fits = m_fits & (i_ck + i_duek <= room) & (i_cv + i_duev <= room)
    m_fits = m_fits & (i_duek <= SEALING.most[0]) & (i_duev <= SEALING.most[1])
    # Every warp has read the counters before any of them is written.
    tl.debug_barrier()
    tl.store(scratch.sealed + i_b, i_newk)
    tl.store(p_last, i_ck)
    tl.store(p_last + B, i_cv)
    tl.store(scratch.new + i_b, tl.where(m_fits, i_duek, 0))
    tl.store(scratch.new + B + i_b, tl.where(m_fits, i_duev, 0))
    store_slots(scratch.index_k, i_b, i_tk, WK, SEALING.most[0], BMK)
    store_slots(scratch.index_v, i_b, i_tv, WV, SEALING.most[1], BMV)
    if scratch.pos is not None:
        o_j = tl.arange(0, BMK)
        tl.store(scratch.pos + i_b * N + i_ck + o_j, S + i_tk + o_j, mask=o_j < tl.where(m_fits, i_duek, 0))
    if m_fits:
        append_side(b_k, keys, row.sink_k, row.tail_k, i_b, i_b, i_length, s_k, factors[0], H, T, S, WK, KEYS)
        append_side(b_v, values, row.sink_v, row.tail_v, i_b, i_b, i_length, s_v, factors[1], H, T, S, WV, VALUES)
        tl.store(p_count + I_LENGTH * B, i_length + T)
    else:
        tl.store(scratch.flag, 1)


@lru_cache(maxsize=1024)
def advance_launch(
    tokens: NewTokens,
    runs: int,
    capacity: int,
    room: int,
    positions: int | None,
    sealing: Sealing,
    rotate_keys: int,
    rotate_values: int,
) -> Launch:
    """Takes keys, values, four windows, counters, new, sealed, two indices, flag, and positions if there are any."""
    constants = append_constants(tokens.keys, tokens.values, rotate_keys, rotate_values)
    batch, device = tokens.keys[0], tokens.device
    numbers = append_numbers(tokens, constants)
    numbers |= {"B": batch, "capacity": capacity, "room": room, "N": positions or 0}
    constants |= {
        "R": runs,
        "SEALING": sealing,
        "BMK": power(sealing.most[0]),
        "BMV": power(sealing.most[1]),
        "PDL": bool(overlap(device)),
        **overlap(device),
    }

    def nest(given: Sequence[Any]) -> tuple[Any, ...]:
        row = Row(given[6], *given[2:6], None)
        return given[0], given[1], row, Scratch(*given[7:12], None if positions is None else given[12])

    return Launch(advance_kernel, (batch,), numbers, constants, device, nest)


def advance_triton(*given: Any) -> None:
    """Launcher of `hfkvq.kernels.step.advance`."""
    keys, values, counters, windows, scratch, capacity, room, local, unit, *rotate, keep = given
    assert all([x.is_contiguous() for x in (counters, *windows, *scratch)]), "written in place"
    new, runs = new_tokens(keys, values, windows), (counters.shape[0] - RUNS) // 2
    positions = scratch[5].shape[1] if len(scratch) > 5 else None
    sealing = Sealing(tuple(local), tuple(unit), (scratch[2].shape[1], scratch[3].shape[1]))
    launch = advance_launch(new, runs, capacity, room, positions, sealing, *rotate)
    if keep is not None:
        keep(launch.bound(None, None, *windows, counters, *scratch))
    launch(keys, values, *windows, counters, *scratch)


@triton.jit
def observe_heads(
    q, sums, counts, weight, i_again, strides, i_b, i_w, i_h, T, H, N, D: tl.constexpr, SHARE: tl.constexpr,
    BH: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Magnitudes of row i_b's T queries of BH KV heads from ``i_h`` on join the sums of row i_w, of N.

    These begin anew where ``i_again``, and are exact in f64 but for absurd ranges.
    """
    o_h = i_h + tl.arange(0, BH)
    o_d = tl.arange(0, BD)
    m_h = o_h < H
    m_x = m_h[:, None] & (o_d < D)[None, :]
    # Each head counts for itself: no other program reads what this one writes.
    b_count = tl.load(counts + o_h * N + i_w, mask=m_h, other=0)
    p_sum = sums + (i_w * H + o_h)[:, None] * D + o_d[None, :]
    b_old = tl.load(p_sum, mask=m_x, other=0.0)
    b_sum = tl.zeros([BH, BD], tl.float64)
    for i_t in range(T):
        for i_g in tl.static_range(SHARE):
            p_q = q + i_b * strides[0] + (o_h * SHARE + i_g)[:, None] * strides[1] + i_t * strides[2]
            b_sum += tl.abs(tl.load(p_q + o_d[None, :] * strides[3], mask=m_x, other=0.0).to(tl.float64))
    b_count = tl.where(i_again, 0, b_count) + T
    b_sum = tl.where(i_again, 0.0, b_old) + b_sum / SHARE
    # Every warp has read them.
    tl.debug_barrier()
    tl.store(p_sum, b_sum, mask=m_x)
    tl.store(counts + o_h * N + i_w, b_count, mask=m_h)
    if weight is not None:
        p_weight = weight + (i_b * H + o_h)[:, None] * D + o_d[None, :]
        tl.store(p_weight, (b_sum / b_count[:, None]).to(tl.float32), mask=m_x)


@triton.jit(do_not_specialize=["T", "N"])
def observe_kernel(
    q, sealed, sums, counts, weight, rows, strides, H, T, N, D: tl.constexpr, SHARE: tl.constexpr, BD: tl.constexpr
):
    """One KV head of one row."""
    i_h, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_w = i_b
    if rows is not None:
        i_w = tl.load(rows + i_b).to(tl.int64)
    i_again = i_b < 0
    if sealed is not None:
        i_again = tl.load(sealed + i_b) > 0
    observe_heads(q, sums, counts, weight, i_again, strides, i_b, i_w, i_h, T, H, N, D, SHARE, 1, BD)


@lru_cache(maxsize=1024)
def observe_launch(
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    device: torch.device,
    heads: int,
    has_sealed: bool,
    has_weight: bool,
    mapped: int = 0,
) -> Launch:
    """Takes queries, sums, counts, and what was sealed, the weight and the map of rows, if there are any.

    ``mapped``: rows of the sums, if there is a map.
    """
    batch, query_heads, tokens, head_dim = shape
    constants = {
        "D": head_dim,
        "SHARE": query_heads // heads,
        "BD": power(head_dim),
        "num_warps": max(1, min(4, power(head_dim) // 32)),
        "enable_fp_fusion": False,
    }

    # Where each of them stands, 0 for nowhere.
    i_sealed, i_weight = 3 * has_sealed, (3 + has_sealed) * has_weight
    i_rows = (3 + has_sealed + has_weight) * bool(mapped)

    def nest(given: Sequence[Any]) -> tuple[Any, ...]:
        again, mean = given[i_sealed] if i_sealed else None, given[i_weight] if i_weight else None
        return given[0], again, given[1], given[2], mean, given[i_rows] if i_rows else None

    numbers = {"strides": stride, "H": heads, "T": tokens, "N": mapped or batch}
    return Launch(observe_kernel, (heads, batch), numbers, constants, device, nest)


def observe_triton(q: Tensor, sums: Tensor, counts: Tensor, *given: Any) -> None:
    """Launcher of `hfkvq.kernels.step.observe`."""
    sealed, weight, rows, keep = (*given, *[None] * 4)[:4]
    has = sealed is not None, weight is not None, 0 if rows is None else sums.shape[0]
    launch = observe_launch(q.shape, q.stride(), q.device, sums.shape[1], *has)
    own = [sums, counts, *[x for x in (sealed, weight, rows) if x is not None]]
    if keep is not None:
        keep(launch.bound(None, *own))
    launch(q, *own)
