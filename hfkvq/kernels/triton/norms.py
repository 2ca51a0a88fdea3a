"""Factors of normed pages: a program takes a page of a head into registers and balances it there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dispatch import reference
from ..norms import BALANCE, DEVIATIONS, FACTORS, LEAST, RULES, Balance
from ..pages import Axis, PageFormat
from ._lib import F16_MAX, on_device, power
from .compile import Wanted

MOST_ELEMENTS = 32768
"""Largest page that a program takes: it and its squares stay in registers, or nearly."""

LEAST_SQUARE = tl.constexpr(LEAST)
LEAST_DEVIATION, MOST_DEVIATION = (tl.constexpr(x) for x in DEVIATIONS)
LEAST_FACTOR, MOST_FACTOR = (tl.constexpr(x) for x in FACTORS)


class NormShape(NamedTuple):
    """Constants of `page_factors`; those that `_lib.PageShape` has, too, are explained there.

    Attributes:
        BD: D, a power of two.
        ROUNDS: see `Balance`.
        DEVIATION: whether that is the rule.
    """

    PER_CHANNEL: bool
    D: int
    G: int
    BD: int
    ROUNDS: int
    DEVIATION: bool


@triton.jit
def tree_mean(b_x, COUNT: tl.constexpr, A: tl.constexpr, B: tl.constexpr, AXIS: tl.constexpr):
    """Mean of [A, B] over an axis of COUNT elements and zeros, in the reference's order: [B] or [A]."""
    if AXIS == 0:
        for i in tl.static_range(A.bit_length() - 1):
            b_x = tl.sum(tl.reshape(b_x, (2, A >> (i + 1), B)), 0)
        return tl.reshape(b_x, (B,)) * (1.0 / COUNT)
    else:
        for i in tl.static_range(B.bit_length() - 1):
            b_x = tl.sum(tl.reshape(b_x, (A, 2, B >> (i + 1))), 1)
        return tl.reshape(b_x, (A,)) * (1.0 / COUNT)


@triton.jit
def spread(b_x, m_a):
    """Range over the first axis of [A, B]: [B]."""
    b_high = tl.max(tl.where(m_a[:, None], b_x, float("-inf")), 0)
    return b_high - tl.min(tl.where(m_a[:, None], b_x, float("inf")), 0)


@triton.jit
def deviation(b_x, m_x, COUNT: tl.constexpr, A: tl.constexpr, B: tl.constexpr, AXIS: tl.constexpr):
    """Standard deviation of [A, B] over an axis of COUNT elements, of a sample: [B] or [A]."""
    b_mean = tl.expand_dims(tree_mean(b_x, COUNT, A, B, AXIS), AXIS)
    b_x = tl.where(m_x, b_x - b_mean, 0.0)
    return tl.math.sqrt_rn(tree_mean(b_x * b_x, COUNT, A, B, AXIS) * (COUNT / max(1, COUNT - 1)))


@triton.jit
def unevenness(b_deviation, m):
    """Largest over least of [N]."""
    b_least = tl.maximum(tl.min(tl.where(m, b_deviation, float("inf")), 0), 1e-8)
    return tl.math.div_rn(tl.max(tl.where(m, b_deviation, float("-inf")), 0), b_least)


@triton.jit
def times(b_factor, b_deviation):
    """Factors [N] times deviations, both within their bounds."""
    b_deviation = tl.minimum(tl.maximum(b_deviation, LEAST_DEVIATION), MOST_DEVIATION)
    return tl.minimum(tl.maximum(b_factor * b_deviation, LEAST_FACTOR), MOST_FACTOR)


@triton.jit
def divided(b_x, b_column, b_row, A: tl.constexpr, B: tl.constexpr):
    """[A, B] by factors [A], then by factors [B]."""
    b_x = tl.math.div_rn(b_x, tl.broadcast_to(b_column[:, None], (A, B)))
    return tl.math.div_rn(b_x, tl.broadcast_to(b_row[None, :], (A, B)))


