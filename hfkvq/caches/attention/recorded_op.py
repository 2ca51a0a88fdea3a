"""Attention in a recorded step: one opaque operation a layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hfkvq.kernels.arguments import AttentionArguments
from hfkvq.kernels.step import MAX_STEP, step

from ..base.recorded import is_captured
from ..layer_state.base import LayerBase
from ..steps.device_steps import StepKV
from ..steps.step_buffer import OWNERS
from .dense import dense_attention

# Older releases have no such tag, and no graphs in parts either.
_TAGS = (torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else ()


@torch.library.custom_op("hfkvq::prompt", mutates_args=("buffer",), tags=_TAGS)
def _prompt(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    buffer: Tensor,
    scaling: float,
    softcap: float,
    causal: bool,
) -> Tensor:
    owner = OWNERS.get(buffer.data_ptr())
    if owner is None:
        raise RuntimeError("hfkvq::prompt: this buffer belongs to no cache layer; pass the layer's own.")
    return _attend_prompt(owner.layer, q, k, v, AttentionArguments(scaling, mask, softcap, sinks, None, causal))


@_prompt.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return q.new_empty((*q.shape[:3], v.shape[-1]))


def _attend_prompt(
    layer: LayerBase, query: Tensor, keys: Tensor, values: Tensor, arguments: AttentionArguments
) -> Tensor:
    """Takes a prompt as an eager forward would: (B, Hq, Q, Dv). A mask may have the capacity's columns."""
    layer.update(keys, values)
    if arguments.mask is not None:
        arguments = arguments._replace(mask=arguments.mask[..., layer.seen - layer.columns : layer.seen])

    def dense() -> Tensor:
        found, _ = dense_attention(None, query, layer.dense("keys"), layer.dense("values"), arguments)
        return found.transpose(1, 2)

    return layer.forward(query, arguments.explicit(query, layer.columns), dense, arguments.mask).contiguous()


def recorded_attention(new: StepKV, query: Tensor, arguments: AttentionArguments) -> Tensor:
    """Attention in a recorded step: one opaque operation, (B, Hq, Q, D) to (B, Hq, Q, Dv).

    One query is a step, and so are up to 16 without a mask, once every row has tokens. Else it is a prompt, whose
    operation does what an eager prompt does, outside CUDA graphs.
    """
    steps, queries = new.steps, query.shape[2]
    buffer, sync = steps.buffer, steps.sync
    assert buffer.tensor is not None, "initialized before"
    if queries <= MAX_STEP:
        # A step takes any mask that can be broadcast.
        arguments = arguments.explicit(query, 1)
    scaling, mask, softcap, sinks, _, causal = arguments.biased()
    # The first tokens of a row may be padding; and so may any of several, if there is a mask.
    several = not steps.trims and mask is None and queries <= MAX_STEP
    # With padding within rows, generate makes no masks outside the graph, which is when trims run.
    unwatched = steps.trims and sync.holes
    if sync.ready and (queries == 1 or several) and not unwatched:
        memory = buffer.tensor, buffer.pages
        keys, smoothing = new.keys, steps.layer.smoothing
        if smoothing is not None:
            query, keys = smoothing.both(query, keys)
        return step(query, keys, new.values, mask, sinks, *memory, scaling, softcap, buffer.spec)
    if is_captured():
        raise RuntimeError("A CUDA graph cannot take this step: it is a prompt, or one whose mask hides new tokens.")
    return _prompt(query, new.keys, new.values, mask, sinks, buffer.tensor, scaling, softcap, causal)
