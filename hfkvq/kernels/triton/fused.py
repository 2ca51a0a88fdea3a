"""Launchers of `hfkvq.kernels.fused`: what a model computes around attention, one launch each."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dispatch import reference
from ._lib import DOT_DTYPES, cdiv, power
from .launch import Launch

WIDEST = 16384
"""Channels of a norm that a program holds at once; wider ones take the reference."""


@triton.jit
def rms_norm_kernel(x, weight, out, eps, D: tl.constexpr, BD: tl.constexpr, FORM: tl.constexpr):
    """One row; see `hfkvq.kernels.fused.NORMS` for FORM."""
    i_r = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    b_x = tl.load(x + i_r * D + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_w = tl.load(weight + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_x *= tl.rsqrt(tl.sum(b_x * b_x, 0) / D + eps)
    if FORM == 0:
        b_x = b_x.to(out.dtype.element_ty).to(tl.float32)
    if FORM == 2:
        b_w += 1.0
    tl.store(out + i_r * D + o_d, (b_x * b_w).to(out.dtype.element_ty), mask=m_d)


@triton.jit(do_not_specialize=["N", "s_gate", "s_up"])
def activated_product_kernel(gate, up, out, s_gate, s_up, N, BN: tl.constexpr, ACTIVATION: tl.constexpr):
    """BN channels of a row; see `hfkvq.kernels.fused.ACTIVATIONS` for ACTIVATION."""
    i_r = tl.program_id(1).to(tl.int64)
    o_n = tl.program_id(0) * BN + tl.arange(0, BN)
    m_n = o_n < N
    b_x = tl.load(gate + i_r * s_gate + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_up = tl.load(up + i_r * s_up + o_n, mask=m_n, other=0.0).to(tl.float32)
    if ACTIVATION == 0:
        b_y = b_x / (1.0 + tl.exp(-b_x))
    elif ACTIVATION == 1:
        # (1 + tanh(z)) / 2 = 1 / (1 + exp(-2z)).
        b_z = 0.7978845608028654 * (b_x + 0.044715 * b_x * b_x * b_x)
        b_y = b_x / (1.0 + tl.exp(-2.0 * b_z))
    else:
        b_y = 0.5 * b_x * (1.0 + tl.erf(b_x * 0.7071067811865476))
    b_y = b_y.to(out.dtype.element_ty).to(tl.float32) * b_up
    tl.store(out + i_r * N + o_n, b_y.to(out.dtype.element_ty), mask=m_n)


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
    p_q = out_q + (((i_b * HQ + o_h) * T + i_t) * D)[:, None] + o_d[None, :]
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
        _norm_launch(rows, dim, eps, form, x.dtype, x.device)(given, weight, out)
    return out


@lru_cache(maxsize=1024)
def _norm_launch(rows: int, dim: int, eps: float, form: int, dtype: torch.dtype, device: torch.device) -> Launch:
    constants = {"D": dim, "BD": power(dim), "FORM": form, "num_warps": max(1, min(16, power(dim) // 512))}
    return Launch(rms_norm_kernel, (rows,), {"eps": eps}, constants | {"enable_fp_fusion": False}, device)


def activated_product_triton(gate: Tensor, up: Tensor, activation: int) -> Tensor:
    """Launcher of `hfkvq.kernels.activated_product`."""
    width, whole = gate.shape[-1], gate.shape
    if not _takes(gate, up):
        return reference("activated_product")(gate, up, activation)
    gate, up = (x.reshape(-1, width) for x in (gate, up))
    gate, up = (x if x.stride(1) == 1 else x.contiguous() for x in (gate, up))
    out = torch.empty(whole, dtype=gate.dtype, device=gate.device)
    if out.numel():
        strides = gate.stride(0), up.stride(0)
        _product_launch(gate.shape, strides, activation, gate.dtype, gate.device)(gate, up, out)
    return out


@lru_cache(maxsize=1024)
def _product_launch(
    shape: tuple[int, ...], strides: tuple[int, int], activation: int, dtype: torch.dtype, device: torch.device
) -> Launch:
    rows, width = shape
    numbers = {"s_gate": strides[0], "s_up": strides[1], "N": width}
    constants = {"BN": 512, "ACTIVATION": activation, "enable_fp_fusion": False, "num_warps": 4}
    return Launch(activated_product_kernel, (cdiv(width, 512), rows), numbers, constants, device)


def rotary_triton(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Launcher of `hfkvq.kernels.rotary`."""
    if not _takes(q, k, cos, sin) or q.shape[-1] % 2:
        return reference("rotary")(q, k, cos, sin)
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    cos, sin = cos.contiguous(), sin.contiguous()
    out_q, out_k = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    if math.prod(q.shape):
        angle = 0 if cos.shape[0] == 1 else cos.stride(0)
        launch = _rotary_launch(q.shape, q.stride(), k.shape[1], k.stride(), angle, q.dtype, q.device)
        launch(q, k, cos, sin, out_q, out_k)
    return out_q, out_k


@lru_cache(maxsize=1024)
def _rotary_launch(
    queries: tuple[int, ...],
    query_stride: tuple[int, ...],
    heads: int,
    key_stride: tuple[int, ...],
    angle: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Launch:
    batch, query_heads, tokens, dim = queries
    names = ("s_qb", "s_qh", "s_qt", "s_kb", "s_kh", "s_kt")
    numbers = dict(zip(names, (*query_stride[:3], *key_stride[:3]), strict=True)) | {"s_angle": angle, "T": tokens}
    constants = {"HQ": query_heads, "H": heads, "D": dim, "BD": power(dim // 2), "BH": 4, "num_warps": 4}
    grid = (batch * tokens, cdiv(query_heads + heads, 4))
    return Launch(rotary_kernel, grid, numbers, constants | {"enable_fp_fusion": False}, device)
