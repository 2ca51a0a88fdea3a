"""Seal on the GPU. Every program looks at its row's counters first and leaves at once if nothing is due."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dispatch import reference
from ..pages import PageFormat
from ._lib import F16_MAX, field_channels, fields_of, on_device, pack_fields, power


@triton.jit
def affine_range(b_x, m_x, levels, AXIS: tl.constexpr):
    """Scale and zero (f16) of groups along AXIS; elements not finite in f16 do not count."""
    m_finite = m_x & (tl.abs(b_x) <= F16_MAX)
    b_low = tl.min(tl.where(m_finite, b_x, float("inf")), AXIS)
    b_high = tl.max(tl.where(m_finite, b_x, float("-inf")), AXIS)
    m_empty = b_low > b_high
    b_low = tl.where(m_empty, 0.0, b_low)
    b_high = tl.where(m_empty, 0.0, b_high)
    # Correctly rounded, as torch divides: an ulp here can move a code.
    b_scale = tl.math.div_rn(b_high - b_low, tl.zeros_like(b_low) + levels)
    return tl.minimum(b_scale, F16_MAX).to(tl.float16), b_low.to(tl.float16)


@triton.jit
def affine_codes(b_x, b_scale, b_zero, levels):
    """``floor((x - zero) / scale + 1/2)`` as i32, clamped to [0, levels]; scale and zero f32, as stored."""
    m_scale = b_scale > 0.0
    b_scale = tl.where(m_scale, b_scale, 1.0)
    b_inverse = tl.where(m_scale, tl.math.div_rn(tl.zeros_like(b_scale) + 1.0, b_scale), 0.0)
    b_code = tl.floor((b_x - b_zero) * b_inverse + 0.5)
    b_code = tl.where(b_code != b_code, 0.0, b_code)
    b_code = tl.where(b_code > 0.0, b_code, 0.0)
    return tl.where(b_code < levels, b_code, levels).to(tl.int32)


@triton.jit
def raised_channels(p_widths, o_c, m_c, WIDTH: tl.constexpr, COUNT: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Whether channels are among the first COUNT of their page that have this width."""
    o_d = tl.arange(0, BD)
    b_all = tl.load(p_widths + o_d, mask=o_d < D, other=0).to(tl.int32)
    b_own = tl.load(p_widths + o_c, mask=m_c, other=0).to(tl.int32)
    # [C, BD]
    m_before = (b_all == WIDTH)[None, :] & (o_d[None, :] < o_c[:, None])
    return (b_own == WIDTH) & (tl.sum(m_before.to(tl.int32), 1) < COUNT)


