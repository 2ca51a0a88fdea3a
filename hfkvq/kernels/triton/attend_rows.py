"""Reads of a row by programs of attention: its counters, its tokens, its queries and their masks."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_counters(counters, i_b, B, RUN: tl.constexpr):
    """Counters of a row: padding, tokens, and keys and values in pages of a run.

    Loads bypass the L1 cache, which must not keep values that change while this program waits.
    """
    p_row = counters + i_b
    p_run = p_row + (2 + 2 * RUN) * B
    return (
        tl.load(p_row, cache_modifier=".cg"), tl.load(p_row + B, cache_modifier=".cg"),
        tl.load(p_run, cache_modifier=".cg"), tl.load(p_run + B, cache_modifier=".cg"),
    )  # fmt: skip


@triton.jit
def loop_tokens(n_k, n_v, i_length, n_q, OPEN: tl.constexpr, SHAPE: tl.constexpr):
    """Tokens that the loop takes: sealed on both sides, and seen by all queries; those of whole pages unless OPEN."""
    n_tokens = n_k
    if SHAPE.TOTAL == 1:
        n_tokens = tl.minimum(n_k, n_v)
        if SHAPE.SEVERAL and SHAPE.MASK == 0:
            n_tokens = tl.minimum(n_tokens, tl.maximum(i_length - n_q - SHAPE.S + 1, 0))
    if OPEN:
        return n_tokens
    else:
        return n_tokens // SHAPE.G * SHAPE.G


@triton.jit
def last_visible(i_length, o_m, m_m, n_q, MASK: tl.constexpr):
    """The last position that each query sees, masks aside; rows of padding see nothing."""
    if MASK > 0:
        return tl.where(m_m, 1073741824, -1)
    else:
        return tl.where(m_m, i_length - n_q + o_m % n_q, -1)


@triton.jit
def last_past(i_length, o_m, n_q, o_last, WINDOW: tl.constexpr):
    """The last position that each query sees no more; anything without a WINDOW."""
    if WINDOW > 0:
        return i_length - n_q + o_m % n_q - WINDOW
    else:
        return o_last


@triton.jit
def first_token(i_length, n_q, n_tokens, S: tl.constexpr, G: tl.constexpr, WINDOW: tl.constexpr):
    """First token of the first page that any query sees, among the loop's tokens."""
    if WINDOW > 0:
        return tl.minimum(tl.maximum(i_length - n_q - WINDOW + 1 - S, 0), n_tokens) // G * G
    else:
        return 0


@triton.jit
def mask_start(i_start, i_length, mask, MASK: tl.constexpr, WINDOW: tl.constexpr):
    """Column of a mask at which a row's first token would stand: of a row with a WINDOW its end may be all there is."""
    if MASK > 0 and WINDOW > 0:
        return i_start - tl.maximum(i_start + i_length - mask[3], 0)
    else:
        return i_start


@triton.jit
def query_rows(q, mask, strides, s_m, L, i_b, i_h, i_m, n_q, SHAPE: tl.constexpr):
    """Indices of SHAPE.BM queries of a KV head, a mask of those that exist, and their addresses.

    Then their masks: address, offset of each query, stride of columns and their number. And for as many queries as a
    product's left operand has rows, addresses and a mask of those that exist.
    """
    o_m = i_m * SHAPE.BM + tl.arange(0, SHAPE.BM)
    m_m = o_m < SHAPE.SHARE * n_q
    p_head = q + i_b * strides[0] + (i_h * SHAPE.SHARE + o_m // n_q) * strides[1] + o_m % n_q * strides[2]
    o_w = tl.arange(0, 16)
    m_w = (o_w < SHAPE.BM) & (i_m * SHAPE.BM + o_w < SHAPE.SHARE * n_q)
    o_w += i_m * SHAPE.BM
    p_rows = q + i_b * strides[0] + (i_h * SHAPE.SHARE + o_w // n_q) * strides[1] + o_w % n_q * strides[2]
    p_mask = q
    o_mask = o_m
    if SHAPE.MASK > 0:
        p_mask = mask + i_b * s_m[0]
        o_mask = (i_h * SHAPE.SHARE + o_m // n_q) * s_m[1] + o_m % n_q * s_m[2]
    return o_m, m_m, p_head, (p_mask, o_mask, strides[3], L), p_rows, m_w
