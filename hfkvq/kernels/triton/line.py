"""Launches of `hfkvq.kernels.line`, one after the other, with one look at their tensors.

A plain step takes three: its beginning, which appends, counts what will be due and observes; attention; and its end,
which merges and seals. What one of them counts only a later one changes, so that no program waits for another.

Nothing is remembered but launches of known shape: where tensors lie is asked anew each time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, reduce
from operator import or_
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from ..decode import LENGTH
from ..line import Observing, Sealing
from ..pages import RunView, Side, StoreFormat
from ._lib import power
from .append import NewTokens, append_constants, append_launch, append_numbers, append_row, is_misrounded
from .configs import edition
from .decode import Plan, decode_plan, table_places
from .due import I_LENGTH, I_RUNS, due_launch, due_of
from .launch import Launch, is_watched
from .merge import MaskKind, mask_kind, mask_words, merge_kernel
from .seal import due_tile, few_tokens, seal_launch, seal_plain, seal_tokens
from .step import observe_kernel


@triton.jit(do_not_specialize=["T", "S", "WK", "WV", "LOCAL_K", "LOCAL_V", "UNIT_K", "UNIT_V"])
def begin_kernel(
    keys, values, sink_k, sink_v, tail_k, tail_v, counters, found, q, sums, counts,
    s_qb, s_qh, s_ql, s_qd, LOCAL_K, LOCAL_V, UNIT_K, UNIT_V,
    s_kb, s_kh, s_kl, s_kd, s_vb, s_vh, s_vl, s_vd, factor_k, factor_v, H, T, S, WK, WV,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, ROTATE_K: tl.constexpr,
    ROTATE_V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, LOOPS_K: tl.constexpr, LOOPS_V: tl.constexpr,
    SHARE: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """One KV head of a row observes its queries, if that is asked for; the first appends the row's tokens.

    ``found``: sealed keys, sealed values, and what will be due of either, a row each.
    """
    i_b = tl.program_id(1).to(tl.int64)
    B = tl.num_programs(1)
    if tl.program_id(0) == 0:
        p_count = counters + i_b
        i_length = append_row(
            keys, values, sink_k, sink_v, tail_k, tail_v, p_count + I_LENGTH * B, i_b, s_kb, s_kh, s_kl, s_kd, s_vb,
            s_vh, s_vl, s_vd, factor_k, factor_v, H, T, S, WK, WV,
            DK, DV, BLOCK_K, BLOCK_V, ROTATE_K, ROTATE_V, BK, BV, LOOPS_K, LOOPS_V,
        )  # fmt: skip
        if found is not None:
            i_rest = tl.maximum(i_length + T - S, 0)
            i_k = tl.load(p_count + I_RUNS * B)
            i_v = tl.load(p_count + (I_RUNS + 1) * B)
            tl.store(found + i_b, i_k)
            tl.store(found + B + i_b, i_v)
            tl.store(found + 2 * B + i_b, due_of(i_rest, i_k, LOCAL_K, UNIT_K))
            tl.store(found + 3 * B + i_b, due_of(i_rest, i_v, LOCAL_V, UNIT_V))
    if q is not None:
        observe_kernel(q, None, sums, counts, None, s_qb, s_qh, s_ql, s_qd, H, T, DK, SHARE, BD)


@triton.jit
def seal_few(
    codes, scale, zero, table, tail, found, i_t, i_bh, AT: tl.constexpr, B, H, N, M, SLOTS,
    D: tl.constexpr, G: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Those of a few slots of a side's pages that are due, from a tail; FORM is what `few_tokens` says."""
    i_b, i_h = i_bh // H, i_bh % H
    BT: tl.constexpr = FORM[2]
    i_first, i_count, i_new = due_tile(found + AT * B + i_b, found + (AT + 2) * B + i_b, i_t, M, BT)
    if (i_first < i_count + i_new) & (i_new > 0):
        s_h = SLOTS * D
        if FORM[0] >= 8:
            seal_plain(
                codes, scale, table, tail, None, i_b, i_h, i_first, i_count, i_new, H * s_h, s_h, D, 1, H, N, M, SLOTS,
                D, G, FORM[1], FORM[3], FORM[4], BT, FORM[5],
            )  # fmt: skip
        else:
            seal_tokens(
                codes, scale, zero, None, table, tail, None, None, i_b, i_h, i_bh, i_first, i_count, i_new, H * s_h,
                s_h, D, 1, H, N, M, SLOTS, D, G, FORM[0], FORM[1], AT == 0, BT, FORM[3],
            )  # fmt: skip


