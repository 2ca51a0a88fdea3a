"""Tokens with scales of their own, and tokens of 8 and 16 bits: what is due may begin and end inside a page."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ...pages import PageFormat
from .._lib import F16_MAX, capability, fields_of, power
from .arithmetic import affine_codes, affine_scale, inverse_of, is_wide, load_tokens, warps_of
from .fit import FIT_THREAD, fitted

FP8_MAX = tl.constexpr(448.0)

TOKEN_TILE, TOKEN_THREAD = 8192, 64
"""Most elements of a tile, and elements of a thread."""

QUADS = tl.constexpr(16)
"""Tokens of a tile from which on they are fitted by four lanes each."""


class TokenShape(NamedTuple):
    """Constants of `seal_token_kernel`; those that `_lib.PageShape` has, too, are explained there.

    Attributes:
        FIT: power of the error that scales are fitted to, 0 for none.
        BT: slots of a tile.
        BE: words of a token, a power of two.
    """

    D: int
    G: int
    BITS: int
    GROUP: int
    FIT: int
    TOKEN_MAJOR: bool
    BT: int
    BE: int


@triton.jit
def due_tile(p_count, p_new, i_t, M, BT: tl.constexpr):
    """Place in a row: the first slot of its i_t-th tile of BT that new tokens touch, sealed tokens, and new ones."""
    i_new = tl.minimum(tl.load(p_new), M)
    i_count = tl.load(p_count)
    return (i_count // BT + i_t) * BT, i_count, i_new


@triton.jit
def fit_tokens(
    p_source, p_column, i_j, i_new, s_l, s_d, LEVELS: tl.constexpr, FIT: tl.constexpr, D: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Scale and zero (f16) of tokens ``i_j + [0, BT)`` of what is new, [1, BT, 1].

    Four lanes have a token, so that what is worked out for it is worked out for few, and sums stay within a warp. Loads
    that the compiler sees to be contiguous would deal channels out to lanes.
    """
    o_x = tl.arange(0, BT * BD)
    o_j = i_j + o_x // 4 % BT
    o_c = o_x // (4 * BT) * 4 + (o_x % 4 ^ 1)
    m_x = (o_j >= 0) & (o_j < i_new) & (o_c < D)
    b_column = o_j.to(tl.int64)
    if p_column is not None:
        b_column = tl.load(p_column + o_j, mask=m_x, other=0).to(tl.int64)
    b_x = tl.load(p_source + b_column * s_l + o_c * s_d, mask=m_x, other=0.0).to(tl.float32)
    b_x, m_x = tl.reshape(b_x, (BD // 4, BT, 4)), tl.reshape(m_x, (BD // 4, BT, 4))
    return fitted(b_x, m_x, LEVELS, FIT, D, 0, 2)


@triton.jit
def seal_tokens(page, p_source, p_column, p_given, i_head, i_first, i_count, i_new, s_l, s_d, SHAPE: tl.constexpr):
    """The due ones of BT slots of a page, from slot ``i_first`` of the row on. A word's fields lie in one thread.

    The row's new tokens, from ``i_count`` on, are columns of a head's source by ``p_column``, or in turn if that is
    None. ``p_given``: factors of the row's new pages.
    """
    D: tl.constexpr = SHAPE.D
    G: tl.constexpr = SHAPE.G
    BITS: tl.constexpr = SHAPE.BITS
    GROUP: tl.constexpr = SHAPE.GROUP
    FIT: tl.constexpr = SHAPE.FIT
    BT: tl.constexpr = SHAPE.BT
    BE: tl.constexpr = SHAPE.BE
    FIELDS: tl.constexpr = 16 // BITS
    LEVELS: tl.constexpr = (1 << BITS) - 1
    E: tl.constexpr = (D + FIELDS - 1) // FIELDS
    EXACT: tl.constexpr = BE * FIELDS == D
    # Whole fields make a group, or a field holds whole groups.
    ALIGNED: tl.constexpr = (GROUP == D) or (EXACT and (GROUP % E == 0 or E % GROUP == 0))
    i_slot = i_first % G
    o_j = i_first - i_count + tl.arange(0, BT)
    m_t = (o_j >= 0) & (o_j < i_new)
    o_slot = i_slot + tl.arange(0, BT)
    o_e = tl.arange(0, BE)
    b_column = o_j
    if p_column is not None:
        b_column = tl.load(p_column + o_j, mask=m_t, other=0)
    # [FIELDS, BT, BE]
    b_x = load_tokens(p_source, b_column, m_t, o_e, o_e < E, s_l, s_d, E, D, FIELDS, False).to(tl.float32)
    # [FIELDS, 1, BE]
    o_c = (tl.arange(0, FIELDS) * E)[:, None, None] + o_e[None, None, :]
    m_c = (o_c < D) & (o_e < E)[None, None, :]
    if page.norm is not None:
        # Whole pages are new, so a tile lies within one of them.
        p_own = p_given + (i_first - i_count) // G * D + o_c
        # There are as many as elements: they are loaded where they are used, since moving them would cost more.
        b_norm = tl.load(tl.broadcast_to(p_own, (FIELDS, BT, BE)), mask=m_c, other=1.0)
        p_norm = tl.broadcast_to(page.norm + i_head * D + o_c, (FIELDS, BT, BE))
        tl.store(p_norm, b_norm, mask=m_c & (o_slot == 0)[None, :, None])
        b_share = tl.math.div_rn(tl.full([FIELDS, BT, BE], 1.0, tl.float32), b_norm.to(tl.float32))
        b_x = b_x * b_share

    m_high = LEVELS == 15
    if ALIGNED:
        # A groups of F fields, or of one field's K parts of W words.
        F: tl.constexpr = FIELDS if GROUP == D else (GROUP // E if GROUP > E else 1)
        A: tl.constexpr = FIELDS // F
        W: tl.constexpr = GROUP if GROUP < BE and GROUP != D else BE
        K: tl.constexpr = BE // W
        b_own = b_x
        if not EXACT:
            b_own = tl.where(m_c, b_x, float("nan"))
        # [A, BT, K]
        b_own = tl.reshape(b_own, (A, F, BT, K, W))
        b_low, b_high = tl.min(tl.min(b_own, 1), 3), tl.max(tl.max(b_own, 1), 3)
        if is_wide(b_low, b_high):
            # Loaded once more: hardly ever, and registers for it would cost every tile.
            b_column = o_j
            if p_column is not None:
                b_column = tl.load(p_column + o_j, mask=m_t, other=0)
            b_again = load_tokens(p_source, b_column, m_t, o_e, o_e < E, s_l, s_d, E, D, FIELDS, False).to(tl.float32)
            if page.norm is not None:
                b_again = b_again * b_share
            m_own = m_c & (tl.abs(b_again) <= F16_MAX)
            b_lows = tl.reshape(tl.where(m_own, b_again, float("inf")), (A, F, BT, K, W))
            b_highs = tl.reshape(tl.where(m_own, b_again, float("-inf")), (A, F, BT, K, W))
            b_low, b_high = tl.min(tl.min(b_lows, 1), 3), tl.max(tl.max(b_highs, 1), 3)
        b_scale, b_zero = affine_scale(b_low, b_high, m_high)
        if FIT > 0 and GROUP == D and page.norm is None and BT >= QUADS:
            b_scale, b_zero = fit_tokens(
                p_source, p_column, i_first - i_count, i_new, s_l, s_d, LEVELS, FIT, D, BT,
                FIELDS * BE,
            )  # fmt: skip
        elif FIT:
            m_fit = tl.reshape(tl.broadcast_to(m_c, (FIELDS, BT, BE)), (A, F, BT, K, W))
            b_scale, b_zero = fitted(tl.reshape(b_x, (A, F, BT, K, W)), m_fit, LEVELS, FIT, GROUP, 1, 4)
            b_scale, b_zero = tl.reshape(b_scale, (A, BT, K)), tl.reshape(b_zero, (A, BT, K))
        o_n = (tl.arange(0, A) * K)[:, None, None] + tl.arange(0, K)[None, None, :]
        p_group = (i_head * (D // GROUP) + o_n) * G + o_slot[None, :, None]
        m_group = tl.broadcast_to(m_t[None, :, None], (A, BT, K))
        tl.store(page.scale + p_group, b_scale, mask=m_group)
        tl.store(page.zero + p_group, b_zero, mask=m_group)
        b_inverse = inverse_of(b_scale.to(tl.float32))[:, None, :, :, None]
        b_base = b_zero.to(tl.float32)[:, None, :, :, None]
        b_code = affine_codes(tl.reshape(b_x, (A, F, BT, K, W)), b_inverse, b_base, LEVELS * 1.0)
        b_code = tl.reshape(b_code, (FIELDS, BT, BE))
    else:
        # Groups cut across fields, as where the head dim is no power of two: each is a mask over the tile.
        b_inverse = tl.zeros([FIELDS, BT, BE], tl.float32)
        b_base = b_inverse
        for i_n in range(D // GROUP):
            m_n = (o_c // GROUP == i_n) & (o_e < E)[None, None, :]
            m_n = m_n & (tl.abs(b_x) <= F16_MAX)
            b_low = tl.min(tl.min(tl.where(m_n, b_x, float("inf")), 0), 1)
            b_high = tl.max(tl.max(tl.where(m_n, b_x, float("-inf")), 0), 1)
            b_scale, b_zero = affine_scale(b_low, b_high, m_high)
            if FIT:
                b_scale, b_zero = fitted(b_x, m_n, LEVELS, FIT, GROUP, 0, 2)
                b_scale, b_zero = tl.reshape(b_scale, (BT,)), tl.reshape(b_zero, (BT,))
            m_n = (o_c // GROUP == i_n) & (o_e < E)[None, None, :]
            p_group = (i_head * (D // GROUP) + i_n) * G + o_slot
            tl.store(page.scale + p_group, b_scale, mask=m_t)
            tl.store(page.zero + p_group, b_zero, mask=m_t)
            b_inverse = tl.where(m_n, inverse_of(b_scale.to(tl.float32))[None, :, None], b_inverse)
            b_base = tl.where(m_n, b_zero.to(tl.float32)[None, :, None], b_base)
        b_code = affine_codes(b_x, b_inverse, b_base, LEVELS * 1.0)
    if not EXACT:
        b_code = tl.where(m_c, b_code, 0)
    # [BT, BE]
    b_word = tl.sum(b_code << (tl.arange(0, FIELDS) * BITS)[:, None, None], 0).to(tl.int16)
    if SHAPE.TOKEN_MAJOR:
        p_word = page.codes + i_head * (G * E) + o_slot[:, None] * E + o_e[None, :]
    else:
        p_word = page.codes + i_head * (G * E) + o_slot[:, None] + o_e[None, :] * G
    tl.store(p_word, b_word, mask=m_t[:, None] & (o_e < E)[None, :])


@triton.jit(do_not_specialize=["count", "new", "index", "N", "M"])
def seal_token_kernel(page, table, count, new, source, index, given, strides, H, N, M, SHAPE: tl.constexpr):
    """The due ones of BT slots of a page."""
    i_t, i_bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    i_first, i_count, i_new = due_tile(count + i_b, new + i_b, i_t, M, SHAPE.BT)
    if i_first >= i_count + i_new or i_new <= 0:
        return
    i_head = tl.load(table + i_b * N + i_first // SHAPE.G).to(tl.int64) * H + i_h
    p_source = source + i_b * strides[0] + i_h * strides[1]
    p_given = given
    if given is not None:
        p_given = given + i_bh * (M // SHAPE.G) * SHAPE.D
    seal_tokens(
        page, p_source, index + i_b * M, p_given, i_head, i_first, i_count, i_new, strides[2], strides[3], SHAPE
    )


@triton.jit
def to_fp8(b_x, NATIVE: tl.constexpr):
    """Bits (u8) of f32 as e4m3: rounded to nearest even, saturating; no NaN."""
    if NATIVE:
        b_code = b_x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        b_bits = tl.minimum(tl.maximum(b_x, -FP8_MAX), FP8_MAX).to(tl.int32, bitcast=True)
        b_sign = (b_bits >> 24) & 0x80
        b_bits = b_bits & 0x7FFFFFFF
        # Normal: the exponent's bias goes from 127 to 7, the mantissa from 23 bits to 3.
        b_normal = (b_bits - (120 << 23) + 0x7FFFF + ((b_bits >> 20) & 1)) >> 20
        # Subnormal: an ulp of 2^14 is 2^-9, the smallest e4m3, so the sum's last bits count those.
        b_tiny = (tl.abs(b_x) + 16384.0).to(tl.int32, bitcast=True) & 0xF
        b_code = (tl.where(b_bits < (121 << 23), b_tiny, b_normal) | b_sign).to(tl.uint8)
    return b_code


@triton.jit(do_not_specialize=["count", "new", "index", "N", "M"])
def seal_unpacked_kernel(
    page, table, count, new, source, index, strides, H, N, M, D: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr,
    BN: tl.constexpr, BC: tl.constexpr, BT: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """The due ones of BT slots of a page, a code an element: fp8 pages, and copies for 16 bits (no scale)."""
    i_t, i_bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    i_first, i_count, i_new = due_tile(count + i_b, new + i_b, i_t, M, BT)
    if i_first >= i_count + i_new or i_new <= 0:
        return
    i_head = tl.load(table + i_b * N + i_first // G).to(tl.int64) * H + i_h
    o_j = i_first - i_count + tl.arange(0, BT)
    m_t = (o_j >= 0) & (o_j < i_new)
    o_slot = i_first % G + tl.arange(0, BT)
    b_column = tl.load(index + i_b * M + o_j, mask=m_t, other=0).to(tl.int64)
    o_n = tl.arange(0, BN)
    # [BT, BN * BC]
    o_i = tl.arange(0, BN * BC)
    o_c = o_i // BC * GROUP + o_i % BC
    m_x = m_t[:, None]
    if BN * BC != D:
        m_x = m_x & ((o_i // BC < D // GROUP) & (o_i % BC < GROUP))[None, :]
    p_x = (source + i_b * strides[0] + i_h * strides[1] + b_column * strides[2])[:, None] + (o_c * strides[3])[None, :]
    b_x = tl.load(p_x, mask=m_x, other=0.0)
    if page.scale is not None:
        b_x = tl.reshape(b_x.to(tl.float32), (BT, BN, BC))
        # [BT, BN]
        b_top = tl.max(tl.abs(b_x), 2)
        if is_wide(b_top, b_top):
            b_top = tl.max(tl.where(tl.abs(b_x) <= F16_MAX, tl.abs(b_x), 0.0), 2)
        b_top = tl.where(b_top == b_top, b_top, 0.0)
        b_scale = tl.math.div_rn(b_top, tl.zeros_like(b_top) + FP8_MAX).to(tl.float16)
        p_scale = (i_head * (D // GROUP) + o_n)[None, :] * G + o_slot[:, None]
        tl.store(page.scale + p_scale, b_scale, mask=m_t[:, None] & (o_n < D // GROUP)[None, :])
        b_x = tl.where(b_x != b_x, 0.0, tl.minimum(tl.maximum(b_x, -F16_MAX), F16_MAX))
        b_x *= inverse_of(b_scale.to(tl.float32))[:, :, None]
        b_x = to_fp8(tl.reshape(b_x, (BT, BN * BC)), NATIVE)
    p_code = page.codes + (i_head * G + o_slot)[:, None] * D + o_c[None, :]
    tl.store(p_code, b_x, mask=m_x)


def _slots(form: PageFormat, tokens: int, most: int) -> tuple[int, int]:
    """Slots of a tile, which lies within a page, and how many tiles new tokens can touch."""
    # Every size is a variant to compile, so there are two: steps of a token, and all else.
    block = 1 if tokens == 1 else min(form.page_size, power(most))
    return block, (tokens + block - 2) // block + 1


def unpacked_constants(
    form: PageFormat, tokens: int, head_dim: int, device: torch.device
) -> tuple[int, dict[str, Any]]:
    """Tiles of new tokens, and what `seal_unpacked_kernel` takes by name."""
    group = form.group_size if form.bits == 8 else head_dim
    groups, width = power(head_dim // group), power(group)
    block, tiles = _slots(form, tokens, max(1, TOKEN_TILE // (groups * width)))
    return tiles, {
        "D": head_dim,
        "G": form.page_size,
        "GROUP": group,
        "BN": groups,
        "BC": width,
        "BT": block,
        "NATIVE": torch.version.hip is None and capability(device) >= (8, 9),
        "num_warps": warps_of(block * groups * width, TOKEN_THREAD),
    }


def token_constants(form: PageFormat, is_keys: bool, tokens: int, head_dim: int) -> tuple[int, dict[str, Any]]:
    """Tiles of new tokens, and what `seal_token_kernel` takes by name."""
    fields, words = fields_of(form.bits), power(form.words(head_dim))
    # Groups that cut across fields take masks, and those registers.
    share = 1 if head_dim in (form.group_size, fields * words) else 2
    block, tiles = _slots(form, tokens, max(1, TOKEN_TILE // share // (fields * words)))
    shape = TokenShape(
        D=head_dim,
        G=form.page_size,
        BITS=form.bits,
        GROUP=form.group_size,
        FIT=form.fit,
        TOKEN_MAJOR=is_keys,
        BT=block,
        BE=words,
    )
    warps = warps_of(block * fields * words, (FIT_THREAD if form.fit else TOKEN_THREAD) // share)
    return tiles, {"SHAPE": shape, "num_warps": warps}
