"""Fields of packed words as operands of a matrix product.

Codes are never converted. A field of a 16-bit word, masked where it stands, *is* an f16 number: a subnormal, the code
times a power of two, exactly. Tensor cores take subnormals at full speed, so unpacking two values costs one AND. A
byte of e4m3 becomes an f16 number by an instruction or, on older GPUs, by its place.

Tiles live in tuples, one for each field. Tokens stand on the long side of every product and queries on the short one,
so that the unpacked operand stays in registers: see `tiles`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .hadamard import sign_matrix
from .tiles import INTERPRETED, dotable

UNIT = tl.constexpr(16777216.0)
"""2^24: what a subnormal f16 has to be multiplied by to be the integer of its bits."""

Q_SHIFT = tl.constexpr(0.125)
"""Factor on queries in f16, which keeps the product of a large query and a large scale finite."""

VALUE_SHIFT = tl.constexpr(256.0)
"""Factor on the scales of values in e4m3, which keeps products of small scales and probabilities in f16 normal."""

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def masked(b_w, MASK: tl.constexpr):
    """A field of words in place, as f16."""
    return (b_w & MASK).to(tl.float16, bitcast=True)


@triton.jit
def unpack2(b_w):
    """Eight 2-bit fields as f16: fields 0 to 4 times 4^f 2^-24, fields 5 to 7 times 4^(f-5) 2^-24."""
    if INTERPRETED:
        b_s = (b_w >> 10) & 0x3F
        return (
            masked(b_w, 0x3), masked(b_w, 0xC), masked(b_w, 0x30), masked(b_w, 0xC0), masked(b_w, 0x300),
            masked(b_s, 0x3), masked(b_s, 0xC), masked(b_s, 0x30),
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            asm="""{
            .reg .b32 t;
            and.b32 $0, $8, 0x00030003;
            and.b32 $1, $8, 0x000c000c;
            and.b32 $2, $8, 0x00300030;
            and.b32 $3, $8, 0x00c000c0;
            and.b32 $4, $8, 0x03000300;
            shr.u32 t, $8, 10;
            and.b32 $5, t, 0x00030003;
            and.b32 $6, t, 0x000c000c;
            and.b32 $7, t, 0x00300030;
            }""",
            constraints="=r,=r,=r,=r,=r,=r,=r,=r,r",
            args=[b_w],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )


@triton.constexpr_function
def anew(asm, again):
    """The same instructions in other words, which the compiler does not take for those it has seen.

    It would make of both one unpacking, at the first of the two places, and hold its fields in registers until the
    second.
    """
    return asm + "// Again." if again else asm


UNPACK4 = tl.constexpr("""{
    .reg .b32 t;
    and.b32 $0, $4, 0x000f000f;
    and.b32 $1, $4, 0x00f000f0;
    shr.u32 t, $4, 8;
    and.b32 $2, t, 0x000f000f;
    and.b32 $3, t, 0x00f000f0;
    }""")


@triton.jit
def unpack4(b_w, AGAIN: tl.constexpr = False):
    """Four 4-bit fields as f16: even fields times 2^-24, odd ones times 16 2^-24."""
    if INTERPRETED:
        b_s = (b_w >> 8) & 0xFF
        return masked(b_w, 0xF), masked(b_w, 0xF0), masked(b_s, 0xF), masked(b_s, 0xF0)
    else:
        return tl.inline_asm_elementwise(
            asm=anew(UNPACK4, AGAIN),
            constraints="=r,=r,=r,=r,r",
            args=[b_w],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )


# A word is two elements here: their low bytes first, then their high ones.
UNPACK8 = tl.constexpr("""{
    .reg .b16 s, t;
    .reg .b32 u;
    prmt.b32 u, $2, 0, 0x3120;
    mov.b32 {s, t}, u;
    cvt.rn.f16x2.e4m3x2 $0, s;
    cvt.rn.f16x2.e4m3x2 $1, t;
    }""")

# The bits of a byte, in place, are a number 2^-8 too small.
UNPACK8_BY_PLACE = tl.constexpr("""{
    .reg .b32 s, t, u;
    mov.b32 u, 0x5c005c00;
    shr.u32 t, $2, 1;
    lop3.b32 t, $2, t, 0x80008000, 0xe4;
    and.b32 t, t, 0xbf80bf80;
    mul.f16x2 $1, t, u;
    shl.b32 s, $2, 8;
    shl.b32 t, $2, 7;
    lop3.b32 t, s, t, 0x80008000, 0xe4;
    and.b32 t, t, 0xbf80bf80;
    mul.f16x2 $0, t, u;
    }""")


@triton.jit
def unpack8(b_w, AGAIN: tl.constexpr = False):
    """Low and high byte, numbers in e4m3, as f16: exact, subnormals included."""
    if INTERPRETED:
        b_low = (((b_w << 8) & -0x8000) | ((b_w & 0x7F) << 7)).to(tl.int16).to(tl.float16, bitcast=True)
        b_high = ((b_w & -0x8000) | ((b_w >> 1) & 0x3F80)).to(tl.int16).to(tl.float16, bitcast=True)
        # NaN, as the instruction decodes these codes.
        b_low = tl.where((b_w & 0x7F) == 0x7F, float("nan"), b_low * 256.0)
        b_high = tl.where((b_w & 0x7F00) == 0x7F00, float("nan"), b_high * 256.0)
        return b_low.to(tl.float16), b_high.to(tl.float16)
    elif tl.target_info.cuda_capability_geq(8, 9):
        return tl.inline_asm_elementwise(
            asm=anew(UNPACK8, AGAIN),
            constraints="=r,=r,r",
            args=[b_w],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        return tl.inline_asm_elementwise(
            asm=anew(UNPACK8_BY_PLACE, AGAIN),
            constraints="=&r,=&r,r",
            args=[b_w],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )


@triton.constexpr_function
def weight(f, bits):
    """Factor that turns field ``f`` into its code, beside `field_unit`."""
    return {2: 0.25 ** (f % 5), 4: 0.0625 ** (f % 2)}.get(bits, 1.0)


@triton.constexpr_function
def field_unit(bits):
    """Factor that turns every field into its code (or its number, for 8 and 16 bits)."""
    return 16777216.0 if bits < 8 else 1.0


@triton.constexpr_function
def key_unit(bits):
    """Factor on raw logits of `pages.half_queries`."""
    return 1.0 if bits == 16 else field_unit(bits) / 0.125


@triton.constexpr_function
def words_of(head_dim, bits):
    """E, elements of a field. Integers: a token's words. 8 and 16 bits: a part of them, at most 128 bytes a row.

    Numbers of 1 bit have fields like those of 2 bits: `trellis` makes them of words that lanes share.
    """
    words = head_dim * max(bits, 2) // 16
    return words if bits < 8 else min(words & -words, 4 * bits)


@triton.constexpr_function
def fields_of(head_dim, bits):
    """Fields that a token's channels make."""
    return 16 // max(bits, 2) if bits < 8 else head_dim // words_of(head_dim, bits)


