"""The model of `hfkvq kld`: what can be said of it before its weights are loaded, then the weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hfkvq.caches.cache import MixedKVCache
from hfkvq.caches.preset import Preset
from hfkvq.caches.tags import Tagger
from hfkvq.measure.reference import load_reference, reference_path


@dataclass(frozen=True)
class Outline:
    """A model without its weights.

    Attributes:
        name: for the record; of a folder its last part.
        source: where `load` finds it; None is the reference model.
        config: of the model.
        tokenizer: of the model.
    """

    name: str
    source: str | None
    config: Any
    tokenizer: Any


def outline(model: str | None) -> Outline:
    """Reads config and tokenizer; None is the reference model.

    Raises:
        ValueError: the folder does not exist, the model cannot be loaded, or it has an encoder.
    """
    if model is not None and model.startswith((".", "/", "~")) and not Path(model).expanduser().is_dir():
        raise ValueError(f"model: the folder {model} does not exist.")
    source = str(reference_path()) if model is None else str(Path(model).expanduser()) if model[0] == "~" else model
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        if config.is_encoder_decoder:
            raise ValueError("it is an encoder-decoder model; choose a decoder-only one.")
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"model: {model!r} cannot be used: {error}") from error
    name = "reference model" if model is None else Path(source).resolve().name if Path(source).is_dir() else source
    return Outline(name, None if model is None else source, config, tokenizer)


def check_lengths(outline: Outline, context: int, prefill: int) -> None:
    """Raises ValueError if windows are too long for the model, or prompts for the windows."""
    room = getattr(outline.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if room and context > room:
        raise ValueError(f"context: got {context}, but {outline.name} has {room} positions; use --context {room}.")
    if not 2 <= prefill < context:
        raise ValueError(
            f"prefill: got {prefill}, allowed 2 to {context - 1}, fewer than --context ({context}): what follows is "
            "scored."
        )


def check_schemes(outline: Outline, schemes: dict[str, Preset]) -> None:
    """Raises ValueError if a scheme cannot hold the model's heads, or read its roles."""
    for preset in schemes.values():
        MixedKVCache(outline.config, preset, attach=False)
        if "tags" in preset.needs:
            Tagger.from_tokenizer(outline.tokenizer)


def load(outline: Outline, device: torch.device, dtype: torch.dtype | None) -> Any:
    """Loads the weights; without a dtype bf16 for the reference model, and what the checkpoint says for any other.

    Raises:
        ValueError: they cannot be loaded.
    """
    if outline.source is None:
        return load_reference(dtype or torch.bfloat16, device)[0]
    try:
        model = AutoModelForCausalLM.from_pretrained(outline.source, dtype=dtype or "auto", trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"model: {outline.source!r} cannot be loaded: {error}") from error
    # The wrapper around PreTrainedModel.to confuses type checkers.
    nn.Module.to(model, device)
    return model.eval()
