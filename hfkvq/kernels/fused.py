"""RMS norms, linear layers, gated MLPs and rotary embedding, as they stand around attention, in one launch each.

Each rounds to the model's dtype where the model's own modules do, so that a step's numbers stay those of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import launched

NORMS = ("rounded, then weighted", "weighted, then rounded", "weighted by 1 + weight, then rounded")
"""Forms of RMS norms: Llama's, gpt-oss's and Gemma's."""

ACTIVATIONS = ("silu", "gelu_tanh", "gelu")
"""Activations of gated MLPs."""


LAYERS = 3
"""Linear layers that one launch computes: queries, keys and values."""


class Widths(NamedTuple):
    """Sizes of a model's layers, by which kernels are compiled ahead.

    Attributes:
        hidden: channels of hidden states.
        intermediate: channels within the MLP.
        heads: query heads.
        kv_heads: KV heads.
        head_dim: channels of a head.
        rows: rows of a step's batch.
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    rows: int


@launched("fused:rms_norm_triton")
def rms_norm(x: Tensor, weight: Tensor, eps: float, form: int) -> Tensor:
    """RMS norm of the last dimension: ``x / sqrt(mean(x²) + eps)`` in f32, weighted.

    Args:
        x: (..., D).
        weight: (D,), in the dtype of x.
        eps: added to the mean square.
        form: index in `NORMS`.

    Returns:
        (..., D) in the dtype of x, contiguous.
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    found = weight * wide.to(x.dtype) if form == 0 else (wide * (weight.float() + (form == 2))).to(x.dtype)
    return found.contiguous()


@launched("fused:linears_triton")
def linears(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] = ()) -> list[Tensor]:
    """Linear layers over the same input, ``x Wᵀ + b`` each, summed in f32.

    Args:
        x: (..., K).
        weights: one to three of (N, K), in the dtype of x.
        biases: (N,) of each; empty for none.

    Returns:
        (..., N) of each, in the dtype of x, contiguous.
    """
    return [F.linear(x, weight, *bias) for weight, *bias in zip(weights, *([biases] if biases else []), strict=True)]


@launched("fused:gated_linear_triton")
def gated_linear(x: Tensor, gate: Tensor, up: Tensor, activation: int) -> Tensor:
    """First half of a gated MLP, ``activation(x Gᵀ) * (x Uᵀ)``; both products are rounded before they are multiplied.

    Args:
        x: (..., K).
        gate: G (N, K), in the dtype of x.
        up: U (N, K), likewise.
        activation: index in `ACTIVATIONS`.

    Returns:
        (..., N) in the dtype of x, contiguous.
    """
    first, second = F.linear(x, gate), F.linear(x, up)
    found = F.gelu(first, approximate="tanh" if activation == 1 else "none") if activation else F.silu(first)
    return found * second


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


@launched("fused:rotary_triton")
def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary embedding of whole heads by halves: ``x cos + (-x₂, x₁) sin``.

    Args:
        q: (B, Hq, T, D), any strides but the last, which is 1.
        k: (B, H, T, D), likewise.
        cos: (B or 1, T, D).

    Returns:
        Queries and keys of the same shapes and dtype: queries lie as (B, T, Hq, D), and so does what PyTorch's
        attention makes of them; keys are contiguous.
    """
    q, k = (_turned(x, cos[:, None], sin[:, None]) for x in (q, k))
    return q.transpose(1, 2).contiguous().transpose(1, 2), k.contiguous()
