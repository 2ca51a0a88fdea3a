"""A step's tokens on the GPU, into windows and pages, in one launch: each launch of a step is a wait for the last one.

What few rows need, to seal a page or to take another's first page, is done by programs of their own, which take such
rows from lists, and leave at once where these are empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..dispatch import reference
from ..norms import BALANCE, Balance
from ..pages import SIDES, PageFormat, StoreFormat
from ._lib import DOT_DTYPES, Page, multiprocessors, overlap, page_block, page_nest, page_shape, power
from .append import AppendShape, NewTokens, append_constants, append_side, new_rows, new_tokens
from .launch import Launch
from .norms import MOST_ELEMENTS, norm_constants, page_factors
from .restore import TILE, restore_side
from .seal.channel import channel_constants, ranks_in_kernel, seal_channels
from .seal.token import seal_tokens, token_constants
from .step import observe_heads


class Side(NamedTuple):
    """Tensors of keys or of values: new tokens, windows, pages, and room for factors of pages, if they are normed."""

    x: Any
    window: Any
    page: Page
    norm: Any


class Rows(NamedTuple):
    """Tensors of `hfkvq.kernels.claim.Claimed`."""

    steps: Any
    found: Any


class Sums(NamedTuple):
    """Tensors of queries' sums, None where there are none; ``weight``: room for means."""

    q: Any
    sums: Any
    counts: Any
    weight: Any


class SideShape(NamedTuple):
    """Constants of a side of D channels.

    Attributes:
        W: tokens of a window.
        ALL: new tokens of all heads.
        HEAD: of one head.
        SEAL: constants of `seal_channels` or `seal_tokens`.
        CHANNEL: whether it is the first.
        TILES: tiles of a page's tokens.
        SLICES: slices of its words.
        NORM: constants of `page_factors`, or ().
        LOADED: constants of `restore_side`.
        BT: tokens that it takes at a time.
        BD: D, a power of two.
    """

    D: int
    W: int
    ALL: AppendShape
    HEAD: AppendShape
    SEAL: Any
    CHANNEL: bool
    TILES: int
    SLICES: int
    NORM: Any
    LOADED: Any
    BT: int
    BD: int


@triton.jit
def take_head(side, i_b, i_h, i_w, i_past, strides, factor, H, SHAPE: tl.constexpr):
    """Row i_b's token of one head, into row i_w of the windows."""
    # Triton 3.6 takes constants within constants only under a name of their own.
    HEAD: tl.constexpr = SHAPE.HEAD
    p_x = side.x + i_h * strides[1]
    b_x = new_rows(p_x, 0, i_b, strides, 1, 1, HEAD)
    append_side(b_x, p_x, side.window, side.window, i_b, i_w * H + i_h, i_past, strides, factor, 1, 1, 0, SHAPE.W, HEAD)


