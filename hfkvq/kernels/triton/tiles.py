"""Layouts of a matrix product's tiles in the registers of one warp.

Which tensor comes in which layout is the compiler's choice; what is written here leads it to layouts in which no value
has to move between lanes.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dotable(b_x):
    """An operand the interpreter can multiply: it has no bf16 arithmetic."""
    if INTERPRETED and b_x.dtype == tl.bfloat16:
        return b_x.to(tl.float32)
    else:
        return b_x


@triton.jit
def stacked(b_parts, BT: tl.constexpr, BM: tl.constexpr):
    """Tiles of the same shape, one below the other: [BT, BM]; as many as a power of two."""
    if len(b_parts) == 1:
        return b_parts[0]
    else:
        N: tl.constexpr = len(b_parts) // 2
        R: tl.constexpr = BT // N
        b_pairs = ()
        for i in tl.static_range(N):
            b_pair = tl.permute(tl.join(b_parts[2 * i], b_parts[2 * i + 1]), (2, 0, 1))
            b_pairs = b_pairs + (tl.reshape(b_pair, (R, BM)),)
        return stacked(b_pairs, BT, BM)


@triton.jit
def unstacked(b_x, PARTS: tl.constexpr, BM: tl.constexpr):
    """A tile as PARTS tiles of the same shape, in order: what `stacked` puts together."""
    if PARTS == 1:
        return (b_x,)
    else:
        R: tl.constexpr = b_x.shape[0] // 2
        b_first, b_last = tl.split(tl.permute(tl.reshape(b_x, (2, R, BM)), (1, 2, 0)))
        return unstacked(b_first, PARTS // 2, BM) + unstacked(b_last, PARTS // 2, BM)


@triton.jit
def parted(b_x, PARTS: tl.constexpr, E: tl.constexpr):
    """A vector as PARTS vectors of E elements, in order."""
    if PARTS == 1:
        return (b_x,)
    else:
        b_first, b_last = tl.split(tl.permute(tl.reshape(b_x, (2, PARTS // 2 * E)), (1, 0)))
        return parted(b_first, PARTS // 2, E) + parted(b_last, PARTS // 2, E)


@triton.jit
def paired(b_x, PARTS: tl.constexpr, E: tl.constexpr):
    """[2, PARTS * E] as PARTS tiles [2, E], in order."""
    if PARTS == 1:
        return (b_x,)
    else:
        b_first, b_last = tl.split(tl.permute(tl.reshape(b_x, (2, 2, PARTS // 2 * E)), (0, 2, 1)))
        return paired(b_first, PARTS // 2, E) + paired(b_last, PARTS // 2, E)


@triton.jit
def put(xs, AT: tl.constexpr, x):
    """The tuple with ``x`` in place of element AT."""
    ys = ()
    for i in tl.static_range(len(xs)):
        if i == AT:
            ys = ys + (x,)
        else:
            ys = ys + (xs[i],)
    return ys


@triton.jit
def as_operand(b_p, BT: tl.constexpr, BM: tl.constexpr):
    """The same 16-bit tensor, but no longer as a product leaves it: as the right operand of the next one takes it.

    Lanes hold rows of an accumulator and columns of a right operand. `movmatrix` turns blocks of 8 x 8 within the
    warp, and the views after it say so to the compiler, which would otherwise go through shared memory.
    """
    if not INTERPRETED:
        b_p = tl.inline_asm_elementwise(
            asm="movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;",
            constraints="=r,r",
            args=[b_p],
            dtype=b_p.dtype,
            # The instruction works on a whole warp: it must not be moved to where tiles have another layout.
            is_pure=False,
            pack=2,
        )
        b_p = tl.permute(tl.reshape(b_p, (BT // 8, 8, BM // 8, 8)), (0, 3, 2, 1))
        b_p = tl.reshape(b_p, (BT, BM))
    return b_p


@triton.jit
def as_product(b_x, BT: tl.constexpr, BM: tl.constexpr):
    """The same f32 tensor, standing as a product leaves it, whatever was loaded or selected in between."""
    if not INTERPRETED:
        b_x = tl.dot(tl.zeros([BT, 16], tl.float16), tl.zeros([16, BM], tl.float16), b_x)
    return b_x
