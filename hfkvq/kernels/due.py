"""What has left the windows: how many tokens of each row are to be sealed, and where in the tail they stand."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .decode import LENGTH, RUNS
from .dispatch import call, define, triton_slot


@define("due")
def _due(
    counters: Tensor,
    sink: int,
    tails: Sequence[int],
    local: Sequence[int],
    unit: Sequence[int],
    most: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    rest = (counters[LENGTH] - sink).clamp(min=0)
    count = counters[RUNS : RUNS + 2]
    new, index = torch.empty_like(count), []
    for at, (tail, own, step, span) in enumerate(zip(tails, local, unit, most, strict=True)):
        new[at] = ((rest - own).clamp(min=0) // step * step - count[at]).clamp(min=0)
        token = count[at, :, None] + torch.arange(span, dtype=torch.int32, device=count.device)
        index.append(token % max(tail, 1))
    return new, index[0], index[1]


@_due.register_fake
def _(
    counters: Tensor,
    sink: int,
    tails: Sequence[int],
    local: Sequence[int],
    unit: Sequence[int],
    most: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    batch = counters.shape[1]
    return counters.new_empty((2, batch)), counters.new_empty((batch, most[0])), counters.new_empty((batch, most[1]))


triton_slot("due", "due:due_triton")


def due(
    counters: Tensor,
    sink: int,
    tails: Sequence[int],
    local: Sequence[int],
    unit: Sequence[int],
    most: Sequence[int],
) -> tuple[Tensor, list[Tensor]]:
    """Tokens that a store of one run is to seal, by side: ``max((rest - local)+ // unit * unit - sealed, 0)``.

    Args:
        counters: i32 (4, B), see `decode_attention`; ``rest`` is ``(length - sink)+``.
        sink: tokens of the sink.
        tails: slots of the tails of keys and of values.
        local: newest tokens that stay as they are.
        unit: tokens that are sealed together.
        most: the most that any row is to seal; 0 where the slots are not asked for.

    Returns:
        i32 (2, B), tokens due of keys and of values, and i32 (B, most) for each side: slots of the tail that hold the
        oldest tokens which are not sealed.
    """
    new, *index = call(_due, counters, counters, sink, list(tails), list(local), list(unit), list(most))
    return new, index