@triton.constexpr_function
def first_channel(f, words, bits):
    """Channel of the first element of field ``f`` of so many elements."""
    # Two fields of 8 bits share words: the low and the high bytes.
    return f // 2 * (2 * words) + f % 2 if bits == 8 else f * words


@triton.jit
def channels_of(f: tl.constexpr, o_e, E: tl.constexpr, BITS: tl.constexpr):
    """Channel of every element of field ``f`` of E elements."""
    return first_channel(f, E, BITS) + (2 if BITS == 8 else 1) * o_e


@triton.jit
def of_head(
    m_t, f: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BITS: tl.constexpr, AXIS: tl.constexpr
):
    """A mask of tokens as one of field ``f``, whose channels lie along AXIS: those that the head lacks are left out.

    It stays as it is where there are none, and is one for all fields where only their tiles are too large: every
    operation less is less to compile.
    """
    o_e = tl.arange(0, BE)
    LAST: tl.constexpr = first_channel(f, E, BITS) + (2 if BITS == 8 else 1) * (E - 1)
    if LAST >= D:
        return m_t & tl.expand_dims((o_e < E) & (channels_of(f, o_e, E, BITS) < D), AXIS)
    elif E < BE:
        return m_t & tl.expand_dims(o_e < E, AXIS)
    else:
        return m_t


