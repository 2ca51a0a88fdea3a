"""Chance in registers: `hfkvq.kernels.chance`."""

from __future__ import annotations

import triton
import triton.language as tl

from ..chance import FACTORS, FIRST, SECOND

OF_CHANNEL, OF_PAGE, OF_HEAD = (tl.constexpr(factor) for factor in FACTORS)
FIRST_FACTOR, SECOND_FACTOR = tl.constexpr(FIRST), tl.constexpr(SECOND)


@triton.jit
def product(b_x, FACTOR: tl.constexpr):
    """The lower 32 bits of a product: u32."""
    return (b_x.to(tl.int64) * FACTOR).to(tl.uint32)


@triton.jit
def chance(o_c, i_page, i_h, SEED: tl.constexpr):
    """Random u32 of channels, a page and a head; None stands for 0."""
    b_x = product(o_c, OF_CHANNEL) + SEED
    if i_page is not None:
        b_x += product(i_page, OF_PAGE)
    if i_h is not None:
        b_x += product(i_h, OF_HEAD)
    b_x = product(b_x ^ (b_x >> 16), FIRST_FACTOR)
    b_x = product(b_x ^ (b_x >> 13), SECOND_FACTOR)
    return b_x ^ (b_x >> 16)
