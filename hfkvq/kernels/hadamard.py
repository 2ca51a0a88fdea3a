"""Block-diagonal Hadamard rotation: the contract and its torch reference."""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import launched


def factor_of(rotate: int) -> float:
    """Factor on a rotation's sums and differences; 1 without a rotation."""
    return rotate**-0.5 if rotate else 1.0


def largest_block(head_dim: int) -> int:
    """The greatest power of two that divides ``head_dim``: the largest rotation block a head admits."""
    return head_dim & -head_dim


def check_rotation(name: str, block: int, head_dim: int) -> None:
    """Raises ValueError unless blocks of a rotation are 0 or a power of two that divides ``head_dim``."""
    if block and (block < 2 or block & (block - 1)):
        raise ValueError(f"{name}: got block {block}, allowed 0 (no rotation) or a power of two.")
    if block and head_dim % block:
        raise ValueError(
            f"{name}: got block {block}, which does not divide head_dim {head_dim}; "
            f"the largest block for this model is {largest_block(head_dim)}."
        )


def saturated(x: Tensor, dtype: torch.dtype) -> Tensor:
    """f32 rounded to a dtype, where f16 has no infinity: a rotation may exceed what each of its channels was."""
    limit = torch.finfo(dtype).max
    return (x.clamp(-limit, limit) if dtype == torch.float16 else x).to(dtype)


def _empty_like(x: Tensor, block: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


# The size of a cache is found on the meta device.
@launched("hadamard:hadamard_triton", fake=_empty_like)
def _hadamard(x: Tensor, block: int) -> Tensor:
    # Butterflies, not a matmul: a library's order of sums depends on the shape, and then a token's bits would depend
    # on the chunk and the batch it came in.
    y, step = x.float().unflatten(-1, (-1, block)), 1
    while step < block:
        upper, lower = y.unflatten(-1, (-1, 2, step)).unbind(-2)
        y, step = torch.stack([upper + lower, upper - lower], -2).flatten(-3), 2 * step
    return saturated((y * block**-0.5).flatten(-2), x.dtype)


def hadamard(x: Tensor, block: int) -> Tensor:
    """Rotates consecutive blocks of channels: ``y = x H_h / sqrt(h)`` (SAW-INT4, section 3), which is its own inverse.

    Args:
        x: (..., D), any float dtype; computed in f32 and rounded once.
        block: h, a power of two that divides D; 0 returns ``x`` itself.

    Returns:
        (..., D) in the dtype of ``x``; the greatest number of f16 where that is exceeded.
    """
    return _hadamard(x, block) if block else x
