"""Prompts that are too long for a model, and rows of tokens as tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def fit(tokens: list[int], limit: int, truncate: str, task: str, max_length: int) -> list[int]:
    """At most ``limit`` tokens of a prompt.

    Args:
        tokens: of the prompt.
        limit: tokens that fit beside the answer.
        truncate: see `HFKVQ`.
        task: whose prompt it is.
        max_length: of the model.

    Raises:
        ValueError: the prompt is longer, and ``truncate`` is "refuse".
    """
    if len(tokens) <= limit:
        return tokens
    if truncate == "refuse":
        raise ValueError(
            f"truncate: a prompt of task {task!r} has {len(tokens)} tokens, but {limit} fit beside the answer in the "
            f"model's {max_length}; raise max_length, lower max_gen_toks or use truncate=middle."
        )
    if truncate == "left":
        return tokens[-limit:]
    half = limit // 2
    return [*tokens[:half], *tokens[len(tokens) - (limit - half) :]]


def padded(rows: Sequence[list[int]], pad: int, side: str) -> tuple[Tensor, Tensor]:
    """Token ids and mask (B, T) of rows, padded on the "left" or "right"."""
    longest = max(map(len, rows))
    ids = torch.full((len(rows), longest), pad)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        at = slice(longest - len(row), None) if side == "left" else slice(len(row))
        ids[i, at] = torch.tensor(row)
        mask[i, at] = 1
    return ids, mask
