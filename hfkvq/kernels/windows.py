"""Rule of what is due: how many tokens have left a window, for numbers, for Triton and for tensors.

A row's first tokens stand in the sink. Of the ``rest`` behind it the newest ``local`` stay as they are, and the others
are sealed ``unit`` at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .decode import LENGTH, sealed_count
from .pages import SIDES


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


@dataclass(frozen=True, slots=True)
class Due:
    """Tokens to seal, of keys and of values.

    Attributes:
        count: i32 (B,), tokens that the last run had sealed before.
        new: i32 (B,), tokens to seal.
        index: i32 (B, m), slots of the tail that hold the oldest tokens which are not sealed.
    """

    count: tuple[Tensor, Tensor]
    new: tuple[Tensor, Tensor]
    index: tuple[Tensor, Tensor]


def due(
    counters: Tensor,
    sink: int,
    tails: Sequence[int],
    local: Sequence[int],
    unit: Sequence[int],
    most: Sequence[int],
    pos: Tensor | None = None,
) -> Due:
    """Counts as sealed, in the last run, what is to be sealed: `tokens_due` of each side. Asks the device nothing.

    Args:
        counters: i32 (2 + 2*runs, B), see `decode_attention`; ``rest`` is ``(length - sink)+``. Written in place.
        sink: tokens of the sink.
        tails: slots of the tails of keys and of values.
        local: newest tokens that stay as they are.
        unit: tokens that are sealed together.
        most: the most that any row is to seal; 0 where the slots are not asked for.
        pos: i32 (B, N), row positions of the last run's tokens, which has room: those of the new ones are written. None
            where runs have none.

    Returns:
        What is to be sealed now.
    """
    rest = (counters[LENGTH] - sink).clamp(min=0)
    before, taken, slots = [], [], []
    for at, (tail, own, step, span) in enumerate(zip(tails, local, unit, most, strict=True)):
        total, count = sealed_count(counters, SIDES[at]), counters[-2 + at].clone()
        new = tokens_due_by_row(rest, total, own, step)
        token = total[:, None] + torch.arange(span, dtype=torch.int32, device=count.device)
        counters[-2 + at] += new
        if pos is not None and at == 0:
            place = torch.arange(pos.shape[1], dtype=torch.int32, device=pos.device) - count[:, None]
            own_position = sink + total[:, None] + place
            pos.copy_(torch.where((place >= 0) & (place < new[:, None]), own_position, pos))
        before.append(count)
        taken.append(new)
        slots.append(token % max(tail, 1))
    return Due((before[0], before[1]), (taken[0], taken[1]), (slots[0], slots[1]))
