"""Numbers of trellis codes in registers: tiles of a page's halves, and single numbers. See `hfkvq.kernels.trellis`."""

from __future__ import annotations

import triton
import triton.language as tl

from ..trellis import ADDEND, FLIP, MASK, MULTIPLIER
from .tiles import INTERPRETED

MUL, ADD, AND, XOR = tl.constexpr(MULTIPLIER), tl.constexpr(ADDEND), tl.constexpr(MASK), tl.constexpr(FLIP)


@triton.jit
def numbers_of(b_state):
    """Both numbers (f16) of states, i32 or u32."""
    b_y = ((b_state.to(tl.uint32) * MUL + ADD) & AND) ^ XOR
    b_first = (b_y & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    return b_first, (b_y >> 16).to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def joined(b_low, b_high):
    """Words u32 of their halves i16."""
    b_word = b_low.to(tl.uint16, bitcast=True).to(tl.uint32)
    return b_word | (b_high.to(tl.uint16, bitcast=True).to(tl.uint32) << 16)


@triton.constexpr_function
def steps_asm():
    """Instructions that make eight registers of a word ($8) and the other half's word ($9): two f16 each."""
    lines = ["{", ".reg .b32 r, t;", "shf.r.wrap.b32 r, $8, $9, 4;"]
    for step in range(8):
        source, byte = ("r", 3 - step // 2) if step % 2 == 0 else ("$8", 3 - step // 2)
        lines.append(f"prmt.b32 t, {source}, 0, 0x444{byte};")
        lines.append(f"mad.lo.u32 t, t, {MULTIPLIER}, {ADDEND};")
        lines.append(f"lop3.b32 ${step}, t, {MASK}, {FLIP}, 0x6a;")
    return "\n".join([*lines, "}"])


@triton.jit
def trellis_fields(b_w, b_other, IN_PAIRS: tl.constexpr):
    """Eight tiles f16 [A, n] of codes i16 [A, n] of one half of a page and those of the other half.

    IN_PAIRS: lanes hold neighbouring tokens in one register, as where a warp loads rows of aligned tokens, or has them
    as an operand of a product.
    """
    if INTERPRETED or not IN_PAIRS:
        N: tl.constexpr = b_w.shape[1] // 2
        b_low, b_high = tl.split(tl.reshape(b_w, (b_w.shape[0], N, 2)))
        b_before, _ = tl.split(tl.reshape(b_other, (b_w.shape[0], N, 2)))
        b_word = joined(b_low, b_high)
        b_shifted = (b_word >> 4) | (joined(b_before, b_before) << 28)
        b_fields = ()
        for step in tl.static_range(8):
            b_first, b_second = numbers_of(((b_shifted if step % 2 == 0 else b_word) >> (24 - 8 * (step // 2))) & 255)
            b_fields = b_fields + (tl.reshape(tl.join(b_first, b_second), b_w.shape),)
        return b_fields
    else:
        return tl.inline_asm_elementwise(
            asm=steps_asm(),
            constraints="=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r",
            args=[b_w, b_other],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )


@triton.jit
def load_numbers(p_codes, o_t, o_e, o_f, m_x, G: tl.constexpr):
    """Numbers f32 of tokens ``o_t`` and channels ``o_f * E + o_e`` of a head's part of a page, any where not ``m_x``.

    Shapes are such that they broadcast.
    """
    p_x = p_codes + o_e * G + o_t // 2 * 2
    p_other = p_codes + o_e * G + (o_t // 2 * 2 + G // 2) % G
    b_word = joined(tl.load(p_x, mask=m_x, other=0), tl.load(p_x + 1, mask=m_x, other=0)).to(tl.int32, bitcast=True)
    b_before = tl.load(p_other, mask=m_x, other=0).to(tl.int32)
    b_state = tl.where(o_f == 0, (b_before & 15) << 4 | (b_word >> 28 & 15), (b_word >> (28 - 4 * o_f)) & 255)
    b_first, b_second = numbers_of(b_state)
    return tl.where(o_t % 2 == 0, b_first, b_second).to(tl.float32)
