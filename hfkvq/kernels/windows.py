"""Rule of what is due: how many tokens have left a window, for numbers, for Triton and for tensors.

A row's first tokens stand in the sink. Of the ``rest`` behind it the newest ``local`` stay as they are, and the others
are sealed ``unit`` at a time.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Sealing(NamedTuple):
    """Tokens that a step seals.

    Attributes:
        local: newest tokens that stay as they are, of keys and of values.
        unit: tokens that are sealed together.
        most: the most that any row will have to seal; 0 for nothing.
    """

    local: tuple[int, int]
    unit: tuple[int, int]
    most: tuple[int, int]


def tokens_due(rest: int, sealed: int, local: int, unit: int) -> int:
    """Tokens that a side is to seal now: of numbers, and inside Triton's kernels, which are compiled from these lines.

    Args:
        rest: tokens behind the sink.
        sealed: how many of them the side has sealed.
        local: newest tokens that stay as they are.
    """
    return max(max(rest - local, 0) // unit * unit - sealed, 0)


def tokens_due_by_row(rest: Tensor, sealed: Tensor | int, local: int, unit: int) -> Tensor:
    """`tokens_due` of every row: (B,), of the dtype of ``rest``; ``sealed`` likewise, or one number for all rows."""
    return ((rest - local).clamp(min=0) // unit * unit - sealed).clamp(min=0)


def most_due(tokens: int, unit: int) -> int:
    """The most that is due after a step of so many tokens, where nothing was due before it."""
    return (unit - 1 + tokens) // unit * unit
