"""Prototype of a decode kernel over trellis pages of 2 bits, timed beside today's formats in one run on a GPU.

    PYTHONPATH=. python evals/trellis_kernel.py [--sizes 32x32k,1x128k] [--formats 2-bit,kitty-pro] [--json FILE]
    TRITON_INTERPRET=1 PYTHONPATH=. python evals/trellis_kernel.py --check

A state of 8 bits gives two numbers: ``y = (state * MULTIPLIER + ADDEND) mod 2^32``, and the two halves of
``(y & MASK) ^ FLIP`` are f16 numbers. States move on by 4 bits, so two numbers take 4. A word of 32 bits holds eight
steps, the first in its highest bits, and takes the last 4 bits of another word, which in turn takes its own: a loop of
32 numbers, whose first state follows upon its last. The other word stands 64 tokens away in the same page, so one lane
has both, and 16 numbers cost a shift and 8 times a byte, a product and a masking.

Pages have 128 tokens. Keys i16 [128, D/8], as pages of 2 bits, with a scale and a mean a channel; values i16
[D/8, 128] with a scale a token. Step s of the words at (token, 2 c) is channels ``s D/8 + 2 c`` and one more of keys,
and channel ``s D/8 + c`` of two tokens of values. The same kernel with scalar 2-bit codes stands beside it: the
difference is what trellis codes cost.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from evals.kernel_bench import (
    add_speedups,
    cache_size,
    copies_for,
    first_line,
    measure_shape,
    new_record,
    row_of,
    save,
    table,
    time_calls,
)
from evals.kernel_cases import Shape, compile_formats, parse_size
from hfkvq.kernels.triton.fields import unpack2
from hfkvq.kernels.triton.tiles import INTERPRETED
from hfkvq.terminal import make_console

PAGE, HALF, M = 128, 64, 8

MULTIPLIER, ADDEND = 0xC0E2D8A5, 0xF2893F07
MASK, FLIP = 0x8FFF8FFF, 0x38003800


@triton.constexpr_function
def steps_asm(multiplier, addend, mask, flip):
    """Instructions that make eight registers of a word ($8) and the word before it ($9)."""
    lines = ["{", ".reg .b32 r, t;", "shf.r.wrap.b32 r, $8, $9, 4;"]
    for step in range(8):
        source, byte = ("r", 3 - step // 2) if step % 2 == 0 else ("$8", 3 - step // 2)
        lines.append(f"prmt.b32 t, {source}, 0, 0x444{byte};")
        lines.append(f"mad.lo.u32 t, t, {multiplier}, {addend};")
        lines.append(f"lop3.b32 ${step}, t, {mask}, {flip}, 0x6a;")
    return "\n".join([*lines, "}"])


@triton.jit
def trellis_steps(b_w, b_before, MUL: tl.constexpr, ADD: tl.constexpr, AND: tl.constexpr, XOR: tl.constexpr):
    """Eight tiles f16 of words i16, two of which make a word of 32 bits, and of the words before these."""
    if INTERPRETED:
        # [.., n] of i16 as [.., n/2] words.
        b_words = join_words(b_w)
        b_shifted = (b_words >> 4) | (join_words(b_before) << 28)
        b_found = ()
        for step in tl.static_range(8):
            b_state = ((b_shifted if step % 2 == 0 else b_words) >> (24 - 8 * (step // 2))) & 255
            b_y = ((b_state * MUL + ADD) & AND) ^ XOR
            b_low = (b_y & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
            b_high = (b_y >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
            b_found = b_found + (tl.reshape(tl.join(b_low, b_high), b_w.shape),)
        return b_found
    else:
        return tl.inline_asm_elementwise(
            asm=steps_asm(MUL, ADD, AND, XOR),
            constraints="=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r",
            args=[b_w, b_before],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )


@triton.jit
def join_words(b_w):
    """Words u32 [A, n/2] of i16 [A, n]."""
    b_low, b_high = tl.split(tl.reshape(b_w, (b_w.shape[0], b_w.shape[1] // 2, 2)))
    return b_low.to(tl.uint16, bitcast=True).to(tl.uint32) | (b_high.to(tl.uint16, bitcast=True).to(tl.uint32) << 16)


@triton.jit
def fields(b_a, b_b, TRELLIS: tl.constexpr, MUL: tl.constexpr, ADD: tl.constexpr, AND: tl.constexpr, XOR: tl.constexpr):
    """Eight tiles of each half of a page."""
    if TRELLIS:
        return trellis_steps(b_a, b_b, MUL, ADD, AND, XOR), trellis_steps(b_b, b_a, MUL, ADD, AND, XOR)
    else:
        return unpack2(b_a), unpack2(b_b)


@triton.jit
def decode_kernel(
    query, key_words, key_scale, key_mean, value_words, value_scale, parts, sums, n_pages, n_own, scaling,
    HEADS: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BM: tl.constexpr, H: tl.constexpr, TRELLIS: tl.constexpr,
    STAGES: tl.constexpr, MUL: tl.constexpr, ADD: tl.constexpr, AND: tl.constexpr, XOR: tl.constexpr,
):  # fmt: skip
    """Part of a row and KV head: pages ``i_split * n_own`` on, of halves of H tokens."""
    i_row, i_split = tl.program_id(0), tl.program_id(1)
    E: tl.constexpr = D // 8
    G: tl.constexpr = 2 * H
    o_m, o_t, o_e = tl.arange(0, BM), tl.arange(0, H), tl.arange(0, E)
    m_m = o_m < R
    # [E, BM]
    p_q = query + i_row * R * D + o_m[None, :] * D + o_e[:, None]
    b_qs = ()
    for f in tl.static_range(8):
        b_q = tl.load(p_q + f * E, mask=m_m[None, :], other=0.0).to(tl.float32) * (scaling * 1.4426950408889634)
        b_qs = b_qs + (b_q,)
    b_max = tl.full((BM,), -float("inf"), tl.float32)
    b_sum = tl.zeros((BM,), tl.float32)
    b_outs = ()
    for f in tl.static_range(8):
        b_outs = b_outs + (tl.zeros((E, BM), tl.float32),)
    first = i_split * n_own
    for i_page in tl.range(first, tl.minimum(first + n_own, n_pages), num_stages=STAGES):
        at = i_row.to(tl.int64) * n_pages + i_page
        p_k = key_words + at * G * E + o_t[:, None] * E + o_e[None, :]
        p_v = value_words + at * G * E + o_e[:, None] * G + o_t[None, :]
        b_k1, b_k2 = tl.load(p_k), tl.load(p_k + H * E)
        b_v1, b_v2 = tl.load(p_v), tl.load(p_v + H)
        b_left, b_right = fields(b_k1, b_k2, TRELLIS, MUL, ADD, AND, XOR)
        p_s = key_scale + at * D + o_e
        p_z = key_mean + at * D + o_e
        b_s1 = tl.zeros((H, BM), tl.float32)
        b_s2 = tl.zeros((H, BM), tl.float32)
        b_bias = tl.zeros((E, BM), tl.float32)
        for f in tl.static_range(8):
            # Field f of scalar codes is 4^(f mod 5) times its code.
            b_scale = tl.load(p_s + f * E).to(tl.float32) * (1.0 if TRELLIS else 0.25 ** (f % 5))
            b_scaled = (b_qs[f] * b_scale[:, None]).to(tl.float16)
            b_s1 = tl.dot(b_left[f], b_scaled, b_s1)
            b_s2 = tl.dot(b_right[f], b_scaled, b_s2)
            b_bias += b_qs[f] * tl.load(p_z + f * E).to(tl.float32)[:, None]
        UNIT: tl.constexpr = 1.0 if TRELLIS else 16777216.0
        b_shift = tl.sum(b_bias, 0)[None, :]
        b_s1, b_s2 = b_s1 * UNIT + b_shift, b_s2 * UNIT + b_shift
        b_new = tl.maximum(b_max, tl.maximum(tl.max(b_s1, 0), tl.max(b_s2, 0)))
        b_alpha = tl.exp2(b_max - b_new)
        b_p1, b_p2 = tl.exp2(b_s1 - b_new[None, :]), tl.exp2(b_s2 - b_new[None, :])
        b_sum = b_sum * b_alpha + tl.sum(b_p1, 0) + tl.sum(b_p2, 0)
        b_max = b_new
        p_u = value_scale + at * G + o_t
        LIFT: tl.constexpr = 1.0 if TRELLIS else 256.0
        b_p1 = (b_p1 * (tl.load(p_u).to(tl.float32) * LIFT)[:, None]).to(tl.float16)
        b_p2 = (b_p2 * (tl.load(p_u + H).to(tl.float32) * LIFT)[:, None]).to(tl.float16)
        b_left, b_right = fields(b_v1, b_v2, TRELLIS, MUL, ADD, AND, XOR)
        b_next = ()
        for f in tl.static_range(8):
            b_next = b_next + (tl.dot(b_right[f], b_p2, tl.dot(b_left[f], b_p1, b_outs[f] * b_alpha[None, :])),)
        b_outs = b_next
    i_part = i_row * tl.num_programs(1) + i_split
    p_o = parts + i_part * BM * D + o_m[None, :] * D + o_e[:, None]
    for f in tl.static_range(8):
        tl.store(p_o + f * E, b_outs[f] * (1.0 if TRELLIS else 65536.0 * 0.25 ** (f % 5)))
    tl.store(sums + i_part * 2 * BM + o_m, b_max)
    tl.store(sums + i_part * 2 * BM + BM + o_m, b_sum)


@triton.jit
def merge_kernel(parts, sums, out, n_splits, D: tl.constexpr, R: tl.constexpr, BM: tl.constexpr, SPLITS: tl.constexpr):
    """Output of one query head of a row from its parts."""
    i_row, i_m = tl.program_id(0), tl.program_id(1)
    o_s, o_d = tl.arange(0, SPLITS), tl.arange(0, D)
    m_s = o_s < n_splits
    o_part = i_row * n_splits + o_s
    b_max = tl.load(sums + o_part * 2 * BM + i_m, mask=m_s, other=-float("inf"))
    b_sum = tl.load(sums + o_part * 2 * BM + BM + i_m, mask=m_s, other=0.0)
    b_weight = tl.exp2(b_max - tl.max(b_max, 0))
    b_x = tl.load(parts + (o_part * BM + i_m)[:, None] * D + o_d[None, :], mask=m_s[:, None], other=0.0)
    b_out = tl.sum(b_x * b_weight[:, None], 0) / tl.sum(b_sum * b_weight, 0)
    tl.store(out + (i_row * R + i_m) * D + o_d, b_out.to(out.dtype.element_ty))


@triton.jit
def walk_kernel(x, weight, table, scratch, states, n_loops, BN: tl.constexpr):
    """States of BN loops of 32 numbers: a free walk finds where the ends meet, a second one the states.

    Costs are f32 [BN, 16, 16], by upper and lower half of a state. The upper half of the best state before stands in
    the last 4 bits of a cost, so that a minimum finds both.
    """
    o_n = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    m_n = o_n < n_loops
    o_s = tl.arange(0, 16)
    o_state = o_s[:, None] * 16 + o_s[None, :]
    b_first, b_second = tl.load(table + 2 * o_state)[None], tl.load(table + 2 * o_state + 1)[None]
    b_shared = tl.zeros((BN,), tl.int32)
    for place in tl.static_range(8, -1, -8):
        b_cost = emissions(x, weight, o_n, m_n, place, b_first, b_second)
        if place == 0:
            b_cost = tl.where(o_s[None, :, None] == b_shared[:, None, None], b_cost, 1e30)
        for i in range(1, 16):
            # [BN, 16], by the lower half of the state before, which becomes the upper one.
            b_best = cheapest(b_cost)
            b_from = (b_best.to(tl.int32, bitcast=True) & 15).to(tl.uint8)
            tl.store(scratch + (o_n * 16 + i)[:, None] * 16 + o_s[None, :], b_from, m_n[:, None])
            b_cost = b_best[:, :, None] + emissions(x, weight, o_n, m_n, (i + place) % 16, b_first, b_second)
        b_best = cheapest(b_cost)
        if place == 0:
            b_lower = b_shared
        else:
            b_lower = tl.argmin(b_best, 1).to(tl.int32)
        b_all = b_best.to(tl.int32, bitcast=True) & 15
        b_upper = tl.sum(tl.where(o_s[None, :] == b_lower[:, None], b_all, 0), 1)
        # Notes of one thread are read by another.
        tl.debug_barrier()
        # The free walk is wanted back to the loop's first numbers.
        for i in range(15, place, -1):
            if place == 0:
                tl.store(states + o_n * 16 + i, (b_upper * 16 + b_lower).to(tl.uint8), m_n)
            b_lower = b_upper
            b_upper = tl.load(scratch + (o_n * 16 + i) * 16 + b_lower, mask=m_n, other=0).to(tl.int32)
        if place == 0:
            tl.store(states + o_n * 16, (b_upper * 16 + b_lower).to(tl.uint8), m_n)
        b_shared = b_upper
        tl.debug_barrier()


@triton.jit
def emissions(x, weight, o_n, m_n, step, b_first, b_second):
    """Errors of two numbers of each loop by state, without what states share: f32 [BN, 16, 16]."""
    p_x = o_n * 32 + step * 2
    b_w1, b_w2 = tl.load(weight + p_x, mask=m_n, other=0.0), tl.load(weight + p_x + 1, mask=m_n, other=0.0)
    b_x1, b_x2 = tl.load(x + p_x, mask=m_n, other=0.0), tl.load(x + p_x + 1, mask=m_n, other=0.0)
    b_e1 = b_first * (b_first * b_w1[:, None, None] - (2.0 * b_w1 * b_x1)[:, None, None])
    return b_e1 + b_second * (b_second * b_w2[:, None, None] - (2.0 * b_w2 * b_x2)[:, None, None])


@triton.jit
def cheapest(b_cost):
    """Least of costs [BN, 16, 16] over the upper halves: [BN, 16], with that half in the last 4 bits."""
    b_bits = (b_cost.to(tl.int32, bitcast=True) & -16) | tl.arange(0, 16)[None, :, None]
    return tl.min(b_bits.to(tl.float32, bitcast=True), 1)


def walked(x: Tensor, weight: Tensor, table: Tensor, block: int = 4, warps: int = 2) -> Tensor:
    """States u8 (N, 16) of loops f32 (N, 16, 2) of least weighted squared error.

    Args:
        weight: f32 (N, 16, 2).
        table: f32 (256, 2), what states stand for.
    """
    states = torch.empty(x.shape[:2], dtype=torch.uint8, device=x.device)
    scratch = torch.empty(*x.shape[:2], 16, dtype=torch.uint8, device=x.device)
    grid = (triton.cdiv(len(x), block),)
    walk_kernel[grid](x, weight, table, scratch, states, len(x), block, num_warps=warps)
    return states


# Pages, in PyTorch.


def code_table(device: torch.device | str = "cpu") -> Tensor:
    """Numbers of each state: f32 (256, 2)."""
    state = torch.arange(256, dtype=torch.int64)
    y = ((state * MULTIPLIER + ADDEND) & MASK) ^ FLIP
    halves = torch.stack([y & 0xFFFF, (y >> 16) & 0xFFFF], 1)
    return _signed(halves).view(torch.float16).float().to(device)


def _signed(x: Tensor) -> Tensor:
    return torch.where(x > 32767, x - 65536, x).to(torch.int16)


def decoded(words: Tensor) -> Tensor:
    """Numbers f32 (8, A, n) of words i16 (A, n) of the first half and, behind them, the second half: (8, 2, A, n).

    Args:
        words: i16 (2, A, n), both halves.
    """
    whole = (words.long() & 0xFFFF).unflatten(2, (-1, 2))
    whole = whole[..., 0] | whole[..., 1] << 16
    shifted = whole >> 4 | (whole.flip(0) & 15) << 28
    states = [((shifted if s % 2 == 0 else whole) >> (24 - 8 * (s // 2))) & 255 for s in range(8)]
    return torch.stack([code_table(words.device)[state].flatten(-2) for state in states])


def decoded_scalar(words: Tensor) -> Tensor:
    """Codes f32 (8, 2, A, n) of words i16 (2, A, n)."""
    return torch.stack([((words.long() & 0xFFFF) >> 2 * f & 3).float() for f in range(8)])


class Pages:
    """Pages of random words.

    Args:
        rows: rows times KV heads.
        pages: of each.
        trellis: whether words are walks, or scalar codes.
    """

    def __init__(self, rows: int, pages: int, dim: int, device: torch.device, trellis: bool, seed: int = 0) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        self.rows, self.pages, self.dim, self.trellis = rows, pages, dim, trellis

        def words(*shape: int) -> Tensor:
            return torch.randint(-32768, 32768, shape, generator=generator, device=device, dtype=torch.int16)

        def scales(*shape: int) -> Tensor:
            return (torch.rand(shape, generator=generator, device=device) + 0.5).half()

        n = rows * pages
        self.key_words, self.value_words = words(n, PAGE, dim // 8), words(n, dim // 8, PAGE)
        self.key_scale, self.key_mean = scales(n, dim), scales(n, dim) - 1
        self.value_scale = scales(n, PAGE)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors, in the order of the kernel's arguments."""
        return [self.key_words, self.key_scale, self.key_mean, self.value_words, self.value_scale]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(x.nbytes for x in self.tensors)

    def dense(self) -> tuple[Tensor, Tensor]:
        """Keys and values f32 (rows, T, D)."""
        read = decoded if self.trellis else decoded_scalar
        keys = [read(words.view(2, HALF, -1)) for words in self.key_words]
        # (8, 2, 64, E) to (128, 8 E)
        key = torch.stack([x.permute(1, 2, 0, 3).reshape(PAGE, -1) for x in keys])
        values = [read(words.unflatten(1, (2, HALF)).transpose(0, 1)) for words in self.value_words]
        # (8, 2, E, 64) to (128, 8 E)
        value = torch.stack([x.permute(1, 3, 0, 2).reshape(PAGE, -1) for x in values])
        key = key * self.key_scale.float()[:, None] + self.key_mean.float()[:, None]
        value = value * self.value_scale.float()[..., None]
        return tuple(x.view(self.rows, -1, self.dim) for x in (key, value))