@triton.jit(do_not_specialize=["SPLITS", "B", "N", "MK", "MV", "WK", "WV"])
def end_kernel(
    part, part_top, part_sum, out, counters, found, table, tail_k, tail_v,
    codes_k, scale_k, zero_k, codes_v, scale_v, zero_v, SPLITS, norm, B, H, N, MK, MV, WK, WV,
    SINKS: tl.constexpr, ROWS: tl.constexpr, Q: tl.constexpr, DV: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr,
    ROTATE: tl.constexpr, PDL: tl.constexpr, DK: tl.constexpr, G: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """ROWS programs merge, as in `merge_kernel`; those behind them seal TILES tiles of keys, then values.

    A row's counters are written by one program and read by none.
    """
    i_m = tl.program_id(0)
    if i_m < ROWS:
        merge_kernel(part, part_top, part_sum, None, out, SPLITS, norm, SINKS, ROWS, Q, DV, BS, BD, ROTATE, PDL)
    else:
        if PDL:
            # Attention reads counters and tails.
            tl.extra.cuda.gdc_wait()
        if tl.program_id(2) == 0:
            i_t, i_bh = i_m - ROWS, tl.program_id(1).to(tl.int64)
            if (i_t == 0) & (i_bh % H == 0):
                p_found = found + i_bh // H
                p_sealed = counters + I_RUNS * B + i_bh // H
                tl.store(p_sealed, tl.load(p_found) + tl.load(p_found + 2 * B))
                tl.store(p_sealed + B, tl.load(p_found + B) + tl.load(p_found + 3 * B))
            if i_t < TILES:
                if codes_k is not None:
                    seal_few(
                        codes_k, scale_k, zero_k, table, tail_k, found, i_t, i_bh, 0, B, H, N, MK, WK, DK, G, KEYS
                    )  # fmt: skip
            elif codes_v is not None:
                seal_few(
                    codes_v, scale_v, zero_v, table, tail_v, found, i_t - TILES, i_bh, 1, B, H, N, MV, WV, DV, G, VALUES
                )  # fmt: skip


def _is_current(x: Tensor) -> bool:
    return not x.is_cuda or x.get_device() == torch.cuda.current_device()


class _Sums(NamedTuple):
    """Where the sums of splits lie in one tensor: f32 in all, and which are tops, weights, and what is due."""

    elements: int
    tops: int
    totals: int
    found: int

    def split(self, buffer: Tensor, part: tuple[int, ...]) -> list[Tensor]:
        """Sums, tops and weights as tensors, and what is due, i32."""
        places = ((0, part), (self.tops, part[:3]), (self.totals, part[:3]))
        sums = [buffer[at : at + math.prod(shape)].view(shape) for at, shape in places]
        return [*sums, buffer[self.found :].view(torch.int32)]


def _sums(part: tuple[int, ...], rows: int) -> _Sums:
    # Each begins at a multiple of sixteen bytes.
    count = -(-part[0] * part[1] * part[2] // 4) * 4
    found = count * part[3] + 2 * count
    return _Sums(found + 4 * rows, count * part[3], count * (part[3] + 1), found)


@lru_cache(maxsize=1024)
def _begin_launch(
    new: NewTokens,
    form: StoreFormat,
    sealing: Sealing | None,
    query: tuple[tuple[int, ...], tuple[int, ...]] | None,
) -> Launch:
    """Takes keys, values, four windows, counters, what is due if it is counted, and queries, sums and counts if any.

    ``query``: shape and stride of queries that are observed.
    """
    constants = append_constants(new.keys, new.values, form.rotate_keys, form.rotate_values)
    batch, heads, _, head_dim = new.keys
    counts, observes = sealing is not None, query is not None
    shape, stride = query or ((batch, heads), (0, 0, 0, 0))
    local, unit, _ = sealing or ((0, 0), (1, 1), (0, 0))
    constants |= {"SHARE": shape[1] // heads, "BD": power(head_dim)}
    numbers = (*stride, *local, *unit, *append_numbers(new, constants))

    def nest(given: Sequence[Any]) -> tuple[Any, ...]:
        return *given[:7], given[7] if counts else None, *(given[-3:] if observes else (None, None, None))

    return Launch(begin_kernel, (heads if observes else 1, batch), numbers, constants, new.device, nest)


@lru_cache(maxsize=1024)
def _end_launch(merge: Launch, new: NewTokens, form: StoreFormat, blocks: int, most: tuple[int, int]) -> Launch:
    """Takes sums, tops, weights, the result, counters, what is due, both tails, table, and pages of keys and values.

    Multiply-adds are fused as in a merge by itself; what seals asks for no sum of a product.
    """
    batch, heads = new.keys[:2]
    dims = (new.keys[3], new.values[3])
    sides: tuple[Side, Side] = ("keys", "values")
    shapes, tiles, places, at = [], [], [], 9
    for fmt, side, dim, tokens in zip(form.runs[0], sides, dims, most, strict=True):
        shape, count = few_tokens(fmt, side, tokens, dim, new.device) if tokens else ((), 0)
        shapes.append(shape)
        tiles.append(count)
        names = {name: at + i for i, name in enumerate(fmt.names)}
        places += [names.get(name) if tokens else None for name in ("codes", "scale", "zero")]
        at += len(names)
    order = [0, 1, 2, 3, 4, 5, 8, 6, 7, *places]

    def nest(given: Sequence[Any]) -> tuple[Any, ...]:
        if isinstance(given[0], Tensor):
            # Not every GPU that Triton knows has an fp8 type.
            given = [x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x for x in given]
        return tuple([None if i is None else given[i] for i in order])

    rows, *rest = merge.grid
    numbers = (*merge.numbers, batch, heads, blocks, *most, new.key_tail, new.value_tail)
    constants = {
        **merge.constants,
        "DK": dims[0],
        "DV": dims[1],
        "G": form.runs[0][0].page_size,
        "KEYS": shapes[0],
        "VALUES": shapes[1],
        "TILES": tiles[0],
    }
    return Launch(end_kernel, (rows + sum(tiles), *rest), numbers, constants, new.device, nest)


class _Step(NamedTuple):
    """A step's launches, and what they write beside the store.

    Attributes:
        begin: see `_begin_launch` and `append_launch`.
        attend: see `decode_plan`.
        end: see `_end_launch` and `merge_launch`.
        sums: where the sums of splits and what is due lie.
        part: shape of the sums.
        out: shape of the result.
        dtype: of the result.
    """

    begin: Launch
    attend: Launch
    end: Launch
    sums: _Sums
    part: tuple[int, ...]
    out: tuple[int, ...]
    dtype: torch.dtype


@lru_cache(maxsize=1024)
def _step(
    store: str,
    query: tuple[int, ...],
    query_stride: tuple[int, ...],
    dtype: torch.dtype,
    keys: tuple[int, ...],
    key_stride: tuple[int, ...],
    values: tuple[int, ...],
    value_stride: tuple[int, ...],
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    windows: tuple[int, int, int],
    blocks: tuple[int, ...],
    mask: MaskKind | None,
    scaling: float,
    softcap: float,
    device: torch.device,
    sealing: Sealing | None,
    observes: bool,
    edition: int,
) -> _Step | None:
    form = StoreFormat.parse(store)
    new = NewTokens(keys, key_stride, values, value_stride, dtypes[:2], dtypes[2], *windows, device)
    held = (keys[1], values[3], new.key_tail, new.value_tail, new.held)
    plan: Plan | None = decode_plan(
        store, query, query_stride, dtype, held, blocks, mask, scaling, softcap, device, edition
    )  # fmt: skip
    if plan is None:
        return None
    if sealing is None and not observes:
        begin = append_launch(new, form.rotate_keys, form.rotate_values)
    else:
        begin = _begin_launch(new, form, sealing, (query, query_stride) if observes else None)
    end = plan.merge if sealing is None else _end_launch(plan.merge, new, form, blocks[0], sealing.most)
    return _Step(begin, plan.launches[0], end, _sums(plan.part, keys[0]), plan.part, plan.out, plan.dtype)


def append_attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    counters: Tensor,
    windows: Sequence[Tensor],
    runs: Sequence[Tensor],
    scaling: float,
    softcap: float,
    store: StoreFormat,
    sealing: Sealing | None = None,
    observing: Observing | None = None,
    mask: Tensor | None = None,
) -> Tensor | None:
    """See `hfkvq.kernels.line.append_attend`; None where the operations have to go one by one, and nothing is done."""
    device, spec = q.device, store.spec
    if not _is_current(q):
        return None
    sink_k, _, tail_k, tail_v = windows
    if not q.is_cuda and is_misrounded(keys, tail_k, store.rotate_keys or store.rotate_values):
        return None
    step = _step(
        spec,
        q.shape,
        q.stride(),
        q.dtype,
        keys.shape,
        keys.stride(),
        values.shape,
        values.stride(),
        (keys.dtype, values.dtype, tail_k.dtype),
        (sink_k.shape[2], tail_k.shape[2], tail_v.shape[2]),
        tuple([runs[at].shape[1] for at in table_places(spec)]),
        None if mask is None else mask_kind(mask),
        scaling,
        softcap,
        device,
        sealing,
        observing is not None,
        edition(),
    )
    if step is None:
        return None
    begin, attend, end, sums, part, shape, dtype = step
    buffer = torch.empty(sums.elements, dtype=torch.float32, device=device)
    out = torch.empty(shape, dtype=dtype, device=device)
    held = [counters, *windows, *runs]
    lie = [x.data_ptr() for x in held]
    at, q_at, k_at, v_at, out_at = [x.data_ptr() for x in (buffer, q, keys, values, out)]
    bits = reduce(or_, lie, at | q_at | k_at | v_at | out_at)
    parts = [at, at + 4 * sums.tops, at + 4 * sums.totals]
    masks = [] if mask is None else [mask_words(mask)]
    seen = [x.data_ptr() for x in masks]
    asked = [q_at, *lie, *seen, *parts]
    begun = [k_at, v_at, *lie[1:5], lie[0]]
    ended = [*parts, out_at]
    if sealing is not None:
        found = at + 4 * sums.found
        begun.append(found)
        ended += [lie[0], found, *lie[3:]]
    if observing is not None:
        seen += [observing.sums.data_ptr(), observing.counts.data_ptr()]
        begun += [q_at, *seen[-2:]]
    if not (reduce(or_, seen, bits) if seen else bits) & 15:
        # As nearly always. What lies within the buffer begins at multiples of sixteen from where it does.
        ready = begin.aligned, attend.aligned, end.aligned
    else:
        ready = begin.ready(begun), attend.ready(asked), end.ready(ended)
    if None in ready:
        tensors = sums.split(buffer, part)
        begins = [keys, values, *windows, counters, *([] if sealing is None else tensors[3:]), *_seen(q, observing)]
        ends = [*tensors[:3], out] + ([] if sealing is None else [counters, tensors[3], *held[3:]])
        _first((begin, begins), (attend, [q, *held, *masks, *tensors[:3]]), (end, ends), counters, keys)
        return out if out.dtype == q.dtype else out.to(q.dtype)
    stream, watched = driver.active.get_current_stream(device.index), is_watched()
    begin.run(ready[0], begun, stream, watched)
    try:
        attend.run(ready[1], asked, stream, watched)
        end.run(ready[2], ended, stream, watched)
    except BaseException:
        _take_back(counters, keys)
        raise
    return out


def _seen(q: Tensor, observing: Observing | None) -> tuple[Tensor, ...]:
    return () if observing is None else (q, *observing)


def _first(
    begin: tuple[Launch, list[Tensor]],
    attend: tuple[Launch, list[Tensor]],
    end: tuple[Launch, list[Tensor]],
    counters: Tensor,
    keys: Tensor,
) -> None:
    """Launches of which some have not been needed yet. What cannot be compiled or loaded fails before all of them."""
    for launch, tensors in (begin, attend, end):
        launch.prepare(tensors)
    begin[0](*begin[1])
    try:
        attend[0](*attend[1])
        end[0](*end[1])
    except BaseException:
        _take_back(counters, keys)
        raise


def _take_back(counters: Tensor, keys: Tensor) -> None:
    """Counts new tokens as not stored: the step failed, and they will come again."""
    counters[LENGTH] -= keys.shape[2]


@lru_cache(maxsize=1024)
def _seals(
    store: str,
    rule: str | None,
    shapes: tuple[tuple[int, ...], ...],
    strides: tuple[tuple[int, ...], ...],
    dtype: torch.dtype,
    device: torch.device,
    blocks: int,
    local: tuple[int, int],
    unit: tuple[int, int],
    most: tuple[int, int],
    positions: int | None,
) -> tuple[Launch, tuple[Launch | None, ...]] | None:
    """The launch that counts, and those that seal keys and values; None where a side has no kernel."""
    form, tails = StoreFormat.parse(store), (shapes[0][2], shapes[1][2])
    count = due_launch(shapes[0][0], form.sink, tails, local, unit, most, device, len(form.runs), positions)
    sides: list[Launch | None] = []
    for at, side in enumerate(("keys", "values")):
        fmt = form.runs[-1][at]
        made = None
        if most[at]:
            own = rule if fmt.raised and rule else ""
            made = seal_launch(fmt, side, shapes[at], strides[at], dtype, device, blocks, most[at], own)
            if made is None:
                return None
        sides.append(made)
    return count, tuple(sides)


def seal_tail(
    counters: Tensor,
    windows: Sequence[Tensor],
    run: RunView,
    local: tuple[int, int],
    unit: tuple[int, int],
    most: tuple[int, int],
    store: StoreFormat,
    rule: str | None,
) -> bool:
    """See `hfkvq.kernels.line.seal_tail`; False where the operations have to go one by one, and nothing is done."""
    device, tails = counters.device, windows[2:]
    if not _is_current(counters):
        return False
    made = _seals(
        store.spec,
        rule,
        (tails[0].shape, tails[1].shape),
        (tails[0].stride(), tails[1].stride()),
        tails[0].dtype,
        device,
        run.table.shape[1],
        local,
        unit,
        most,
        None if run.pos is None else run.pos.shape[1],
    )
    if made is None:
        return False
    count, sides = made
    batch = counters.shape[1]
    found = torch.empty(4 * batch + batch * sum(most), dtype=torch.int32, device=device)
    at = found.data_ptr()
    table = run.table.data_ptr()
    counted = [counters.data_ptr(), at] if run.pos is None else [counters.data_ptr(), at, run.pos.data_ptr()]
    ready = [count.ready(counted)]
    given = []
    index = at + 16 * batch
    for i, (side, parts) in enumerate(zip(sides, (run.keys, run.values), strict=True)):
        if side is not None:
            own = [x.data_ptr() for x in parts]
            own += [table, at + 4 * batch * i, at + 4 * batch * (2 + i), tails[i].data_ptr(), index]
            given.append((side, own))
            ready.append(side.ready(own))
        index += 4 * batch * most[i]
    if None in ready:
        return False
    stream, watched = driver.active.get_current_stream(device.index), is_watched()
    count.run(ready[0], counted, stream, watched)
    for (side, own), variant in zip(given, ready[1:], strict=True):
        side.run(variant, own, stream, watched)
    return True
