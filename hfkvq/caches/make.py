"""The cache of any preset, for those who are told which one by somebody else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.cache_utils import Cache, DynamicCache

from .cache import MixedKVCache
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
