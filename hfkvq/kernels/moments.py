"""Attention that a few queries pay each key: moments over the queries, for schemes that rank tokens by attention."""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import call, define, triton_slot

LEAST = 1e-10
"""Constant that ARKV's released code adds to a probability before the logarithm."""


@define("attention_moments")
def _attention_moments(logits: Tensor, sinks: Tensor | None, real: Tensor) -> Tensor:
    columns, x = logits.shape[3], logits
    if sinks is not None:
        x = torch.cat([x, sinks[:, :, None, None].expand(-1, -1, x.shape[2], 1)], -1)
    # Queries that see nothing: NaN.
    probs = torch.softmax(x, -1).nan_to_num(0.0)[..., :columns]
    weight = real[:, None, :, None].to(probs.dtype)
    mean = (probs * weight).sum(2) / weight.sum(2).clamp(min=1)
    square = ((probs - mean[:, :, None]) * weight).square_()
    total = square.sum(2)
    entropy = -(probs * (probs + LEAST).log() * weight).sum(2)
    return torch.stack([mean, total, square.square_().sum(2), entropy])


triton_slot("attention_moments", "moments:attention_moments_triton")


def attention_moments(logits: Tensor, sinks: Tensor | None, real: Tensor) -> Tensor:
    """Moments over the real queries of ``A = softmax(logits)``, and each key's part of their entropy.

    Args:
        logits: f32 (N, r, Q, n), -inf where a query does not see a key; one that sees none pays nothing.
        sinks: f32 (N, r), logits that join the denominator only, or None.
        real: bool (N, Q), queries that count.

    Returns:
        f32 (4, N, r, n): the mean of A over queries; the sums over them of squares and of fourth powers of
        ``A - mean``; and ``-Σ A log(A + 1e-10)``.
    """
    return call(_attention_moments, logits, logits, sinks, real)