@triton.jit
def take_token(side, lengths, table, i_b, i_h, strides, factor, H, N, SHAPE: tl.constexpr):
    """Row i_b's token of one head, into its tail and its page."""
    D: tl.constexpr = SHAPE.D
    W: tl.constexpr = SHAPE.W
    SEAL: tl.constexpr = SHAPE.SEAL
    i_length = tl.load(lengths + i_b)
    i_past = tl.maximum(i_length - 1, 0)
    i_head = tl.load(table + i_b * N + i_past // SEAL.G).to(tl.int64) * H + i_h
    take_head(side, i_b, i_h, i_b, i_past, strides, factor, H, SHAPE)
    if i_length > 0:
        # The rounded token is read from its tail.
        tl.debug_barrier()
        p_source = side.window + ((i_b * H + i_h) * W + i_past % W) * D
        seal_tokens(side.page, p_source, None, None, i_head, i_past, i_past, 1, D, 1, SEAL)


@triton.jit(do_not_specialize=["N"])
def take_token_kernel(
    keys, values, lengths, table, s_k, s_v, factors, H, N, KEYS: tl.constexpr, VALUES: tl.constexpr, PDL: tl.constexpr
):
    """One head of one row and side."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        # Attention comes next, and waits for this kernel itself; what came before is there by now.
        tl.extra.cuda.gdc_launch_dependents()
    i_bh = tl.program_id(0).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    if tl.program_id(1) == 0:
        take_token(keys, lengths, table, i_b, i_h, s_k, factors[0], H, N, KEYS)
    else:
        take_token(values, lengths, table, i_b, i_h, s_v, factors[1], H, N, VALUES)


@triton.jit
def seal_page(side, p_weight, i_bh, i_h, i_head, i_w, i_start, H, SHAPE: tl.constexpr):
    """A page of one head, from row i_w of the windows."""
    D: tl.constexpr = SHAPE.D
    G: tl.constexpr = SHAPE.W
    SEAL: tl.constexpr = SHAPE.SEAL
    NORM: tl.constexpr = SHAPE.NORM
    p_source = side.window + (i_w * H + i_h) * (G * D)
    p_norm = side.norm
    if side.norm is not None:
        p_norm = side.norm + i_bh * (G if SHAPE.CHANNEL else D)
        page_factors(p_norm, p_source, tl.arange(0, G), D, 1, NORM)
        tl.debug_barrier()
    for i in range(SHAPE.TILES * SHAPE.SLICES):
        if SHAPE.CHANNEL:
            T: tl.constexpr = SEAL.NG * SEAL.GROUP
            i_j = i // SHAPE.SLICES * T
            p_own = p_norm
            if side.norm is not None:
                p_own = p_norm + i_j
            o_t = tl.arange(0, T)
            seal_channels(
                side.page, p_source + i_j * D, None, o_t, None, p_weight, p_own, i_head, i_start + i_j,
                i % SHAPE.SLICES, D, 1, SEAL,
            )  # fmt: skip
        else:
            i_first = i_start + i * SEAL.BT
            seal_tokens(side.page, p_source, None, p_norm, i_head, i_first, i_start, G, D, 1, SEAL)


@triton.jit
def row_of_list(p_list, i_job, B, H):
    """Row of a job, of which each row has one for each head and side: -1 where there are no more."""
    return tl.load(p_list + i_job // (2 * H), mask=i_job < 2 * H * B, other=-1)


@triton.jit
def window_of(rows, i_b, B, HALF, G: tl.constexpr):
    """Tokens of a row before its new one, and the row of the windows that takes it."""
    i_past = tl.load(rows.steps + B + i_b) - 1
    return i_past, tl.load(rows.found + i_b).to(tl.int64) + tl.where(i_past >= G, HALF, 0)


@triton.jit
def take_heads(side, rows, i_b, strides, factor, B, H, HALF, SHAPE: tl.constexpr):
    """Row i_b's token of all heads, into its window, unless it is a page's last."""
    ALL: tl.constexpr = SHAPE.ALL
    # The loads start together.
    b_x = new_rows(side.x, 0, i_b, strides, H, 1, ALL)
    i_past, i_w = window_of(rows, i_b, B, HALF, SHAPE.W)
    if tl.load(rows.steps + 6 * B + i_b) == 0:
        append_side(b_x, side.x, side.window, side.window, i_b, i_w, i_past, strides, factor, H, 1, 0, SHAPE.W, ALL)


@triton.jit
def fill_page(
    side, queries, rows, table, i_b, i_h, strides, s_q, factor, B, H, N, HALF, SHARE: tl.constexpr, SHAPE: tl.constexpr
):
    """The last token of a row's page joins the window of one head, which is sealed then."""
    i_past, i_w = window_of(rows, i_b, B, HALF, SHAPE.W)
    i_start = tl.load(rows.steps + 5 * B + i_b)
    i_head = tl.load(table + i_b * N + i_start // SHAPE.W).to(tl.int64) * H + i_h
    take_head(side, i_b, i_h, i_w, i_past, strides, factor, H, SHAPE)
    p_weight = queries.weight
    if queries.weight is not None:
        i_slot = tl.load(rows.found + i_b).to(tl.int64)
        i_again = tl.load(rows.steps + 4 * B + i_b) > 0
        observe_heads(
            queries.q, queries.sums, queries.counts, queries.weight, i_again, s_q, i_b, i_slot, i_h, 1, H, HALF,
            SHAPE.D, SHARE, 1, SHAPE.BD,
        )  # fmt: skip
        p_weight = queries.weight + (i_b * H + i_h) * SHAPE.D
    tl.debug_barrier()
    seal_page(side, p_weight, i_b * H + i_h, i_h, i_head, i_w, i_start, H, SHAPE)


@triton.jit
def first_page(side, rows, table, i_b, i_h, strides, factor, B, H, N, FOUND, SHAPE: tl.constexpr):
    """The first page of a row that lacks it, of one head."""
    LOADED: tl.constexpr = SHAPE.LOADED
    i_from = tl.load(rows.found + 2 * FOUND + i_b).to(tl.int64)
    i_to = tl.load(rows.found + i_b).to(tl.int64)
    for i_t in range(0, SHAPE.W, SHAPE.BT):
        restore_side(side.window, table, side.page, i_from, i_to, i_b, i_h, i_t, N, H, LOADED, SHAPE.BT, SHAPE.BD)
    # Its last token may join the other window in this launch.
    i_other = B
    for i_r in range(0, B, 32):
        o_r = i_r + tl.arange(0, 32)
        m_r = (tl.load(rows.found + o_r, mask=o_r < B, other=-1) == i_from) & (o_r < B)
        m_r = m_r & (tl.load(rows.steps + B + o_r, mask=m_r, other=0) == SHAPE.W)
        i_other = tl.minimum(i_other, tl.min(tl.where(m_r, o_r, B), 0))
    if i_other < B:
        tl.debug_barrier()
        take_head(side, i_other.to(tl.int64), i_h, i_to, SHAPE.W - 1, strides, factor, H, SHAPE)


@triton.jit(do_not_specialize=["B", "N", "HALF", "FOUND", "RESTORES"])
def take_page_kernel(
    keys, values, queries, rows, table, s_k, s_v, s_q, factors, B, H, N, HALF, FOUND, RESTORES,
    SHARE: tl.constexpr, BH: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """First programs of their own for keys, values and queries' sums of each row, unless its token is a page's last.

    They wait for nothing of each other: what few rows take is the time that attention, which comes next, waits. Those
    behind them take heads of rows that fill a page, then of rows that lack their first one.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    PARTS: tl.constexpr = 2 if queries.sums is None else 3
    i_p = tl.program_id(0)
    if i_p < PARTS * B:
        i_own = (i_p % B).to(tl.int64)
        if i_p < B:
            take_heads(keys, rows, i_own, s_k, factors[0], B, H, HALF, KEYS)
        elif i_p < 2 * B:
            take_heads(values, rows, i_own, s_v, factors[1], B, H, HALF, VALUES)
        elif queries.sums is not None:
            if tl.load(rows.steps + 6 * B + i_own) == 0:
                i_slot = tl.load(rows.found + i_own).to(tl.int64)
                i_again = tl.load(rows.steps + 4 * B + i_own) > 0
                observe_heads(
                    queries.q, queries.sums, queries.counts, None, i_again, s_q, i_own, i_slot, 0, 1, H, HALF, KEYS.D,
                    SHARE, BH, KEYS.BD,
                )  # fmt: skip
    else:
        n_programs = tl.num_programs(0) - PARTS * B
        i_job = i_p - PARTS * B
        i_b = row_of_list(rows.steps + 7 * B, i_job, B, H)
        while i_b >= 0:
            i_h = (i_job % H).to(tl.int64)
            if i_job // H % 2 == 0:
                fill_page(
                    keys, queries, rows, table, i_b.to(tl.int64), i_h, s_k, s_q, factors[0], B, H, N, HALF, SHARE, KEYS
                )
            else:
                fill_page(
                    values, Sums(None, None, None, None), rows, table, i_b.to(tl.int64), i_h, s_v, s_q, factors[1], B,
                    H, N, HALF, SHARE, VALUES,
                )  # fmt: skip
            i_job += n_programs
            i_b = row_of_list(rows.steps + 7 * B, i_job, B, H)
        i_job = i_p - PARTS * B
        i_b = tl.where(RESTORES > 0, row_of_list(rows.steps + 8 * B, i_job, B, H), -1)
        while i_b >= 0:
            i_h = (i_job % H).to(tl.int64)
            if i_job // H % 2 == 0:
                first_page(keys, rows, table, i_b.to(tl.int64), i_h, s_k, factors[0], B, H, N, FOUND, KEYS)
            else:
                first_page(values, rows, table, i_b.to(tl.int64), i_h, s_v, factors[1], B, H, N, FOUND, VALUES)
            i_job += n_programs
            i_b = row_of_list(rows.steps + 8 * B, i_job, B, H)


def _sides(
    form: StoreFormat, heads: int, dims: Sequence[int], width: int, rule: str, balance: Sequence[Balance]
) -> tuple[list[SideShape], int, list[int | None]]:
    """Constants of keys and of values, warps, and a head's factors of a page on each side, None for none."""
    shapes, found, factors = [(1, n, 1, dim) for n in (heads, 1) for dim in dims], [], []
    rotations = form.rotate_keys, form.rotate_values
    every, head = (append_constants(*pair, *rotations) for pair in (shapes[:2], shapes[2:]))
    warps = max(every["num_warps"] if form.sink else 0, head["num_warps"])
    for at, (fmt, side, dim, own) in enumerate(zip(form.runs[0], SIDES, dims, balance, strict=True)):
        channel, slices = fmt.axis == "channel", 1
        tokens = fmt.page_size if form.sink else 1
        if channel:
            (tiles, slices), seal = channel_constants(fmt, side == "keys", tokens, dim, rule if fmt.raised else "")
        else:
            _, seal = token_constants(fmt, side == "keys", tokens, dim)
            tiles = tokens // seal["SHAPE"].BT
        norm: Any = ()
        if fmt.normed:
            given = norm_constants(fmt.axis, fmt.page_size, dim, own)
            norm, warps = given["SHAPE"], max(warps, given["num_warps"])
        warps = max(warps, seal["num_warps"])
        name, block = ("KEYS", "VALUES")[at], page_block(fmt, dim, TILE)
        found.append(
            SideShape(
                D=dim, W=width, ALL=every[name], HEAD=head[name], SEAL=seal["SHAPE"], CHANNEL=channel, TILES=tiles,
                SLICES=slices, NORM=norm, LOADED=page_shape(fmt, side, dim), BT=block, BD=max(16, power(dim)),
            )
        )  # fmt: skip
        factors.append((fmt.page_size if channel else dim) if fmt.normed else None)
    return found, warps, factors


def _is_served(form: StoreFormat, dims: Sequence[int], rule: str) -> bool:
    """True where pages of both sides are sealed by one program for each head."""

    def fits(fmt: PageFormat, dim: int) -> bool:
        # Walks through a page take as many programs as it has pairs of tokens.
        if fmt.trellis or fmt.bits >= 8 or (fmt.normed and fmt.page_size * power(dim) > MOST_ELEMENTS):
            return False
        return fmt.axis == "token" or not rule or ranks_in_kernel(fmt, dim)

    return len(form.runs) == 1 and all(fits(fmt, dim) for fmt, dim in zip(form.runs[0], dims, strict=True))


@lru_cache(maxsize=1024)
def take_token_launch(store: str, new: NewTokens, blocks: int) -> Launch:
    """Takes keys, values, lengths, the table, two tails, and the pages' tensors."""
    form, (rows, heads, _, dim), device = StoreFormat.parse(store), new.keys, new.device
    shapes, warps, _ = _sides(form, heads, (dim, new.values[3]), new.key_tail, "", (BALANCE, BALANCE))
    pages = page_nest(form.runs[0], 6)

    def nest(given: Sequence[Any]) -> tuple[Any, ...]:
        keys, values, lengths, table, *tails = given[:6]
        own = zip((keys, values), tails, pages(given), strict=True)
        sides = [Side(x, tail, page, None) for x, tail, page in own]
        return *sides, lengths, table

    factors = tuple([shape.HEAD.BLOCK**-0.5 for shape in shapes])
    numbers = {"s_k": new.key_stride, "s_v": new.value_stride, "factors": factors, "H": heads, "N": blocks}
    constants = {"KEYS": shapes[0], "VALUES": shapes[1], "num_warps": warps, "enable_fp_fusion": False}
    constants |= {"PDL": bool(overlap(device)), **overlap(device)}
    return Launch(take_token_kernel, (rows * heads, 2), numbers, constants, device, nest)


def take_token_triton(*given: Any) -> None:
    """Launcher of `hfkvq.kernels.take_token`; formats without a kernel take the reference."""
    keys, values, lengths, tails, parts, table, store = given
    dims = keys.shape[3], values.shape[3]
    if not _is_served(store, dims, "") or any(fmt.whole for fmt in store.runs[0]):
        return reference("take_token")(*given)
    own = [*parts[0], *parts[1]]
    assert all([x.is_contiguous() for x in (*tails, *own)]), "written in place"
    if len(lengths):
        launch = take_token_launch(store.spec, new_tokens(keys, values, (*tails, *tails)), table.shape[1])
        launch(keys, values, lengths.contiguous(), table.contiguous(), *tails, *own)
    return None


@lru_cache(maxsize=1024)
def take_page_launch(
    store: str,
    query: tuple[int, ...],
    query_stride: tuple[int, ...],
    new: NewTokens,
    slots: int,
    blocks: int,
    rule: str,
    balance: tuple[Balance, Balance],
    sums: bool,
    restores: bool,
    stride: int,
) -> tuple[Launch, list[tuple[int, ...] | None]]:
    """Takes keys, values, two windows, steps, what was found, the table, and the pages' tensors.

    Then room for factors of either side, and queries, two tensors of sums and room for means, of what there is. The
    shapes of both rooms come with it.
    """
    form, (rows, heads, _, dim), device = StoreFormat.parse(store), new.keys, new.device
    shapes, warps, factors = _sides(form, heads, (dim, new.values[3]), form.sink, rule, balance)
    pages, end = page_nest(form.runs[0], 7), 7 + sum(len(fmt.names) for fmt in form.runs[0])

    def nest(given: Sequence[Any]) -> tuple[Any, ...]:
        xs, windows, lists, table, last = given[:2], given[2:4], given[4:6], given[6], list(given[end:])
        norms = [None if size is None else last.pop(0) for size in factors]
        own = zip(xs, windows, pages(given), norms, strict=True)
        sides = [Side(x, window, page, norm) for x, window, page, norm in own]
        return *sides, Sums(*(last or [None] * 4)), Rows(*lists), table

    # A page takes all registers of a multiprocessor.
    own = rows * (3 if sums else 2)
    programs = min(2 * heads * rows, max(32, multiprocessors(device) - own))
    numbers = {
        "s_k": new.key_stride,
        "s_v": new.value_stride,
        "s_q": query_stride,
        "factors": tuple([shape.HEAD.BLOCK**-0.5 for shape in shapes]),
        "B": rows,
        "H": heads,
        "N": blocks,
        "HALF": slots,
        "FOUND": stride,
        "RESTORES": int(restores),
    }
    constants = {"SHARE": query[1] // heads, "BH": power(heads), "KEYS": shapes[0], "VALUES": shapes[1]}
    constants |= {"num_warps": warps, "enable_fp_fusion": False, "PDL": bool(overlap(device)), **overlap(device)}
    launch = Launch(take_page_kernel, (own + programs,), numbers, constants, device, nest)
    rooms = [None if size is None else (rows, heads, size) for size in factors]
    return launch, [*rooms, (rows, heads, dim) if sums else None]


def take_page_triton(*given: Any) -> None:
    """Launcher of `hfkvq.kernels.take_page`; trellis codes and f64 take the reference.

    On a GPU that launches a kernel for each of its parts, which a graph can record.
    """
    query, keys, values, rows, windows, parts, table, sums, store, rule, balance, restores = given
    dims = keys.shape[3], values.shape[3]
    odd = windows[0].dtype not in DOT_DTYPES or not _is_served(store, dims, rule)
    if odd or store.sink != store.runs[0][0].page_size:
        return reference("take_page")(*given)
    own = [*parts[0], *parts[1]]
    assert all([x.is_contiguous() for x in (*windows, *own, *sums, rows.steps)]), "written in place"
    if not keys.shape[0]:
        return None
    sizes = query.shape, query.stride(), new_tokens(keys, values, (*windows, *windows)), windows[0].shape[0] // 2
    launch, rooms = take_page_launch(
        store.spec, *sizes, table.shape[1], rule, tuple(balance), bool(sums), restores, rows.found.stride(0)
    )
    kinds = torch.float16, torch.float16, torch.float32
    norms = [torch.empty(s, dtype=k, device=keys.device) for s, k in zip(rooms, kinds, strict=True) if s is not None]
    last = [*norms[:-1], query, *sums, norms[-1]] if sums else norms
    launch(keys, values, *windows, rows.steps, rows.found, table.contiguous(), *own, *last)
    return None
