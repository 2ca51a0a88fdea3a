"""Attention of a model, as its config describes it."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from types import CodeType, ModuleType
from typing import Any

from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer, LinearAttentionLayer
from transformers.configuration_utils import PreTrainedConfig


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The decoder's part of a config."""
    return config.get_text_config(decoder=True)


def head_dim_of(config: PreTrainedConfig) -> int | None:
    """The head dim if the config says it plainly; latent attention (MLA) and layers of several kinds (Gemma4) don't."""
    # Fields that differ by layer cannot be read, so this comes first.
    if getattr(config, "is_heterogeneous", False) or getattr(config, "kv_lora_rank", None):
        return None
    dim = getattr(config, "head_dim", None)
    if dim is None and getattr(config, "hidden_size", None) and getattr(config, "num_attention_heads", None):
        dim = config.hidden_size // config.num_attention_heads
    return dim if isinstance(dim, int) else None


def latent_dims(config: PreTrainedConfig) -> tuple[int, int] | None:
    """Channels of latents and of their rotary parts, where the model's attention hands these to the cache."""
    if getattr(config, "is_heterogeneous", False):
        return None
    rank, rope_dim = (getattr(config, name, None) for name in ("kv_lora_rank", "qk_rope_head_dim"))
    return (rank, rope_dim) if rank and rope_dim and expands_latents(config) else None


def expands_latents(config: PreTrainedConfig) -> bool:
    """True if the model's attention hands latents to the cache, and expands what it returns."""
    module = _modeling(config)
    return module is not None and any(hasattr(each, "expand_kv") for each in vars(module).values())


def queries_per_head(config: PreTrainedConfig) -> int:
    """Query heads of a KV head; 1 where layers may differ."""
    if getattr(config, "is_heterogeneous", False):
        return 1
    heads = getattr(config, "num_attention_heads", 1)
    return max(1, heads // (getattr(config, "num_key_value_heads", None) or heads))


def attention_shape(config: PreTrainedConfig) -> tuple[int, int, int] | None:
    """Query heads, KV heads and head dim of full attention; None if the config does not say it plainly."""
    text = text_config(config)
    dim = head_dim_of(text)
    heads = None if dim is None else getattr(text, "num_attention_heads", None)
    return None if dim is None or not heads else (heads, heads // queries_per_head(text), dim)


TOUCHES_KEYS = {"diffllama", "doge", "jetmoe"}
"""Between update and attention these compute with keys or values, which no graph of ours can follow."""

_NOT_FOLLOWED = {"prophetnet", "t5gemma2_decoder"}
"""These join what is cached with other keys before they attend to it."""

_BIASED = {"bloom", "longt5", "mpt", "mt5", "pop2piano", "switch_transformers", "t5", "udop", "umt5"}
"""These add a bias to logits, by how far apart tokens stand (ALiBi, T5's buckets); Falcon may, too."""


def hinders_eviction(config: PreTrainedConfig) -> str | None:
    """Reason why no token of this config's model may be evicted; None where some may.

    Tokens move up where others are evicted, so what attention does by their distance would go wrong.
    """
    kind = config.model_type
    if (kind in TOUCHES_KEYS and looks_attention_up(config)) or kind in _NOT_FOLLOWED:
        return "computes with all cached keys or values itself"
    if kind in _BIASED or getattr(config, "alibi", False):
        return "adds a bias by the distance of tokens, as all of them stand"
    if "local" in (getattr(config, "attention_layers", None) or ()):
        return "has layers with a window over tokens, as all of them stand"
    return None


SINKS_BY_TOKEN = {"inkling2", "inkling2_text"}
"""Each query of these brings an attention sink of its own; ours belong to heads, so their caches stay as they are."""


UNMASKED = {"moshi"}
"""Models whose masks hide nothing of what a window's layer is handed, so that queries of one forward see unlike many
tokens: their layers stay as Transformers makes them."""


def stock_layers(config: PreTrainedConfig) -> list[Any]:
    """The layers of Transformers' own cache for a decoder's config."""
    layers, blocks = DynamicCache(config=config).layers, getattr(config, "block_types", None)
    if blocks and not getattr(config, "layer_types", None):
        # Transformers 5.17 takes recurrent layers of RecurrentGemma for windows, to which nothing is ever given.
        kinds = (blocks[i % len(blocks)] for i in range(len(layers)))
        layers = [LinearAttentionLayer() if kind == "recurrent" else x for kind, x in zip(kinds, layers, strict=True)]
    return layers


def windows_of(config: PreTrainedConfig, layers: Sequence[Any]) -> dict[int, int]:
    """Tokens that a query sees of layers whose windows can be held in pages, by their numbers.

    Not where layers see chunks, share keys and values, or hold latents, which a window's pages would have dequantized
    in every step. ``layers`` are those that Transformers makes for the config.
    """
    shared = getattr(config, "kv_sharing_modes", None) or getattr(config, "num_kv_shared_layers", 0)
    if shared or config.model_type in UNMASKED or expands_latents(config):
        return {}
    kinds, plain = getattr(config, "layer_types", None), getattr(config, "sliding_window", None) is not None
    return {
        i: layer.sliding_window
        for i, layer in enumerate(layers)
        if type(layer) is DynamicSlidingWindowLayer
        and layer.sliding_window > 0
        and (kinds[i] == "sliding_attention" if kinds else plain)
    }


def looks_attention_up(config: PreTrainedConfig) -> bool:
    """True if every attention of this config's model that is given a cache is taken from Transformers' table.

    A file that uses the table may do so for its images alone. Falcon and a few others compare the implementation's name
    with those they know; a new name would lead them astray.
    """
    module = _modeling(config)
    if module is None:
        # Stock sdpa is intercepted all the same.
        return False
    found = [each for each in map(_cached_attention, vars(module).values()) if each is not None]
    return bool(found) and all("ALL_ATTENTION_FUNCTIONS" in code.co_names for code in found)


def _modeling(config: PreTrainedConfig) -> ModuleType | None:
    """The modeling file beside the config's, if there is one."""
    for cls in type(config).__mro__:
        name = cls.__module__.replace("configuration_", "modeling_")
        if name == cls.__module__:
            # A config class of a user's own, or Transformers' base classes.
            continue
        try:
            return importlib.import_module(name)
        except ImportError:
            return None
    return None


def _cached_attention(cls: object) -> CodeType | None:
    """The forward of a class that updates a cache of keys and values, by names that caches of convolutions lack."""
    forward = inspect.unwrap(cls.forward) if isinstance(cls, type) and hasattr(cls, "forward") else None
    code = getattr(forward, "__code__", None)
    if code is None or "update" not in code.co_names:
        return None
    # Transformers 5.24 has the new name.
    return code if any(name == "cache" or name.startswith("past_key_value") for name in code.co_varnames) else None
