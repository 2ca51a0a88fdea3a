"""The cache of any preset, and a draft model's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache

from .base.capture import RECORDERS
from .base.model_calls import intercept
from .cache import MixedKVCache
from .schemes.base import Scheme
from .schemes.preset import Preset, get_preset
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


@contextlib.contextmanager
def captured_draft(model: torch.nn.Module) -> Iterator[None]:
    """Has a draft model's steps captured in assisted decoding, over pages of 16 bits.

    ``with captured_draft(draft): model.generate(**inputs, past_key_values=cache, assistant_model=draft)``. Within the
    context every empty `DynamicCache` that the draft is given is replaced, as `generate` makes one for it. Nothing is
    replaced where steps are not captured (on a CPU), nor for models whose layers no page can hold.

    Args:
        model: that drafts.
    """

    def replaced(own: Any) -> Any:
        if type(own) is not DynamicCache or own.get_seq_length():
            return own
        cache = MixedKVCache(model, "full")
        # Drafts are taken back.
        cache.activate_past_recording()
        return cache

    interceptor = intercept(model) if next(model.parameters()).device.type in RECORDERS else None
    try:
        MixedKVCache(model, "full", attach=False)
    except ValueError:
        interceptor = None
    if interceptor is not None:
        interceptor.replace_caches(replaced)
    try:
        yield
    finally:
        if interceptor is not None:
            interceptor.replace_caches(None)
