"""Everything a layer holds as dense keys or values: read where it lies, written where it belongs.

Programs follow the pages, whose tokens stand together in memory and in the result; what a row has no page for, its
windows and its padding, is left to programs that follow the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..decode import RUNS
from ..dispatch import reference
from ..hadamard import factor_of
from ..pages import SIDES, PageFormat, Side, StoreFormat, split_runs
from ._lib import (
    DOT_DTYPES,
    cdiv,
    load_page,
    on_device,
    page_block,
    page_nest,
    page_shape,
    page_tensors,
    part_kinds,
    power,
    run_shapes,
    side_kinds,
)
from .compile import Wanted
from .hadamard import butterflies, saturated
from .launch import Launch

TILE, WARPS = 4096, 4
"""Elements of a page that a program takes, and its warps."""

LOOPS = 16
"""Blocks of columns that a program looks through for what no page holds."""


@triton.jit
def store_tokens(
    out, b_x, o_row, m_t, rotation, D: tl.constexpr, ROTATE: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr
):
    """Rotates tokens [BT, BD] back, and stores them in rows of D elements."""
    if ROTATE > 0:
        b_x = tl.reshape(b_x.to(tl.float32), (BT * BD // ROTATE, ROTATE))
        b_x = tl.reshape(butterflies(b_x, ROTATE, BT * BD // ROTATE) * rotation, (BT, BD))
    b_x = saturated(b_x, out.dtype.element_ty)
    o_d = tl.arange(0, BD)
    tl.store(out + o_row[:, None] * D + o_d[None, :], b_x, mask=m_t[:, None] & (o_d < D)[None, :])


# Tables may begin at any block.
@triton.jit(do_not_specialize=["table", "B", "N", "COLUMNS"])
def gather_pages_kernel(
    out, counters, table, pos, page, rotation, B, N, COLUMNS, H: tl.constexpr, COUNTER: tl.constexpr, S: tl.constexpr,
    WINDOW: tl.constexpr, SHAPE: tl.constexpr, ROTATE: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """BT tokens of one page of a run, whose tokens sealed are row COUNTER of the counters; all, without counters."""
    i_t, i_bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    G: tl.constexpr = SHAPE.G
    CHUNKS: tl.constexpr = (G + BT - 1) // BT
    i_page, i_slot = i_t // CHUNKS, i_t % CHUNKS * BT
    # The loads start together: most of a program's time is waiting for one after the other.
    n, i_start = N * G, 0
    if counters is not None:
        n = tl.load(counters + COUNTER * B + i_b)
        i_start = tl.load(counters + i_b)
        i_length = tl.load(counters + B + i_b)
    i_head = tl.load(table + i_b * N + i_page).to(tl.int64) * H + i_h
    if i_page * G + i_slot >= n:
        return
    if WINDOW > 0:
        # Columns are the newest ones. Pages before them may hold other tokens by now.
        i_start = COLUMNS - i_length
        if i_start + S + i_page * G + i_slot + BT <= 0:
            return
    o_slot = i_slot + tl.arange(0, BT)
    o_j = i_page * G + o_slot
    m_t = (o_j < n) & (o_slot < G)
    if pos is None:
        o_x = o_j + S
    else:
        o_x = tl.load(pos + i_b * (N * G) + o_j, mask=m_t, other=0)
    o_column = i_start + o_x
    m_out = m_t & (o_column >= 0) & (o_column < COLUMNS)
    if i_page * G + i_slot + BT <= n:
        # All tokens are there, as nearly always: then none of them is looked at for that.
        m_t = tl.full([BT], 1, tl.int1)
        b_x = load_page(page, i_head, i_slot, m_t, SHAPE, BT, BD)
        store_tokens(out, b_x, i_bh * COLUMNS + o_column, m_out, rotation, SHAPE.D, ROTATE, BT, BD)
        return
    b_x = load_page(page, i_head, i_slot, m_t, SHAPE, BT, BD)
    store_tokens(out, b_x, i_bh * COLUMNS + o_column, m_out, rotation, SHAPE.D, ROTATE, BT, BD)


@triton.jit(do_not_specialize=["B", "W", "COLUMNS"])
def gather_windows_kernel(
    out, counters, sink, tail, rotation, B, W, COLUMNS,
    H: tl.constexpr, SIDE: tl.constexpr, RUNS: tl.constexpr, S: tl.constexpr, WINDOW: tl.constexpr, D: tl.constexpr,
    ROTATE: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, LOOPS: tl.constexpr,
):  # fmt: skip
    """BT logical columns LOOPS times: what they hold of the windows, 0 where they hold nothing.

    Columns of pages are left alone, and most blocks have nothing else. SIDE is the row of the counters with the tokens
    that the first run has sealed of this side.
    """
    i_t, i_bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_b = i_bh // H
    i_start = tl.load(counters + i_b)
    i_length = tl.load(counters + B + i_b)
    if WINDOW > 0:
        i_start = COLUMNS - i_length
    n_sealed = 0
    for i_run in tl.static_range(RUNS):
        n_sealed += tl.load(counters + (SIDE + 2 * i_run) * B + i_b)
    for i in range(LOOPS):
        i_column = (i_t * LOOPS + i) * BT
        i_first = i_column - i_start
        if (i_column < COLUMNS) & ((i_first < S) | (i_first + BT > S + n_sealed)):
            o_x = i_first + tl.arange(0, BT)
            o_d = tl.arange(0, BD)
            # Tokens behind the sink that no page holds.
            o_newest = o_x - S - n_sealed
            m_tail = (o_x >= S) & (o_newest >= 0) & (o_newest < W) & (o_x < i_length)
            p_tail = tail + (i_bh * W + (o_x - S) % W)[:, None] * D + o_d[None, :]
            b_x = tl.load(p_tail, mask=m_tail[:, None] & (o_d < D)[None, :], other=0.0)
            if S > 0:
                m_sink = (o_x >= 0) & (o_x < S) & (o_x < i_length)
                p_sink = sink + (i_bh * S + o_x)[:, None] * D + o_d[None, :]
                b_sink = tl.load(p_sink, mask=m_sink[:, None] & (o_d < D)[None, :], other=0.0)
                b_x = tl.where(m_sink[:, None], b_sink, b_x)
            o_column = i_column + tl.arange(0, BT)
            m_t = (o_column < COLUMNS) & ((o_x < S) | (o_newest >= 0))
            if RUNS > 1:
                # Tokens of pages may stand before the row's start, and zeros are there already.
                m_t = m_t & (o_x >= 0)
            store_tokens(out, b_x, i_bh * COLUMNS + o_column, m_t, rotation, D, ROTATE, BT, BD)


def _constants(heads: int, head_dim: int, sink: int = 0, window: int = 0, rotate: int = 0) -> dict[str, Any]:
    """Arguments of both kernels, by name."""
    own = {"H": heads, "S": sink, "WINDOW": window, "ROTATE": rotate, "BD": max(16, power(head_dim))}
    # The reference multiplies and adds, and rounds both.
    return {**own, "num_warps": WARPS, "enable_fp_fusion": False}


def _page_constants(fmt: PageFormat, run: int, side: Side, head_dim: int) -> dict[str, Any]:
    """Further arguments of `gather_pages_kernel` for a run."""
    shape, block = page_shape(fmt, side, head_dim), page_block(fmt, head_dim, TILE)
    return {"COUNTER": RUNS + 2 * run + (side == "values"), "SHAPE": shape, "BT": block}


@lru_cache(maxsize=256)
def _run_launch(
    fmt: PageFormat, side: Side, rows: int, blocks: int, heads: int, head_dim: int, counted: bool, device: torch.device
) -> Launch:
    """Takes the result, counters if there are any, the table, and the pages' tensors."""
    constants = _constants(heads, head_dim) | _page_constants(fmt, 0, side, head_dim)
    pages = page_nest((fmt,), 2 + counted)
    numbers = {"rotation": 1.0, "B": rows, "N": blocks, "COLUMNS": blocks * fmt.page_size}
    grid = (blocks * cdiv(fmt.page_size, constants["BT"]), rows * heads)

    def nest(given: Sequence[Any]) -> tuple[Any, ...]:
        return given[0], given[1] if counted else None, given[1 + counted], None, pages(given)[0]

    return Launch(gather_pages_kernel, grid, numbers, constants, device, nest)


