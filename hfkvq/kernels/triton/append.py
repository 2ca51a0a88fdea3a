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
from ..hadamard import largest_block
from ._lib import cdiv, power
from .hadamard import butterflies, saturated
from .launch import Launch
from .pair_format import Row


class AppendShape(NamedTuple):
    """Constants of one side of a step's new tokens.

    Attributes:
        D: channels.
        BLOCK: channels that are taken as a row: a rotation's block, if there is one.
        ROTATE: the rotation, 0 for none.
        BR: rows at a time.
        LOOPS: how many times.
    """

    D: int
    BLOCK: int
    ROTATE: int
    BR: int
    LOOPS: int


@triton.jit
def blocks_of(i, H, T, SHAPE: tl.constexpr):
    """Rows of a side, some at a time: a mask, heads, tokens and channels."""
    BLOCK: tl.constexpr = SHAPE.BLOCK
    BLOCKS: tl.constexpr = SHAPE.D // BLOCK
    o_r = i * SHAPE.BR + tl.arange(0, SHAPE.BR)
    o_c = (o_r % BLOCKS * BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :]
    return o_r < T * H * BLOCKS, (o_r // BLOCKS % H).to(tl.int64), o_r // (BLOCKS * H), o_c


@triton.jit
def new_rows(x, i, i_b, strides, H, T, SHAPE: tl.constexpr):
    """The i-th rows of new tokens: [BR, BLOCK]."""
    m_r, o_h, o_j, o_c = blocks_of(i, H, T, SHAPE)
    p_x = (x + i_b * strides[0] + o_h * strides[1] + o_j.to(tl.int64) * strides[2])[:, None] + o_c * strides[3]
    return tl.load(p_x, mask=m_r[:, None], other=0.0)


@triton.jit
def append_side(b_x, x, sink, tail, i_b, i_w, i_length, strides, factor, H, T, S, W, SHAPE: tl.constexpr):
    """New tokens of row i_b and one side, for row i_w of the windows; ``b_x`` are the first rows."""
    D: tl.constexpr = SHAPE.D
    for i in range(SHAPE.LOOPS):
        if i > 0:
            b_x = new_rows(x, i, i_b, strides, H, T, SHAPE)
        m_r, o_h, o_j, o_c = blocks_of(i, H, T, SHAPE)
        b_y = b_x
        if SHAPE.ROTATE:
            b_y = saturated(butterflies(b_x.to(tl.float32), SHAPE.BLOCK, SHAPE.BR) * factor, x.dtype.element_ty)
        o_token = i_length + o_j
        m_sink = o_token < S
        o_head = i_w * H + o_h
        p_sink = sink + ((o_head * S + o_token) * D)[:, None] + o_c
        p_tail = tail + ((o_head * W + (o_token - S) % W) * D)[:, None] + o_c
        tl.store(p_sink, b_y, mask=(m_r & m_sink)[:, None])
        tl.store(p_tail, b_y, mask=(m_r & (o_token >= S))[:, None])


@triton.jit(do_not_specialize=["T", "S", "WK", "WV", "length"])
def append_kernel(
    keys, values, row, length, s_k, s_v, factors, H, T, S, WK, WV, KEYS: tl.constexpr, VALUES: tl.constexpr
):
    """One row; its counter stands ``length`` elements into the counters, and no other program reads it.

    With a map of rows the counter is of several layers, and counts the tokens already.
    """
    i_b = tl.program_id(0).to(tl.int64)
    p_length = row.counters + length + i_b
    i_length = tl.load(p_length)
    i_w = i_b
    if row.rows is not None:
        i_length -= T
        i_w = tl.load(row.rows + i_b).to(tl.int64)
    # The loads start together with the length's.
    b_k = new_rows(keys, 0, i_b, s_k, H, T, KEYS)
    b_v = new_rows(values, 0, i_b, s_v, H, T, VALUES)
    append_side(b_k, keys, row.sink_k, row.tail_k, i_b, i_w, i_length, s_k, factors[0], H, T, S, WK, KEYS)
    append_side(b_v, values, row.sink_v, row.tail_v, i_b, i_w, i_length, s_v, factors[1], H, T, S, WV, VALUES)
    if row.rows is None:
        # Every warp has read the length by now.
        tl.debug_barrier()
        tl.store(p_length, i_length + T)


def append_constants(
    keys: tuple[int, ...], values: tuple[int, ...], rotate_keys: int, rotate_values: int
) -> dict[str, Any]:
    """Constants of kernels that call `append_side` for keys and values of these shapes, by name."""
    found: dict[str, Any] = {"enable_fp_fusion": False}
    for name, shape, rotate in (("VALUES", values, rotate_values), ("KEYS", keys, rotate_keys)):
        _, heads, tokens, dim = shape
        block = rotate or largest_block(dim)
        # Elements a step of the loop holds: enough for 16 bytes a thread, and no more than the tokens of the call.
        rows = power(min(tokens * heads * dim, 8192) // block)
        found[name] = AppendShape(dim, block, rotate, rows, cdiv(tokens * heads * dim, rows * block))
        # Strides of keys come last.
        found["num_warps"] = max(1, min(8, power(rows * block // 256)))
    return found


class NewTokens(NamedTuple):
    """Keys and values of new tokens and the windows they join, but for their addresses.

    Attributes:
        keys: shape.
        values: shape.
        sink: tokens of the sink.
        key_tail: slots of the tail of keys.
    """

    keys: tuple[int, ...]
    key_stride: tuple[int, ...]
    values: tuple[int, ...]
    value_stride: tuple[int, ...]
    sink: int
    key_tail: int
    value_tail: int
    device: torch.device


def new_tokens(keys: Tensor, values: Tensor, windows: Sequence[Tensor]) -> NewTokens:
    """Constants of launches."""
    sink_k, _, tail_k, tail_v = windows
    lengths = sink_k.shape[2], tail_k.shape[2], tail_v.shape[2]
    return NewTokens(keys.shape, keys.stride(), values.shape, values.stride(), *lengths, keys.device)


def append_numbers(new: NewTokens, constants: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `append_kernel` by name: strides, factors of rotations, heads, tokens, and lengths of windows."""
    _, heads, tokens, _ = new.keys
    factors = tuple([constants[side].BLOCK ** -0.5 for side in ("KEYS", "VALUES")])
    sizes = {"H": heads, "T": tokens, "S": new.sink, "WK": new.key_tail, "WV": new.value_tail}
    return {"s_k": new.key_stride, "s_v": new.value_stride, "factors": factors, **sizes}


@lru_cache(maxsize=1024)
def append_launch(new: NewTokens, rotate_keys: int, rotate_values: int, mapped: bool = False) -> Launch:
    """Takes keys, values, four windows, counters and, if ``mapped``, rows."""
    constants = append_constants(new.keys, new.values, rotate_keys, rotate_values)
    batch = new.keys[0]
    numbers = {"length": LENGTH * batch, **append_numbers(new, constants)}

    def nest(given: Sequence[Any]) -> tuple[Any, ...]:
        return given[0], given[1], Row(given[6], *given[2:6], given[7] if mapped else None)

    return Launch(append_kernel, (batch,), numbers, constants, new.device, nest)


def append_triton(*given: Any) -> None:
    """Launcher of `hfkvq.kernels.append`."""
    keys, values, counters, windows, rotate_keys, rotate_values, rows = given
    assert all([x.is_contiguous() for x in (counters, *windows)]), "written in place"
    launch = append_launch(new_tokens(keys, values, windows), rotate_keys, rotate_values, rows is not None)
    launch(keys, values, *windows, counters, *([] if rows is None else [rows]))
