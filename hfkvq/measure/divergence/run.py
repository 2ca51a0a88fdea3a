"""A measurement from a model's name and texts to its record: what `hfkvq kld` and `recommend` share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from hfkvq.caches.cache import MixedKVCache
from hfkvq.caches.schemes.preset import Preset
from hfkvq.caches.tags import Tagger

from ..models import Source, find_model, load_model, load_tokenizer, read_config
from ..records import device_name
from . import intervals, report
from .measurement import Stopped, measure
from .naming import OtherCache
from .windows import Text, Windows, cut, find_texts


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
    # Loading weights has a progress bar of its own.
    logging.disable_progress_bar()
    source = find_model(model)
    return Checkpoint(source, read_config(source), load_tokenizer(source))


def check_context(checkpoint: Checkpoint, context: int) -> None:
    """Raises ValueError if windows are too long for the model."""
    room = getattr(checkpoint.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if room and context > room:
        raise ValueError(
            f"context: got {context}, but {checkpoint.source.name} has {room} positions; use --context {room}."
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


def check_prompt(context: int, prefill: int | None) -> int:
    """Tokens of a prompt, half of the window by default.

    Raises:
        ValueError: nothing would be left to score, or nothing before it.
    """
    prompt = context // 2 if prefill is None else prefill
    if not 2 <= prompt < context:
        raise ValueError(
            f"prefill: got {prompt}, allowed 2 to {context - 1}, fewer than --context: what follows is scored."
        )
    return prompt


def measure_text(
    model: str | None,
    chosen: Mapping[str, Preset | OtherCache],
    *,
    text: Sequence[Path] | None = None,
    dataset: str | None = None,
    part: str = "test",
    field: str = "text",
    context: int = 2048,
    prefill: int | None = None,
    chunk: int = 16,
    windows: int = 16,
    batch_size: int = 1,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    seed: int = 0,
    command: str = "kld",
    on_progress: Callable[[str, float], object] | None = None,
) -> report.Record:
    """Measures schemes on windows of texts; see `measure` and `find_texts`.

    Args:
        model: see `hfkvq.measure.models.find_model`.
        text: files; see `find_texts`.
        context: tokens of a window.
        prefill: of them, the prompt; None is half.
        chunk: tokens fed at a time behind it.
        windows: most windows.
        batch_size: windows run together.
        dtype: of the model; None is the checkpoint's.
        device: where to; None is the CPU.
        seed: of the bootstrap, and of the reference model's own text.

    Raises:
        ValueError: see there.
        ImportError: a package is missing; its extra is named.
        Stopped: Ctrl-C, with the record of what was measured.
    """
    where = torch.device("cpu") if device is None else device
    intervals.check_scipy(command)
    prompt = check_prompt(context, prefill)
    plan = find_checkpoint(model)
    texts: Sequence[Text] = find_texts(text, dataset, part, field, plan.source.reference, seed)
    check_context(plan, context)
    check_schemes(plan, dict(chosen))
    given = cut(texts, plan.tokenizer, context, windows)
    loaded = load_model(plan.source, where, dtype)
    settings = {"context": context, "prefill": prompt, "chunk": chunk, "batch_size": batch_size, "seed": seed}
    about = {
        "model": plan.source.name,
        "model_file": plan.source.origin or None,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "device": device_name(where),
        "device_type": where.type,
        "settings": {**settings, "schemes": list(chosen), "windows": windows},
    }

    def record_of(measured: report.Measured, shown: Windows) -> report.Record:
        source = {
            "source": ", ".join(dict.fromkeys(shown.names)),
            "windows": Counter(shown.names),
            "tokens_sha256": shown.sha256,
            "first_token": shown.first_token,
        }
        return report.as_record(measured, seed, {**about, "text": source}, shown.names)

    try:
        measured = measure(
            loaded,
            given.tokens,
            chosen,
            prefill=prompt,
            chunk=chunk,
            batch_size=batch_size,
            tokenizer=plan.tokenizer,
            on_progress=on_progress,
        )
    except Stopped as stop:
        if stop.measured is not None:
            stop.record = record_of(stop.measured, given.first(stop.measured.windows))
        raise
    return record_of(measured, given)
