"""The page loop with integer products, for up to four queries and 4-bit pages with one scale a token.

Every step has a unit of its own: of probabilities times the scales of values. See `digits`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import key_logits as keys
from . import value_sums as values
from .digits import (
    BASE,
    MOST_WEIGHT,
    WEIGHT_SHIFT,
    byte_fields,
    bytes_of,
    field_bytes,
    larger,
    query_digits,
    weight_digits,
)
from .fields import LOG2E, Q_SHIFT, words_of
from .tiles import put


@triton.jit
def twice(p_q, COLUMNS: tl.constexpr, SHARE: tl.constexpr):
    """Addresses of a KV head's queries, each in two columns, and their mask. ``p_q``: the first one and a stride."""
    o_q = tl.arange(0, COLUMNS) // 2
    return p_q[0] + o_q * p_q[1], o_q < SHARE


@triton.jit
def normed_queries(b_us):
    """The power of two that brings the largest magnitude of a column to 32 and more, below 64: [8]. Its inverse: [4].

    At most 2^15, which f16 holds: products with smaller numbers than 2^-10 hardly matter.
    """
    b_big = b_us[0]
    for f in tl.static_range(1, len(b_us)):
        b_big = larger(b_big, b_us[f])
    b_bits = tl.max(tl.abs(b_big.to(tl.float32)), 0).to(tl.int32, bitcast=True) & 0x7F800000
    # Exponents, where f32 has them.
    b_bits = tl.maximum(b_bits, 117 << 23)
    b_all = ((117 << 23) - b_bits) + (142 << 23)
    b_unit, _ = tl.split(tl.reshape((b_bits - (5 << 23)).to(tl.float32, bitcast=True), (4, 2)))
    return b_all.to(tl.float32, bitcast=True), b_unit


