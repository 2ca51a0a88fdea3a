"""The layers of a cache, from a model's config and a preset, and the schemes of layers with windows."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

from transformers.cache_utils import (
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
    StaticCache,
    StaticSlidingWindowLayer,
)
from transformers.configuration_utils import PreTrainedConfig

from ..base import warn_once
from ..base.model_config import (
    SINKS_BY_TOKEN,
    TOUCHES_KEYS,
    expands_latents,
    head_dim_of,
    hinders_eviction,
    latent_dims,
    looks_attention_up,
    queries_per_head,
    stock_layers,
    windows_of,
)
from ..base.recorded import DeviceSync, Group
from ..layer_state.update import PaddingReader
from ..schemes.base import Scheme, latent_layout, warn_of_limits
from ..schemes.full import Full
from ..schemes.preset import Preset
from .layer import KVLayer
from .recurrent import HybridLayer, RecurrentLayer

PAYS = 4
"""Least ratio of a window's tokens to a scheme's own unquantized tokens, for its pages to pay."""

PAGE = 32
"""Tokens of a window's 16-bit pages at the most: a ring of large ones would hold much more than the window."""


def scheme_for_window(scheme: Scheme, window: int, dims: tuple[int, int]) -> Scheme:
    """Scheme of a layer with a window: the cache's where that pays, or else 16-bit pages.

    16-bit pages take windows that are short beside what the scheme keeps unquantized anyway, and schemes that choose
    among all tokens of a row: those that evict, and those that give tokens widths of their own.
    """
    if isinstance(scheme, Full):
        return Full(page_size=min(PAGE, scheme.page_size))
    if not scheme.evicts and not scheme.latents and "tags" not in scheme.needs:
        layout = scheme.layout(*dims)
        if len(layout.keys.formats) == 1 and window >= PAYS * layout.own_tokens():
            return scheme
    return Full(page_size=PAGE)


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
        layers: in the model's order: `KVLayer` for full attention and for sliding windows, `RecurrentLayer` for
            recurrent states, the others as Transformers makes them.
        compressed: numbers of those that are `KVLayer`.
        sync: of layers whose steps may be recorded; None where none may.
        captured: whether steps are captured as CUDA graphs; else, if they were to be, why not.
    """

    layers: list[Any]
    compressed: tuple[int, ...]
    sync: DeviceSync | None
    captured: bool
    why_not_captured: str | None


def is_attachable(text: PreTrainedConfig) -> bool:
    """True if a model of this text config takes its attention from Transformers' table, in all its layers."""
    known = all(type(layer).__name__ in _KNOWN_LAYERS for layer in stock_layers(text))
    return known and looks_attention_up(text)


def is_held_in_pages(layer: Any, text: PreTrainedConfig) -> bool:
    """True if this layer of Transformers, in the cache of a model of this text config, becomes a `KVLayer`."""
    kind = type(layer)
    return kind in (DynamicLayer, LinearAttentionAndFullAttentionLayer) and text.model_type not in SINKS_BY_TOKEN


