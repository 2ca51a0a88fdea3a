"""Masks of decode steps that look alike from step to step, so that what is launched for one serves the next."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

ROOM = "hfkvq_room"
"""Attribute of a mask whose rows go on in memory behind its columns: how many columns they have there."""

FOLDED = "hfkvq_folded"
"""Attribute of such a mask: what `fold_mask` has made of it."""

KIND = "hfkvq_kind"
"""Attribute of such a mask: its `mask_kind`, once for all layers."""

COLUMNS = 1024
"""Rows of `step_mask` have a multiple of so many columns in memory."""


def step_mask(columns: Tensor) -> Tensor:
    """A padding mask as a decode step's, for all of the model's layers.

    Args:
        columns: (B, L), nonzero where a token is visible.

    Returns:
        bool (B, 1, 1, L), as models expect of masks that are not added, with `ROOM`.
    """
    rows, length = columns.shape
    room = -(-length // COLUMNS) * COLUMNS
    whole = torch.zeros(rows, room, dtype=torch.bool, device=columns.device)
    mask = whole[:, None, None, :length]
    mask.copy_(columns[:, None, None, :])
    setattr(mask, ROOM, room)
    return mask


def has_room(mask: Tensor) -> bool:
    """True for a mask that `step_mask` made."""
    return hasattr(mask, ROOM)


def fold_mask(mask: Tensor | None, batch: int, heads: int) -> Tensor | None:
    """A mask (B or 1, Hq or 1, Q or 1, L) for rows that are KV heads of its rows: (B*heads or 1, Hq/heads or 1, ...).

    That of a `step_mask` is one as well, and made once for all layers.
    """
    if mask is None or (mask.shape[0] == 1 and mask.shape[1] == 1):
        return mask
    if mask.shape[1] > 1:
        mask = mask.expand(batch, -1, -1, -1)
        return mask.reshape(batch * heads, mask.shape[1] // heads, *mask.shape[2:])
    if not has_room(mask):
        return mask.repeat_interleave(heads, 0)
    made: dict[int, Tensor] = getattr(mask, FOLDED, {})
    if heads not in made:
        made[heads] = step_mask(mask[:, 0, 0].repeat_interleave(heads, 0))
        setattr(mask, FOLDED, made)
    return made[heads]


class MaskKind(NamedTuple):
    """A mask as kernels know it, but for its address.

    Attributes:
        kind: 0 for none, 1 for a mask of bytes, 2 for one that is added.
        strides: by row, head, query and column; 0 where it broadcasts.
    """

    kind: int = 0
    length: int = 1
    strides: tuple[int, ...] = (0, 0, 0, 0)


def mask_kind(mask: Tensor) -> MaskKind:
    """Kind of a mask, for kernels; a mask with `ROOM` keeps it while its columns fit."""
    known: MaskKind | None = getattr(mask, KIND, None)
    if known is not None:
        return known
    strides = tuple([stride if size > 1 else 0 for stride, size in zip(mask.stride(), mask.shape, strict=True)])
    found = MaskKind(2 if mask.is_floating_point() else 1, getattr(mask, ROOM, mask.shape[-1]), strides)
    if has_room(mask):
        setattr(mask, KIND, found)
    return found
