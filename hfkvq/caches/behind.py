"""Causal attention of a prompt's tokens behind a context, by PyTorch's own kernels and without a mask.

A mask of Q x T columns would rule out the fastest kernels, and query heads that share keys would each get a copy of
them. Flash attention aligns its triangle to the newest token. cuDNN's, faster on newer GPUs, is aligned to the upper
left: it is asked twice, for the context, which every query sees all of, and for the prompt's own tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention, can_use_flash_attention
from torch.nn.attention.bias import causal_lower_right

from hfkvq import kernels

PAYS = 1 << 31
"""Queries of all rows and heads times columns from which on cuDNN is asked: it plans anew for every length."""


def takes(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether `attend_behind` takes these: as flash attention does, and of tensors that get no gradient."""
    if not query.is_cuda or (torch.is_grad_enabled() and any(x.requires_grad for x in (query, keys, values))):
        return False
    return can_use_flash_attention(_asked(query, keys, values))


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
    queries, columns = query.shape[2], keys.shape[2]
    if query.shape[:3].numel() * columns >= PAYS and can_use_cudnn_attention(_asked(query, keys, values)):
        return _in_two_parts(query, keys, values, scaling)
    bias = causal_lower_right(queries, columns)
    return F.scaled_dot_product_attention(query, keys, values, bias, scale=scaling, enable_gqa=True)


def _asked(query: Tensor, keys: Tensor, values: Tensor) -> SDPAParams:
    # Not causal: that would ask for a triangle that neither has for fewer queries than keys.
    return SDPAParams(query, keys, values, None, 0.0, False, True)


def _in_two_parts(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    past = keys.shape[2] - query.shape[2]
    out, lse = _cudnn(query, keys[:, :, :past], values[:, :, :past], scaling, False)
    kernels.join(out, lse, *_cudnn(query, keys[:, :, past:], values[:, :, past:], scaling, True))
    return out


def _cudnn(query: Tensor, keys: Tensor, values: Tensor, scaling: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention (B, Hq, Q, D) and log-sum-exps (B, Hq, Q), which PyTorch's public function does not give."""
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, keys, values, None, True, 0.0, causal, scale=scaling
    )
    return found[0], found[1].reshape(query.shape[:3])
