"""The model of `hfkvq kld`: what can be said of it before its weights are loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hfkvq.caches.cache import MixedKVCache
from hfkvq.caches.schemes.preset import Preset
from hfkvq.caches.tags import Tagger
from hfkvq.measure.models import Source, find_model, load_tokenizer, read_config

from .naming import OtherCache


@dataclass(frozen=True)
class Checkpoint:
    """A model without its weights."""

    source: Source
    config: Any
    tokenizer: Any


def find_checkpoint(model: str | None) -> Checkpoint:
    """Finds a model by its name (see `find_model`), and reads config and tokenizer.

    Raises:
        ValueError: there is none, it cannot be read, or it has an encoder.
    """
    source = find_model(model)
    return Checkpoint(source, read_config(source), load_tokenizer(source))


def check_lengths(checkpoint: Checkpoint, context: int, prefill: int) -> None:
    """Raises ValueError if windows are too long for the model, or prompts for the windows."""
    room = getattr(checkpoint.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if room and context > room:
        raise ValueError(
            f"context: got {context}, but {checkpoint.source.name} has {room} positions; use --context {room}."
        )
    if not 2 <= prefill < context:
        raise ValueError(
            f"prefill: got {prefill}, allowed 2 to {context - 1}, fewer than --context ({context}): what follows is "
            "scored."
        )


def check_schemes(checkpoint: Checkpoint, schemes: dict[str, Preset | OtherCache]) -> None:
    """Raises ValueError if a scheme cannot hold the model's heads, or read its roles, ImportError without a package."""
    for preset in schemes.values():
        if isinstance(preset, OtherCache):
            preset.check(checkpoint.config)
            continue
        MixedKVCache(checkpoint.config, preset, attach=False)
        if "tags" in preset.needs:
            Tagger.from_tokenizer(checkpoint.tokenizer)