def build_layers(
    text: PreTrainedConfig,
    preset: Preset,
    max_cache_len: int | None,
    capture: bool,
    attach: bool,
    debug: bool,
    name: str,
    offloading: bool | int,
    own_attention: bool,
) -> Layers:
    """Makes the layers of an empty cache.

    Args:
        capture: whether steps are to be captured where they can be.
        attach: whether the attention implementation is "hfkvq".
        name: of the model, for messages.
        own_attention: whether the model looks no attention implementation up.

    Raises:
        ValueError: a head dim that a scheme cannot hold, no attention layers, or layers that cannot be offloaded.
    """
    head_dim, latents = head_dim_of(text), latent_dims(text)
    dims = (head_dim, head_dim) if head_dim is not None else latents
    for each in preset.schemes:
        if each.latents and latents is None:
            has = "layers of several kinds" if expands_latents(text) else "keys and values"
            raise ValueError(
                f"scheme: got {each.name!r}, which is for models with latent attention (DeepSeek, Kimi, GLM, LongCat), "
                f"but {name} has {has}; choose another, e.g. 'best-3.4'."
            )
        if dims is not None:
            each.layout(*dims).check(*dims)
            warn_of_limits(each, *dims)
    stock = stock_layers(text)
    full = tuple(i for i, layer in enumerate(stock) if is_held_in_pages(layer, text))
    if not full and not any(isinstance(layer, DynamicLayer) for layer in stock):
        raise ValueError(
            f"model_or_config: {name} has no attention layers, so there is no KV cache to compress; run "
            "this model without hfkvq."
        )
    schemes = preset.by_layer(len(stock))
    sharing = getattr(text, "kv_sharing_modes", None)
    shares = bool(getattr(text, "num_kv_shared_layers", 0))
    # A window as long as the capacity hides nothing.
    windows = {
        i: 0 if max_cache_len is not None and max_cache_len <= window else window
        for i, window in windows_of(text, stock).items()
    }
    held = tuple(sorted({*full, *windows}))
    evicts = next((scheme.name for scheme in schemes if scheme.evicts), None)
    hinders = hinders_eviction(text) if evicts else None
    if hinders:
        raise ValueError(
            f"scheme: got {evicts!r}, but {name} {hinders}, so none can be evicted; choose a scheme that keeps every "
            "token, e.g. 'kitty-pro'."
        )
    offloaded = _offloaded_layers(offloading, full, schemes, name)
    for i, window in windows.items():
        if window:
            schemes[i] = scheme_for_window(schemes[i], window, dims or (128, 128))
    # Steps are recorded with "hfkvq" attention only, and need every layer to be of a kind that can be.
    why = "the attention implementation is not switched"
    as_they_are = [latents is not None and latent_layout(each, *latents) is not None for each in schemes]
    why = "debug looks at every token" if attach else why
    if attach and not debug and held:
        own = [schemes[i] for i in held]
        why = _why_not_recorded(text, own, sharing is not None or shares, dims)
        if latents is not None and not all(as_they_are[i] for i in full):
            others = ", ".join(dict.fromkeys(each.name for each in own if latent_layout(each, *latents) is None))
            why = f"latents are dequantized in each step: {others} cannot be attended to as latents"
            warn_once(f"{name}: {why}; those of latent-4, latent-8, full and saw-int4 can.")
    can = why is None and bool(held)
    # Steps write into what these layers of Transformers hold, or they hold nothing.
    in_place = [type(x) is LinearAttentionLayer or type(x).__name__ == "DummyLayer" for x in stock]
    captured = can and capture and all(i in held or stays for i, stays in enumerate(in_place))
    layers: list[Any] = list(stock)
    if max_cache_len is not None and can:
        layers = list(StaticCache(config=text, max_cache_len=max_cache_len).layers)
    layers = [RecurrentLayer(x.number_of_states) if type(x) is LinearAttentionLayer else x for x in layers]
    # Masks of windows are others.
    readers = PaddingReader(), PaddingReader()
    for i in held:
        defer, window = sharing[i] == "store" if sharing else shares, windows.get(i, 0)
        count = getattr(stock[i], "number_of_states", 0)
        options = schemes[i], readers[window > 0], max_cache_len, defer, debug, can
        layers[i] = layer = HybridLayer(*options, number_of_states=count) if count else KVLayer(*options, window)
        layer.offloaded = i in offloaded
        layer.holds_latents, layer.latents = latents is not None, attach and as_they_are[i]
        layer.own_attention = text.model_type if own_attention else ""
        if layer.eviction is not None:
            layer.eviction.place = i, len(layers)
    if not held:
        logger.warning(
            "%s has no layer with only attention, over all tokens or a window, so nothing is compressed: all layers "
            "stay as Transformers makes them.",
            name,
        )
    sharing_heads = text.num_attention_heads if latents is not None else queries_per_head(text)
    sync = group_layers([layers[i] for i in held], sharing_heads)
    # Said where a step shows that it matters.
    uncaptured = (why or "layers are of several kinds") if capture and not captured else None
    return Layers(layers, held, sync, captured, uncaptured)


def _offloaded_layers(
    offloading: bool | int, full: tuple[int, ...], schemes: list[Scheme], name: str
) -> tuple[int, ...]:
    """Numbers of the layers whose pages lie in the host's memory: the last ones, of those that hold all tokens."""
    if offloading is False:
        return ()
    if not full:
        raise ValueError(f"offloading: got {offloading}, but {name} has no layer that holds all tokens in pages.")
    count = len(full) if offloading is True else offloading
    if not isinstance(count, int) or not 1 <= count <= len(full):
        raise ValueError(
            f"offloading: got {offloading!r}, allowed True, False, or how many of the last layers that hold all "
            f"tokens in pages, from 1 to {len(full)}."
        )
    evicts = next((schemes[i].name for i in full[-count:] if schemes[i].evicts), None)
    if evicts:
        raise ValueError(
            f"offloading: got {offloading} with {evicts!r}, whose evictions move pages on the GPU; choose a scheme "
            "that keeps every token, e.g. 'kitty-pro', or make the cache without offloading."
        )
    return full[-count:]


def seen_by(layer: Any) -> int | None:
    """Tokens that a layer was given; None where the host does not know, or a layer does not count them."""
    if isinstance(layer, KVLayer):
        return layer.seen
    return layer.get_seq_length() if isinstance(layer, (DynamicLayer, StaticSlidingWindowLayer)) else None


def group_layers(layers: list[KVLayer], queries_per_head: int = 1) -> DeviceSync | None:
    """Lets layers of a cache know of each other; what they know of recorded steps, if any may be."""
    evicting = [layer.eviction for layer in layers if layer.eviction is not None]
    for kind in {type(part) for part in evicting}:
        group = Group([part for part in evicting if type(part) is kind])
        for part in group.members:
            part.group = group
    buffers = [layer.buffer for layer in layers if layer.buffer is not None]
    for buffer in buffers:
        buffer.queries_per_head = queries_per_head
    return DeviceSync(buffers) if buffers else None


def _why_not_recorded(
    text: PreTrainedConfig, schemes: list[Scheme], shares: bool, dims: tuple[int, int] | None
) -> str | None:
    """Why steps of this model and these schemes cannot be recorded; None where they can."""
    if dims is None:
        return "heads have no one dimension (layers of several kinds)"
    if shares:
        return "layers share keys and values"
    if "hybrid_sliding" in (getattr(text, "layer_types", None) or ()):
        return "layers have recurrent states beside sliding windows"
    if text.model_type in TOUCHES_KEYS:
        return f"{text.model_type} computes with the cached keys itself"
    reasons = (scheme.limits(*dims).captured for scheme in schemes)
    return next((reason for reason in reasons if reason), None)
