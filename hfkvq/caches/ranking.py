"""What attention says of tokens and layers: scores, statistics and ranks, as pure functions of probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hfkvq import kernels

WHOLE = 16
"""Width of a token in the model's own dtype; 0 is a token to evict."""


@dataclass(frozen=True)
class Attention:
    """What queries pay the tokens of their rows: all that scores and statistics ask of it.

    N rows are of one KV head each, which has r query heads; n tokens are in order.

    Attributes:
        mean: f32 (N, r, n), over the real queries.
        squares: f32 (N, r, n), sum over them of ``(A - mean)^2``.
        fourths: f32 (N, r, n), of ``(A - mean)^4``.
        entropy: f32 (N,), ``-Σ A log(A + 1e-10)`` over heads, queries and tokens.
        count: f32 (N,), real queries.
    """

    mean: Tensor
    squares: Tensor
    fourths: Tensor
    entropy: Tensor
    count: Tensor

    @classmethod
    def of(cls, logits: Tensor, sinks: Tensor | None, real: Tensor) -> Attention:
        """Of logits (N, r, Q, n); see `hfkvq.kernels.attention_moments`."""
        (mean, squares, fourths), entropy = kernels.attention_moments(logits, sinks, real)
        return cls(mean, squares, fourths, entropy, real.sum(1).float())

    @cached_property
    def variance(self) -> Tensor:
        """f32 (N, r, n), unbiased; that of a single query is 0."""
        return self.squares / (self.count - 1).clamp(min=1)[:, None, None]


def token_scores(seen: Attention, gamma: float) -> Tensor:
    """ARKV eq. (9): ``S_k = mean_{h,q} A + γ var_q A``, averaged over five neighbours and over the query heads.

    Beyond a row's ends scores count as 0.

    Returns:
        f32 (N, n).
    """
    score = (seen.mean + gamma * seen.variance).mean(1, keepdim=True)
    return torch.nn.functional.avg_pool1d(score, 5, stride=1, padding=2)[:, 0]


def code_statistics(seen: Attention) -> Tensor:
    """Of ARKV's released code: ``-Σ A log(A + 1e-10)``, ``Σ var_q A`` and ``Σ m4 / max(m2, 1e-8)²``.

    Sums over a KV head's query heads, queries and keys, to be summed over KV heads.

    Returns:
        f32 (N, 3): entropy, variance, kurtosis.
    """
    count = seen.count.clamp(min=1)[:, None, None]
    kurtosis = (seen.fourths / count) / (seen.squares / count).clamp(min=1e-8).square()
    return torch.stack([seen.entropy, seen.variance.sum((1, 2)), kurtosis.sum((1, 2))], 1)


def paper_statistics(seen: Attention, past: Tensor) -> Tensor:
    """ARKV eqs. (3) to (5): entropy, variance and kurtosis of ``p_k = Σ_{h,q} A / Z`` over the past keys.

    To be averaged over KV heads.

    Args:
        seen: the attention.
        past: bool (N, n), tokens older than the window.

    Returns:
        f32 (N, 3).
    """
    # Sums over queries; Z takes their number out again.
    p = seen.mean.sum(1) * seen.count[:, None] * past
    p = p / p.sum(1, keepdim=True).clamp(min=1e-30)
    keys = past.sum(1, keepdim=True).clamp(min=1)
    centred = (p - p.sum(1, keepdim=True) / keys) * past
    second, fourth = (centred.pow(n).sum(1) / keys[:, 0] for n in (2, 4))
    # Flat attention: 0 / 0.
    kurtosis = torch.where(second > 0, fourth / second.square().clamp(min=1e-38), 0.0)
    return torch.stack([-torch.special.xlogy(p, p).sum(1), second, kurtosis], 1)


def tier_widths(scores: Tensor, kept: Tensor, whole: Tensor, is_whole: Tensor, low_bits: int) -> Tensor:
    """ARKV eq. (10): of the tokens of highest score, the first ``whole`` stay whole, the rest of ``kept`` get few bits.

    Args:
        scores: f32 (N, n), -inf where there is no token to judge. Of equal scores the earlier token comes first.
        kept: i64 (N,), b.
        whole: i64 (N,), B_o.
        is_whole: bool (N, n), tokens that are whole so far; only they can be whole hereafter.
        low_bits: width of the tier of few bits.

    Returns:
        u8 (N, n): 16, ``low_bits`` or 0.
    """
    order = scores.argsort(dim=1, descending=True, stable=True)
    places = torch.arange(order.shape[1], device=order.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(1, order, places)
    stays = (rank < kept[:, None]) & (scores > -torch.inf)
    best = (stays & is_whole).gather(1, order)
    first = torch.zeros_like(best).scatter_(1, order, best & (best.cumsum(1) <= whole[:, None]))
    return torch.where(first, WHOLE, torch.where(stays, low_bits, 0)).to(torch.uint8)
