"""Decode attention over full integer pages at the speed of their bytes: the road that most tokens take.

Codes are never converted. A field of a 16-bit word, masked where it stands, *is* an f16 number: a subnormal, the code
times a power of two, exactly. Tensor cores take subnormals at full speed, so unpacking two values costs one AND; the
powers of two fold into the query (keys) and the final sum (values). Scales fold into the query (per channel) or into
logits and probabilities (per token), minima into one bias. Tokens stand on the long side of the product and query
heads on the short one, so the unpacked operand stays in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

UNIT = tl.constexpr(16777216.0)
"""2^24: what a subnormal f16 has to be multiplied by to be the integer of its bits."""


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


@triton.jit
def unpack4(b_w):
    """Four 4-bit fields as f16: even fields times 2^-24, odd ones times 16 2^-24."""
    if INTERPRETED:
        b_s = (b_w >> 8) & 0xFF
        return masked(b_w, 0xF), masked(b_w, 0xF0), masked(b_s, 0xF), masked(b_s, 0xF0)
    else:
        return tl.inline_asm_elementwise(
            asm="""{
            .reg .b32 t;
            and.b32 $0, $4, 0x000f000f;
            and.b32 $1, $4, 0x00f000f0;
            shr.u32 t, $4, 8;
            and.b32 $2, t, 0x000f000f;
            and.b32 $3, t, 0x00f000f0;
            }""",
            constraints="=r,=r,=r,=r,r",
            args=[b_w],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )


@triton.jit
def unpack(b_w, BITS: tl.constexpr):
    """All fields of words, as f16, each with its power of two."""
    if BITS == 2:
        return unpack2(b_w)
    else:
        return unpack4(b_w)


@triton.jit
def weight(f: tl.constexpr, BITS: tl.constexpr):
    """What field ``f`` has to be multiplied by, beside 2^24, to be its code."""
    W: tl.constexpr = 1.0 / (1 << (2 * (f % 5))) if BITS == 2 else 1.0 / (1 << (4 * (f % 2)))
    return W


@triton.jit
def stacked(b_parts, BT: tl.constexpr, BM: tl.constexpr):
    """Eight tiles [BT / 8, BM] one below the other: [BT, BM]."""
    b_01, b_23 = tl.join(b_parts[0], b_parts[1]), tl.join(b_parts[2], b_parts[3])
    b_45, b_67 = tl.join(b_parts[4], b_parts[5]), tl.join(b_parts[6], b_parts[7])
    # [BT / 8, BM, low bit, middle bit, high bit of the tile's number]
    b_all = tl.join(tl.join(b_01, b_23), tl.join(b_45, b_67))
    return tl.reshape(tl.permute(b_all, (4, 3, 2, 0, 1)), (BT, BM))


@triton.jit(do_not_specialize=["N", "L", "SPLITS", "FIRST", "PAGED"])
def full_pages_kernel(
    q, counters, table, k_codes, k_scale, k_zero, k_high, k_high_index, v_codes, v_scale, v_zero, mask,
    out, out_top, out_sum, s_qb, s_qh, s_mb, s_ml, scaling, B, N, L, SPLITS, FIRST, PAGED,
    H: tl.constexpr, SHARE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, S: tl.constexpr, G: tl.constexpr,
    K_BITS: tl.constexpr, K_CHANNEL: tl.constexpr, N4: tl.constexpr, V_BITS: tl.constexpr, V_GROUP: tl.constexpr,
    MASKED: tl.constexpr, BT: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One split of one row's pages that are full on both sides, against the SHARE query heads of a KV head.

    A step takes BT tokens: a page, or what shares the scales of a key channel.
    """
    i_s, i_bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    K_FIELDS: tl.constexpr = 16 // K_BITS
    V_FIELDS: tl.constexpr = 16 // V_BITS
    EK: tl.constexpr = D // K_FIELDS
    EV: tl.constexpr = DV // V_FIELDS
    V_GROUPS: tl.constexpr = DV // V_GROUP
    # Fields of values that share a scale.
    SHARED: tl.constexpr = V_FIELDS // V_GROUPS
    STEPS: tl.constexpr = G // BT
    o_m = tl.arange(0, BM)
    o_t = tl.arange(0, BT)
    o_k = tl.arange(0, EK)
    o_v = tl.arange(0, EV)
    m_m = o_m < SHARE
    i_row = (i_bh * SPLITS + FIRST + i_s) * SHARE

    n_pages = tl.minimum(tl.load(counters + 2 * B + i_b), tl.load(counters + 3 * B + i_b)) // G
    per_split = (n_pages + PAGED - 1) // PAGED
    i_first = tl.minimum(i_s * per_split, n_pages)
    i_end = tl.minimum(i_first + per_split, n_pages)
    if i_first >= i_end:
        tl.store(out_top + i_row + o_m, tl.full([BM], float("-inf"), tl.float32), mask=m_m)
        return

    # Logits in units of ln 2, for exp2.
    log2_scaling = scaling * 1.4426950408889634
    p_head = q + i_b * s_qb + (i_h * SHARE + o_m)[None, :] * s_qh
    b_qs = ()
    b_total = tl.zeros([BM], tl.float32)
    for f in tl.static_range(K_FIELDS):
        # [EK, BM]
        b_q = tl.load(p_head + (f * EK + o_k)[:, None], mask=m_m[None, :], other=0.0).to(tl.float32) * log2_scaling
        if K_CHANNEL:
            b_qs = b_qs + (b_q,)
        else:
            b_total += tl.sum(b_q, 0)
            b_qs = b_qs + ((b_q * weight(f, K_BITS)).to(tl.float16),)
    b_accs = ()
    for f in tl.static_range(V_FIELDS):
        b_accs = b_accs + (tl.zeros([EV, BM], tl.float32),)
    b_zeros = ()
    for g in tl.static_range(V_GROUPS):
        b_zeros = b_zeros + (tl.zeros([BM], tl.float32),)
    b_top = tl.full([BM], float("-inf"), tl.float32)
    b_sum = tl.zeros([BM], tl.float32)
    if MASKED:
        p_mask = mask + i_b * s_mb + (tl.load(counters + i_b) + S + o_t).to(tl.int64) * s_ml

    for i_step in tl.range(i_first * STEPS, i_end * STEPS, num_stages=STAGES):
        i_slot = i_step % STEPS * BT
        i_head = tl.load(table + i_b * N + i_step // STEPS).to(tl.int64) * H + i_h
        # [BT, EK] and [EV, BT]
        b_kw = tl.load(k_codes + i_head * (G * EK) + (i_slot + o_t)[:, None] * EK + o_k[None, :])
        b_vw = tl.load(v_codes + i_head * (G * EV) + (i_slot + o_t)[None, :] + o_v[:, None] * G)
        b_ks = unpack(b_kw, K_BITS)
        if K_CHANNEL:
            i_group = (i_head * STEPS + i_step % STEPS) * D
            b_s = tl.zeros([BT, BM], tl.float32)
            if N4 > 0:
                # The upper two bits of raised channels: their queries are gathered, not their keys.
                BR: tl.constexpr = 16 if N4 <= 16 else triton.next_power_of_2(N4)
                o_r = tl.arange(0, BR)
                m_r = o_r < N4
                b_channel = tl.load(k_high_index + i_head * N4 + o_r, mask=m_r, other=0).to(tl.int32)
                m_q = m_r[:, None] & m_m[None, :]
                # [BR, BM]
                b_raised = tl.load(p_head + b_channel[:, None], mask=m_q, other=0.0).to(tl.float32)
                b_scale = tl.load(k_scale + i_group + b_channel).to(tl.float32) * (4.0 * log2_scaling)
                b_raised = b_raised * b_scale[:, None]
                p_high = k_high + i_head * (G // 8 * N4) + (i_slot // 8 + tl.arange(0, BT // 8))[:, None] * N4
                b_hs = unpack2(tl.load(p_high + o_r[None, :], mask=m_r[None, :], other=0))
                b_parts = ()
                for f in tl.static_range(8):
                    b_parts = b_parts + (tl.dot(b_hs[f], (b_raised * weight(f, 2)).to(tl.float16)),)
                b_s = stacked(b_parts, BT, BM)
            b_least = tl.zeros([EK, BM], tl.float32)
            for f in tl.static_range(K_FIELDS):
                p_d = i_group + f * EK + o_k
                b_scale = tl.load(k_scale + p_d).to(tl.float32) * weight(f, K_BITS)
                b_s = tl.dot(b_ks[f], (b_qs[f] * b_scale[:, None]).to(tl.float16), b_s)
                b_least += b_qs[f] * tl.load(k_zero + p_d).to(tl.float32)[:, None]
            b_bias = tl.sum(b_least, 0)
        else:
            b_s = tl.zeros([BT, BM], tl.float32)
            for f in tl.static_range(K_FIELDS):
                b_s = tl.dot(b_ks[f], b_qs[f], b_s)
            b_scale = tl.load(k_scale + i_head * G + i_slot + o_t).to(tl.float32) * UNIT
            b_floor = tl.load(k_zero + i_head * G + i_slot + o_t).to(tl.float32)
            b_s = b_s * b_scale[:, None] + b_floor[:, None] * b_total[None, :]
        if MASKED:
            m_t = tl.load(p_mask + i_step * BT * s_ml) != 0
            b_s = tl.where(m_t[:, None], b_s, float("-inf"))
        # With a bias the logits are b_s * UNIT + bias, which the exponent's own multiply-add makes.
        b_most = tl.max(b_s, 0)
        if K_CHANNEL:
            b_most = b_most * UNIT + b_bias
        b_new = tl.maximum(b_top, b_most)
        if MASKED:
            # A page in which nothing is visible, before anything else was.
            b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
        else:
            b_safe = b_new
        b_shrink = tl.exp2(b_top - b_safe)
        if K_CHANNEL:
            b_p = tl.exp2(b_s * UNIT + (b_bias - b_safe)[None, :])
        else:
            b_p = tl.exp2(b_s - b_safe[None, :])
        b_top = b_new
        b_sum = b_sum * b_shrink + tl.sum(b_p, 0)
        b_vs = unpack(b_vw, V_BITS)
        b_old, b_old_zeros, b_accs, b_zeros = b_accs, b_zeros, (), ()
        for g in tl.static_range(V_GROUPS):
            p_t = (i_head * V_GROUPS + g) * G + i_slot + o_t
            b_scale = tl.load(v_scale + p_t).to(tl.float32)
            b_floor = tl.load(v_zero + p_t).to(tl.float32)
            b_zeros = b_zeros + (b_old_zeros[g] * b_shrink + tl.sum(b_p * b_floor[:, None], 0),)
            # 2^8 keeps small probabilities out of f16's own subnormals.
            b_ps = (b_p * (b_scale * 256.0)[:, None]).to(tl.float16)
            for f in tl.static_range(g * SHARED, (g + 1) * SHARED):
                b_accs = b_accs + (tl.dot(b_vs[f], b_ps, b_old[f] * b_shrink[None, :]),)

    p_out = out + (i_row + o_m)[None, :] * DV + o_v[:, None]
    for f in tl.static_range(V_FIELDS):
        b_out = b_accs[f] * (UNIT / 256.0 * weight(f, V_BITS)) + b_zeros[f // SHARED][None, :]
        tl.store(p_out + f * EV, b_out, mask=m_m[None, :])
    tl.store(out_top + i_row + o_m, b_top * 0.6931471805599453, mask=m_m)
    tl.store(out_sum + i_row + o_m, b_sum, mask=m_m)
