"""Gradients: none flows through compressed keys and values, and whoever asks for one is told so."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .base import LayerBase


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise RuntimeError(
            "hfkvq: no gradient flows through compressed keys and values, so k_proj and v_proj would get none. Train "
            "without past_key_values (use_cache=False) or with DynamicCache, and run what needs no gradient under "
            "torch.no_grad()."
        )


def refuse_gradient(layer: LayerBase, x: Tensor) -> Tensor:
    """Guard of a layer's keys, values and attention output: backward through them raises.

    Only where the keys or values that came last would have got a gradient: a forward alone is nobody's harm.
    """
    if not layer.differentiated or not torch.is_grad_enabled():
        return x
    return _NoGradient.apply(x, torch.zeros((), device=x.device, requires_grad=True))
