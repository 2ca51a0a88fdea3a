"""The cache of any preset, for those who are told which one by somebody else, and what its kernels are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig
from transformers.cache_utils import Cache, DynamicCache
from transformers.configuration_utils import PreTrainedConfig

from hfkvq.kernels.step import StepPlan

from .cache import MixedKVCache
from .layers import KVLayer, PaddingReader
from .layers.build import is_held_in_pages
from .model_config import attention_shape, latent_dims, stock_layers, text_config, windows_of
from .preset import Preset, get_preset
from .scheme import Scheme, latent_layout
from .tags import Tagger
from .triaxial import TriAxialCache
from .window import in_window


def make_cache(
    model: Any,
    what: Preset | Scheme | str | Path | Mapping[str, Any] | None,
    tokenizer: Any = None,
    tagger: Tagger | None = None,
) -> Cache:
    """An empty cache.

    Args:
        model: that is to use it; below an adapter, if it has one.
        what: see `get_preset`; None is Transformers' own cache.
        tokenizer: the model's, for schemes that read roles from token ids.
        tagger: in its place; make one and use it for many caches.

    Raises:
        ValueError: see `MixedKVCache`; a scheme that needs tags, and neither tokenizer nor tagger.
    """
    if what is None:
        return DynamicCache(config=model.config.get_text_config(decoder=True))
    preset = get_preset(what)
    if "tags" in preset.needs:
        return TriAxialCache.of_preset(model, preset, tokenizer=tokenizer, tagger=tagger)
    return MixedKVCache(model, preset)


class LayerShape(NamedTuple):
    """What is attended to in layers of one kind.

    Attributes:
        heads: query heads.
        kv_heads: KV heads; one, where the layers hold latents.
        head_dim: channels of keys and values, or of latents.
        window: tokens that a query sees; 0 for all.
        rope_dim: channels of the rotary parts beside latents; 0 for keys and values.
    """

    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0
    rope_dim: int = 0


def layer_shapes(name: str) -> list[LayerShape]:
    """The kinds of a model's layers: a folder, or a name on the Hub, whose config is all that is read.

    Raises:
        ValueError: its config does not say, or there is none.
    """
    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"model: {name!r} cannot be loaded: {error}") from error
    shapes = shapes_of(config)
    if shapes is None:
        raise ValueError(f"model: the config of {name!r} names no head dim; give --heads, --kv-heads and --head-dim.")
    return shapes


def shapes_of(config: PreTrainedConfig) -> list[LayerShape] | None:
    """The kinds of a model's layers; None if its config does not say."""
    text = text_config(config)
    latents, found = latent_dims(text), attention_shape(config)
    if latents is not None:
        return [LayerShape(text.num_attention_heads, 1, latents[0], rope_dim=latents[1])]
    if found is None:
        return None
    stock = stock_layers(text)
    windows = set(windows_of(text, stock).values())
    full = {0} if any(is_held_in_pages(layer, text) for layer in stock) else set()
    return [LayerShape(*found, window) for window in sorted(full | windows)]


def layer_plan(scheme: Scheme, shape: LayerShape, dtype: torch.dtype) -> StepPlan:
    """What a layer of a fixed capacity would hold: all that its kernels depend on, whatever its rows and capacity.

    Args:
        scheme: of the layer; a window may take 16-bit pages instead, see `hfkvq.caches.window.in_window`.
        shape: of the layer.
        dtype: of the model.

    Raises:
        ValueError: the scheme cannot hold heads of this dimension.
    """
    dims = shape.head_dim, shape.rope_dim or shape.head_dim
    scheme.layout(*dims).check(*dims)
    if shape.window:
        scheme = in_window(scheme, shape.window, dims)
    layer = KVLayer(scheme, PaddingReader(), 1, recordable=True, window=shape.window)
    layer.latents = shape.rope_dim > 0 and latent_layout(scheme, *dims) is not None
    assert layer.buffer is not None, "steps may be recorded"
    layer.buffer.queries_per_head = shape.heads // shape.kv_heads
    keys, values = (torch.empty(1, shape.kv_heads, 1, dim, dtype=dtype) for dim in dims)
    layer.lazy_initialization(keys, values)
    layer.buffer.bind()
    assert layer.buffer.plan is not None, "it is empty"
    return layer.buffer.plan
