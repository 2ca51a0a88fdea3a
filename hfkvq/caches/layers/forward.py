"""The one way of an attention call through a layer: the newest tokens join it, queries attend, what is due is sealed.

Attention functions, handles and prompts of compiled models come by here. A step is done at once over the layer's
buffer, where it can be; else the layer begins, attends and finishes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hfkvq.kernels.arguments import AttentionArguments

from ..layer_state.base import LayerBase
from ..store import MAX_STEP


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


def attend(
    layer: LayerBase,
    query: Tensor,
    arguments: AttentionArguments,
    dense: Callable[[], Tensor],
    padding_mask: Tensor | None,
    after: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Attention of an update's queries over all that a layer holds then.

    Args:
        layer: that has been updated.
        query: (B, Hq, Q, D), after RoPE.
        arguments: of the call; without a mask it is causal.
        dense: attends to `KVLayer.dense` keys and values, (B, Hq, Q, Dv); asked where pages cannot be attended, as of
            a prompt. It adds the bias itself.
        padding_mask: the mask that the model was given, in which padding is looked for.
        after: what becomes of what pages give, where that is not yet what ``dense`` gives (latents); None for nothing.

    Returns:
        (B, Hq, Q, Dv).
    """
    if arguments.softcap or arguments.sinks is not None:
        layer.keep_logits()
    out = layer.step(query, arguments)
    if out is not None:
        return refuse_gradient(layer, out if after is None else after(out))
    tokens, pages = layer.staged_length, layer.begin(padding_mask, query.shape[2])
    if layer.scheme.quantizes_first and tokens > MAX_STEP and not pages and not layer.window:
        layer.finish(query, arguments)
        layer.settle()
        return refuse_gradient(layer, dense())
    out = layer.attend(query, arguments.biased()) if pages else dense()
    if pages and after is not None:
        out = after(out)
    layer.finish(query, arguments)
    return refuse_gradient(layer, out)


def attend_in_pieces(layer: LayerBase, query: Tensor, arguments: AttentionArguments) -> Tensor:
    """Attends to the pages with a prompt's queries, a few at a time: steps' kernels take no more."""
    queries, mask, outs = query.shape[2], arguments.mask, []
    for first in range(0, queries, MAX_STEP):
        own = slice(first, min(first + MAX_STEP, queries))
        if mask is None:
            newest = torch.arange(own.start, own.stop, device=query.device) + layer.seen - queries
            shown = (torch.arange(layer.seen, device=query.device) <= newest[:, None])[None, None]
        else:
            shown = mask if mask.shape[2] == 1 else mask[:, :, own]
        outs.append(layer.attend(query[:, :, own], arguments._replace(mask=shown)))
    return torch.cat(outs, 2)
