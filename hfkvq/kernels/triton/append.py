"""Append on the GPU: keys, values and the counter of a row in one program, so that the counter has one reader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..decode import LENGTH
from ..dispatch import reference
from ..hadamard import block_of, largest_block
from ._lib import cdiv, power
from .hadamard import saturated, turned
from .launch import Launch
from .windows import without_last


@triton.jit
def blocks_of(i, H, T, D: tl.constexpr, BLOCK: tl.constexpr, BR: tl.constexpr):
    """Blocks of BLOCK channels, BR at a time: a mask, heads, tokens and channels."""
    BLOCKS: tl.constexpr = D // BLOCK
    o_r = i * BR + tl.arange(0, BR)
    o_c = (o_r % BLOCKS * BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :]
    return o_r < T * H * BLOCKS, (o_r // BLOCKS % H).to(tl.int64), o_r // (BLOCKS * H), o_c


@triton.jit
def new_rows(
    x, i, i_b, s_b, s_h, s_l, s_d, H, T, D: tl.constexpr, BLOCK: tl.constexpr, BR: tl.constexpr
):  # fmt: skip
    """The i-th BR blocks of a row's new tokens: [BR, BLOCK]."""
    m_r, o_h, o_j, o_c = blocks_of(i, H, T, D, BLOCK, BR)
    p_x = (x + i_b * s_b + o_h * s_h + o_j.to(tl.int64) * s_l)[:, None] + o_c * s_d
    return tl.load(p_x, mask=m_r[:, None], other=0.0)


@triton.jit
def append_side(
    b_x, x, sink, tail, i_b, i_w, i_length, s_b, s_h, s_l, s_d, factor, H, T, S, W,
    D: tl.constexpr, BLOCK: tl.constexpr, ROTATE: tl.constexpr, BR: tl.constexpr, LOOPS: tl.constexpr,
):  # fmt: skip
    """New tokens of row i_b and one side, for row i_w of the windows, BR blocks of BLOCK channels at a time.

    ``b_x`` are the first.
    """
    for i in range(LOOPS):
        if i > 0:
            b_x = new_rows(x, i, i_b, s_b, s_h, s_l, s_d, H, T, D, BLOCK, BR)
        m_r, o_h, o_j, o_c = blocks_of(i, H, T, D, BLOCK, BR)
        b_y = b_x
        if ROTATE:
            b_y = saturated(turned(b_x.to(tl.float32), ROTATE, BR, False) * factor, x.dtype.element_ty)
        o_token = i_length + o_j
        m_sink = o_token < S
        o_head = i_w * H + o_h
        p_sink = sink + ((o_head * S + o_token) * D)[:, None] + o_c
        p_tail = tail + ((o_head * W + (o_token - S) % W) * D)[:, None] + o_c
        tl.store(p_sink, b_y, mask=(m_r & m_sink)[:, None])
        tl.store(p_tail, b_y, mask=(m_r & (o_token >= S))[:, None])


@triton.jit(do_not_specialize=["T", "S", "WK", "WV", "length"])
def append_kernel(
    keys, values, sink_k, sink_v, tail_k, tail_v, counters, rows, length, s_kb, s_kh, s_kl, s_kd, s_vb, s_vh, s_vl,
    s_vd, factor_k, factor_v, H, T, S, WK, WV,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, ROTATE_K: tl.constexpr,
    ROTATE_V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, LOOPS_K: tl.constexpr, LOOPS_V: tl.constexpr,
):  # fmt: skip
    """One row; its counter stands ``length`` elements into ``counters``, and no other program reads it.

    With ``rows`` the counter is of several layers, and counts the tokens already.
    """
    i_b = tl.program_id(0).to(tl.int64)
    p_length = counters + length + i_b
    i_length = tl.load(p_length)
    i_w = i_b
    if rows is not None:
        i_length -= T
        i_w = tl.load(rows + i_b).to(tl.int64)
    # The loads start together with the length's.
    b_k = new_rows(keys, 0, i_b, s_kb, s_kh, s_kl, s_kd, H, T, DK, BLOCK_K, BK)
    b_v = new_rows(values, 0, i_b, s_vb, s_vh, s_vl, s_vd, H, T, DV, BLOCK_V, BV)
    append_side(
        b_k, keys, sink_k, tail_k, i_b, i_w, i_length, s_kb, s_kh, s_kl, s_kd, factor_k, H, T, S, WK,
        DK, BLOCK_K, ROTATE_K, BK, LOOPS_K,
    )  # fmt: skip
    append_side(
        b_v, values, sink_v, tail_v, i_b, i_w, i_length, s_vb, s_vh, s_vl, s_vd, factor_v, H, T, S, WV,
        DV, BLOCK_V, ROTATE_V, BV, LOOPS_V,
    )  # fmt: skip
    if rows is None:
        # Every warp has read the length by now.
        tl.debug_barrier()
        tl.store(p_length, i_length + T)