@triton.jit
def factors_of_deviation(
    b_x, m_a, m_b, NA: tl.constexpr, NB: tl.constexpr, A: tl.constexpr, B: tl.constexpr, ROUNDS: tl.constexpr
):
    """Factors [A] by the rule "deviation"."""
    m_x = m_a[:, None] & m_b[None, :]
    b_column = tl.full([A], 1.0, tl.float32)
    b_row = tl.full([B], 1.0, tl.float32)
    b_best = b_column
    b_columns = deviation(b_x, m_x, NB, A, B, 1)
    b_least = unevenness(b_columns, m_a) + unevenness(deviation(b_x, m_x, NA, A, B, 0), m_b)
    for _ in range(ROUNDS):
        b_column = times(b_column, b_columns)
        b_row = times(b_row, deviation(divided(b_x, b_column, b_row, A, B), m_x, NA, A, B, 0))
        b_now = divided(b_x, b_column, b_row, A, B)
        b_columns = deviation(b_now, m_x, NB, A, B, 1)
        b_found = unevenness(b_columns, m_a) + unevenness(deviation(b_now, m_x, NA, A, B, 0), m_b)
        b_best = tl.where(b_found <= b_least, b_column, b_best)
        b_least = tl.minimum(b_found, b_least)
    b_total = tree_mean(tl.where(m_a, b_best, 0.0), NA, A, 1, 0)
    return tl.math.div_rn(b_best, tl.broadcast_to(b_total, (A,)))


@triton.jit
def factors_of_error(
    b_x, m_a, m_b, NA: tl.constexpr, NB: tl.constexpr, A: tl.constexpr, B: tl.constexpr, ROUNDS: tl.constexpr
):
    """Factors [A] by the rule "error"."""
    b_power = b_x * b_x
    # [1]
    b_mean = tree_mean(tree_mean(b_power, NB, A, B, 1), NA, A, 1, 0)
    b_mean = tl.where(b_mean > 0.0, b_mean, 1.0)
    b_power = tl.math.div_rn(b_power, tl.broadcast_to(b_mean[:, None], (A, B)))
    b_first = spread(b_x, m_a)
    b_base = tl.where(b_first > 0.0, b_first, 1.0)
    b_square = tl.full([A], 1.0, tl.float32)
    b_best = tl.full([A], 1.0, tl.float32)
    b_least = tl.full([1], 1.0, tl.float32)
    for _ in range(ROUNDS):
        b_rows = tree_mean(tl.math.div_rn(b_power, tl.broadcast_to(b_square[:, None], (A, B))), NA, A, B, 0)
        b_rows = tl.maximum(b_rows, LEAST_SQUARE)
        b_square = tree_mean(tl.math.div_rn(b_power, tl.broadcast_to(b_rows[None, :], (A, B))), NB, A, B, 1)
        b_square = tl.maximum(b_square, LEAST_SQUARE)
        b_norm = tl.math.sqrt_rn(b_square)
        b_total = tree_mean(tl.where(m_a, b_norm, 0.0), NA, A, 1, 0)
        b_norm = tl.math.div_rn(b_norm, tl.broadcast_to(b_total, (A,))).to(tl.float16).to(tl.float32)
        b_share = b_x * tl.math.div_rn(tl.full([A], 1.0, tl.float32), b_norm)[:, None]
        b_share = tl.math.div_rn(spread(b_share, m_a), b_base)
        b_share = tl.where((b_first > 0.0) | (b_share <= 0.0), b_share, float("inf"))
        b_loss = tree_mean(b_share * b_share, NB, B, 1, 0)
        b_loss *= tree_mean(tl.where(m_a, b_norm * b_norm, 0.0), NA, A, 1, 0)
        b_best = tl.where(b_loss < b_least, b_norm, b_best)
        b_least = tl.minimum(b_loss, b_least)
    return b_best


