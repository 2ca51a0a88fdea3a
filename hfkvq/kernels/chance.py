"""Chance that is the same on every device: numbers of a few whole numbers, for random channels and random signs."""

from __future__ import annotations

import torch
from torch import Tensor

FACTORS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
"""Odd factors of a channel, of what else a number depends on, and of that number's neighbour."""

FIRST, SECOND = 0x85EBCA6B, 0xC2B2AE35
"""Factors of MurmurHash3's last step."""

_WORD = 0xFFFFFFFF


def chance(channel: Tensor, page: Tensor | int, head: Tensor | int, seed: int) -> Tensor:
    """Random whole numbers below 2^32: i64, of the shape that the arguments broadcast to.

    Args:
        page: likewise, or a number.
        seed: below 2^31.
    """
    x = (channel.long() * FACTORS[0] + page * FACTORS[1] + head * FACTORS[2] + seed) & _WORD
    x = ((x ^ (x >> 16)) * FIRST) & _WORD
    x = ((x ^ (x >> 13)) * SECOND) & _WORD
    return x ^ (x >> 16)


def random_signs(head_dim: int, seed: int, device: torch.device) -> Tensor:
    """A sign for each channel: f32 (D,), 1 or -1."""
    return 1.0 - 2.0 * (chance(torch.arange(head_dim, device=device), 0, 0, seed) & 1).float()
