"""Attention of prompts in batches of the engine, where every prompt has a length of its own.

PyTorch's first choice is cuDNN, which plans anew for every shape and stride: some 45 ms on an H200, as long as all of a
prompt of 1,000 tokens takes. So flash attention is asked, which plans nothing and aligns causal attention to the newest
token; and cuDNN only for long prompts, which are padded, so that there are few shapes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hfkvq.caches.behind import cudnn_or_none, flash, likes_cudnn, takes
from hfkvq.caches.dense import dense_attention
from hfkvq.kernels.arguments import AttentionArguments

LONG, STEP = 4096, 1024
"""Tokens of prompts for which cuDNN is asked, and a multiple of which they have there."""


def prompt_attention(module: Any, query: Tensor, keys: Tensor, values: Tensor, arguments: AttentionArguments) -> Tensor:
    """Causal attention of a request's newest tokens.

    Args:
        module: the attention module.
        query: (1, Hq, Q, D), of the newest Q tokens, after RoPE.
        keys: (1, H, T, D), of all.
        values: likewise.
        arguments: of the call, without a mask.

    Returns:
        (1, Q, Hq, D).
    """
    tokens = query.shape[2]
    if arguments.softcap or arguments.sinks is not None or not takes(query, keys, values):
        return dense_attention(module, query, keys, values, arguments)[0]
    found = None
    if LONG <= tokens == keys.shape[2] and likes_cudnn(query, keys, values):
        room = -(-tokens // STEP) * STEP
        own = _padded(query, room), _padded(keys, room), _padded(values, room)
        found = cudnn_or_none(*own, arguments.scaling, causal=True)
    out, _ = found or flash(query, keys, values, arguments.scaling, True)
    return out[:, :, :tokens].transpose(1, 2)


def _padded(x: Tensor, tokens: int) -> Tensor:
    """With zeros behind it, which no token before them attends to; its strides depend on ``tokens`` alone."""
    found = x.new_empty((1, tokens, x.shape[1], x.shape[3]))
    found[:, : x.shape[2]] = x.transpose(1, 2)
    found[:, x.shape[2] :] = 0
    return found.transpose(1, 2)