def attend(
    query: Tensor, pages: Pages, splits: int, scaling: float, warps: int = 1, stages: int = 3, out: Tensor | None = None
) -> Tensor:
    """Attention of queries (rows, R, D) over pages: (rows, R, D)."""
    rows, share, dim = query.shape
    own = -(-pages.pages // splits)
    splits = -(-pages.pages // own)
    parts = query.new_empty((rows, splits, M, dim), dtype=torch.float32)
    sums = query.new_empty((rows, splits, 2, M), dtype=torch.float32)
    out = torch.empty_like(query) if out is None else out
    code = {"MUL": MULTIPLIER, "ADD": ADDEND, "AND": MASK, "XOR": FLIP}
    key_words, key_scale, key_mean, value_words, value_scale = pages.tensors
    decode_kernel[rows, splits](
        query, key_words, key_scale, key_mean, value_words, value_scale, parts, sums, pages.pages, own, scaling,
        1, dim, share, M, HALF, pages.trellis, stages, **code, num_warps=warps,
    )  # fmt: skip
    merge_kernel[rows, share](parts, sums, out, splits, dim, share, M, triton.next_power_of_2(splits), num_warps=4)
    return out


def check(device: torch.device, dim: int = 128) -> None:
    """Holds the kernel against PyTorch. Raises ValueError if it differs."""
    for trellis in (False, True):
        pages = Pages(2, 3, dim, device, trellis)
        query = torch.randn(2, 4, dim, generator=torch.Generator(device).manual_seed(1), device=device).bfloat16() / 4
        key, value = (x.double() for x in pages.dense())
        exact = (query.double() @ key.mT * dim**-0.5).softmax(-1) @ value
        error = float((attend(query, pages, 2, dim**-0.5).double() - exact).norm() / exact.norm())
        print(f"{'trellis' if trellis else 'scalar'}: error {error:.1e}", flush=True)
        if not error < 0.02:
            raise ValueError(f"trellis={trellis}: the kernel is wrong by {error:.3g}, allowed 0.02.")


def time_walks(device: torch.device, loops: int = 2**21) -> None:
    """Prints how long it takes to find the states of keys and values of 32k tokens of 8 heads of 128: 2^21 loops."""
    x, weight = torch.randn(loops, 16, 2, device=device), torch.ones(loops, 16, 2, device=device)
    table = code_table(device) / 0.8
    for block, warps in ((2, 1), (4, 1), (4, 2), (8, 2), (8, 4)):
        try:
            timing = time_calls([partial(walked, x, weight, table, block, warps)], 3, 1.0)
        except Exception as error:
            print("walks", block, warps, first_line(error), flush=True)
            continue
        lost = float((x - table[walked(x, weight, table, block, warps).long()]).square().mean())
        print(
            f"walks of {loops} loops: {block} a program, {warps} warps: {timing.p50 / 1e3:.2f} ms, lost {lost:.4f}",
            flush=True,
        )


def rows_of(shape: Shape, device: torch.device, copied: float) -> list[dict[str, Any]]:
    """Lines of the prototype at a shape: the fastest of some numbers of splits, warps and stages."""
    found = []
    rows = shape.batch * shape.kv_heads
    query = torch.randn(rows, shape.heads // shape.kv_heads, shape.head_dim, device=device).bfloat16()
    for trellis in (False, True):
        name = "prototype, trellis" if trellis else "prototype, scalar"
        count = shape.context // PAGE
        pages = Pages(rows, count, shape.head_dim, device, trellis)
        copies = [pages] + [
            Pages(rows, count, shape.head_dim, device, trellis, seed)
            for seed in range(1, copies_for(pages.nbytes, cache_size(device)))
        ]
        best: Any = None
        for target in (1056, 2112, 4224):
            splits = max(1, min(count, target // rows))
            for warps, stages in ((1, 2), (1, 3), (2, 2), (2, 3), (4, 2)):
                calls: list[Callable[[], object]] = [
                    partial(attend, query, own, splits, shape.scaling, warps, stages) for own in copies
                ]
                try:
                    timing = time_calls(calls, 5)
                except Exception as error:
                    print(name, splits, warps, stages, first_line(error), flush=True)
                    continue
                if best is None or timing.p50 < best[0].p50:
                    best = timing, f"{splits} splits, {warps} warps, {stages} stages", calls
        timing = time_calls(best[2], 20)
        nbytes = pages.nbytes + 2 * query.nbytes
        found.append(row_of(shape, name, "format", timing, nbytes, copied, spec="prototype", remark=best[1]))
        del copies, pages, best
        torch.cuda.empty_cache()
    return found


def main() -> None:
    """Checks, then times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare with PyTorch")
    parser.add_argument("--walks", action="store_true", help="only time how long pages take to be encoded")
    parser.add_argument("--sizes", default="32x32k,1x128k")
    parser.add_argument("--formats", default="2-bit,kivi-2,best-2.5,kitty-pro")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    device = torch.device("cuda") if torch.cuda.is_available() and not INTERPRETED else torch.device("cpu")
    check(device)
    if given.check:
        return
    device = torch.device("cuda", torch.cuda.current_device())
    if given.walks:
        time_walks(device)
        return
    shapes = [Shape(*parse_size(part)) for part in given.sizes.split(",")]
    names = given.formats.split(",")
    compile_formats(names, shapes, device)
    record = new_record(device, {})
    copied = record["copy"]["tb_per_s"] * 1e12
    for shape in shapes:
        rows = list(measure_shape(shape, names, device, copied, 20))
        torch.cuda.empty_cache()
        rows += rows_of(shape, device, copied)
        add_speedups(rows)
        record["rows"] += rows
        make_console().print(table(rows))
        for row in rows:
            print(json.dumps({key: row.get(key) for key in ("name", "us", "speedup", "remark", "error")}), flush=True)
        if given.json:
            save(record, given.json)


if __name__ == "__main__":
    main()
