"""What the kernels share: how page tiles are laid out in registers, and a little launch plumbing."""

from __future__ import annotations

import contextlib
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

F16_MAX = tl.constexpr(65504.0)


def on_device(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Makes the device of ``x`` current: Triton launches on the current device, whatever its arguments are on."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


@lru_cache(maxsize=32)
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; the interpreter runs one program at a time and wants few of them."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def fields_of(bits: int) -> int:
    """Channels in a word; 16-bit pages count as words of one channel."""
    return 16 // bits


def power(x: int) -> int:
    """The least power of two that is not below ``x``: what `tl.arange` takes."""
    return triton.next_power_of_2(max(1, x))


@triton.jit
def field_channels(o_e, D: tl.constexpr, E: tl.constexpr, FIELDS: tl.constexpr, BE: tl.constexpr):
    """Channel of every position ``field * BE + e`` of an unpacked tile, and whether there is such a channel.

    Tiles keep this order instead of the natural one: words unpack into it without a shuffle, and a dot product does
    not care. BE is E rounded up to a power of two, or a part of E that begins at ``o_e[0]``.
    """
    # [FIELDS, BE]
    o_c = tl.arange(0, FIELDS)[:, None] * E + o_e[None, :]
    m_c = (o_c < D) & (o_e[None, :] < E)
    return tl.reshape(o_c, (FIELDS * BE,)), tl.reshape(m_c.to(tl.int32), (FIELDS * BE,)) > 0


@triton.jit
def pack_fields(b_code, BITS: tl.constexpr, FIELDS: tl.constexpr, BE: tl.constexpr, BT: tl.constexpr):
    """Codes i32 [BT, FIELDS * BE] to words i16 [BT, BE]."""
    o_shift = tl.arange(0, FIELDS) * BITS
    # [BT, FIELDS, BE]
    b_code = tl.reshape(b_code, (BT, FIELDS, BE)) << o_shift[None, :, None]
    return tl.sum(b_code, 1).to(tl.int16)


@triton.jit
def unpack_fields(b_word, BITS: tl.constexpr, FIELDS: tl.constexpr, BE: tl.constexpr, BT: tl.constexpr):
    """Words i16 [BT, BE] to codes i32 [BT, FIELDS * BE]."""
    o_shift = tl.arange(0, FIELDS) * BITS
    # The arithmetic shift smears the sign bit into fields that the mask removes.
    # [BT, FIELDS, BE]
    b_code = (b_word.to(tl.int32)[:, None, :] >> o_shift[None, :, None]) & ((1 << BITS) - 1)
    return tl.reshape(b_code, (BT, FIELDS * BE))


@triton.jit
def rank_of_channel(p_index, o_c, ROOM: tl.constexpr, BR: tl.constexpr):
    """First rank in ``high_index`` or ``full_index`` that names each channel; ROOM or more where none does.

    Unused ranks name channel 0 and hold zeros, so it does no harm if channel 0 finds the first of them.
    """
    o_r = tl.arange(0, BR)
    b_index = tl.load(p_index + o_r, mask=o_r < ROOM, other=0).to(tl.int32)
    # [BR, C]
    m_same = (b_index[:, None] == o_c[None, :]) & (o_r[:, None] < ROOM)
    return tl.min(tl.where(m_same, o_r[:, None], ROOM), 0)


@triton.jit
def load_page(
    codes, scale, zero, high, high_index, full, full_index, i_head, i_first, m_t,
    D: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, PER_CHANNEL: tl.constexpr,
    TOKEN_MAJOR: tl.constexpr, N4: tl.constexpr, N16: tl.constexpr, BT: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Dense [BT, FIELDS * BE] tile of a page: slots ``i_first + [0, BT)``, channels in the order of fields.

    f32; 16-bit pages stay in their own dtype.

    Elements that ``m_t`` or the head's width rule out are 0, whatever the page holds there.
    """
    FIELDS: tl.constexpr = 16 // BITS
    E: tl.constexpr = (D + FIELDS - 1) // FIELDS
    o_t = i_first + tl.arange(0, BT)
    o_e = tl.arange(0, BE)
    o_c, m_c = field_channels(o_e, D, E, FIELDS, BE)
    m_tile = m_t[:, None] & m_c[None, :]
    i_head = i_head.to(tl.int64)
    if TOKEN_MAJOR:
        p_word = codes + i_head * (G * E) + o_t[:, None] * E + o_e[None, :]
    else:
        p_word = codes + i_head * (G * E) + o_e[None, :] * G + o_t[:, None]
    # [BT, BE]
    b_word = tl.load(p_word, mask=m_t[:, None] & (o_e[None, :] < E), other=0)
    if BITS == 16:
        b_x = b_word
    else:
        b_code = unpack_fields(b_word, BITS, FIELDS, BE, BT)
        if N4 > 0:
            # Eight tokens of a group share a word.
            ROWS: tl.constexpr = GROUP // 8
            b_rank = rank_of_channel(high_index + i_head * N4, o_c, N4, triton.next_power_of_2(N4))
            o_row = o_t // GROUP * ROWS + o_t % ROWS
            p_high = high + i_head * (G // 8 * N4) + o_row[:, None] * N4 + b_rank[None, :]
            b_high = tl.load(p_high, mask=m_tile & (b_rank < N4)[None, :], other=0).to(tl.int32)
            b_code += ((b_high >> (o_t % GROUP // ROWS * 2)[:, None]) & 3) << 2
        b_x = b_code.to(tl.float32)
        if PER_CHANNEL:
            p_group = i_head * (G // GROUP * D)
            if GROUP % BT == 0 or GROUP == G:
                # The tile lies within one group. [C]
                p_group += i_first // GROUP * D
                b_scale = tl.load(scale + p_group + o_c, mask=m_c, other=0.0).to(tl.float32)[None, :]
                b_zero = tl.load(zero + p_group + o_c, mask=m_c, other=0.0).to(tl.float32)[None, :]
            else:
                # [BT, C]
                p_group += (o_t // GROUP * D)[:, None] + o_c[None, :]
                b_scale = tl.load(scale + p_group, mask=m_tile, other=0.0).to(tl.float32)
                b_zero = tl.load(zero + p_group, mask=m_tile, other=0.0).to(tl.float32)
        else:
            p_group = i_head * (D // GROUP * G)
            if GROUP == D:
                # [BT]
                b_scale = tl.load(scale + p_group + o_t, mask=m_t, other=0.0).to(tl.float32)[:, None]
                b_zero = tl.load(zero + p_group + o_t, mask=m_t, other=0.0).to(tl.float32)[:, None]
            else:
                # [BT, C]
                p_group += (o_c // GROUP * G)[None, :] + o_t[:, None]
                b_scale = tl.load(scale + p_group, mask=m_tile, other=0.0).to(tl.float32)
                b_zero = tl.load(zero + p_group, mask=m_tile, other=0.0).to(tl.float32)
        b_x = b_x * b_scale + b_zero
        if N16 > 0:
            b_rank = rank_of_channel(full_index + i_head * N16, o_c, N16, triton.next_power_of_2(N16))
            p_full = full + i_head * (G * N16) + o_t[:, None] * N16 + b_rank[None, :]
            b_x += tl.load(p_full, mask=m_tile & (b_rank < N16)[None, :], other=0.0).to(tl.float32)
        # A select, not a product: scale and zero of a page that is only reserved may be NaN.
        b_x = tl.where(m_tile, b_x, 0.0)
    return b_x
