"""Launchers of `hfkvq.kernels.fused`: what a model computes around attention, one launch each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ..dispatch import reference
from ..fused import LAYERS, Widths
from ._lib import DOT_DTYPES, capability, cdiv, power
from .compile import Wanted
from .launch import Launch
from .limits import LIMITS

ROWS = 64
"""Most rows of a step whose linear layers run here; PyTorch's products are as fast for more."""

HALVES = (torch.bfloat16, torch.float16)

WIDEST = 16384
"""Channels of a norm that a program holds at once; wider ones take the reference."""

MANY, TILE = 4096, 2048
"""Rows from which a program norms several, and elements of such a program."""


@triton.jit(do_not_specialize=["form", "R"])
def rms_norm_kernel(x, weight, out, eps, form, R, D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr):
    """BR of R rows; see `hfkvq.kernels.fused.NORMS` for the form."""
    o_r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    m_x = (o_r < R)[:, None] & m_d[None, :]
    o_x = o_r[:, None] * D + o_d[None, :]
    b_x = tl.load(x + o_x, mask=m_x, other=0.0).to(tl.float32)
    b_w = tl.load(weight + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_x *= tl.rsqrt(tl.sum(b_x * b_x, 1) / D + eps)[:, None]
    b_x = tl.where(form == 0, b_x.to(out.dtype.element_ty).to(tl.float32), b_x)
    b_w = tl.where(form == 2, b_w + 1.0, b_w)
    tl.store(out + o_x, (b_x * b_w[None, :]).to(out.dtype.element_ty), mask=m_x)


@triton.jit
def _sums(
    x, w, u, i, M, N, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """Products of BM rows of ``x`` with BN rows of ``w``, and of ``u`` unless it is None, in f32.

    A program of one output channel (BN = 1) sums products in registers, [BM]; others take tensor cores, [BN, BM].
    Rows beyond the last repeat it, so that nothing but channels is masked.
    """
    o_m = tl.minimum(tl.arange(0, BM), M - 1)
    o_k = tl.arange(0, BK)
    if BN == 1:
        p_w = i.to(tl.int64) * K + o_k
        p_x = x + o_m[:, None] * K + o_k[None, :]
        b_first = tl.zeros([BM, BK], tl.float32)
        b_second = b_first
        for k in tl.range(0, K, BK, num_stages=1):
            m_k = k + o_k < K
            b_x = tl.load(p_x + k, mask=m_k[None, :], other=0.0).to(tl.float32)
            b_w = tl.load(w + p_w + k, mask=m_k, other=0.0, eviction_policy="evict_first")
            b_first += b_w.to(tl.float32)[None, :] * b_x
            if u is not None:
                b_w = tl.load(u + p_w + k, mask=m_k, other=0.0, eviction_policy="evict_first")
                b_second += b_w.to(tl.float32)[None, :] * b_x
        return tl.sum(b_first, 1), tl.sum(b_second, 1)
    else:
        o_n = tl.minimum(i * BN + tl.arange(0, BN), N - 1)
        p_w = o_n.to(tl.int64)[:, None] * K + o_k[None, :]
        p_x = x + o_m[None, :] * K + o_k[:, None]
        b_first = tl.zeros([BN, BM], tl.float32)
        b_second = b_first
        for k in tl.range(0, K, BK, num_stages=STAGES):
            if K % BK == 0:
                b_x = tl.load(p_x + k)
                b_first = tl.dot(tl.load(w + p_w + k, eviction_policy="evict_first"), b_x, b_first)
                if u is not None:
                    b_second = tl.dot(tl.load(u + p_w + k, eviction_policy="evict_first"), b_x, b_second)
            else:
                m_k = k + o_k < K
                b_x = tl.load(p_x + k, mask=m_k[:, None], other=0.0)
                b_first = tl.dot(tl.load(w + p_w + k, mask=m_k[None, :], other=0.0), b_x, b_first)
                if u is not None:
                    b_second = tl.dot(tl.load(u + p_w + k, mask=m_k[None, :], other=0.0), b_x, b_second)
        return b_first, b_second


@triton.jit(do_not_specialize=["M", "N0", "N1", "N2"])
def linears_kernel(
    x, weights, biases, outs, M, N0, N1, N2,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BN channels of one of three layers, of N0, N1 and N2 channels; programs count through them."""
    i = tl.program_id(0)
    w, out, N = weights[0], outs[0], N0
    if biases is not None:
        bias = biases[0]
    if i >= tl.cdiv(N0, BN):
        i -= tl.cdiv(N0, BN)
        w, out, N = weights[1], outs[1], N1
        if biases is not None:
            bias = biases[1]
        if i >= tl.cdiv(N1, BN):
            i -= tl.cdiv(N1, BN)
            w, out, N = weights[2], outs[2], N2
            if biases is not None:
                bias = biases[2]
    b_y, _ = _sums(x, w, None, i, M, N, K, BM, BN, BK, STAGES)
    o_m = tl.arange(0, BM)
    if BN == 1:
        if biases is not None:
            b_y += tl.load(bias + i).to(tl.float32)
        tl.store(out + o_m * N + i, b_y.to(out.dtype.element_ty), mask=o_m < M)
    else:
        o_n = i * BN + tl.arange(0, BN)
        if biases is not None:
            b_y += tl.load(bias + o_n, mask=o_n < N, other=0.0).to(tl.float32)[:, None]
        m_y = (o_n < N)[:, None] & (o_m < M)[None, :]
        tl.store(out + o_m[None, :] * N + o_n[:, None], b_y.to(out.dtype.element_ty), mask=m_y)


@triton.jit
def _activate(b_x, activation):
    """An activation in f32; see `hfkvq.kernels.fused.ACTIVATIONS`."""
    if activation == 0:
        b_y = b_x / (1.0 + tl.exp(-b_x))
    elif activation == 1:
        # (1 + tanh(z)) / 2 = 1 / (1 + exp(-2z)).
        b_z = 0.7978845608028654 * (b_x + 0.044715 * b_x * b_x * b_x)
        b_y = b_x / (1.0 + tl.exp(-2.0 * b_z))
    else:
        b_y = 0.5 * b_x * (1.0 + tl.erf(b_x * 0.7071067811865476))
    return b_y


@triton.jit(do_not_specialize=["activation", "M", "N"])
def gated_linear_kernel(
    x, gate, up, out, activation, M, N,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BN channels; see `hfkvq.kernels.fused.ACTIVATIONS` for the activation."""
    i = tl.program_id(0)
    kind = out.dtype.element_ty
    b_x, b_up = _sums(x, gate, up, i, M, N, K, BM, BN, BK, STAGES)
    b_y = _activate(b_x.to(kind).to(tl.float32), activation)
    b_y = (b_y.to(kind).to(tl.float32) * b_up.to(kind).to(tl.float32)).to(kind)
    o_m = tl.arange(0, BM)
    if BN == 1:
        tl.store(out + o_m * N + i, b_y, mask=o_m < M)
    else:
        o_n = i * BN + tl.arange(0, BN)
        tl.store(out + o_m[None, :] * N + o_n[:, None], b_y, mask=(o_n < N)[:, None] & (o_m < M)[None, :])


@triton.jit(do_not_specialize=["activation", "eighths"])
def activated_product_kernel(gate, up, out, activation, eighths, BN: tl.constexpr):
    """BN elements of ``activation(gate) * up``, of which there are eight times ``eighths``."""
    o_n = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    # Eight elements that lie side by side are masked alike, so that they are loaded at once.
    m_n = o_n // 8 < eighths
    kind = out.dtype.element_ty
    b_x = tl.load(gate + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_up = tl.load(up + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_y = _activate(b_x, activation).to(kind).to(tl.float32) * b_up
    tl.store(out + o_n, b_y.to(kind), mask=m_n)


@triton.jit(do_not_specialize=["T", "s_qb", "s_qh", "s_qt", "s_kb", "s_kh", "s_kt", "s_angle"])
def rotary_kernel(
    q, k, cos, sin, out_q, out_k, s_qb, s_qh, s_qt, s_kb, s_kh, s_kt, s_angle, T,
    HQ: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """BH heads of a token, the query's first; ``s_angle`` steps to the next row's angles."""
    i_t = (tl.program_id(0) % T).to(tl.int64)
    i_b = (tl.program_id(0) // T).to(tl.int64)
    HALF: tl.constexpr = D // 2
    o_h = tl.program_id(1) * BH + tl.arange(0, BH)
    o_d = tl.arange(0, BD)
    m_d = (o_d < HALF)[None, :]
    m_q, m_k = (o_h < HQ)[:, None] & m_d, ((o_h >= HQ) & (o_h < HQ + H))[:, None] & m_d
    o_k = o_h - HQ
    p_q = q + i_b * s_qb + i_t * s_qt + (o_h * s_qh)[:, None] + o_d[None, :]
    p_k = k + i_b * s_kb + i_t * s_kt + (o_k * s_kh)[:, None] + o_d[None, :]
    kind = q.dtype.element_ty
    b_1 = tl.where(m_q, tl.load(p_q, mask=m_q, other=0.0), tl.load(p_k, mask=m_k, other=0.0)).to(tl.float32)
    p_q, p_k = p_q + HALF, p_k + HALF
    b_2 = tl.where(m_q, tl.load(p_q, mask=m_q, other=0.0), tl.load(p_k, mask=m_k, other=0.0)).to(tl.float32)
    o_angle = i_b * s_angle + i_t * D + o_d[None, :]
    b_c1 = tl.load(cos + o_angle, mask=m_d, other=0.0).to(tl.float32)
    b_c2 = tl.load(cos + o_angle + HALF, mask=m_d, other=0.0).to(tl.float32)
    b_s1 = tl.load(sin + o_angle, mask=m_d, other=0.0).to(tl.float32)
    b_s2 = tl.load(sin + o_angle + HALF, mask=m_d, other=0.0).to(tl.float32)
    # Products are rounded before they are added, as PyTorch rounds them.
    b_y1 = (b_1 * b_c1).to(kind).to(tl.float32) + (-b_2 * b_s1).to(kind).to(tl.float32)
    b_y2 = (b_2 * b_c2).to(kind).to(tl.float32) + (b_1 * b_s2).to(kind).to(tl.float32)
    p_q = out_q + (((i_b * T + i_t) * HQ + o_h) * D)[:, None] + o_d[None, :]
    p_k = out_k + (((i_b * H + o_k) * T + i_t) * D)[:, None] + o_d[None, :]
    tl.store(p_q, b_y1.to(kind), mask=m_q)
    tl.store(p_q + HALF, b_y2.to(kind), mask=m_q)
    tl.store(p_k, b_y1.to(kind), mask=m_k)
    tl.store(p_k + HALF, b_y2.to(kind), mask=m_k)


def _takes(*tensors: Tensor) -> bool:
    """False for dtypes that kernels lack, and where the interpreter would truncate what should be rounded."""
    first = tensors[0].dtype
    served = first in DOT_DTYPES and all(x.dtype == first for x in tensors)
    return served and (first != torch.bfloat16 or tensors[0].is_cuda)


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float, form: int) -> Tensor:
    """Launcher of `hfkvq.kernels.rms_norm`."""
    dim = x.shape[-1]
    if not _takes(x, weight) or dim > WIDEST or not weight.is_contiguous():
        return reference("rms_norm")(x, weight, eps, form)
    given = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows := x.numel() // dim:
        _norm_launch(rows, dim, eps, form, x.device)(given, weight, out)
    return out


@lru_cache(maxsize=1024)
def _norm_launch(rows: int, dim: int, eps: float, form: int, device: torch.device) -> Launch:
    # Programs of one short row, in a prompt millions, would wait for multiprocessors more than they compute.
    block = max(1, TILE // power(dim)) if rows > MANY else 1
    constants = {"D": dim, "BD": power(dim), "BR": block, "num_warps": max(1, min(16, block * power(dim) // 512))}
    numbers = {"eps": eps, "form": form, "R": rows}
    return Launch(rms_norm_kernel, (cdiv(rows, block),), numbers, constants | {"enable_fp_fusion": False}, device)


def linears_triton(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] = ()) -> list[Tensor]:
    """Launcher of `hfkvq.kernels.linears`."""
    rows = _rows(x, *weights, *biases)
    if not rows or len(weights) > LAYERS:
        return reference("linears")(x, weights, biases)
    outs = [torch.empty((*x.shape[:-1], each.shape[0]), dtype=x.dtype, device=x.device) for each in weights]
    sizes = tuple([each.shape[0] for each in weights])
    _linears_launch(rows, sizes, x.shape[-1], bool(biases), x.device)(x, *weights, *biases, *outs)
    return outs


@lru_cache(maxsize=1024)
def _linears_launch(rows: int, sizes: tuple[int, ...], width: int, biased: bool, device: torch.device) -> Launch:
    constants = _tiles(rows, width, 1, device)
    numbers = {"M": rows} | {f"N{i}": n for i, n in enumerate([*sizes, *[0] * LAYERS][:LAYERS])}
    grid = (sum(cdiv(size, constants["BN"]) for size in sizes),)

    def nest(given: Sequence[Any]) -> tuple[Any, ...]:
        n = len(sizes)
        own = [tuple([*given[at : at + n], *[given[at]] * LAYERS][:LAYERS]) for at in range(1, len(given), n)]
        return given[0], own[0], own[1] if biased else None, own[-1]

    return Launch(linears_kernel, grid, numbers, constants, device, nest)


def gated_linear_triton(x: Tensor, gate: Tensor, up: Tensor, activation: int) -> Tensor:
    """Launcher of `hfkvq.kernels.gated_linear`."""
    rows = _rows(x, gate, up)
    if not rows:
        # Rows are many, as in prompts, or dtypes PyTorch's.
        return _activated(F.linear(x, gate), F.linear(x, up), activation)
    out = torch.empty((*x.shape[:-1], gate.shape[0]), dtype=x.dtype, device=x.device)
    _gated_launch(rows, gate.shape[0], x.shape[-1], activation, x.device)(x, gate, up, out)
    return out


@lru_cache(maxsize=1024)
def _gated_launch(rows: int, size: int, width: int, activation: int, device: torch.device) -> Launch:
    constants = _tiles(rows, width, 2, device)
    numbers = {"activation": activation, "M": rows, "N": size}
    return Launch(gated_linear_kernel, (cdiv(size, constants["BN"]),), numbers, constants, device)


def _activated(gate: Tensor, up: Tensor, activation: int) -> Tensor:
    """``activation(gate) * up`` of results of products, in one launch where the dtype allows."""
    if not _takes(gate, up) or not gate.numel() or gate.numel() % 8:
        gelu = {1: "tanh", 2: "none"}.get(activation)
        return (F.silu(gate) if gelu is None else F.gelu(gate, approximate=gelu)) * up
    out = torch.empty_like(gate)
    _activated_launch(gate.numel(), activation, gate.device)(gate, up, out)
    return out


@lru_cache(maxsize=1024)
def _activated_launch(count: int, activation: int, device: torch.device) -> Launch:
    numbers, constants = {"activation": activation, "eighths": count // 8}, {"BN": 1024, "num_warps": 4}
    return Launch(activated_product_kernel, (cdiv(count, 1024),), numbers, constants, device)


def _rows(x: Tensor, *others: Tensor) -> int:
    """Rows of a product that kernels compute; 0 where PyTorch's is to be taken."""
    width = x.shape[-1]
    rows = x.numel() // width if width else 0
    taken = x.dtype in HALVES and _takes(x, *others) and all(each.is_contiguous() for each in (x, *others))
    return rows if taken and rows <= ROWS and width % 8 == 0 else 0


def _tiles(rows: int, width: int, weights: int, device: torch.device) -> dict[str, Any]:
    """Sizes of a program's tiles, as they were the fastest of some hundred on an H100 (docs/speed.md)."""
    if rows <= 2:
        size = min(2048, power(width))
        return {"K": width, "BM": rows, "BN": 1, "BK": size, "STAGES": 1, "num_warps": max(1, size // 256)}
    height = max(16, power(rows))
    size = 128 if width % 128 == 0 else 64
    limits = LIMITS.get(capability(device))
    stages = (limits.most_shared if limits else 48 << 10) // (2 * size * (64 * weights + height))
    stages = max(1, min(5 if weights == 1 else 3, stages))
    return {"K": width, "BM": height, "BN": 64, "BK": size, "STAGES": stages, "num_warps": 4}


def fused_wanted(widths: Widths, dtype: torch.dtype, device: torch.device) -> Iterator[Wanted]:
    """Kernels that steps of a model launch around attention, as far as its sizes tell."""
    hidden, intermediate, heads, kv_heads, dim, rows = widths
    for each in {hidden, dim}:
        # Prompts' rows are many.
        for count in (rows, MANY + 1) if each <= WIDEST else ():
            yield _norm_launch(count, each, 1e-6, 0, device).wanted([dtype] * 3)
    q, k = (((1, n, 1, dim), (n * dim, dim, n * dim, 1)) for n in (heads, kv_heads))
    if dim % 2 == 0:
        yield _rotary_launch(*q, kv_heads, k[1], 0, device).wanted([dtype] * 6)
    yield _activated_launch(8, 0, device).wanted([dtype] * 3)
    if dtype in HALVES and rows <= ROWS:
        for width in {hidden, intermediate, heads * dim}:
            if width % 8 == 0:
                yield _linears_launch(rows, (1,), width, False, device).wanted([dtype] * 3)
        if hidden % 8 == 0:
            # Qwen2's queries, keys and values have biases, of which its config says nothing.
            yield _linears_launch(rows, (1,), hidden, True, device).wanted([dtype] * 4)
            yield _gated_launch(rows, 1, hidden, 0, device).wanted([dtype] * 4)


def rotary_triton(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Launcher of `hfkvq.kernels.rotary`."""
    if not _takes(q, k, cos, sin) or q.shape[-1] % 2:
        return reference("rotary")(q, k, cos, sin)
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    cos, sin = cos.contiguous(), sin.contiguous()
    out_q = torch.empty(q.transpose(1, 2).shape, dtype=q.dtype, device=q.device)
    out_k = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    if math.prod(q.shape):
        angle = 0 if cos.shape[0] == 1 else cos.stride(0)
        launch = _rotary_launch(q.shape, q.stride(), k.shape[1], k.stride(), angle, q.device)
        launch(q, k, cos, sin, out_q, out_k)
    return out_q.transpose(1, 2), out_k


@lru_cache(maxsize=1024)
def _rotary_launch(
    queries: tuple[int, ...],
    query_stride: tuple[int, ...],
    heads: int,
    key_stride: tuple[int, ...],
    angle: int,
    device: torch.device,
) -> Launch:
    batch, query_heads, tokens, dim = queries
    names = ("s_qb", "s_qh", "s_qt", "s_kb", "s_kh", "s_kt")
    numbers = dict(zip(names, (*query_stride[:3], *key_stride[:3]), strict=True)) | {"s_angle": angle, "T": tokens}
    constants = {"HQ": query_heads, "H": heads, "D": dim, "BD": power(dim // 2), "BH": 4, "num_warps": 4}
    grid = (batch * tokens, cdiv(query_heads + heads, 4))
    return Launch(rotary_kernel, grid, numbers, constants | {"enable_fp_fusion": False}, device)