def run_wanted(
    fmt: PageFormat, side: Side, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, whole: bool
) -> Wanted:
    """The variant of `run_pages_triton` in f32, or for whole pages in the model's dtype."""
    launch = _run_launch(fmt, side, 1, 1, heads, head_dim, not whole, device)
    first = [dtype] if whole else [torch.float32, torch.int32]
    return launch.wanted([*first, torch.int32, *side_kinds(fmt, side, heads, head_dim, dtype)])


def run_pages_triton(*given: Any) -> Tensor:
    """Launcher of `hfkvq.kernels.products.run_pages`; models of f64 take the reference."""
    table, count, parts, fmt, side, head_dim, *rest = given
    dtype = rest[0] if rest else torch.float32
    if dtype not in DOT_DTYPES or (fmt.bits == 16 and parts[0].dtype not in DOT_DTYPES):
        return reference("run_pages")(*given)
    (batch, blocks), heads = table.shape, parts[0].shape[1]
    assert all([part.is_contiguous() for part in parts]), "pages are contiguous"
    out = torch.empty((batch, heads, blocks * fmt.page_size, head_dim), dtype=dtype, device=table.device)
    if out.numel():
        # The first token is the first column.
        before = RUNS + (side == "values")
        counters = [] if count is None else [torch.cat([table.new_zeros((before, batch)), count[None]])]
        launch = _run_launch(fmt, side, batch, blocks, heads, head_dim, count is not None, table.device)
        launch(out, *counters, table.contiguous(), *parts)
    return out


