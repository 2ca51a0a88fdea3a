"""A measurement from a model's name and texts to its record and table: what `hfkvq kld` and `recommend` share."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from transformers.utils import logging

from hfkvq.caches.cache import MixedKVCache
from hfkvq.caches.schemes.preset import Preset
from hfkvq.caches.tags import Tagger

from ..models import Source, find_model, load_model, load_tokenizer, read_config
from ..records import BASELINE, commit, device_name, finite, now, versions
from ..tables import NOTHING, narrow_table, number, small_number
from .intervals import CONFIDENCE, RESAMPLES, Interval, check_scipy, mean_interval
from .measurement import Bill, Divergence, Measured, Stopped, check_prompt, measure
from .naming import OtherCache
from .windows import Text, Windows, cut, find_texts

KIND = "hfkvq kld"

Record = dict[str, Any]


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
    on_progress: Callable[[str, float], object] = lambda name, share: None,
) -> Record:
    """Measures schemes on windows of texts; see `hfkvq.measure.models.find_model`, `find_texts`, `cut` and `measure`.

    Args:
        prefill: tokens of the prompt; None is half of a window.
        dtype: of the model; None is the checkpoint's.
        device: where to; None is the CPU.
        seed: of the bootstrap, and of the reference model's own text.

    Raises:
        ValueError: see there.
        ImportError: a package is missing; its extra is named.
        Stopped: Ctrl-C, with the record of what was measured.
    """
    where = torch.device("cpu") if device is None else device
    check_scipy()
    prompt = check_prompt(context, context // 2 if prefill is None else prefill)
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

    def record_of(measured: Measured, shown: Windows) -> Record:
        source = {
            "source": ", ".join(dict.fromkeys(shown.names)),
            "windows": Counter(shown.names),
            "tokens_sha256": shown.sha256,
            "first_token": shown.first_token,
        }
        return as_record(measured, seed, {**about, "text": source}, shown.names)

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


def _bill(bill: Bill) -> Record:
    return {
        "code_bits": finite(bill.code_bits),
        "total_bits": finite(bill.total_bits),
        "held_bytes": None if math.isnan(bill.held_bytes) else round(bill.held_bytes),
        "bf16_bytes": round(bill.bf16_bytes),
        "key_bits": finite(bill.key_bits),
    }


def _row(one: Divergence, measured: Measured, seed: int, names: Sequence[str]) -> Record:
    kld, agrees = one.kld.double().mean(1), one.agrees.double().mean(1)
    # Windows score equally many tokens, so a window's mean weighs what any other's does.
    change = (one.nll.double() - measured.baseline.nll.double()).mean(1)
    worse = mean_interval(change.tolist(), seed)
    return {
        "name": one.name,
        "scheme": one.preset.to_dict(),
        "simulated": isinstance(one.preset, OtherCache) and one.preset.simulated,
        "about": (one.preset.about or None) if isinstance(one.preset, OtherCache) else None,
        "kld": {
            "mean": one.mean,
            "interval": mean_interval(kld.tolist(), seed),
            "median": one.quantile(0.5),
            "p99": one.quantile(0.99),
            "p999": one.quantile(0.999),
            "max": float(one.kld.max()),
        },
        "top1": {"share": one.top1, "interval": mean_interval(agrees.tolist(), seed)},
        "perplexity": one.perplexity,
        "perplexity_ratio": {
            "value": math.exp(float(change.mean())),
            "interval": worse and tuple(math.exp(end) for end in worse),
        },
        "texts": {
            name: {
                "kld": _mean(kld, of := [each == name for each in names]),
                "top1": _mean(agrees, of),
                "perplexity_ratio": math.exp(_mean(change, of)),
            }
            for name in dict.fromkeys(names)
        },
        **_bill(one.bill),
    }


def _mean(values: Tensor, chosen: Sequence[bool]) -> float:
    return float(values[torch.tensor(chosen, dtype=torch.bool, device="cpu")].mean())


def as_record(measured: Measured, seed: int, about: Record, names: Sequence[str]) -> Record:
    """Everything in the table, and what it takes to repeat it.

    Args:
        seed: of the bootstrap.
        about: model, dtype, device, text and settings.
        names: of the texts, one a window.
    """
    return {
        "kind": KIND,
        "date": now(),
        **about,
        "versions": versions("torch", "transformers", "scipy"),
        "commit": commit(),
        "windows": measured.windows,
        "tokens": measured.windows * measured.scored,
        "bootstrap": {"unit": "window", "confidence": CONFIDENCE, "resamples": RESAMPLES, "seed": seed},
        "baseline": {"name": BASELINE, "perplexity": measured.baseline.perplexity, **_bill(measured.baseline.bill)},
        "rows": [_row(one, measured, seed, names) for one in measured.schemes],
    }


def _range(interval: Interval | None, show: Callable[[float], str]) -> str:
    return NOTHING if interval is None else f"{show(interval[0])}–{show(interval[1])}"


def table(record: Record, wide: bool = True) -> Table:
    """One row per scheme, the baseline first; 95 % intervals under the figures they belong to.

    ``wide`` takes up to 120 columns, otherwise 100.
    """
    view = narrow_table(show_edge=wide)
    view.add_column("cache", vertical="top", overflow="fold")
    titles = ["code\nbits", "total\nbits", *(["held\nMiB"] if wide else []), "KLD\nmean", "KLD\nmedian", "KLD\n99%"]
    for title in [*titles, "KLD\n99.9%", "top-1\n%", "perp-\nlexity", "ratio\nto bf16"]:
        view.add_column(title, justify="right", no_wrap=True)

    def memory(row: Record) -> list[str]:
        simulated = row.get("simulated", False)
        held = [NOTHING if simulated else f"{row['held_bytes'] / 2**20:.2f}"] if wide else []
        total = number(row["total_bits"], 2)
        return [number(row["code_bits"], 2), f"{total}\ncomputed" if simulated else total, *held]

    base = record["baseline"]
    view.add_row(base["name"], *memory(base), *[""] * 5, f"{base['perplexity']:.3f}", "", end_section=True)
    for row in record["rows"]:
        kld, top1, ratio = row["kld"], row["top1"], row["perplexity_ratio"]
        view.add_row(
            # Where a long name may be folded.
            row["name"].replace(":", "\n"),
            *memory(row),
            f"{small_number(kld['mean'])}\n{_range(kld['interval'], small_number)}",
            *(small_number(kld[name]) for name in ("median", "p99", "p999")),
            f"{100 * top1['share']:.2f}\n{_range(top1['interval'], lambda share: f'{100 * share:.1f}')}",
            f"{row['perplexity']:.3f}",
            f"{ratio['value']:.4f}\n{_range(ratio['interval'], lambda value: f'{value:.3f}')}",
        )
    return view


def notes(record: Record) -> list[str]:
    """Legend of the table, a sentence or two each."""
    settings, text = record["settings"], record["text"]
    has_floor = any(row["name"] == "full" for row in record["rows"])
    count = f"{record['windows']} window{'s' if record['windows'] > 1 else ''}"
    said = [
        f"{record['model']}, {record['dtype']}, on {record['device_type']}: {record['tokens']:,} scored tokens in "
        f"{count} of {settings['context']:,} of {text['source']}, after prompts of {settings['prefill']:,}; "
        f"{settings['chunk']} tokens fed at a time"
        + (", as generate does." if settings["chunk"] == 1 else ", which attend to each other unquantized."),
        f"KLD is the divergence, in nats, from {BASELINE}'s predictions on the same chunks."
        + (" `full` holds 16 bits, so its row shows what rounding alone does." if has_floor else ""),
    ]
    if record["windows"] > 1:
        said.append(
            f"The second line of a row has {100 * CONFIDENCE:.0f} % intervals, bootstrapped over windows; with few "
            "windows they are too narrow."
        )
    else:
        said.append("One window has no confidence intervals; use --windows.")
    said.append("Bits and MiB are those of one window's cache at its end, with every window, scale and table.")
    if any(row.get("simulated") for row in record["rows"]):
        said.append(
            "Simulated rows are not usable caches: they hold everything in full precision and round it as a method "
            "would. Their bits are computed from the method's format, not from bytes held."
        )
    said += dict.fromkeys(row["about"] for row in record["rows"] if row.get("about"))
    if record["dtype"] == "float32":
        said.append("A float32 model's windows are float32 too, so total bits are higher than they are in bf16.")
    return said
