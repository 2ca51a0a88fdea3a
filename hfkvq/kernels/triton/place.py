"""Place on the GPU: a program copies some slots of one head of a request's window, of keys or of values."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dispatch import reference
from ._lib import DOT_DTYPES, cdiv, power
from .compile import Wanted
from .launch import Launch

TILE, WARPS = 4096, 4
"""Elements that a program copies, and its warps."""


@triton.jit
def place_side(
    x, window, i_first, i_slot, i_count, i_head, i_h, i_t, s_t, s_h, D: tl.constexpr, G: tl.constexpr, BT: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """The i_t-th BT tokens of a stretch."""
    o_t = i_t * BT + tl.arange(0, BT)
    o_d = tl.arange(0, BD)
    m_x = (o_t < i_count)[:, None] & (o_d < D)[None, :]
    p_x = x + (i_first + o_t)[:, None] * s_t + i_h * s_h + o_d[None, :]
    p_window = window + (i_head * G + i_slot + o_t)[:, None] * D + o_d[None, :]
    tl.store(p_window, tl.load(p_x, mask=m_x, other=0.0).to(window.dtype.element_ty), mask=m_x)


@triton.jit(do_not_specialize=["R", "rows", "places"])
def place_kernel(
    keys, values, window_k, window_v, rows, places, R, s_k, s_kh, s_v, s_vh, H: tl.constexpr, G: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, BT: tl.constexpr, BDK: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """BT tokens of one head of a request."""
    CHUNKS: tl.constexpr = (G + BT - 1) // BT
    i_r, i_t, i_h = tl.program_id(0) // CHUNKS, tl.program_id(0) % CHUNKS, tl.program_id(1)
    i_count = tl.load(places + 2 * R + i_r)
    if i_t * BT >= i_count:
        return
    i_first = tl.load(places + i_r).to(tl.int64)
    i_slot = tl.load(places + R + i_r)
    i_head = tl.load(rows + i_r).to(tl.int64) * H + i_h
    if tl.program_id(2) == 0:
        place_side(keys, window_k, i_first, i_slot, i_count, i_head, i_h, i_t, s_k, s_kh, DK, G, BT, BDK)
    else:
        place_side(values, window_v, i_first, i_slot, i_count, i_head, i_h, i_t, s_v, s_vh, DV, G, BT, BDV)


@lru_cache(maxsize=256)
def _launch(
    requests: int, heads: int, page: int, dims: tuple[int, int], strides: tuple[int, ...], device: torch.device
) -> Launch:
    """Takes keys, values, their windows, rows and places."""
    block = min(power(page), max(1, TILE // power(max(dims))))
    constants = {"H": heads, "G": page, "DK": dims[0], "DV": dims[1], "BT": block, "num_warps": WARPS}
    constants |= {"BDK": power(dims[0]), "BDV": power(dims[1])}
    numbers = {"R": requests, **dict(zip(("s_k", "s_kh", "s_v", "s_vh"), strides, strict=True))}
    return Launch(place_kernel, (requests * cdiv(page, block), heads, 2), numbers, constants, device)


def place_wanted(heads: int, page: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> Wanted:
    """The variant for new tokens as models make them."""
    made = _launch(1, heads, page, (head_dim, head_dim), (heads * head_dim, head_dim) * 2, device)
    return made.wanted([dtype] * 4 + [torch.int32] * 2)


def place_triton(keys: Tensor, values: Tensor, windows: Sequence[Tensor], rows: Tensor, places: Tensor) -> None:
    """Launcher of `hfkvq.kernels.place`; f64 takes the reference."""
    if keys.dtype not in DOT_DTYPES:
        return reference("place")(keys, values, windows, rows, places)
    assert all([window.is_contiguous() for window in windows]), "written in place"
    keys, values = (x if x.stride(2) == 1 else x.contiguous() for x in (keys, values))
    if len(rows):
        strides = *keys.stride()[:2], *values.stride()[:2]
        sizes = len(rows), keys.shape[1], windows[0].shape[2], (keys.shape[2], values.shape[2])
        _launch(*sizes, strides, keys.device)(keys, values, *windows, rows.contiguous(), places.contiguous())
    return None
