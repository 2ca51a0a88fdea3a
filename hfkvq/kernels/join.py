"""Attention over two sets of keys, joined: the contract and its torch reference."""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import call, define, triton_slot


@define("join", mutates=("out", "lse"))
def _join(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    top = torch.maximum(lse, other_lse)
    # A query that sees nothing on either side has -inf twice.
    top = top.masked_fill(top == -torch.inf, 0.0)
    own, more = torch.exp(lse - top), torch.exp(other_lse - top)
    total = (own + more).clamp(min=1e-30)
    # A side that shows a query nothing may hold anything.
    shown = (lse > -torch.inf)[..., None], (other_lse > -torch.inf)[..., None]
    mixed = out.float().masked_fill(~shown[0], 0.0) * (own / total)[..., None]
    out.copy_(mixed + other.float().masked_fill(~shown[1], 0.0) * (more / total)[..., None])
    lse.copy_(top + torch.log(own + more))


@_join.register_fake
def _(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    return None


triton_slot("join", "join:join_triton")


def join(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Joins attention of the same queries over two sets of keys, in place: softmax over both.

    ``out = (out e^lse + other e^other_lse) / (e^lse + e^other_lse)``, and ``lse`` is of both; in f32.

    Args:
        out: (B, Hq, Q, D), any strides but of channels; written.
        lse: f32 (B, Hq, Q), contiguous, log of the sum of the exponentials of the logits; -inf where a query sees
            nothing; written.
        other: (B, Hq, Q, D), like ``out``.
        other_lse: f32 (B, Hq, Q), contiguous.
    """
    call(_join, out, out, lse, other, other_lse)
