"""Numbers of trellis codes in registers: tiles of a page's halves, and single numbers. See `hfkvq.kernels.trellis`."""

from __future__ import annotations

import triton
import triton.language as tl

from ..trellis import ADDEND, FLIP, MASK, MULTIPLIER, RATIO, SECOND_ADDEND, SECOND_MULTIPLIER
from .tiles import INTERPRETED

MUL, ADD, AND, XOR = tl.constexpr(MULTIPLIER), tl.constexpr(ADDEND), tl.constexpr(MASK), tl.constexpr(FLIP)
AGAIN = tl.constexpr(RATIO)
MUL_2, ADD_2 = tl.constexpr(SECOND_MULTIPLIER), tl.constexpr(SECOND_ADDEND)


@triton.jit
def numbers_of(b_state, SECOND: tl.constexpr = False):
    """Both numbers (f16) of the first or the second product of states, i32 or u32."""
    if SECOND:
        b_y = b_state.to(tl.uint32) * MUL_2 + ADD_2
    else:
        b_y = b_state.to(tl.uint32) * MUL + ADD
    b_y = (b_y & AND) ^ XOR
    b_first = (b_y & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    return b_first, (b_y >> 16).to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def joined(b_low, b_high):
    """Words u32 of their halves i16."""
    b_word = b_low.to(tl.uint16, bitcast=True).to(tl.uint32)
    return b_word | (b_high.to(tl.uint16, bitcast=True).to(tl.uint32) << 16)


@triton.constexpr_function
def steps_asm(bits):
    """Instructions that make registers of a word and the other half's word (the last operands): two f16 each.

    Eight of the first product, then of 1-bit codes eight of the second one.
    """
    products = ((MULTIPLIER, ADDEND), (SECOND_MULTIPLIER, SECOND_ADDEND))[: 2 // bits]
    own, other = 8 * len(products), 8 * len(products) + 1
    lines = ["{", ".reg .b32 r, s, t;", f"shf.r.wrap.b32 r, ${own}, ${other}, 4;"]
    for step in range(8):
        source, byte = ("r", 3 - step // 2) if step % 2 == 0 else (f"${own}", 3 - step // 2)
        lines.append(f"prmt.b32 s, {source}, 0, 0x444{byte};")
        for i in range(len(products)):
            lines.append(f"mad.lo.u32 t, s, {products[i][0]}, {products[i][1]};")
            lines.append(f"lop3.b32 ${8 * i + step}, t, {MASK}, {FLIP}, 0x6a;")
    return "\n".join([*lines, "}"])


@triton.jit
def trellis_fields(b_w, b_other, BITS: tl.constexpr, IN_PAIRS: tl.constexpr):
    """Tiles f16 [A, n] of codes i16 [A, n] of one half of all lanes and those of the other half: numbers 0 to 7.

    Of 1-bit codes these are of the half's first quarter, and eight more of its second one.

    IN_PAIRS: threads hold neighbouring lanes in one register, as where a warp loads rows of aligned lanes, or has them
    as an operand of a product.
    """
    if INTERPRETED or not IN_PAIRS:
        N: tl.constexpr = b_w.shape[1] // 2
        b_low, b_high = tl.split(tl.reshape(b_w, (b_w.shape[0], N, 2)))
        b_before, _ = tl.split(tl.reshape(b_other, (b_w.shape[0], N, 2)))
        b_word = joined(b_low, b_high)
        b_shifted = (b_word >> 4) | (joined(b_before, b_before) << 28)
        b_fields = ()
        for i in tl.static_range(16 // BITS):
            b_state = ((b_shifted if i % 2 == 0 else b_word) >> (24 - 8 * (i % 8 // 2))) & 255
            b_first, b_second = numbers_of(b_state, i >= 8)
            b_fields = b_fields + (tl.reshape(tl.join(b_first, b_second), b_w.shape),)
        return b_fields
    elif BITS == 2:
        return tl.inline_asm_elementwise(
            asm=steps_asm(2),
            constraints="=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r",
            args=[b_w, b_other],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        return tl.inline_asm_elementwise(
            asm=steps_asm(1),
            constraints="=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r",
            args=[b_w, b_other],
            dtype=(
                tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16,
                tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16,
            ),
            is_pure=True,
            pack=2,
        )  # fmt: skip


@triton.jit
def load_numbers(p_codes, o_l, o_e, o_f, m_x, L: tl.constexpr, BITS: tl.constexpr):
    """Numbers f32 of lanes ``o_l`` of L and places ``o_f * E + o_e`` along them, any where not ``m_x``.

    ``p_codes``: a head's part of a page's codes. Shapes are such that they broadcast.
    """
    BLOCK: tl.constexpr = L * BITS // 4
    o_block = o_l // BLOCK
    # Quarters of a half, and the half.
    o_quarter, o_half = o_block % (2 // BITS), o_block // (2 // BITS)
    p_x = p_codes + o_e * (2 * BLOCK) + o_l % BLOCK // 2 * 2
    p_other = p_x + (1 - o_half) * BLOCK
    p_x += o_half * BLOCK
    b_word = joined(tl.load(p_x, mask=m_x, other=0), tl.load(p_x + 1, mask=m_x, other=0)).to(tl.int32, bitcast=True)
    b_before = tl.load(p_other, mask=m_x, other=0).to(tl.int32)
    b_state = tl.where(o_f == 0, (b_before & 15) << 4 | (b_word >> 28 & 15), (b_word >> (28 - 4 * o_f)) & 255)
    b_first, b_second = numbers_of(b_state)
    b_x = tl.where(o_l % 2 == 0, b_first, b_second)
    if BITS == 1:
        b_first, b_second = numbers_of(b_state, True)
        b_x = tl.where(o_quarter == 0, b_x, tl.where(o_l % 2 == 0, b_first, b_second))
    return b_x.to(tl.float32)