@triton.jit
def attend_digits(
    run, outs, b_qs, i_row, i_b, i_h, i_first, i_end, n_tokens, n_table, scaling, FORM: tl.constexpr,
    SHAPE: tl.constexpr,
):  # fmt: skip
    """Steps ``i_first`` to ``i_end`` over the pages of one row's run, as `attend_pages.attend_pages` takes them.

    ``b_qs`` has every query in two columns. Logits stand as [tokens / 16, 8, 2, 4]: pairs of tokens in lanes.
    """
    H: tl.constexpr = SHAPE.H
    D: tl.constexpr = SHAPE.D
    DV: tl.constexpr = SHAPE.DV
    G: tl.constexpr = SHAPE.G
    BT: tl.constexpr = FORM.step
    BITS: tl.constexpr = FORM.key_bits
    OPEN: tl.constexpr = FORM.open
    STEPS: tl.constexpr = G // BT
    EK: tl.constexpr = words_of(D, BITS)
    EV: tl.constexpr = words_of(DV, BITS)
    FIELDS: tl.constexpr = 16 // BITS
    o_r = tl.arange(0, BT)
    # Rows of products are tokens 0, 2, .. 14, 1, 3, .. 15 of sixteen.
    o_turned = o_r // 16 * 16 + o_r % 8 * 2 + o_r // 8 % 2
    o_e = tl.arange(0, EV)
    o_m = tl.arange(0, 4)
    m_m = o_m < SHAPE.SHARE
    m_lower = tl.arange(0, 8) % 2 == 1
    b_halves = ()
    for f in tl.static_range(FIELDS):
        b_halves = b_halves + ((b_qs[f] * Q_SHIFT).to(tl.float16),)
    b_base = tl.where(m_lower, 1.0 * BASE, 1.0).to(tl.float16)[None, :] + tl.zeros([EK, 8], tl.float16)
    b_accs = values.zero_tiles(FIELDS, EV, 4)
    b_sum = tl.zeros([8, 4], tl.float32)
    b_least = tl.zeros([8, 4], tl.float32)
    b_most = tl.zeros([8, 4], tl.float32)
    b_top = tl.full([4], float("-inf"), tl.float32)
    log2_scaling = scaling * LOG2E
    # Digits: the largest magnitude of a query is below 64.
    b_all, b_unit = normed_queries(b_halves)
    b_unit = b_unit * (log2_scaling / (Q_SHIFT * BASE))
    b_first = tl.where(m_lower, b_all, 0.0).to(tl.float16)[None, :] + tl.zeros([EK, 8], tl.float16)
    b_all = b_all.to(tl.float16)[None, :] + tl.zeros([EK, 8], tl.float16)
    b_ds = ()
    for f in tl.static_range(FIELDS // 2):
        b_ds = b_ds + (bytes_of(query_digits(b_halves[f], b_halves[f + FIELDS // 2], b_first, b_all, b_base)),)
    b_total = keys.group_totals(b_qs, D, EK, D)[0] * log2_scaling
    b_total, _ = tl.split(tl.reshape(b_total, (4, 2)))
    for i_step in tl.range(i_first, i_end, num_stages=FORM.stages):
        i_slot = i_step % STEPS * BT
        i_head = tl.load(run.table + i_b * n_table + i_step // STEPS).to(tl.int64) * H + i_h
        p_t = i_head * G + i_slot + o_r
        # int8 [BT, 2 EK]
        b_k = tl.load(
            run.k_codes.to(tl.pointer_type(tl.int8), bitcast=True)
            + i_head * (G * 2 * EK)
            + (i_slot + o_turned)[:, None] * (2 * EK)
            + tl.arange(0, 2 * EK)[None, :]
        )
        b_ks = byte_fields(b_k)
        b_x = tl.zeros([BT, 8], tl.int32)
        for f in tl.static_range(FIELDS // 2):
            b_x = tl.dot(b_ks[f], b_ds[f], b_x, out_dtype=tl.int32)
        b_hi, b_lo = tl.split(tl.reshape(b_x, (BT, 4, 2)))
        b_s = (b_hi * BASE + b_lo).to(tl.float32)
        # Tokens in order, by pairs in lanes. [BT / 16, 8, 2, 4]
        b_s = tl.permute(tl.reshape(b_s, (BT // 16, 2, 8, 4)), (0, 2, 1, 3))
        b_scale = tl.reshape(tl.load(run.k_scale + p_t).to(tl.float32), (BT // 16, 8, 2))
        b_low = tl.load(run.k_zero + p_t).to(tl.float32)
        b_low = tl.reshape(b_low, (BT // 16, 8, 2))[:, :, :, None] * b_total[None, None, None, :]
        if OPEN:
            m_t = tl.where(i_step * BT + o_r < n_tokens, 0.0, float("-inf"))
            b_low += tl.reshape(m_t, (BT // 16, 8, 2))[:, :, :, None]
        b_s = b_s * (b_scale[:, :, :, None] * b_unit[None, None, None, :]) + b_low
        b_page = tl.max(tl.max(tl.max(b_s, 2), 0), 0)
        b_p = tl.exp2(b_s - b_page[None, None, None, :])
        b_new = tl.maximum(b_top, b_page)
        b_shrink = tl.exp2(b_top - b_new)
        b_grow = tl.exp2(b_page - b_new)
        b_top = b_new
        b_vs = tl.load(run.v_scale + p_t)
        b_held = b_vs
        if OPEN:
            # Whatever empty slots hold must not make the unit large.
            b_held = tl.where(i_step * BT + o_r < n_tokens, b_vs, 0.0)
        b_largest = tl.maximum(tl.max(b_held, 0).to(tl.float32), 1e-30)
        b_vs = tl.reshape(b_vs.to(tl.float32), (BT // 16, 8, 2))
        b_vz = tl.reshape(tl.load(run.v_zero + p_t).to(tl.float32), (BT // 16, 8, 2))
        b_psum = tl.sum(tl.sum(b_p, 2), 0)
        b_pz = tl.sum(tl.sum(b_p * b_vz[:, :, :, None], 2), 0)
        b_sum = b_sum * b_shrink[None, :] + b_psum * b_grow[None, :]
        b_least = b_least * b_shrink[None, :] + b_pz * b_grow[None, :]
        b_p = b_p * b_vs[:, :, :, None]
        b_most = b_most * b_shrink[None, :] + tl.sum(tl.sum(b_p, 2), 0) * b_grow[None, :]
        b_n = b_p * (MOST_WEIGHT / b_largest) + WEIGHT_SHIFT
        b_d = weight_digits(tl.reshape(b_n, (BT, 4)), BT)
        b_grow = b_grow * (b_largest * (1.0 / MOST_WEIGHT))
        b_v = tl.load(run.v_codes + i_head * (G * EV) + o_e[:, None] * G + (i_slot + o_r)[None, :])
        b_ws = field_bytes(b_v)
        for f in tl.static_range(FIELDS):
            b_o = tl.dot(b_ws[f], b_d, out_dtype=tl.int32)
            b_hi, b_lo = tl.split(tl.reshape(b_o, (EV, 4, 2)))
            b_o = (b_hi * 256 + b_lo).to(tl.float32)
            b_accs = put(b_accs, f, b_accs[f] * b_shrink[None, :] + b_o * b_grow[None, :])
    # The uppermost field of a byte is signed: its products are 128 too low.
    b_lowest = tl.sum(b_least, 0)
    UPPER: tl.constexpr = 8 // BITS
    b_lower = b_lowest + (128.0 * 2.0 ** (BITS - 8)) * tl.sum(b_most, 0)
    b_outs = ()
    for f in tl.static_range(FIELDS):
        b_low = b_lower if f % UPPER == UPPER - 1 else b_lowest
        b_outs = b_outs + (b_accs[f] * (2.0 ** (-BITS * (f % UPPER))) + b_low[None, :],)
    values.store_part(outs, b_outs, b_top, tl.sum(b_sum, 0), i_row, o_m, m_m, DV, BITS, EV, EV, True)
