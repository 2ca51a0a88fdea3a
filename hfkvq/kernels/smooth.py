"""Key smoothing: key channels are centred and scaled before they are rounded, queries scaled to match."""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import launched
from .hadamard import saturated

SHIFT, FACTOR, SCALE = 0, 1, 2
"""Rows of smoothing vectors: what is taken from keys, what keys are then multiplied by, and its inverse for queries."""


def _empty(q: Tensor, k: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty(k.shape, dtype=k.dtype, device=k.device)


@launched("smooth:smooth_triton", fake=_empty)
def smooth(q: Tensor, k: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Smooths keys and the queries that attend to them: ``k' = (k - shift) * factor``, ``q' = q / factor``.

    A query's logits change by ``-q · shift``, the same number for all keys, which softmax ignores. Computed in f32 (f64
    for f64) and rounded once; f16 saturates.

    Args:
        q: (B, Hq, Q, D), after RoPE, any strides; Q may be 0.
        k: (B, H, T, D), likewise; T may be 0.
        vectors: f32 (3, H, D), contiguous: rows `SHIFT`, `FACTOR` and `SCALE` = 1 / factor.

    Returns:
        Queries and keys of the same shapes and dtypes, contiguous.
    """
    kind = torch.promote_types(k.dtype, torch.float32)
    shift, factor, scale = vectors.to(kind)[:, :, None]
    heads = k.shape[1]
    queries = (q.to(kind).unflatten(1, (heads, -1)) * scale[:, None]).flatten(1, 2)
    found = saturated(queries, q.dtype), saturated((k.to(kind) - shift) * factor, k.dtype)
    return found[0].contiguous(), found[1].contiguous()


def unsmooth(k: Tensor, vectors: Tensor) -> Tensor:
    """The keys (B, H, T, D) that `smooth` was given, up to rounding: ``k = k' / factor + shift``."""
    kind = torch.promote_types(k.dtype, torch.float32)
    shift, _, scale = vectors.to(kind)[:, :, None]
    return saturated(torch.addcmul(shift, k, scale), k.dtype)
