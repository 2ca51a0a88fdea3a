"""Factors of tokens, or of channels, that even a page out before it is quantized: the contract and its torch reference.

A scale of each channel suffers from tokens larger than others, a scale of each token from such channels. Dividing by a
factor along the other axis makes the elements that share a scale alike (KVarN's variance normalisation).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .dispatch import launched
from .groups import F16_MAX
from .pages import Axis

LEAST = 0.5488
"""Least squared factor, beside a page of mean square 1: e^-0.6. What is small may stay so; it widens no range."""


RULES = ("error", "deviation")
"""Rules of balancing pages, see `page_norms`."""

DEVIATIONS, FACTORS = (1e-3, 1e3), (0.7408182206817179, 22026.465794806718)
"""Bounds of standard deviations and factors in the rule "deviation"; of factors e^-0.3 and e^10."""


class Balance(NamedTuple):
    """Balancing of pages; see `page_norms`.

    Attributes:
        rounds: how often rows and columns take turns.
        rule: "error" or "deviation".
    """

    rounds: int = 1
    rule: str = "error"


BALANCE = Balance()
"""Unless a scheme says otherwise."""


def tree_sum(x: Tensor, dim: int) -> Tensor:
    """Sum along ``dim`` (kept), as ``x[i] + x[i + n/2]`` until one is left: the same bits on every device."""
    count = x.shape[dim]
    rest = (1 << (count - 1).bit_length()) - count
    if rest:
        x = torch.cat([x, x.new_zeros(*x.shape[:dim], rest, *x.shape[dim + 1 :])], dim)
    while x.shape[dim] > 1:
        upper, lower = x.chunk(2, dim)
        x = upper + lower
    return x


def _tree_mean(x: Tensor, dim: int) -> Tensor:
    return tree_sum(x, dim) * (1.0 / x.shape[dim])


def _positive_or_one(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, 1.0)


def _loss(x: Tensor, norm: Tensor, first: Tensor, own: int, other: int) -> Tensor:
    """Mean squared error to be expected, relative to that without factors in each row: (..., 1, 1).

    An error is of the size of the row's range, ``first`` without factors, times the element's factor.
    """
    y = x * (1.0 / norm)
    share = (y.amax(other, keepdim=True) - y.amin(other, keepdim=True)) / _positive_or_one(first)
    # A row that is constant, and so exact, must remain so.
    share = torch.where(first > 0, share, torch.zeros_like(share).masked_fill(share > 0, torch.inf))
    return _tree_mean(share * share, own) * _tree_mean(norm * norm, other)


def _deviation(x: Tensor, dim: int) -> Tensor:
    """Standard deviation along ``dim`` (kept), of a sample."""
    count = x.shape[dim]
    x = x - _tree_mean(x, dim)
    # In f64, for roots in f32 are not rounded alike everywhere, and rounds are chosen by them.
    return (_tree_mean(x * x, dim) * (count / max(1, count - 1))).double().sqrt().float()


def _imbalance(x: Tensor, own: int, other: int) -> Tensor:
    """Largest standard deviation over the least, of columns and of rows together: (..., 1, 1)."""
    columns, rows = _deviation(x, own), _deviation(x, other)
    columns = columns.amax(other, keepdim=True) / columns.amin(other, keepdim=True).clamp(min=1e-8)
    return columns + rows.amax(own, keepdim=True) / rows.amin(own, keepdim=True).clamp(min=1e-8)


def _of_deviation(x: Tensor, own: int, other: int, rounds: int) -> Tensor:
    """Factors by the rule "deviation"."""
    column, row = torch.ones_like(x.narrow(own, 0, 1)), torch.ones_like(x.narrow(other, 0, 1))
    now, best, least = x, column, _imbalance(x, own, other)
    for _ in range(rounds):
        column = (column * _deviation(now, own).clamp(*DEVIATIONS)).clamp(*FACTORS)
        now = x / column / row
        row = (row * _deviation(now, other).clamp(*DEVIATIONS)).clamp(*FACTORS)
        now = x / column / row
        found = _imbalance(now, own, other)
        best, least = torch.where(found <= least, column, best), torch.minimum(found, least)
    return best / _tree_mean(best, other)


@launched("norms:page_norms_triton")
def page_norms(
    source: Tensor, index: Tensor, axis: Axis, page: int, balance: Balance = BALANCE, new: Tensor | None = None
) -> Tensor:
    """Factors that balance whole pages, for normed formats (KVarN's variance normalisation).

    Rows are what shares a scale (channels for the axis "channel"), columns what gets a factor; both take turns. The
    rule "error" divides rows, then columns, by their root mean square, and keeps the factors of the round after which
    the error to be expected is least, relative to that without factors in each row, or else 1 for all. "deviation" is
    that of KVarN's authors: columns, then rows, by their standard deviation, and it keeps the last of the rounds that
    leave the least imbalance, the largest over the least deviation, of columns and rows together. Elements that are not
    finite in f16 count as 0.

    Args:
        source: (B, H, L, D), any float dtype, in the basis of the store.
        index: i32 (B, m), column of each token of the pages; anything where a row has none. m is a multiple of G.
        axis: the axis of the format.
        page: G, tokens in a page.
        balance: rule and rounds; by "error" 1 round does nearly all, KVarN's authors take 16.
        new: i32 (B,), tokens of each row that count; factors of pages behind them are anything. None for all.

    Returns:
        f16 (B, H, m/G, G) for the axis "channel", else (B, H, m/G, D); their mean is 1. The same on every device.

    Raises:
        ValueError: there is no such rule.
    """
    rounds, rule = balance
    if rule not in RULES:
        raise ValueError(f"rule: got {rule!r}, allowed {', '.join(RULES)}.")
    heads, head_dim = source.shape[1], source.shape[3]
    chosen = index.clamp(0, source.shape[2] - 1).long()[:, None, :, None].expand(-1, heads, -1, head_dim)
    x = source.gather(2, chosen).float().unflatten(2, (-1, page))
    if not x.numel() or (new is not None and not new.any()):
        return x.new_ones((*x.shape[:3], page if axis == "channel" else head_dim), dtype=torch.float16)
    x = torch.where(x.abs() <= F16_MAX, x, 0.0)
    # Rows have scales of their own and run along ``other``, the axis of the factors.
    own, other = (4, 3) if axis == "channel" else (3, 4)
    if rule == "deviation":
        return _of_deviation(x, own, other, rounds).squeeze(own).half()
    power = x * x
    power = power / _positive_or_one(_tree_mean(_tree_mean(power, own), other))
    first = x.amax(other, keepdim=True) - x.amin(other, keepdim=True)
    square = torch.ones_like(x.narrow(own, 0, 1))
    best, least = square, torch.ones_like(square[..., :1, :1])
    for _ in range(rounds):
        rows = _tree_mean(power / square, other).clamp(min=LEAST)
        square = _tree_mean(power / rows, own).clamp(min=LEAST)
        norm = square.sqrt()
        # About 1, so that scales and zeros stay where f16 is exact; and as it is stored.
        norm = (norm / _tree_mean(norm, other)).half().float()
        loss = _loss(x, norm, first, own, other)
        better = loss < least
        best, least = torch.where(better, norm, best), torch.where(better, loss, least)
    return best.squeeze(own).half()
