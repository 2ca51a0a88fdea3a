"""Codes, queries and probabilities as bytes for integer products, which take twice as many of them at a time.

A query or a probability is two digits, in columns side by side: a product has eight columns, and four queries share a
head. Codes are bytes as soon as they are masked. Digits are exact to 2^-14 of the largest number of their page.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import INTERPRETED

BASE = tl.constexpr(254)
"""Weight of a query's upper digit: it is at most 64, and the lower one at most 127."""

MOST_WEIGHT = tl.constexpr(32512.0)
"""The largest number that `weight_digits` takes: digits of 127 and 0, to base 256."""

WEIGHT_SHIFT = tl.constexpr(8388736.0)
"""2^23, from which on the lowest bit of f32 counts one, and 128, which makes the lower digit a byte without sign."""


@triton.jit
def bytes_of(b_w):
    """int16 [R, N] as bytes int8 [2R, N], lower ones first."""
    R: tl.constexpr = b_w.shape[0]
    N: tl.constexpr = b_w.shape[1]
    # Bytes are shifted apart: from a join the compiler would conclude that these were nibbles, and an axis added by
    # indexing would have a layout of its own.
    o_shift = tl.reshape((tl.arange(0, 2) * 8).to(tl.int16), (1, 2, 1))
    b_bytes = (tl.broadcast_to(tl.reshape(b_w, (R, 1, N)), (R, 2, N)) >> o_shift).to(tl.int8)
    return tl.reshape(b_bytes, (2 * R, N))


@triton.jit
def byte_fields(b_w):
    """Both 4-bit fields of bytes int8."""
    if INTERPRETED:
        return b_w & 0xF, (b_w >> 4) & 0xF
    else:
        return tl.inline_asm_elementwise(
            asm="""{
            .reg .b32 t;
            shr.u32 t, $2, 4;
            and.b32 $0, $2, 0x0f0f0f0f;
            and.b32 $1, t, 0x0f0f0f0f;
            }""",
            constraints="=r,=r,r",
            args=[b_w],
            dtype=(tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )


@triton.jit
def field_bytes(b_w):
    """4-bit fields of 16-bit words as bytes where they stand in theirs; of the upper one in a byte 128 less."""
    if INTERPRETED:
        b_low = b_w & 0xFF
        b_high = (b_w >> 8) & 0xFF
        return (
            (b_low & 0xF).to(tl.int8), ((b_low & 0xF0) - 128).to(tl.int8), (b_high & 0xF).to(tl.int8),
            ((b_high & 0xF0) - 128).to(tl.int8),
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            asm="""{
            .reg .b32 a, b;
            prmt.b32 a, $4, $5, 0x6420;
            prmt.b32 b, $4, $5, 0x7531;
            and.b32 $0, a, 0x0f0f0f0f;
            lop3.b32 $1, a, 0xf0f0f0f0, 0x80808080, 0x6a;
            and.b32 $2, b, 0x0f0f0f0f;
            lop3.b32 $3, b, 0xf0f0f0f0, 0x80808080, 0x6a;
            }""",
            constraints="=r,=r,=r,=r,r,r",
            args=[b_w],
            dtype=(tl.int8, tl.int8, tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )


@triton.jit
def larger(b_x, b_y):
    """Larger of two magnitudes, f16."""
    if INTERPRETED:
        return tl.maximum(tl.abs(b_x), tl.abs(b_y))
    else:
        return tl.inline_asm_elementwise(
            asm="""{
            .reg .b32 s, t;
            abs.f16x2 s, $1;
            abs.f16x2 t, $2;
            max.f16x2 $0, s, t;
            }""",
            constraints="=r,r,r",
            args=[b_x, b_y],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )


@triton.jit
def whole_number(b_x):
    """f32, rounded half to even."""
    return (b_x + 12582912.0) - 12582912.0


@triton.jit
def digit(b_x, b_first, b_all, b_base):
    """A digit of f16 numbers as int16: what is left of ``x * all`` behind ``x * first``, rounded, times base."""
    b_x = b_x.to(tl.float32)
    b_rest = b_x * b_all.to(tl.float32) - whole_number(b_x * b_first.to(tl.float32))
    return whole_number(b_rest * b_base.to(tl.float32)).to(tl.int16)


@triton.jit
def query_digits(b_x, b_y, b_first, b_all, b_base):
    """Digits of two f16 tiles as int16: those of ``b_x`` in lower bytes, of ``b_y`` in upper ones.

    Columns whose ``b_first`` is 0, and ``b_base`` 1, take the upper digit of ``x * all``, others what that leaves.
    """
    if INTERPRETED:
        return (digit(b_x, b_first, b_all, b_base) & 0xFF) | (digit(b_y, b_first, b_all, b_base) << 8)
    else:
        # 1536 and a number of up to eight bits: its bits are the lowest ones.
        return tl.inline_asm_elementwise(
            asm="""{
            .reg .b32 m, d, e, g, mg;
            mov.b32 mg, 0x66006600;
            fma.rn.f16x2 m, $1, $3, mg;
            sub.f16x2 m, mg, m;
            fma.rn.f16x2 d, $1, $4, m;
            fma.rn.f16x2 e, d, $5, mg;
            fma.rn.f16x2 m, $2, $3, mg;
            sub.f16x2 m, mg, m;
            fma.rn.f16x2 d, $2, $4, m;
            fma.rn.f16x2 g, d, $5, mg;
            prmt.b32 $0, e, g, 0x6240;
            }""",
            constraints="=r,r,r,r,r,r",
            args=[b_x, b_y, b_first, b_all, b_base],
            dtype=tl.int16,
            is_pure=True,
            pack=2,
        )


@triton.jit
def weight_digits(b_n, BT: tl.constexpr):
    """Numbers f32 [BT, 4], with WEIGHT_SHIFT added, as digits int8 [BT, 8] to base 256: upper and lower by turns.

    The right operand of a product, made of what a product has left: see `fields.as_operand`.
    """
    if INTERPRETED:
        b_bits = b_n.to(tl.int32, bitcast=True) & 0xFFFF
        b_d = tl.join((b_bits >> 8).to(tl.int8), ((b_bits & 0xFF) - 128).to(tl.int8))
        return tl.reshape(b_d, (BT, 8))
    else:
        # Two tokens: their upper digits, then their lower ones.
        b_d = tl.inline_asm_elementwise(
            asm="""{
            .reg .b32 t;
            prmt.b32 t, $1, $2, 0x4051;
            xor.b32 t, t, 0x80800000;
            movmatrix.sync.aligned.m8n8.trans.b16 $0, t;
            }""",
            constraints="=r,r,r",
            args=[b_n],
            dtype=tl.int16,
            # The instruction works on a whole warp: it must not be moved to where tiles have another layout.
            is_pure=False,
            pack=2,
        )
        # Lane (g, t) now holds column g of pairs of tokens.
        b_d = tl.permute(tl.reshape(b_d, (BT // 16, 8, 2, 4)), (0, 3, 2, 1))
        return bytes_of(tl.reshape(b_d, (BT // 2, 8)))
