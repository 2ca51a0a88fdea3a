"""Causal attention of a prompt's tokens behind a context, by PyTorch's own kernels and without a mask.

A mask of Q x T columns would rule out the fastest kernels, and query heads that share keys would each get a copy of
them. Flash attention aligns its triangle to the newest token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention.bias import causal_lower_right


def takes(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether `attend_behind` takes these: as flash attention does, and of tensors that get no gradient."""
    if not query.is_cuda or (torch.is_grad_enabled() and any(x.requires_grad for x in (query, keys, values))):
        return False
    # Not True: that asks for a triangle aligned to the upper left, which flash attention does not have.
    return can_use_flash_attention(SDPAParams(query, keys, values, None, 0.0, False, True))


def attend_behind(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """Attention of the newest tokens over all: causal, aligned to the newest.

    Args:
        query: (B, Hq, Q, D), of the newest Q tokens.
        keys: (B, H, T, D), T > Q.
        values: (B, H, T, D).
        scaling: factor on the logits.

    Returns:
        (B, Hq, Q, D).
    """
    bias = causal_lower_right(query.shape[2], keys.shape[2])
    return F.scaled_dot_product_attention(query, keys, values, bias, scale=scaling, enable_gqa=True)
