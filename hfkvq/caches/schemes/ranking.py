"""Scores, statistics and ranks of tokens and layers, as pure functions of attention's probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from .score_inputs import Attention as Attention
from .score_inputs import Evidence

WHOLE = 16
"""Width of a token in the model's own dtype; 0 is a token to evict."""


def token_scores(seen: Attention, past: Tensor, gamma: float, joint: bool = False) -> Tensor:
    """ARKV eq. (9): ``S_k = mean_{h,q} A + γ var A``, averaged over five neighbours.

    Neighbours are past tokens of past tokens, and of the window those of the window: what lies on the other side, or
    beyond a row's ends, counts as 0.

    Args:
        seen: the attention.
        past: bool (N, n), tokens older than the window.
        gamma: γ.
        joint: take the variance over queries and query heads together, as the equation has it; else over the queries
            of each head, and then their mean, as the released code has it.

    Returns:
        f32 (N, n).
    """
    score = (seen.mean + gamma * (seen.joint_variance[:, None] if joint else seen.variance)).mean(1, keepdim=True)
    sides = torch.cat([score * past[:, None], score * ~past[:, None]], 1)
    mixed = torch.nn.functional.avg_pool1d(sides, 5, stride=1, padding=2)
    return torch.where(past, mixed[:, 0], mixed[:, 1])


def window_scores(evidence: Evidence, window: int, kernel: int) -> Tensor:
    """SnapKV's: what the newest queries pay each older token, averaged over queries, neighbours and query heads.

    Beyond the ends of what is older than the window scores count as 0, and there they are 0.

    Args:
        evidence: with "attention".
        window: newest tokens, which are not judged.
        kernel: neighbours, an odd number, the token itself included.

    Returns:
        f32 (N, n).
    """
    past = evidence.past(window)
    paid = evidence.of("attention").mean(1, keepdim=True) * past[:, None]
    return torch.nn.functional.avg_pool1d(paid, kernel, stride=1, padding=kernel // 2)[:, 0] * past


def expected_attention(mean: Tensor, covariance: Tensor, evidence: Evidence, first: int) -> Tensor:
    """Expected Attention's: softmax over the keys of ``s μ·k + s² kᵀΣk / 2``, s the factor on logits.

    That is the logarithm of the mean of ``exp(s q·k)`` over normal queries q.

    Args:
        mean: f32 (N, r, D), μ of the queries of each query head.
        covariance: f32 (N, r, D, D), Σ.
        evidence: with "keys".
        first: first tokens, which are left out, with 0.

    Returns:
        f32 (N, r, n).
    """
    keys, scale = evidence.of("keys").float(), evidence.scaling
    logits = (mean @ keys.mT) * scale + (keys[:, None] @ covariance * keys[:, None]).sum(-1) * (scale * scale / 2)
    judged = (evidence.rank >= first) & evidence.past(0)
    return torch.softmax(logits.masked_fill(~judged[:, None], -torch.inf), -1).nan_to_num(0.0)


def code_statistics(seen: Attention, past: Tensor) -> Tensor:
    """Statistics of ARKV's released code: ``-Σ A log(A + 1e-10)``, ``Σ var_q A`` and ``Σ m4 / max(m2, 1e-8)²``.

    Sums over a KV head's query heads, queries and past keys, to be summed over KV heads.

    Args:
        seen: the attention.
        past: bool (N, n), tokens older than the window.

    Returns:
        f32 (N, 3): entropy, variance, kurtosis.
    """
    count = seen.count.clamp(min=1)[:, None, None]
    kurtosis = (seen.fourths / count) / (seen.squares / count).clamp(min=1e-8).square()
    each = torch.stack([seen.entropy, seen.variance, kurtosis], 1)
    return (each * past[:, None, None]).sum((2, 3))


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
