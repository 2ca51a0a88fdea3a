"""Attention over dense keys and values: of prompts, and of plain tensors, which are none of ours.

Stock sdpa where it has every argument; else the modeling file's own eager attention, or, of a prompt that is an
operation of a compiled model and knows no module, a few queries at a time.

Causal prompts behind a context get no mask where flash attention takes them: a mask of Q x T columns would rule out the
fastest kernels, and query heads that share keys would each get a copy of them. Queries are rotated instead of the
context.
"""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention.bias import causal_lower_right
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hfkvq import kernels
from hfkvq.kernels.arguments import AttentionArguments

from ..store import MAX_STEP, SIDES, KVStore

_CHUNK = 512
"""Queries whose logits are held at a time, where PyTorch's own attention lacks an argument."""


class _WithoutCudnn:
    """A context in which PyTorch's attention goes without cuDNN, in whichever threads are in it.

    cuDNN plans anew for every length, which takes longer than a whole step.
    """

    def __init__(self) -> None:
        self._lock, self._inside, self._enabled = threading.Lock(), 0, True

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._enabled = torch.backends.cuda.cudnn_sdp_enabled()
                torch.backends.cuda.enable_cudnn_sdp(False)
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                torch.backends.cuda.enable_cudnn_sdp(self._enabled)


WITHOUT_CUDNN = _WithoutCudnn()


def is_plain(arguments: AttentionArguments, columns: int, dropout: float, given: dict[str, Any]) -> bool:
    """True if a call is causal, aligned to the newest token, and nothing else; ``given`` is what the model adds."""
    if arguments.mask is not None or not arguments.causal or arguments.softcap or dropout:
        return False
    names = ("softcap", "s_aux", "sinks", "position_bias")
    if arguments.sinks is not None or arguments.bias is not None or any(given.get(name) is not None for name in names):
        return False
    return not given.get("output_attentions") and (given.get("sliding_window") or columns) >= columns


