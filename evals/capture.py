"""Queries, keys and values of a prefill, caught where the cache meets the attention, and attention replayed on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hfkvq.caches.base.model_calls import with_cache
from hfkvq.caches.cache import MixedKVCache
from hfkvq.caches.layers import HybridLayer, KVLayer
from hfkvq.kernels.arguments import AttentionArguments
from hfkvq.kernels.pages import PageFormat, Side
from hfkvq.kernels.quantize import dequantize_pages, quantize_pages

_LOGITS = 1 << 26
"""Logits of a replay that are held at once."""


@dataclass(frozen=True)
class Capture:
    """One layer of one request.

    Attributes:
        query: (Hq, n, D), the newest n positions, after RoPE.
        keys: (H, T, Dk), after RoPE.
        values: (H, T, Dv).
        softcap: bound of the logits, 0 for none.
        sinks: (Hq,) logits of nothing, or None.
        mask: bool (n, T), which keys each query sees, or None for those up to its own: tokens of an image may see
            each other.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    scaling: float
    softcap: float = 0.0
    sinks: Tensor | None = None
    mask: Tensor | None = None

    def attend(self, keys: Tensor, values: Tensor) -> Tensor:
        """``o = softmax(q k^T) v``, masked: f32 (Hq, n, Dv) for f32 keys (H, T, Dk) and values (H, T, Dv)."""
        heads, count, _ = self.query.shape
        share, tokens = heads // keys.shape[0], keys.shape[1]
        query = self.query.float().unflatten(0, (-1, share))
        column = torch.arange(tokens, device=keys.device)
        out = []
        step = max(1, _LOGITS // (heads * tokens))
        for first in range(0, count, step):
            rows = query[:, :, first : first + step]
            logits = torch.einsum("hsqd,htd->hsqt", rows, keys) * self.scaling
            if self.softcap:
                logits = self.softcap * torch.tanh(logits / self.softcap)
            position = tokens - count + first + torch.arange(rows.shape[2], device=keys.device)
            seen = column <= position[:, None] if self.mask is None else self.mask[first : first + step]
            logits = logits.masked_fill(~seen, -torch.inf)
            if self.sinks is not None:
                nothing = self.sinks.float().view(-1, share, 1, 1).expand(*logits.shape[:3], 1)
                logits = torch.cat([logits, nothing], -1)
            probabilities = logits.softmax(-1)[..., :tokens]
            out.append(torch.einsum("hsqt,htd->hsqd", probabilities, values))
        return torch.cat(out, 2).flatten(0, 1)


class _CaptureLayer(KVLayer):
    """Notes what its attention is given, and stores nothing."""

    captured: Capture | None = None
    first_query = 0

    def begin(self, mask: Tensor | None, queries: int) -> bool:
        """The attention is to be asked here, whatever the prompt's length."""
        return True

    def attend(self, query: Tensor, arguments: AttentionArguments) -> Tensor:
        """Attention of the prompt to itself."""
        scaling, mask, softcap, sinks, *_ = arguments
        keys, values = self.dense("keys"), self.dense("values")
        seen = None if mask is None else mask[0, 0] if mask.dtype == torch.bool else mask[0, 0] == 0
        held = Capture(query[0], keys[0], values[0], scaling, softcap, sinks, seen)
        first = self.first_query
        newest = None if seen is None else seen[first:]
        self.captured = dataclasses.replace(held, query=query[0, :, first:], mask=newest)
        if not softcap and sinks is None:
            return F.scaled_dot_product_attention(
                query, keys, values, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
            )
        return held.attend(keys[0].float(), values[0].float())[None].to(query.dtype)

    def finish(self, query: Tensor, arguments: AttentionArguments) -> None:
        """The new tokens are no longer needed."""
        self.staged, self.new_columns = None, 0


class _CaptureHybridLayer(_CaptureLayer, HybridLayer):
    """The same, of a layer with recurrent states beside."""


def spread_layers(candidates: Sequence[int], count: int) -> list[int]:
    """``count`` of the layers, evenly spread from the first to the last; all of them if there are not more."""
    if count < 1:
        raise ValueError(f"layers: got {count}, allowed 1 or more; the paper takes four to six.")
    if len(candidates) <= count:
        return list(candidates)
    if count == 1:
        return [candidates[len(candidates) // 2]]
    last = len(candidates) - 1
    return [candidates[(2 * i * last + count - 1) // (2 * (count - 1))] for i in range(count)]


def compressed_layers(model: Any) -> list[int]:
    """Indices of the layers that a cache of this model would compress, those with sliding windows aside."""
    layers = MixedKVCache(model, "full", attach=False).layers
    return [i for i, layer in enumerate(layers) if isinstance(layer, KVLayer) and not layer.window]


@torch.no_grad()
def capture(
    model: Any,
    ids: Sequence[int],
    layers: Sequence[int],
    first_query: int = 0,
    inputs: Mapping[str, Any] | None = None,
) -> list[Capture]:
    """One prefill of a prompt.

    Args:
        model: a causal language model of Transformers.
        ids: token ids of one row.
        layers: indices of the layers to note.
        first_query: queries before this position are not kept.
        inputs: what else the model is given, such as the pixels of images.

    Returns:
        One `Capture` a layer, on the device that the layer runs on.

    Raises:
        RuntimeError: the model's attention did not pass through the cache, so there is nothing to measure.
    """
    cache = MixedKVCache(model, "full", attach=False)
    attached = MixedKVCache(model, "full")
    for i in layers:
        old = cache.layers[i]
        assert isinstance(old, KVLayer)
        kind = _CaptureHybridLayer if isinstance(old, HybridLayer) else _CaptureLayer
        layer = cache.layers[i] = kind(old.scheme, old.reader)
        if isinstance(old, HybridLayer):
            layer.states = old.states  # pyright: ignore[reportAttributeAccessIssue]
        layer.first_query = first_query
    try:
        device = next(model.parameters()).device
        more = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in (inputs or {}).items()}
        model(
            input_ids=torch.tensor([list(ids)], device=device, dtype=torch.int64),
            **with_cache(model, cache),
            use_cache=True,
            **more,
        )
    finally:
        attached.detach()
    found = [cache.layers[i].captured for i in layers]  # type: ignore[union-attr]
    if any(x is None for x in found):
        raise RuntimeError(
            f"{type(model).__name__}: its attention does not pass through the cache as other models' does, so its keys "
            "and values cannot be captured."
        )
    return found  # type: ignore[return-value]


def quantized(x: Tensor, fmt: PageFormat, side: Side, columns: Tensor) -> Tensor:
    """Keys or values of which some tokens were stored in a format and read back: f32 (H, T, D).

    Args:
        x: (H, T, D).
        fmt: its page is one group, so that few tokens can be measured too; a last group that is not full repeats its
            last token, which widens no scale.
        side: "keys" or "values".
        columns: i64 (m,), the tokens, in order.
    """
    whole = x.float().clone()
    count = columns.shape[0]
    span = -(-count // fmt.page_size) * fmt.page_size
    padded = columns[torch.arange(span, device=columns.device).clamp(max=count - 1)]
    pages = x[:, padded].unflatten(1, (-1, fmt.page_size)).transpose(0, 1)
    back = dequantize_pages(quantize_pages(pages, fmt, side), fmt, side, x.shape[-1])
    whole[:, columns] = back.transpose(0, 1).flatten(1, 2)[:, :count]
    return whole
