"""Restore on the GPU. Every program looks first whether its row wants anything, and leaves at once if not."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from ..dispatch import reference
from ..pages import StoreFormat
from ._lib import DOT_DTYPES, cdiv, load_page, page_nest, part_kinds, run_shapes
from .compile import Wanted
from .hadamard import saturated
from .launch import Launch

TILE, WARPS = 4096, 4
"""Elements of a page that a program takes, and its warps."""


@triton.jit
def restore_side(
    window, table, page, i_from, i_to, i_b, i_h, i_slot, N, H, SHAPE: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr
):
    """BT tokens of one head of one side."""
    D: tl.constexpr = SHAPE.D
    G: tl.constexpr = SHAPE.G
    o_t = i_slot + tl.arange(0, BT)
    o_d = tl.arange(0, BD)
    m_x = (o_t < G)[:, None] & (o_d < D)[None, :]
    o_x = o_t[:, None] * D + o_d[None, :]
    p_to = window + (i_to * H + i_h) * (G * D) + o_x
    if i_from >= 0:
        tl.store(p_to, tl.load(window + (i_from * H + i_h) * (G * D) + o_x, mask=m_x, other=0.0), mask=m_x)
    else:
        i_head = tl.load(table + i_b * N).to(tl.int64) * H + i_h
        b_x = load_page(page, i_head, i_slot, o_t < G, SHAPE, BT, BD)
        tl.store(p_to, saturated(b_x.to(tl.float32), window.dtype.element_ty), mask=m_x)


@triton.jit(do_not_specialize=["N"])
def restore_kernel(
    window_k, window_v, due, source, rows, table, keys, values, N, H: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, BT: tl.constexpr, BDK: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """BT tokens of one head of a row's first page, of both sides."""
    i_t, i_bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    if tl.load(due + i_b) == 0:
        return
    i_from = tl.load(source + i_b).to(tl.int64)
    i_to = tl.load(rows + i_b).to(tl.int64)
    restore_side(window_k, table, keys, i_from, i_to, i_b, i_h, i_t * BT, N, H, KEYS, BT, BDK)
    restore_side(window_v, table, values, i_from, i_to, i_b, i_h, i_t * BT, N, H, VALUES, BT, BDV)


@lru_cache(maxsize=256)
def _launch(store: str, heads: int, dims: tuple[int, int], rows: int, blocks: int, device: torch.device) -> Launch:
    formats = StoreFormat.parse(store).runs[0]
    constants = {"H": heads, **run_shapes(formats, dims, TILE), "num_warps": WARPS}
    pages = page_nest(formats, 6)

    def nest(given: Sequence[Any]) -> tuple[Any, ...]:
        return (*given[:6], *pages(given))

    grid = (cdiv(formats[0].page_size, constants["BT"]), rows * heads)
    return Launch(restore_kernel, grid, {"N": blocks}, constants, device, nest)


def restore_wanted(form: StoreFormat, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> Wanted:
    """The variant for pages of a format."""
    made = _launch(form.spec, heads, (head_dim, head_dim), 1, 1, device)
    return made.wanted([dtype] * 2 + [torch.int32] * 4 + part_kinds(form, heads, head_dim, dtype))


def restore_triton(*given: Any) -> None:
    """Launcher of `hfkvq.kernels.restore`; f64 takes the reference."""
    due, source, rows, (keys, values), run, store = given
    if keys.dtype not in DOT_DTYPES:
        return reference("restore")(*given)
    table, *parts = run
    assert all([x.is_contiguous() for x in (keys, values, *parts)]), "written in place"
    if len(rows):
        sizes = keys.shape[1], (keys.shape[3], values.shape[3]), len(rows), table.shape[1]
        _launch(store.spec, *sizes, keys.device)(keys, values, due, source, rows, table.contiguous(), *parts)
    return None