@triton.jit
def ranked_channels(p_widths, o_r, WIDTH: tl.constexpr, COUNT: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """The channel of each rank, 0 for ranks that are not used, and whether they are."""
    o_d = tl.arange(0, BD)
    m_chosen = tl.load(p_widths + o_d, mask=o_d < D, other=0).to(tl.int32) == WIDTH
    b_rank = tl.cumsum(m_chosen.to(tl.int32), 0) - 1
    # [R, BD]
    m_rank = m_chosen[None, :] & (b_rank[None, :] == o_r[:, None]) & (o_r[:, None] < COUNT)
    b_channel = tl.sum(tl.where(m_rank, o_d[None, :], 0), 1)
    return b_channel, tl.sum(m_rank.to(tl.int32), 1) > 0


@triton.jit(do_not_specialize=["N", "M"])
def seal_channel_kernel(
    codes, scale, zero, table, count, new, source, index, widths, s_b, s_h, s_l, s_d, H, N, M,
    D: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, TOKEN_MAJOR: tl.constexpr,
    COUNT4: tl.constexpr, COUNT16: tl.constexpr, BG: tl.constexpr, BE: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """One group of GROUP tokens times the FIELDS * BE channels of BE words."""
    i_g, i_bh, i_e = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    i_b, i_h = i_bh // H, i_bh % H
    i_j = i_g * GROUP
    if i_j >= tl.minimum(tl.load(new + i_b), M):
        return
    FIELDS: tl.constexpr = 16 // BITS
    E: tl.constexpr = (D + FIELDS - 1) // FIELDS
    i_token = tl.load(count + i_b) + i_j
    i_head = tl.load(table + i_b * N + i_token // G).to(tl.int64) * H + i_h
    i_slot = i_token % G
    o_t = tl.arange(0, BG)
    m_t = o_t < GROUP
    o_e = i_e * BE + tl.arange(0, BE)
    o_c, m_c = field_channels(o_e, D, E, FIELDS, BE)

    b_column = tl.load(index + i_b * M + i_j + o_t, mask=m_t, other=0).to(tl.int64)
    p_x = source + i_b * s_b + i_h * s_h + b_column[:, None] * s_l + o_c[None, :] * s_d
    # [BG, C]
    m_x = m_t[:, None] & m_c[None, :]
    b_x = tl.load(p_x, mask=m_x, other=0.0).to(tl.float32)
    b_levels = tl.zeros([FIELDS * BE], tl.float32) + ((1 << BITS) - 1)
    p_widths = widths
    if widths is not None:
        p_widths = widths + (i_bh * (M // G) + i_j // G) * D
        if COUNT4 > 0:
            b_levels = tl.where(raised_channels(p_widths, o_c, m_c, 4, COUNT4, D, BD), 15.0, b_levels)
    b_scale, b_zero = affine_range(b_x, m_x, b_levels, 0)
    b_code = affine_codes(b_x, b_scale.to(tl.float32)[None, :], b_zero.to(tl.float32)[None, :], b_levels[None, :])
    b_code = tl.where(m_c[None, :], b_code & ((1 << BITS) - 1), 0)
    if widths is not None:
        if COUNT16 > 0:
            m_whole = raised_channels(p_widths, o_c, m_c, 16, COUNT16, D, BD)
            b_scale = tl.where(m_whole, 0.0, b_scale)
            b_zero = tl.where(m_whole, 0.0, b_zero)
            b_code = tl.where(m_whole[None, :], 0, b_code)
    p_group = (i_head * (G // GROUP) + i_slot // GROUP) * D + o_c
    tl.store(scale + p_group, b_scale.to(tl.float16), mask=m_c)
    tl.store(zero + p_group, b_zero.to(tl.float16), mask=m_c)
    if TOKEN_MAJOR:
        p_word = codes + i_head * (G * E) + (i_slot + o_t)[:, None] * E + o_e[None, :]
    else:
        p_word = codes + i_head * (G * E) + o_e[None, :] * G + (i_slot + o_t)[:, None]
    tl.store(p_word, pack_fields(b_code, BITS, FIELDS, BE, BG), mask=m_t[:, None] & (o_e < E)[None, :])


@triton.jit(do_not_specialize=["N", "M"])
def seal_raised_kernel(
    high, high_index, full, full_index, table, count, new, source, index, widths, s_b, s_h, s_l, s_d, H, N, M,
    D: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, COUNT4: tl.constexpr, COUNT16: tl.constexpr,
    N4: tl.constexpr, N16: tl.constexpr, BG: tl.constexpr, BW: tl.constexpr, B4: tl.constexpr, B16: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """The raised channels of one group of tokens: upper bits, whole values, and the page's indices."""
    i_g, i_bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    i_j = i_g * GROUP
    if i_j >= tl.minimum(tl.load(new + i_b), M):
        return
    i_token = tl.load(count + i_b) + i_j
    i_head = tl.load(table + i_b * N + i_token // G).to(tl.int64) * H + i_h
    i_slot = i_token % G
    p_widths = widths
    if widths is not None:
        p_widths = widths + (i_bh * (M // G) + i_j // G) * D
    if COUNT4 > 0:
        # Eight tokens share a word: the group's tokens in the order of fields. [8 * BW]
        ROWS: tl.constexpr = GROUP // 8
        o_w = tl.arange(0, BW)
        o_u, m_u = field_channels(o_w, GROUP, ROWS, 8, BW)
        b_column = tl.load(index + i_b * M + i_j + o_u, mask=m_u, other=0).to(tl.int64)
        p_token = source + i_b * s_b + i_h * s_h + b_column[:, None] * s_l
        o_r = tl.arange(0, B4)
        b_channel = tl.zeros([B4], tl.int32)
        m_used = b_channel > 0
        if widths is not None:
            b_channel, m_used = ranked_channels(p_widths, tl.where(o_r < N4, o_r, D), 4, COUNT4, D, BD)
        # [8 * BW, B4]
        m_x = m_u[:, None] & m_used[None, :]
        b_x = tl.load(p_token + b_channel[None, :] * s_d, mask=m_x, other=0.0).to(tl.float32)
        b_scale, b_zero = affine_range(b_x, m_x, 15.0, 0)
        b_code = affine_codes(b_x, b_scale.to(tl.float32)[None, :], b_zero.to(tl.float32)[None, :], 15.0)
        b_code = tl.where(m_x, b_code >> 2, 0)
        # [B4, BW]
        b_word = pack_fields(tl.trans(b_code), 2, 8, BW, B4)
        p_high = high + i_head * (G // 8 * N4) + (i_slot // 8 + o_w)[None, :] * N4 + o_r[:, None]
        tl.store(p_high, b_word, mask=(o_r < N4)[:, None] & (o_w < ROWS)[None, :])
        if i_slot == 0:
            tl.store(high_index + i_head * N4 + o_r, b_channel.to(high_index.dtype.element_ty), mask=o_r < N4)
    if COUNT16 > 0:
        o_r = tl.arange(0, B16)
        b_channel = tl.zeros([B16], tl.int32)
        m_used = b_channel > 0
        if widths is not None:
            b_channel, m_used = ranked_channels(p_widths, o_r, 16, COUNT16, D, BD)
        o_t = tl.arange(0, BG)
        m_t = o_t < GROUP
        b_column = tl.load(index + i_b * M + i_j + o_t, mask=m_t, other=0).to(tl.int64)
        p_token = source + i_b * s_b + i_h * s_h + b_column[:, None] * s_l
        # [BG, B16]
        b_x = tl.load(p_token + b_channel[None, :] * s_d, mask=m_t[:, None] & m_used[None, :], other=0.0)
        p_full = full + i_head * (G * N16) + (i_slot + o_t)[:, None] * N16 + o_r[None, :]
        tl.store(p_full, b_x, mask=m_t[:, None] & (o_r < N16)[None, :])
        if i_slot == 0:
            tl.store(full_index + i_head * N16 + o_r, b_channel.to(full_index.dtype.element_ty), mask=o_r < N16)


@triton.jit(do_not_specialize=["N", "M"])
def seal_token_kernel(
    codes, scale, zero, table, count, new, source, index, s_b, s_h, s_l, s_d, H, N, M,
    D: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, TOKEN_MAJOR: tl.constexpr,
    BT: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """BT tokens, which may lie in several pages; 16-bit pages (GROUP 0) are copied."""
    i_t, i_bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    b_new = tl.minimum(tl.load(new + i_b), M)
    if i_t * BT >= b_new:
        return
    FIELDS: tl.constexpr = 16 // BITS
    E: tl.constexpr = (D + FIELDS - 1) // FIELDS
    o_j = i_t * BT + tl.arange(0, BT)
    m_t = o_j < b_new
    o_token = tl.load(count + i_b) + o_j
    o_head = tl.load(table + i_b * N + o_token // G, mask=m_t, other=0).to(tl.int64) * H + i_h
    o_slot = o_token % G
    o_e = tl.arange(0, BE)
    o_c, m_c = field_channels(o_e, D, E, FIELDS, BE)

    b_column = tl.load(index + i_b * M + o_j, mask=m_t, other=0).to(tl.int64)
    p_x = source + i_b * s_b + i_h * s_h + b_column[:, None] * s_l + o_c[None, :] * s_d
    # [BT, C]
    m_x = m_t[:, None] & m_c[None, :]
    b_x = tl.load(p_x, mask=m_x, other=0.0)
    if TOKEN_MAJOR:
        p_word = codes + (o_head * G + o_slot)[:, None] * E + o_e[None, :]
    else:
        p_word = codes + (o_head * (G * E) + o_slot)[:, None] + o_e[None, :] * G
    m_word = m_t[:, None] & (o_e < E)[None, :]
    if GROUP == 0:
        tl.store(p_word, b_x, mask=m_word)
    else:
        b_x = b_x.to(tl.float32)
        b_scale = tl.zeros([BT, FIELDS * BE], tl.float32)
        b_zero = tl.zeros([BT, FIELDS * BE], tl.float32)
        for i_n in range(D // GROUP):
            # Fields interleave channels, so a group is a mask over the tile and not a slice of it. [1, C]
            m_n = (m_c & (o_c // GROUP == i_n))[None, :]
            b_own_scale, b_own_zero = affine_range(b_x, m_x & m_n, (1 << BITS) - 1.0, 1)
            p_group = (o_head * (D // GROUP) + i_n) * G + o_slot
            tl.store(scale + p_group, b_own_scale, mask=m_t)
            tl.store(zero + p_group, b_own_zero, mask=m_t)
            b_scale = tl.where(m_n, b_own_scale.to(tl.float32)[:, None], b_scale)
            b_zero = tl.where(m_n, b_own_zero.to(tl.float32)[:, None], b_zero)
        b_code = affine_codes(b_x, b_scale, b_zero, (1 << BITS) - 1.0)
        b_code = tl.where(m_c[None, :], b_code, 0)
        tl.store(p_word, pack_fields(b_code, BITS, FIELDS, BE, BT), mask=m_word)


def seal_triton(
    parts: Sequence[Tensor],
    table: Tensor,
    count: Tensor,
    new: Tensor,
    source: Tensor,
    index: Tensor,
    widths: Tensor | None,
    fmt: str,
    side: str,
) -> None:
    """Launcher of `hfkvq.kernels.seal`; fp8 pages, and bf16 rounding under the interpreter, take the reference."""
    form = PageFormat.parse(fmt)
    named = dict(zip(form.names, parts, strict=True))
    stored = named["codes"] if form.bits == 16 else named.get("full", source)
    # Triton's interpreter truncates where bf16 should be rounded.
    truncates = not source.is_cuda and stored.dtype == torch.bfloat16 != source.dtype
    if form.bits == 8 or truncates:
        return reference("seal")(parts, table, count, new, source, index, widths, fmt, side)
    assert all(part.is_contiguous() for part in parts), "pages are contiguous: they are written in place"
    batch, heads, _, head_dim = source.shape
    tokens, page = index.shape[1], form.page_size
    if not tokens or not batch:
        return None
    fields, words = fields_of(form.bits), form.words(head_dim)
    common = (
        table.contiguous(),
        count.contiguous(),
        new.contiguous(),
        source,
        index.contiguous(),
    )
    sizes = (*source.stride(), heads, table.shape[1], tokens)
    shape = {
        "D": head_dim,
        "G": page,
        "BITS": form.bits,
        "TOKEN_MAJOR": side == "keys" or form.bits == 16,
        # A fused multiply-add would round once where the contract rounds twice, and move codes at ties.
        "enable_fp_fusion": False,
    }
    with on_device(source):
        if form.axis == "token" or form.bits == 16:
            block = min(16, power(tokens))
            seal_token_kernel[(triton.cdiv(tokens, block), batch * heads)](
                named["codes"],
                named.get("scale"),
                named.get("zero"),
                *common,
                *sizes,
                GROUP=form.group_size if form.bits < 16 else 0,
                BT=block,
                BE=power(words),
                **shape,
            )
            return None
        group, groups = form.group_size, tokens // form.group_size
        block = power(group)
        width = max(1, min(power(words), (64 if form.raised else 128) // fields, 8192 // (block * fields)))
        chosen = widths.contiguous() if widths is not None and form.raised else None
        counts = {"COUNT4": form.raised_count(4), "COUNT16": form.raised_count(16)}
        seal_channel_kernel[(groups, batch * heads, triton.cdiv(words, width))](
            named["codes"],
            named["scale"],
            named["zero"],
            *common,
            chosen,
            *sizes,
            GROUP=group,
            BG=block,
            BE=width,
            BD=power(head_dim),
            num_warps=8 if block * fields * width > 4096 else 4,
            **counts,
            **shape,
        )
        if form.raised:
            room4, room16 = form.raised_room(4), form.raised_room(16)
            seal_raised_kernel[(groups, batch * heads)](
                *(named.get(name) for name in ("high", "high_index", "full", "full_index")),
                *common,
                chosen,
                *sizes,
                D=head_dim,
                G=page,
                GROUP=group,
                N4=room4,
                N16=room16,
                BG=block,
                BW=power(group // 8),
                B4=power(room4),
                B16=power(room16),
                BD=power(head_dim),
                num_warps=8 if block * max(room4, room16) > 4096 else 4,
                enable_fp_fusion=False,
                **counts,
            )
    return None
