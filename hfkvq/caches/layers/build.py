"""The layers of a cache, from a model's config and a preset."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

from transformers.cache_utils import DynamicCache, DynamicLayer, StaticCache, StaticSlidingWindowLayer
from transformers.configuration_utils import PreTrainedConfig

from ..model_config import TOUCHES_KEYS, head_dim_of, looks_attention_up, queries_per_head
from ..preset import Preset
from ..scheme import Scheme, warn_of_limits
from .group import DeviceSync
from .layer import KVLayer
from .padding import PaddingReader

logger = logging.getLogger(__name__)

# Layer types whose models do not look at the attention implementation's name.
_KNOWN_LAYERS = {
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
    "DummyLayer",
}


class Layers(NamedTuple):
    """The layers of a cache.

    Attributes:
        layers: in the model's order: `KVLayer` for full attention, the others as Transformers makes them.
        compressed: numbers of those that are `KVLayer`.
        sync: of layers whose steps may be recorded; None where none may.
        captured: whether steps are captured as CUDA graphs.
        why_not_captured: why not, though they were to be; else None.
    """

    layers: list[Any]
    compressed: tuple[int, ...]
    sync: DeviceSync | None
    captured: bool
    why_not_captured: str | None


def is_attachable(text: PreTrainedConfig) -> bool:
    """Whether a model of this text config takes its attention from Transformers' table, in all its layers."""
    known = all(type(layer).__name__ in _KNOWN_LAYERS for layer in DynamicCache(config=text).layers)
    return known and looks_attention_up(text)


def build_layers(
    text: PreTrainedConfig,
    preset: Preset,
    max_cache_len: int | None = None,
    capture: bool = False,
    attach: bool = True,
    debug: bool = False,
    name: str = "",
) -> Layers:
    """Makes the layers of an empty cache.

    Args:
        text: config of the decoder.
        preset: scheme of each layer.
        max_cache_len: see `hfkvq.MixedKVCache`.
        capture: whether steps are to be captured where they can be.
        attach: whether the attention implementation is "hfkvq".
        debug: see `hfkvq.MixedKVCache`.
        name: of the model, for messages.

    Raises:
        ValueError: a head dim that a scheme cannot hold, or no attention layers.
    """
    head_dim = head_dim_of(text)
    if head_dim is not None:
        for each in preset.schemes:
            each.layout(head_dim, head_dim).check(head_dim, head_dim)
            warn_of_limits(each, head_dim, head_dim)
    stock = DynamicCache(config=text).layers
    full = tuple(i for i, layer in enumerate(stock) if type(layer) is DynamicLayer)
    if not full and not any(isinstance(layer, DynamicLayer) for layer in stock):
        raise ValueError(
            f"model_or_config: {name} has no attention layers, so there is no KV cache to compress; run "
            "this model without hfkvq."
        )
    schemes = preset.by_layer(len(stock))
    evicts = next((scheme.name for scheme in schemes if scheme.evicts), None)
    if evicts and text.model_type in TOUCHES_KEYS and looks_attention_up(text):
        raise ValueError(
            f"scheme: got {evicts!r}, but {name} computes with all cached keys or values itself, so none can be "
            "evicted; choose a scheme that keeps every token, e.g. 'kitty-pro'."
        )
    sharing = getattr(text, "kv_sharing_modes", None)
    shares = bool(getattr(text, "num_kv_shared_layers", 0))
    # Steps are recorded with "hfkvq" attention only, and need every layer to be of a kind that can be.
    why = "the attention implementation is not switched" if not attach else "debug looks at every token"
    if attach and not debug and full:
        why = _why_not_recorded(text, [schemes[i] for i in full], sharing is not None or shares, head_dim)
    can = why is None and bool(full)
    captured = can and capture and len(full) == len(stock)
    recordable = captured or (can and max_cache_len is not None)
    layers: list[Any] = list(stock)
    if max_cache_len is not None and recordable:
        layers = list(StaticCache(config=text, max_cache_len=max_cache_len).layers)
    reader = PaddingReader()
    for i in full:
        defer = sharing[i] == "store" if sharing else shares
        layers[i] = layer = KVLayer(schemes[i], reader, max_cache_len, defer, debug, recordable)
        if layer.eviction is not None:
            layer.eviction.place = i, len(layers)
    if not full:
        logger.warning(
            "%s has no layer of full attention alone, so nothing is compressed: all layers stay as Transformers "
            "makes them.",
            name,
        )
    sync = group_layers([layers[i] for i in full], queries_per_head(text))
    # Said where a step shows that it matters.
    uncaptured = (why or "layers are of several kinds") if capture and not captured else None
    return Layers(layers, full, sync, captured, uncaptured)


def seen_by(layer: Any) -> int | None:
    """Tokens that a layer was given; None where the host does not know, or a layer does not count them."""
    if isinstance(layer, KVLayer):
        return layer.seen
    return layer.get_seq_length() if isinstance(layer, (DynamicLayer, StaticSlidingWindowLayer)) else None


def group_layers(layers: list[KVLayer], queries_per_head: int = 1) -> DeviceSync | None:
    """Lets layers of a cache know of each other; what they know of recorded steps, if any may be."""
    evicting = [layer.eviction for layer in layers if layer.eviction is not None]
    for kind in {type(part.group) for part in evicting}:
        kind([part for part in evicting if type(part.group) is kind])
    recordable = [layer.steps for layer in layers if layer.steps is not None]
    for steps in recordable:
        steps.buffer.queries_per_head = queries_per_head
    return DeviceSync(recordable) if recordable else None


def _why_not_recorded(text: PreTrainedConfig, schemes: list[Scheme], shares: bool, head_dim: int | None) -> str | None:
    """Why steps of this model and these schemes cannot be recorded; None where they can."""
    if head_dim is None:
        return "heads have no one dimension (latent attention, or layers of several kinds)"
    if shares:
        return "layers share keys and values"
    if text.model_type in TOUCHES_KEYS:
        return f"{text.model_type} computes with the cached keys itself"
    reasons = (scheme.limits(head_dim, head_dim).captured for scheme in schemes)
    return next((reason for reason in reasons if reason), None)
