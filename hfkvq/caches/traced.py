"""Attention in a recorded step: one opaque operation a layer."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hfkvq.kernels.step import MAX_STEP, step

from .recorded import is_captured

if TYPE_CHECKING:
    from .static import StaticKVLayer

LAYERS: weakref.WeakValueDictionary[int, StaticKVLayer] = weakref.WeakValueDictionary()
"""Layers by their buffer's address, for prompts of compiled models."""


class StepKV:
    """What `StaticKVLayer.update` returns in a recorded step: the layer and the new tokens; no tensor."""

    def __init__(self, layer: StaticKVLayer, keys: Tensor, values: Tensor) -> None:
        self.layer, self.keys, self.values = layer, keys, values


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
    layer = LAYERS.get(buffer.data_ptr())
    if layer is None:
        raise RuntimeError("hfkvq::prompt: this buffer belongs to no cache layer; pass the layer's own.")
    return layer.attend_prompt(q, k, v, mask, sinks, scaling, softcap, causal)


@_prompt.register_fake
def _(
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
    return q.new_empty((*q.shape[:3], v.shape[-1]))


def traced_attention(
    keys: StepKV, query: Tensor, mask: Tensor | None, scaling: float, softcap: float, sinks: Tensor | None, causal: bool
) -> Tensor:
    """Attention in a recorded step: one opaque operation, (B, Hq, Q, D) to (B, Hq, Q, Dv).

    One query is a step, and so are up to 16 without a mask, once every row has tokens. Else it is a prompt, whose
    operation does what an eager prompt does, outside CUDA graphs.
    """
    layer, queries = keys.layer, query.shape[2]
    assert layer.buffer is not None, "initialized before"
    # The first tokens of a row may be padding; and so may any of several, if there is a mask.
    several = layer.several and mask is None and queries <= MAX_STEP
    # With padding within rows, generate makes no masks outside the graph, which is when trims run.
    unwatched = layer.trims and layer.clock.holes
    if layer.clock.ready and (queries == 1 or several) and not unwatched:
        return step(query, keys.keys, keys.values, mask, sinks, layer.buffer, scaling, softcap, layer.spec)
    if is_captured():
        raise RuntimeError("A CUDA graph cannot take this step: it is a prompt, or one whose mask hides new tokens.")
    return _prompt(query, keys.keys, keys.values, mask, sinks, layer.buffer, scaling, softcap, causal)