def takes(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """True if `lower_right` takes these without a mask: flash attention does, and none of them gets a gradient."""
    if not query.is_cuda or (torch.is_grad_enabled() and any(x.requires_grad for x in (query, keys, values))):
        return False
    dim = query.shape[3]
    asked = SDPAParams(query, keys, values, None, 0.0, False, True)
    return values.shape[3] == dim and dim % 8 == 0 and can_use_flash_attention(asked)


def lower_right(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """Causal attention (B, Hq, Q, D) of the newest Q tokens of dense keys and values (B, H, T, D)."""
    bias = causal_lower_right(query.shape[2], keys.shape[2])
    return F.scaled_dot_product_attention(query, keys, values, bias, scale=scaling, enable_gqa=True)  # type: ignore[arg-type]


def attend_layer(layer: Any, query: Tensor, arguments: AttentionArguments) -> Tensor | None:
    """Attention of a prompt that a layer has been given, behind what it holds; of `is_plain` calls.

    Args:
        layer: of the cache, that has been updated and has begun.
        query: (B, Hq, Q, D), after RoPE.
        arguments: of the call.

    Returns:
        (B, Hq, Q, D); None where there is nothing before, or where it has to go another way.
    """
    new, tokens = layer.staged, layer.staged_length
    before = layer.columns - tokens
    if new is None or not before or tokens <= MAX_STEP or query.shape[2] != tokens:
        return None
    if layer.window or layer.latents or layer.evicted or not takes(query, *new):
        return None
    if layer.buffer is not None:
        layer.buffer.close()
    return attend_store(layer.held(), layer.smoothed_query(query), new, before, arguments.scaling)


def attend_store(store: KVStore, query: Tensor, new: tuple[Tensor, Tensor], columns: int, scaling: float) -> Tensor:
    """Attention of the newest tokens over a store's ``columns``, which are dequantized for it, and themselves.

    Args:
        store: of the tokens before.
        query: (B, Hq, Q, D), of the newest Q tokens.
        new: keys and values (B, H, Q, D) of these tokens, not rotated.
        columns: tokens before.
        scaling: factor on the logits.

    Returns:
        (B, Hq, Q, D).
    """
    form, total = store.format, columns + query.shape[2]
    keys, values = (store.dense_before(x, side, total, back=False) for side, x in zip(SIDES, new, strict=True))
    out = lower_right(kernels.hadamard(query, form.rotate_keys), keys, values, scaling)
    return kernels.hadamard(out, form.rotate_values, back=True)


def dense_attention(
    module: Any,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    arguments: AttentionArguments,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention over dense keys and values, as the model would do it without us.

    Args:
        module: the attention module; None where there is none.
        query: (B, Hq, Q, D), after RoPE.
        keys: (B, H, T, D).
        values: (B, H, T, Dv).
        arguments: of the call; no mask that is causal is aligned to the newest token.
        dropout: of the probabilities.
        **kwargs: of the call, as the model gave them; they say softcap, sinks and bias again.

    Returns:
        (B, Q, Hq, Dv), and the probabilities where the model's own attention gives them.
    """
    queries, columns, mask, causal = query.shape[2], keys.shape[2], arguments.mask, arguments.causal
    if mask is None and 1 < queries < columns and causal:
        if is_plain(arguments, columns, dropout, kwargs) and takes(query, keys, values):
            return lower_right(query, keys, values, arguments.scaling).transpose(1, 2), None
        # Without a mask stock sdpa would align the triangle to the upper left.
        mask = _triangle(query, columns)
        window = kwargs.get("sliding_window")
        if window:
            mask = mask.triu(columns - queries - window + 1)
    if mask is not None and not mask.is_floating_point() and mask.dtype != torch.bool:
        mask = mask.bool()
    if module is None and (arguments.softcap or arguments.sinks is not None):
        return _chunked_attention(query, keys, values, arguments._replace(mask=mask)), None
    if module is None:
        module, kwargs = SimpleNamespace(num_key_value_groups=query.shape[1] // keys.shape[1]), {"is_causal": causal}
    scaling, special = arguments.scaling, any(kwargs.get(name) is not None for name in ("softcap", "s_aux", "sinks"))
    if not special and not kwargs.get("output_attentions"):
        return ALL_ATTENTION_FUNCTIONS["sdpa"](
            module, query, keys, values, mask, dropout=dropout, scaling=scaling, **kwargs
        )
    eager = sys.modules[type(module).__module__].eager_attention_forward
    if mask is None and queries > 1 and causal:
        mask = _triangle(query, columns)
    if mask is not None and mask.dtype == torch.bool:
        shape, lowest = torch.broadcast_shapes(mask.shape, (1, 1, queries, columns)), torch.finfo(query.dtype).min
        mask = torch.zeros(shape, dtype=query.dtype, device=query.device).masked_fill(~mask, lowest)
    return eager(module, query, keys, values, mask, dropout=dropout, scaling=scaling, **kwargs)


def _triangle(query: Tensor, columns: int) -> Tensor:
    """The causal mask of the newest queries: bool (1, 1, Q, L)."""
    queries = query.shape[2]
    mask = torch.ones(queries, columns, dtype=torch.bool, device=query.device)
    return mask.tril(columns - queries)[None, None]


def _chunked_attention(query: Tensor, keys: Tensor, values: Tensor, arguments: AttentionArguments) -> Tensor:
    """Attention with softcap and sinks, a few queries at a time: (B, Q, Hq, Dv)."""
    share, columns = query.shape[1] // keys.shape[1], keys.shape[2]
    keys, values = (x.float().repeat_interleave(share, 1) for x in (keys, values))
    mask, softcap, sinks, outs = arguments.mask, arguments.softcap, arguments.sinks, []
    if mask is None and arguments.causal:
        mask = _triangle(query, columns)
    for first in range(0, query.shape[2], _CHUNK):
        own = query[:, :, first : first + _CHUNK].float()
        logits = own @ keys.transpose(-1, -2) * arguments.scaling
        if softcap:
            logits = torch.tanh(logits / softcap) * softcap
        if mask is not None:
            shown = mask if mask.shape[2] == 1 else mask[:, :, first : first + _CHUNK]
            logits = logits + shown if mask.is_floating_point() else logits.masked_fill(~shown, -torch.inf)
        if sinks is not None:
            extra = sinks.float().view(1, -1, 1, 1).expand(logits.shape[0], -1, own.shape[2], 1)
            logits = torch.cat([logits, extra], -1)
        probs = torch.softmax(logits, -1).nan_to_num(0.0)[..., :columns]
        outs.append((probs @ values).to(query.dtype))
    return torch.cat(outs, 2).transpose(1, 2).contiguous()
