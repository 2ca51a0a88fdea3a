"""Tokens that have left the windows: how many of each row are to be sealed, and their slots in the tail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .decode import LENGTH, sealed_count
from .dispatch import call, define, triton_slot
from .pages import SIDES
from .windows import tokens_due_by_row


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


@define("due", mutates=("counters", "found", "pos"))
def _due(
    counters: Tensor,
    found: Tensor,
    sink: int,
    tails: Sequence[int],
    local: Sequence[int],
    unit: Sequence[int],
    most: Sequence[int],
    # Without a default: PyTorch 2.11 leaves out arguments that have theirs, and then misses one that is written.
    pos: Tensor | None,
) -> None:
    rest = (counters[LENGTH] - sink).clamp(min=0)
    before, taken, slots = [], [], []
    for at, (tail, own, step, span) in enumerate(zip(tails, local, unit, most, strict=True)):
        total, count = sealed_count(counters, SIDES[at]), counters[-2 + at].clone()
        new = tokens_due_by_row(rest, total, own, step)
        token = total[:, None] + torch.arange(span, dtype=torch.int32, device=count.device)
        counters[-2 + at] += new
        if pos is not None and at == 0:
            slot = (count - total)[:, None] + token
            inside = token < (total + new)[:, None]
            rows = torch.arange(total.shape[0], device=count.device)[:, None].expand_as(slot)[inside]
            pos[rows, slot[inside].long()] = sink + token[inside]
        before.append(count)
        taken.append(new)
        slots.append((token % max(tail, 1)).flatten())
    found.copy_(torch.cat(before + taken + slots))


triton_slot("due", "due:due_triton")


def due(
    counters: Tensor,
    sink: int,
    tails: Sequence[int],
    local: Sequence[int],
    unit: Sequence[int],
    most: Sequence[int],
    pos: Tensor | None = None,
) -> Due:
    """Counts as sealed, in the last run, what is to be sealed: `hfkvq.kernels.windows.tokens_due` of each side.

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
    batch = counters.shape[1]
    spans = [batch * span for span in most]
    found = counters.new_empty(4 * batch + sum(spans))
    call(_due, counters, counters, found, sink, list(tails), list(local), list(unit), list(most), pos)
    keys, values, new_keys, new_values, *index = found.split([batch] * 4 + spans)
    slots = tuple([part.view(batch, span) for part, span in zip(index, most, strict=True)])
    return Due((keys, values), (new_keys, new_values), slots)  # type: ignore[arg-type]
