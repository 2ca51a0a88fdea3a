"""Restore on the GPU. Every program looks first whether its row wants anything, and leaves at once if not."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dispatch import reference
from ..pages import PageFormat, Side
from ._lib import DOT_DTYPES, Page, cdiv, load_page_in_order, page_block, page_shape, power
from .hadamard import saturated
from .launch import Launch

TILE, WARPS = 4096, 4
"""Elements of a page that a program takes, and its warps."""


@triton.jit(do_not_specialize=["N"])
def restore_kernel(
    windows, table, due, source, rows, page, N, H: tl.constexpr, SHAPE: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr
):
    """BT tokens of one head of a row's first page."""
    i_t, i_bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    if tl.load(due + i_b) == 0:
        return
    D: tl.constexpr = SHAPE.D
    G: tl.constexpr = SHAPE.G
    i_from = tl.load(source + i_b).to(tl.int64)
    i_to = tl.load(rows + i_b).to(tl.int64)
    i_slot = i_t * BT
    o_t = i_slot + tl.arange(0, BT)
    o_d = tl.arange(0, BD)
    m_x = (o_t < G)[:, None] & (o_d < D)[None, :]
    o_x = o_t[:, None] * D + o_d[None, :]
    p_to = windows + (i_to * H + i_h) * (G * D) + o_x
    if i_from >= 0:
        tl.store(p_to, tl.load(windows + (i_from * H + i_h) * (G * D) + o_x, mask=m_x, other=0.0), mask=m_x)
    else:
        i_head = tl.load(table + i_b * N).to(tl.int64) * H + i_h
        b_x = load_page_in_order(page, i_head, i_slot, o_t < G, SHAPE, BT, BD)
        tl.store(p_to, saturated(b_x.to(tl.float32), windows.dtype.element_ty), mask=m_x)


@lru_cache(maxsize=256)
def _launch(fmt: str, side: Side, shape: tuple[int, ...], rows: int, blocks: int, device: torch.device) -> Launch:
    form, (_, heads, page, head_dim) = PageFormat.parse(fmt), shape
    block = page_block(form, head_dim, TILE, 1)
    constants = {
        "H": heads,
        "SHAPE": page_shape(form, side, head_dim),
        "BT": block,
        "BD": max(16, power(head_dim)),
        "num_warps": WARPS,
        # The reference multiplies and adds, and rounds both.
        "enable_fp_fusion": False,
    }
    at = [form.names.index(name) if name in form.names else None for name in Page._fields]

    def nest(given: Sequence[Any]) -> tuple[Any, ...]:
        parts = [None if i is None else given[5 + i] for i in at]
        if isinstance(parts[0], Tensor) and form.bits == 8:
            # Bytes stand in for fp8, a type that some GPUs lack.
            parts[0] = parts[0].view(torch.uint8)
        return (*given[:5], Page(*parts))

    return Launch(restore_kernel, (cdiv(page, block), rows * heads), {"N": blocks}, constants, device, nest)


def restore_triton(
    windows: Tensor,
    parts: Sequence[Tensor],
    table: Tensor,
    due: Tensor,
    source: Tensor,
    rows: Tensor,
    fmt: str,
    side: Side,
) -> None:
    """Launcher of `hfkvq.kernels.restore`; what the interpreter would truncate takes the reference."""
    if windows.dtype not in DOT_DTYPES or (not windows.is_cuda and windows.dtype == torch.bfloat16):
        return reference("restore")(windows, parts, table, due, source, rows, fmt, side)
    assert all([x.is_contiguous() for x in (windows, *parts)]), "written in place"
    if len(rows):
        launch = _launch(fmt, side, windows.shape, len(rows), table.shape[1], windows.device)
        launch(windows, table.contiguous(), due, source, rows, *parts)
    return None
