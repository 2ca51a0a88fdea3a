"""The cache of any preset, for those who are told which one by somebody else, and what its kernels are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from transformers.cache_utils import Cache, DynamicCache

from hfkvq.kernels.step import StepPlan

from .cache import MixedKVCache
from .layers import KVLayer, PaddingReader
from .model_config import attention_shape
from .preset import Preset, get_preset
from .scheme import Scheme
from .tags import Tagger
from .triaxial import TriAxialCache


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


def model_shape(name: str) -> tuple[int, int, int]:
    """Query heads, KV heads and head dim of a model: a folder, or a name on the Hub, whose config is all that is read.

    Raises:
        ValueError: its config does not say, or there is none.
    """
    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"model: {name!r} cannot be loaded: {error}") from error
    found = attention_shape(config)
    if found is None:
        raise ValueError(f"model: the config of {name!r} names no head dim; give --heads, --kv-heads and --head-dim.")
    return found


def layer_plan(
    scheme: Scheme, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, window: int = 0
) -> StepPlan:
    """What a layer of a fixed capacity would hold: all that its kernels depend on, whatever its rows and capacity.

    Raises:
        ValueError: the scheme cannot hold heads of this dimension.
    """
    scheme.layout(head_dim, head_dim).check(head_dim, head_dim)
    layer = KVLayer(scheme, PaddingReader(), 1, recordable=True, window=window)
    assert layer.buffer is not None, "steps may be recorded"
    layer.buffer.queries_per_head = heads // kv_heads
    token = torch.empty(1, kv_heads, 1, head_dim, dtype=dtype)
    layer.lazy_initialization(token, token)
    layer.buffer.bind()
    assert layer.buffer.plan is not None, "it is empty"
    return layer.buffer.plan
