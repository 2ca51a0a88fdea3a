"""The model of `hfkvq kld`: what can be said of it before its weights are loaded, then the weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from hfkvq.caches.cache import MixedKVCache
from hfkvq.caches.preset import Preset
from hfkvq.caches.tags import Tagger
from hfkvq.measure.demo.outline import read_config
from hfkvq.measure.reference import load_reference, reference_path


@dataclass(frozen=True)
class Checkpoint:
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


def find_checkpoint(model: str | None) -> Checkpoint:
    """Reads config and tokenizer; None is the reference model.

    Raises:
        ValueError: the folder does not exist, the model cannot be loaded, or it has an encoder.
    """
    config = read_config(str(reference_path()) if model is None else model)
    source = str(reference_path()) if model is None else str(Path(model).expanduser()) if model[0] == "~" else model
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"model: {model!r} cannot be used: {error}") from error
    name = "reference model" if model is None else Path(source).resolve().name if Path(source).is_dir() else source
    return Checkpoint(name, None if model is None else source, config, tokenizer)


def check_lengths(checkpoint: Checkpoint, context: int, prefill: int) -> None:
    """Raises ValueError if windows are too long for the model, or prompts for the windows."""
    room = getattr(checkpoint.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if room and context > room:
        raise ValueError(f"context: got {context}, but {checkpoint.name} has {room} positions; use --context {room}.")
    if not 2 <= prefill < context:
        raise ValueError(
            f"prefill: got {prefill}, allowed 2 to {context - 1}, fewer than --context ({context}): what follows is "
            "scored."
        )


def check_schemes(checkpoint: Checkpoint, schemes: dict[str, Preset]) -> None:
    """Raises ValueError if a scheme cannot hold the model's heads, or read its roles."""
    for preset in schemes.values():
        MixedKVCache(checkpoint.config, preset, attach=False)
        if "tags" in preset.needs:
            Tagger.from_tokenizer(checkpoint.tokenizer)


def load(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype | None) -> Any:
    """Loads the weights; without a dtype bf16 for the reference model, and what the checkpoint says for any other.

    Raises:
        ValueError: they cannot be loaded.
    """
    if checkpoint.source is None:
        return load_reference(dtype or torch.bfloat16, device)[0]
    try:
        model = AutoModelForCausalLM.from_pretrained(checkpoint.source, dtype=dtype or "auto", trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"model: {checkpoint.source!r} cannot be loaded: {error}") from error
    # The wrapper around PreTrainedModel.to confuses type checkers.
    nn.Module.to(model, device)
    return model.eval()