@triton.jit
def page_factors(p_out, p_x, b_column, s_l, s_d, SHAPE: tl.constexpr):
    """Writes factors of one page of one head: columns ``b_column`` [G] of its tokens.

    The page is [A, B]: factors along A (tokens, if scales are per channel), scales along B.
    """
    PER_CHANNEL: tl.constexpr = SHAPE.PER_CHANNEL
    D: tl.constexpr = SHAPE.D
    G: tl.constexpr = SHAPE.G
    BD: tl.constexpr = SHAPE.BD
    NA: tl.constexpr = G if PER_CHANNEL else D
    NB: tl.constexpr = D if PER_CHANNEL else G
    A: tl.constexpr = G if PER_CHANNEL else BD
    B: tl.constexpr = BD if PER_CHANNEL else G
    o_c = tl.arange(0, BD)
    b_column = b_column.to(tl.int64)
    if PER_CHANNEL:
        p_tile = p_x + (b_column * s_l)[:, None] + (o_c * s_d)[None, :]
    else:
        p_tile = p_x + (o_c * s_d)[:, None] + (b_column * s_l)[None, :]
    m_a = tl.arange(0, A) < NA
    m_b = tl.arange(0, B) < NB
    # [A, B]
    b_x = tl.load(p_tile, mask=m_a[:, None] & m_b[None, :], other=0.0).to(tl.float32)
    b_x = tl.where(tl.abs(b_x) <= F16_MAX, b_x, 0.0)
    p_out += tl.arange(0, A)
    if SHAPE.DEVIATION:
        b_best = factors_of_deviation(b_x, m_a, m_b, NA, NB, A, B, SHAPE.ROUNDS)
    else:
        b_best = factors_of_error(b_x, m_a, m_b, NA, NB, A, B, SHAPE.ROUNDS)
    tl.store(p_out, b_best.to(tl.float16), mask=m_a)


@triton.jit(do_not_specialize=["index", "new", "M", "L"])
def page_norms_kernel(out, source, index, new, s_b, s_h, s_l, s_d, H, M, L, SHAPE: tl.constexpr):
    """One page of one head."""
    G: tl.constexpr = SHAPE.G
    i_p, i_bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    if new is not None:
        if i_p * G >= tl.load(new + i_b):
            return
    o_t = tl.arange(0, G)
    b_column = tl.load(index + i_b * M + i_p * G + o_t, mask=o_t < G, other=0)
    b_column = tl.minimum(tl.maximum(b_column, 0), L - 1)
    p_out = out + (i_bh * (M // G) + i_p) * (G if SHAPE.PER_CHANNEL else SHAPE.D)
    page_factors(p_out, source + i_b * s_b + i_h * s_h, b_column, s_l, s_d, SHAPE)


def page_norms_triton(
    source: Tensor, index: Tensor, axis: Axis, page: int, balance: Balance = BALANCE, new: Tensor | None = None
) -> Tensor:
    """Launcher of `hfkvq.kernels.page_norms`; pages that outgrow registers, and f64, take the reference."""
    batch, heads, length, head_dim = source.shape
    outgrows = page * power(head_dim) > MOST_ELEMENTS
    if outgrows or source.dtype == torch.float64 or balance.rule not in RULES:
        return reference("page_norms")(source, index, axis, page, balance, new)
    pages, size = index.shape[1] // page, page if axis == "channel" else head_dim
    out = torch.empty((batch, heads, pages, size), dtype=torch.float16, device=source.device)
    if not out.numel():
        return out
    with on_device(source):
        page_norms_kernel[(pages, batch * heads)](
            out=out,
            source=source,
            index=index.contiguous(),
            new=new,
            **dict(zip(("s_b", "s_h", "s_l", "s_d"), source.stride(), strict=True)),
            H=heads,
            M=index.shape[1],
            L=length,
            **norm_constants(axis, page, head_dim, balance),
        )
    return out


def norm_constants(axis: str, page: int, head_dim: int, balance: Balance) -> dict[str, Any]:
    """Constants of `page_norms_kernel`, its number of warps included."""
    elements, (rounds, rule) = page * power(head_dim), balance
    return {
        "SHAPE": NormShape(axis == "channel", head_dim, page, power(head_dim), rounds, rule == "deviation"),
        # 252 registers for a page of 128 x 128; sixteen warps have 128 each, and spill.
        "num_warps": 16 if elements > 16384 else max(4, min(8, elements // 1024)),
        # The reference multiplies and adds, and rounds both.
        "enable_fp_fusion": False,
    }


def norms_wanted(fmt: PageFormat, heads: int, head_dim: int, balance: Balance, dtype: torch.dtype) -> Iterator[Wanted]:
    """The variant for prompts and for steps, where pages are normed."""
    if fmt.normed and fmt.page_size * power(head_dim) <= MOST_ELEMENTS:
        constants = norm_constants(fmt.axis, fmt.page_size, head_dim, balance)
        tensors = (torch.float16, dtype, torch.int32, torch.int32)
        yield Wanted(page_norms_kernel, (*tensors, 16, 16, 16, 1, heads, 1, 1), constants)
