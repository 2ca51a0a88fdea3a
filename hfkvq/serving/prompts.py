"""Attention of prompts in batches of the engine, where every prompt has a length of its own.

PyTorch's first choice is cuDNN, which plans anew for every shape and stride: some 45 ms on an H200, as long as all of a
prompt of 1,000 tokens takes. So cuDNN is kept for long first prompts, which are padded, so that there are few shapes.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention

from hfkvq.caches.attention.interface import WITHOUT_CUDNN, dense_attention, flash_takes, lower_right
from hfkvq.kernels.arguments import AttentionArguments

LONG, STEP = 4096, 1024
"""Tokens of first prompts that cuDNN may take, and a multiple of which they have there."""


def prompt_attention(module: Any, query: Tensor, keys: Tensor, values: Tensor, arguments: AttentionArguments) -> Tensor:
    """Causal attention of a request's newest tokens.

    Args:
        query: (1, Hq, Q, D), of the newest Q tokens, after RoPE.
        keys: (1, H, T, D), of all.
        arguments: of the call, without a mask.

    Returns:
        (1, Q, Hq, D).
    """
    tokens = query.shape[2]
    if arguments.softcap or arguments.sinks is not None or not flash_takes(query, keys, values):
        return dense_attention(module, query, keys, values, arguments)[0]
    asked = SDPAParams(query, keys, values, None, 0.0, True, True)
    if LONG <= tokens == keys.shape[2] and can_use_cudnn_attention(asked):
        q, k, v = (_padded(x, -(-tokens // STEP) * STEP) for x in (query, keys, values))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=arguments.scaling, enable_gqa=True)
    else:
        with WITHOUT_CUDNN:
            out = lower_right(query, keys, values, arguments.scaling)
    return out[:, :, :tokens].transpose(1, 2)


def _padded(x: Tensor, tokens: int) -> Tensor:
    """With zeros behind it, which no token before them attends to; its strides depend on ``tokens`` alone."""
    found = x.new_empty((1, tokens, x.shape[1], x.shape[3]))
    found[:, : x.shape[2]] = x.transpose(1, 2)
    found[:, x.shape[2] :] = 0
    return found.transpose(1, 2)