@triton.jit
def unpacked_fields(
    codes, i_head, o_slot, m_t, D: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr, BE: tl.constexpr,
    MASKED: tl.constexpr, AXIS: tl.constexpr,
):  # fmt: skip
    """Fields of 8 or 16 bits at slots of a page, channels along AXIS; with MASKED, 0 where ``m_t`` says so."""
    # Two elements of 8 bits make a word.
    ROW: tl.constexpr = D // 2 if BITS == 8 else D
    o_e = tl.arange(0, BE)
    b_fields = ()
    for f in tl.static_range(ROW // BE):
        p_x = codes + i_head * (G * ROW) + tl.expand_dims(o_slot, AXIS) * ROW + tl.expand_dims(f * BE + o_e, 1 - AXIS)
        if MASKED:
            b_x = tl.load(p_x, mask=tl.expand_dims(m_t, AXIS), other=0)
        else:
            b_x = tl.load(p_x)
        if BITS == 8:
            b_fields = b_fields + unpack8(b_x)
        else:
            b_fields = b_fields + (b_x,)
    return b_fields


@triton.jit
def across_fields(b_qs, E: tl.constexpr, H: tl.constexpr):
    """Fields of E channels rotated in blocks of H, once each is rotated within itself."""
    for i in tl.static_range(len(b_qs)):
        # Stage i combines fields that stand 2^i apart, as long as they are of one block.
        if (1 << i) * E < H:
            b_next = ()
            for f in tl.static_range(len(b_qs)):
                if f & (1 << i):
                    b_next = b_next + (b_qs[f - (1 << i)] - b_qs[f],)
                else:
                    b_next = b_next + (b_qs[f] + b_qs[f + (1 << i)],)
            b_qs = b_next
    return b_qs


@triton.jit
def query_fields(
    p_q, m_q, D: tl.constexpr, FIELDS: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BITS: tl.constexpr,
    BM: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """Queries of 16 rows ``p_q`` as FIELDS tiles f32 [BE, BM], rotated by ROTATE (0: not at all).

    A product with the identity costs little and puts them where the right operand of the next product wants them; a
    product with a Hadamard matrix of the field rotates on the way, and fields combine by butterflies. The rotation's
    factor is left to the caller.
    """
    o_e = tl.arange(0, BE)
    if ROTATE == 0:
        b_turn = (o_e[:, None] == o_e[None, :]).to(tl.float32)
    else:
        b_turn = sign_matrix(BE, ROTATE if ROTATE < E else E)
    p_x = p_q[:, None] + channels_of(0, o_e, E, BITS)[None, :]
    # All are asked for before the first is waited for: the compiler keeps loads behind the barriers of products.
    b_loads = ()
    for f in tl.static_range(FIELDS):
        # [16, BE]
        m_x = of_head(m_q[:, None], f, D, E, BE, BITS, 0)
        b_loads = b_loads + (tl.load(p_x + first_channel(f, E, BITS), mask=m_x, other=0.0),)
    b_qs = ()
    for f in tl.static_range(FIELDS):
        b_q = b_loads[f]
        if b_q.dtype == tl.float32:
            if INTERPRETED:
                b_q = tl.dot(b_q, b_turn, input_precision="ieee")
            else:
                # Two halves of 8 bits of mantissa each.
                b_high = b_q.to(tl.bfloat16)
                b_low = (b_q - b_high.to(tl.float32)).to(tl.bfloat16)
                b_q = tl.dot(b_low, b_turn.to(tl.bfloat16), tl.dot(b_high, b_turn.to(tl.bfloat16)))
        else:
            b_q = tl.dot(dotable(b_q), dotable(b_turn.to(b_q.dtype)))
        if BM == 8:
            # [BE, BM]
            b_q, _ = tl.split(tl.permute(tl.reshape(b_q, (2, BM, BE)), (2, 1, 0)))
        else:
            b_q = tl.permute(b_q, (1, 0))
        b_qs = b_qs + (b_q,)
    return across_fields(b_qs, E, ROTATE)
