"""Block-diagonal Hadamard rotation: the contract and its torch reference."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from .dispatch import define


@lru_cache(maxsize=32)
def sylvester(order: int, device: torch.device) -> Tensor:
    """Sylvester's Hadamard matrix over sqrt(order): f32 (order, order), symmetric and its own inverse."""
    matrix = torch.ones(1, 1, device=device)
    block = torch.tensor([[1.0, 1.0], [1.0, -1.0]], device=device)
    while matrix.shape[0] < order:
        matrix = torch.kron(block, matrix)
    return matrix / order**0.5


def largest_block(head_dim: int) -> int:
    """The greatest power of two that divides ``head_dim``: the largest rotation block a head admits."""
    return head_dim & -head_dim


def check_rotation(name: str, block: int, head_dim: int) -> None:
    """Raises ValueError unless ``block`` is 0 or a power of two that divides ``head_dim``."""
    if block and (block < 2 or block & (block - 1)):
        raise ValueError(f"{name}: got block {block}, allowed 0 (no rotation) or a power of two.")
    if block and head_dim % block:
        raise ValueError(
            f"{name}: got block {block}, which does not divide head_dim {head_dim}; "
            f"the largest block for this model is {largest_block(head_dim)}."
        )


@define("hadamard")
def _hadamard(x: Tensor, block: int) -> Tensor:
    # Butterflies, not a matmul: a library's order of sums depends on the shape, and then a token's bits would depend
    # on the chunk and the batch it came in.
    y, step = x.float().unflatten(-1, (-1, block)), 1
    while step < block:
        upper, lower = y.unflatten(-1, (-1, 2, step)).unbind(-2)
        y, step = torch.stack([upper + lower, upper - lower], -2).flatten(-3), 2 * step
    return (y * block**-0.5).flatten(-2).to(x.dtype)


@_hadamard.register_kernel("cuda")
def _(x: Tensor, block: int) -> Tensor:
    # One launch instead of one for every butterfly.
    blocks = x.float().unflatten(-1, (-1, block))
    return (blocks @ sylvester(block, x.device)).flatten(-2).to(x.dtype)


@_hadamard.register_fake
def _(x: Tensor, block: int) -> Tensor:
    return torch.empty_like(x)


def hadamard(x: Tensor, block: int) -> Tensor:
    """Rotates consecutive blocks of channels: ``y = x H_h / sqrt(h)`` (SAW-INT4, section 3.2); its own inverse.

    Args:
        x: (..., D), any float dtype; computed in f32 and rounded once.
        block: h, a power of two that divides D; 0 returns ``x`` itself.

    Returns:
        (..., D) in the dtype of ``x``.
    """
    return _hadamard(x, block) if block else x
