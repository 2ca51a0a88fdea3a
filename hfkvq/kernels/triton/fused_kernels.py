"""Kernels of fused steps: a step's beginning and its end, each of several operations.

A plain step takes three launches: its beginning, which appends, counts what will be due and observes; attention; and
its end, which merges and seals. What one of them counts only a later one changes, so that no program waits for another.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..pages import SIDES, StoreFormat
from ..step_tensors import Sealing
from ._lib import power
from .append import NewTokens, append_constants, append_numbers, append_row
from .launch import Launch
from .merge import merge_kernel
from .seal.token import few_tokens, seal_few
from .step import observe_kernel
from .windows import I_LENGTH, I_RUNS, tokens_due, window_numbers


@triton.jit(do_not_specialize=["T", "S", "WK", "WV", "LOCAL_K", "LOCAL_V", "UNIT_K", "UNIT_V"])
def begin_kernel(
    keys, values, sink_k, sink_v, tail_k, tail_v, counters, found, q, sums, counts,
    s_qb, s_qh, s_ql, s_qd, LOCAL_K, LOCAL_V, UNIT_K, UNIT_V,
    s_kb, s_kh, s_kl, s_kd, s_vb, s_vh, s_vl, s_vd, factor_k, factor_v, H, T, S, WK, WV,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, ROTATE_K: tl.constexpr,
    ROTATE_V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, LOOPS_K: tl.constexpr, LOOPS_V: tl.constexpr,
    SHARE: tl.constexpr, BD: tl.constexpr, SIGNED: tl.constexpr,
):  # fmt: skip
    """One KV head of a row observes its queries, if that is asked for; the first appends the row's tokens.

    ``found``: sealed keys, sealed values, and what will be due of either, a row each.
    """
    i_b = tl.program_id(1).to(tl.int64)
    B = tl.num_programs(1)
    if tl.program_id(0) == 0:
        p_count = counters + i_b
        i_length = append_row(
            keys, values, sink_k, sink_v, tail_k, tail_v, p_count + I_LENGTH * B, None, i_b, s_kb, s_kh, s_kl, s_kd,
            s_vb, s_vh, s_vl, s_vd, factor_k, factor_v, H, T, S, WK, WV,
            DK, DV, BLOCK_K, BLOCK_V, ROTATE_K, ROTATE_V, BK, BV, LOOPS_K, LOOPS_V,
        )  # fmt: skip
        if found is not None:
            i_rest = tl.maximum(i_length + T - S, 0)
            i_k = tl.load(p_count + I_RUNS * B)
            i_v = tl.load(p_count + (I_RUNS + 1) * B)
            tl.store(found + i_b, i_k)
            tl.store(found + B + i_b, i_v)
            tl.store(found + 2 * B + i_b, tokens_due(i_rest, i_k, LOCAL_K, UNIT_K))
            tl.store(found + 3 * B + i_b, tokens_due(i_rest, i_v, LOCAL_V, UNIT_V))
    if q is not None:
        observe_kernel(q, None, sums, counts, None, None, s_qb, s_qh, s_ql, s_qd, H, T, B, DK, SHARE, BD, SIGNED)


@triton.jit(do_not_specialize=["SPLITS", "QUERIES", "B", "N", "MK", "MV", "WK", "WV"])
def end_kernel(
    part, part_top, part_sum, out, counters, found, table, tail_k, tail_v,
    codes_k, scale_k, zero_k, codes_v, scale_v, zero_v, SPLITS, norm, QUERIES, B, H, N, MK, MV, WK, WV,
    SINKS: tl.constexpr, SHARE: tl.constexpr, SEVERAL: tl.constexpr, DV: tl.constexpr, BS: tl.constexpr,
    BD: tl.constexpr, ROTATE: tl.constexpr, PDL: tl.constexpr, DK: tl.constexpr, G: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """SHARE * QUERIES programs merge, as in `merge_kernel`; those behind them seal TILES tiles of keys, then values.

    A row's counters are written by one program and read by none.
    """
    i_m = tl.program_id(0)
    n_rows = SHARE * QUERIES if SEVERAL else SHARE
    if i_m < n_rows:
        merge_kernel(
            part, part_top, part_sum, None, out, SPLITS, norm, QUERIES, SINKS, SHARE, SEVERAL, DV, BS, BD, ROTATE, PDL
        )  # fmt: skip
    else:
        if PDL:
            # Attention reads counters and tails.
            tl.extra.cuda.gdc_wait()
        if tl.program_id(2) == 0:
            i_t, i_bh = i_m - n_rows, tl.program_id(1).to(tl.int64)
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


@lru_cache(maxsize=1024)
def begin_launch(
    new: NewTokens,
    form: StoreFormat,
    sealing: Sealing | None,
    query: tuple[tuple[int, ...], tuple[int, ...], bool] | None,
) -> Launch:
    """Takes keys, values, four windows, counters, what is due if it is counted, and queries, sums and counts if any.

    ``query``: shape and stride of queries that are observed, and whether with their signs.
    """
    constants = append_constants(new.keys, new.values, form.rotate_keys, form.rotate_values)
    batch, heads, _, head_dim = new.keys
    counts, observes = sealing is not None, query is not None
    shape, stride, signed = query or ((batch, heads), (0, 0, 0, 0), False)
    constants |= {"SHARE": shape[1] // heads, "BD": power(head_dim), "SIGNED": signed}
    numbers = dict(zip(("s_qb", "s_qh", "s_ql", "s_qd"), stride, strict=True)) | append_numbers(new, constants)
    windows = window_numbers(sealing or Sealing((0, 0), (1, 1), (0, 0)))
    numbers |= {name: windows[name] for name in ("LOCAL_K", "LOCAL_V", "UNIT_K", "UNIT_V")}

    def nest(given: Sequence[Any]) -> tuple[Any, ...]:
        return *given[:7], given[7] if counts else None, *(given[-3:] if observes else (None, None, None))

    return Launch(begin_kernel, (heads if observes else 1, batch), numbers, constants, new.device, nest)


@lru_cache(maxsize=1024)
def end_launch(merge: Launch, new: NewTokens, form: StoreFormat, blocks: int, most: tuple[int, int]) -> Launch:
    """Takes sums, tops, weights, the result, counters, what is due, both tails, table, and pages of keys and values.

    Multiply-adds are fused as in a merge by itself; what seals asks for no sum of a product.
    """
    batch, heads = new.keys[:2]
    dims = (new.keys[3], new.values[3])
    shapes, tiles, places, at = [], [], [], 9
    for fmt, side, dim, tokens in zip(form.runs[0], SIDES, dims, most, strict=True):
        shape, count = few_tokens(fmt, side == "keys", tokens, dim, new.device) if tokens else ((), 0)
        shapes.append(tuple(shape))
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
    numbers = {**merge.numbers, "B": batch, "H": heads, "N": blocks, "MK": most[0], "MV": most[1]}
    numbers |= {"WK": new.key_tail, "WV": new.value_tail}
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