def is_misrounded(x: Tensor, tail: Tensor, rotate: int) -> bool:
    """True if the interpreter would truncate where bf16 should be rounded."""
    rounds = bool(rotate) or x.dtype != tail.dtype
    return rounds and not x.is_cuda and torch.bfloat16 in (x.dtype, tail.dtype)


def append_constants(
    keys: tuple[int, ...], values: tuple[int, ...], rotate_keys: int, rotate_values: int
) -> dict[str, Any]:
    """Constants of kernels that call `append_side` for keys and values of these shapes, by name."""
    found: dict[str, Any] = {"enable_fp_fusion": False}
    for name, shape, rotate in (("V", values, rotate_values), ("K", keys, rotate_keys)):
        _, heads, tokens, dim = shape
        block = block_of(rotate) or largest_block(dim)
        # Elements a step of the loop holds: enough for 16 bytes a thread, and no more than the tokens of the call.
        rows = power(min(tokens * heads * dim, 8192) // block)
        found |= {f"D{name}": dim, f"BLOCK_{name}": block, f"ROTATE_{name}": rotate, f"B{name}": rows}
        found[f"LOOPS_{name}"] = cdiv(tokens * heads * dim, rows * block)
        # Strides of the keys come last.
        found["num_warps"] = max(1, min(8, power(rows * block // 256)))
    return found


class NewTokens(NamedTuple):
    """Keys and values of new tokens and the windows they join, but for their addresses.

    Attributes:
        keys: shape.
        key_stride: likewise.
        values: shape.
        value_stride: likewise.
        dtypes: of keys and of values.
        held: dtype of the windows.
        sink: tokens of the sink.
        key_tail: slots of the tail of keys.
        value_tail: of values.
        device: of everything.
    """

    keys: tuple[int, ...]
    key_stride: tuple[int, ...]
    values: tuple[int, ...]
    value_stride: tuple[int, ...]
    dtypes: tuple[torch.dtype, torch.dtype]
    held: torch.dtype
    sink: int
    key_tail: int
    value_tail: int
    device: torch.device


def new_tokens(keys: Tensor, values: Tensor, windows: Sequence[Tensor]) -> NewTokens:
    """Constants of launches."""
    sink_k, _, tail_k, tail_v = windows
    lengths = sink_k.shape[2], tail_k.shape[2], tail_v.shape[2]
    kinds = (keys.dtype, values.dtype), tail_k.dtype
    return NewTokens(keys.shape, keys.stride(), values.shape, values.stride(), *kinds, *lengths, keys.device)


def append_numbers(new: NewTokens, constants: Mapping[str, Any]) -> dict[str, int | float]:
    """Arguments of `append_kernel` by name: strides, factors of rotations, heads, tokens, and lengths of windows."""
    _, heads, tokens, _ = new.keys
    found: dict[str, int | float] = {"H": heads, "T": tokens, "S": new.sink, "WK": new.key_tail, "WV": new.value_tail}
    for side, stride in (("k", new.key_stride), ("v", new.value_stride)):
        found |= dict(zip((f"s_{side}b", f"s_{side}h", f"s_{side}l", f"s_{side}d"), stride, strict=True))
        found[f"factor_{side}"] = constants[f"BLOCK_{side.upper()}"] ** -0.5
    return found


@lru_cache(maxsize=1024)
def append_launch(new: NewTokens, rotate_keys: int, rotate_values: int, mapped: bool = False) -> Launch:
    """Takes keys, values, four windows, counters and, if ``mapped``, rows."""
    constants = append_constants(new.keys, new.values, rotate_keys, rotate_values)
    batch = new.keys[0]
    numbers = {"length": LENGTH * batch, **append_numbers(new, constants)}
    return Launch(append_kernel, (batch,), numbers, constants, new.device, None if mapped else without_last)


def append_triton(
    keys: Tensor,
    values: Tensor,
    counters: Tensor,
    windows: Sequence[Tensor],
    rotate_keys: int,
    rotate_values: int,
    rows: Tensor | None = None,
) -> None:
    """Launcher of `hfkvq.kernels.append`; bf16 rounding under the interpreter takes the reference."""
    if is_misrounded(keys, windows[2], rotate_keys or rotate_values):
        return reference("append")(keys, values, counters, windows, rotate_keys, rotate_values, rows)
    assert all([x.is_contiguous() for x in (counters, *windows)]), "written in place"
    launch = append_launch(new_tokens(keys, values, windows), rotate_keys, rotate_values, rows is not None)
    launch(keys, values, *windows, counters, *([] if rows is None else [rows]))
    return None
