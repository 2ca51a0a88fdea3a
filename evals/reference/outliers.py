"""Outlier channels for the reference model, which do not change what it computes."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import nn

ModelT = TypeVar("ModelT", bound=nn.Module)


def with_outliers(model: ModelT, factor: float = 8.0, pairs: int = 2) -> ModelT:
    """Return a copy that computes the same, and whose keys have outlier channels as those of large models do.

    In every layer the last `pairs` rotary pairs (channels i and i + head_dim/2, the lowest frequencies) of the weight
    of `k_norm` are multiplied by `factor`, and those of `q_norm` divided by it. Both stand before the rotation, which
    mixes channels only within a pair, so each product of query and key stays what it was. With a power of two nothing
    is rounded either.

    Args:
        model: a model with `q_norm` and `k_norm` over the head dimension, such as Qwen3.
        factor: growth of the channels.
        pairs: number of rotary pairs per layer.
    """
    changed = copy.deepcopy(model)
    weights = dict(changed.named_parameters())
    key_names = [name for name in weights if name.endswith("k_norm.weight")]
    if not key_names:
        raise ValueError(f"model={type(model).__name__} has no q_norm and k_norm; use a Qwen3 model")
    with torch.no_grad():
        for name in key_names:
            k_weight, q_weight = weights[name], weights[name.replace("k_norm", "q_norm")]
            half = k_weight.shape[0] // 2
            if not 1 <= pairs <= half:
                raise ValueError(f"pairs={pairs} must be between 1 and half the head dimension, {half}")
            low = torch.arange(half - pairs, half, device=k_weight.device)
            channels = torch.cat([low, low + half])
            k_weight[channels] *= factor
            q_weight[channels] /= factor
    return changed