def gather_rows_triton(*given: Any) -> Tensor:
    """Launcher of `hfkvq.kernels.gather_rows`; float64 models take the reference."""
    counters, windows, runs, columns, store, side = given
    at = SIDES.index(side)
    sink, tail = windows[at].contiguous(), windows[2 + at].contiguous()
    if sink.dtype not in DOT_DTYPES:
        return reference("gather_rows")(*given)
    views = split_runs(store, runs)
    batch, heads, _, head_dim = sink.shape
    rotate = store.rotate_values if at else store.rotate_keys
    # Runs in no order may leave columns out; what is in order leaves them to the windows.
    make = torch.empty if store.ordered else torch.zeros
    out = make((batch, heads, columns, head_dim), dtype=sink.dtype, device=sink.device)
    if not out.numel():
        return out
    common = {"out": out, "counters": counters.contiguous(), "rotation": factor_of(rotate)}
    common |= {"B": batch, "COLUMNS": columns, **_constants(heads, head_dim, store.sink, store.window, rotate)}
    with on_device(sink):
        for i, (view, formats) in enumerate(zip(views, store.runs, strict=True)):
            fmt, blocks = formats[at], view.table.shape[1]
            if not blocks:
                continue
            own = _page_constants(fmt, i, side, head_dim)
            gather_pages_kernel[(blocks * -(-fmt.page_size // own["BT"]), batch * heads)](
                table=view.table.contiguous(),
                pos=None if view.pos is None else view.pos.contiguous(),
                page=page_tensors(view.values if at else view.keys, fmt),
                N=blocks,
                **own,
                **common,
            )
        block_t = max(1, 4096 // power(head_dim))
        gather_windows_kernel[(cdiv(columns, block_t * LOOPS), batch * heads)](
            sink=sink,
            tail=tail,
            W=tail.shape[2],
            SIDE=RUNS + at,
            RUNS=len(views),
            D=head_dim,
            BT=block_t,
            LOOPS=LOOPS,
            **common,
        )
    return out


@triton.jit
def gather_unit(
    out, x, window, page, o_row, i_window, i_head, i_slot, i_h, m_sealed, i_held, i_end, s_t, s_h, rotation,
    WINDOWED: tl.constexpr, SHAPE: tl.constexpr, ROTATE: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """BT tokens of one head of a request's block: sealed ones, those in a window, and new ones.

    Args:
        x: the block's first token among the new ones.
        o_row: rows of the result, [BT].
        i_window: head of a window.
        i_head: head of a page.
        i_slot: the first token's place in the block.
        m_sealed: whether a page holds the block where there are windows, and not the window.
        i_held: tokens of the block that are held; those behind them, up to ``i_end``, are new.
    """
    D: tl.constexpr = SHAPE.D
    G: tl.constexpr = SHAPE.G
    o_t = i_slot + tl.arange(0, BT)
    o_d = tl.arange(0, BD)
    m_d = (o_d < D)[None, :]
    if i_slot < i_held:
        m_t = (o_t < i_held) & (o_t < G)
        if not WINDOWED:
            b_x = load_page(page, i_head, i_slot, m_t, SHAPE, BT, BD).to(tl.float32)
        elif m_sealed:
            # Pages are sealed whole: then none of their tokens is looked at.
            b_x = load_page(page, i_head, i_slot, tl.full([BT], 1, tl.int1), SHAPE, BT, BD).to(tl.float32)
        else:
            p_window = window + (i_window * G + o_t)[:, None] * D + o_d[None, :]
            b_x = tl.load(p_window, mask=m_t[:, None] & m_d, other=0.0).to(tl.float32)
        # One copy of what rotates back is enough to compile.
        store_tokens(out, b_x, o_row, m_t, rotation, D, ROTATE, BT, BD)
    if (i_slot + BT > i_held) & (i_slot < i_end):
        m_new = (o_t >= i_held) & (o_t < i_end)
        p_new = x + o_t.to(tl.int64)[:, None] * s_t + i_h * s_h + o_d[None, :]
        b_new = tl.load(p_new, mask=m_new[:, None] & m_d, other=0.0)
        store_tokens(out, b_new, o_row, m_new, 1.0, D, 0, BT, BD)


@triton.jit(do_not_specialize=["units", "requests", "windows", "table", "N", "U", "R"])
def gather_requests_kernel(
    out_k, out_v, new_k, new_v, units, requests, windows, window_k, window_v, table, keys, values, N, U, R, s_k, s_v,
    s_kh, s_vh, rotation_k, rotation_v, H: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    ROTATE_K: tl.constexpr, ROTATE_V: tl.constexpr, BT: tl.constexpr, BDK: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """BT tokens of one head of a request's block, of keys or of values."""
    G: tl.constexpr = KEYS.G
    CHUNKS: tl.constexpr = (G + BT - 1) // BT
    i_u, i_h = tl.program_id(0) // CHUNKS, tl.program_id(1)
    i_slot = tl.program_id(0) % CHUNKS * BT
    i_r = tl.load(units + i_u)
    i_block = tl.load(units + U + i_u)
    i_begin = tl.load(requests + i_r).to(tl.int64)
    i_held = tl.load(requests + R + i_r) - i_block * G
    i_end = tl.load(requests + 2 * R + i_r) - i_block * G
    i_new = tl.load(requests + 3 * R + i_r).to(tl.int64)
    if i_slot >= i_end:
        return
    i_end = tl.minimum(i_end, G)
    i_new -= i_held
    i_held = tl.minimum(tl.maximum(i_held, 0), G)
    m_sealed = (i_block > 0) & (i_held == G)
    i_window = i_h.to(tl.int64)
    WINDOWED: tl.constexpr = windows is not None
    if WINDOWED:
        i_window += tl.load(windows + tl.where(i_block == 0, 0, R) + i_r).to(tl.int64) * H
    i_head = tl.load(table + i_r.to(tl.int64) * N + i_block).to(tl.int64) * H + i_h
    o_row = (i_begin + i_block * G + i_slot + tl.arange(0, BT)) * H + i_h
    if tl.program_id(2) == 0:
        gather_unit(
            out_k, new_k + i_new * s_k, window_k, keys, o_row, i_window, i_head, i_slot, i_h, m_sealed, i_held, i_end,
            s_k, s_kh, rotation_k, WINDOWED, KEYS, ROTATE_K, BT, BDK,
        )  # fmt: skip
    else:
        gather_unit(
            out_v, new_v + i_new * s_v, window_v, values, o_row, i_window, i_head, i_slot, i_h, m_sealed, i_held, i_end,
            s_v, s_vh, rotation_v, WINDOWED, VALUES, ROTATE_V, BT, BDV,
        )  # fmt: skip


@lru_cache(maxsize=256)
def _requests_launch(
    store: str,
    heads: int,
    dims: tuple[int, int],
    strides: tuple[int, ...],
    sizes: tuple[int, int, int],
    windowed: bool,
    device: torch.device,
) -> Launch:
    """Takes results, new tokens, units, requests, windows if there are any, the table, and pages."""
    form = StoreFormat.parse(store)
    formats, (units, requests, blocks) = form.runs[0], sizes
    constants = {"H": heads, **run_shapes(formats, dims, TILE), "num_warps": WARPS}
    constants |= {"ROTATE_K": form.rotate_keys, "ROTATE_V": form.rotate_values}
    numbers = {"N": blocks, "U": units, "R": requests}
    numbers |= {"rotation_k": factor_of(form.rotate_keys), "rotation_v": factor_of(form.rotate_values)}
    numbers |= dict(zip(("s_k", "s_kh", "s_v", "s_vh"), strides, strict=True))
    begin = 10 if windowed else 7
    pages = page_nest(formats, begin)

    def nest(given: Sequence[Any]) -> tuple[Any, ...]:
        windows = given[6:9] if windowed else (None,) * 3
        return (*given[:6], *windows, given[begin - 1], *pages(given))

    grid = (units * cdiv(formats[0].page_size, constants["BT"]), heads, 2)
    return Launch(gather_requests_kernel, grid, numbers, constants, device, nest)


def requests_wanted(
    form: StoreFormat, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, windowed: bool
) -> Wanted:
    """The variant for new tokens as models make them."""
    i32, strides = torch.int32, (heads * head_dim, head_dim) * 2
    made = _requests_launch(form.spec, heads, (head_dim, head_dim), strides, (1, 1, 1), windowed, device)
    kinds = [dtype] * 4 + [i32] * 2 + [i32, dtype, dtype] * windowed + [i32]
    return made.wanted([*kinds, *part_kinds(form, heads, head_dim, dtype)])


def gather_requests_triton(*given: Any) -> tuple[Tensor, Tensor]:
    """Launcher of `hfkvq.kernels.gather_requests`; f64 takes the reference."""
    keys, values, units, requests, run, windows, tokens, store = given
    if keys.dtype not in DOT_DTYPES:
        return reference("gather_requests")(*given)
    table, *parts = run
    assert all([x.is_contiguous() for x in (*parts, *windows)]), "pages and windows are contiguous"
    keys, values = (x if x.stride(2) == 1 else x.contiguous() for x in (keys, values))
    out = [torch.empty((tokens, *x.shape[1:]), dtype=x.dtype, device=x.device) for x in (keys, values)]
    if units.shape[1]:
        heads, dims = keys.shape[1], (keys.shape[2], values.shape[2])
        sizes = units.shape[1], requests.shape[1], table.shape[1]
        strides = *keys.stride()[:2], *values.stride()[:2]
        launch = _requests_launch(store.spec, heads, dims, strides, sizes, bool(windows), keys.device)
        launch(*out, keys, values, units.contiguous(), requests.contiguous(), *windows, table.contiguous(), *parts)
    return out[0], out[1]
