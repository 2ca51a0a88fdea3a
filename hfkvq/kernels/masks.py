"""Masks of decode steps that look alike from step to step, so that what is launched for one serves the next."""

from __future__ import annotations

import torch
from torch import Tensor

ROOM = "hfkvq_room"
"""Attribute of a mask whose rows go on in memory behind its columns: how many columns they have there."""

COLUMNS = 1024
"""Rows of `step_mask` have a multiple of so many columns in memory."""


def step_mask(columns: Tensor) -> Tensor:
    """A padding mask as a decode step's, for all of the model's layers.

    Args:
        columns: (B, L), nonzero where a token is visible.

    Returns:
        u8 (B, 1, 1, L), 1 where visible, with `ROOM`.
    """
    rows, length = columns.shape
    room = -(-length // COLUMNS) * COLUMNS
    # Bytes of truth, not of numbers: of 256 the last byte is 0.
    whole = torch.empty(rows, room, dtype=torch.bool, device=columns.device)
    whole[:, :length].copy_(columns)
    mask = whole.view(torch.uint8)[:, None, None, :length]
    setattr(mask, ROOM, room)
    return mask


def has_room(mask: Tensor) -> bool:
    """Whether this is a `step_mask`."""
    return hasattr(mask, ROOM)
