"""What was measured where, with what and how: the record that is saved as JSON, and taken up again."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hfkvq.bounded import DAMAGE, load_json

from ..report import Record, environment, save
from .cases import Settings
from .engines import COMPILED_BASELINES, EAGER_BASELINES, STOCK, Engine, scheme_of
from .models import weight_bytes
from .run import describe_settings
from .search import Row

KIND = "hfkvq bench generate"

GRAPHS = "HFKVQ_GRAPHS"
"""Environment variable that switches off what engines without a mode have by default, and so is recorded."""

METHOD = (
    "A model of the real architecture with random weights, in one process. decode: the cache is filled with random "
    "keys and values through its own update, without a prefill; after a warm-up, greedy steps (forward of one token a "
    "row, argmax, fed back) are timed by the clock, the device being waited for before and after a repeat and never in "
    "between; quantiles are over repeats. Compiled models go through torch.compile with the arguments recorded; caches "
    "of fixed capacity have room for the context and the most steps that may be taken. turns: the same of eager "
    "caches, all held at a time; a repeat has some steps of each, and times_as_long is over repeats. prefill: the "
    "forward of a random prompt into a fresh cache, last logits alone, never compiled. whole: `generate` from end to "
    "end, greedy, of a fixed length, from a random prompt, with a streamer that takes each token's time; a cache of "
    "fixed capacity is reset, another one is made anew within the time. assisted, lookup: the same with tokens guessed "
    "by a smaller model of random weights, or looked up in the prompt. cold: `generate` in a process of its own with "
    "empty folders for compiled kernels; calls_s are its first calls, after imports and weights, the cache's making "
    "included. Bytes are those of PyTorch's allocator: cache_bytes what filling added, peak_bytes the most at any "
    "time, weights, filling and compiling included, above_bytes what of it came after the weights, steady_bytes the "
    "most while steps were timed. agrees: leading tokens of the first row that are those of another cache's."
)


def new_record(
    device: torch.device,
    commit: str,
    model: str,
    built: Any,
    engines: Sequence[Engine],
    settings: Settings,
    copy: Record,
    **options: Any,
) -> Record:
    """A record without rows.

    Args:
        device: a CUDA device.
        commit: what is measured; empty asks git.
        model: its name as typed.
        built: the model.
        engines: what it is measured with.
        settings: how long, and how.
        copy: see `hfkvq.measure.bench.report.describe_copy`.
        **options: what else was asked for.
    """
    text = built.config.get_text_config(decoder=True)
    total, read = weight_bytes(built)
    rate = copy["tb_per_s"] * 1e12
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    return {
        **environment(device, commit),
        "kind": KIND,
        "method": METHOD,
        "model": {
            "name": model,
            "type": text.model_type,
            "dtype": str(built.dtype).removeprefix("torch."),
            **{name: getattr(text, name, None) for name in (*names, "head_dim", "vocab_size")},
            "weight_bytes": total,
            "weight_bytes_of_a_step": read,
            "weight_ms_of_a_step": None if read is None or not rate else 1e3 * read / rate,
        },
        "copy": copy,
        "settings": {**describe_settings(settings), **options, GRAPHS: os.environ.get(GRAPHS)},
        "modes": {engine.name: engine.mode for engine in engines},
        "schemes": {engine.name: engine.preset.to_dict() for engine in engines if engine.preset is not None},
        "rows": [],
    }


def save_record(record: Record, path: Path) -> None:
    """Writes it, with the speed-ups of all rows so far, in place of an earlier state at once or not at all."""
    add_speedups(record["rows"])
    add_agreement(record["rows"])
    part = path.with_name(path.name + ".part")
    save(record, part)
    part.replace(path)


def load(path: Path) -> Record:
    """Reads a record. Raises ValueError if the file is none."""
    try:
        record = load_json(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"resume: {path} cannot be read: {error}") from error
    if not isinstance(record, dict) or record.get("kind") != KIND:
        raise ValueError(f"resume: {path} was not written by `{KIND} --json`.")
    try:
        _rename(record)
    except DAMAGE as error:
        raise ValueError(f"resume: {path} is damaged ({error!r}); measure anew.") from None
    return record


def _rename(record: Record) -> None:
    """Engines of records from before caches had graphs of their own get the names that they would have now."""
    if "modes" in record:
        return
    # What was compiled had no ending, what grew had ":grow"; ":eager" was of fixed capacity, which has no name now.
    endings = {"grow": "eager", "eager": "fixed-eager", "compiled": "compiled"}

    def renamed(name: str) -> str:
        head, _, last = name.rpartition(":")
        return f"{head}:{endings[last]}" if head and last in endings else f"{name}:compiled"

    for row in record["rows"]:
        for field in ("engine", "than"):
            if field in row and row[field] not in STOCK:
                row[field] = renamed(row[field])
    record["schemes"] = {renamed(name): scheme for name, scheme in record.get("schemes", {}).items()}
    record["modes"] = {}


_SAME = ("gpu", "versions", "model")
_SAME_SETTINGS = ("compile", "experts", "prefill_chunk", GRAPHS)


def _conditions(record: Record) -> dict[str, Any]:
    """What figures that stand side by side must share, as JSON has it: tuples are lists there."""
    settings = record.get("settings", {})
    shared = {name: record.get(name) for name in _SAME} | {name: settings.get(name) for name in _SAME_SETTINGS}
    shared["liger"] = bool(settings.get("liger"))
    # Of the bandwidth, which is measured each time.
    shared["model"] = {name: x for name, x in (shared["model"] or {}).items() if name != "weight_ms_of_a_step"}
    return json.loads(json.dumps(shared))


def resume(record: Record, before: Record) -> None:
    """Takes over an earlier run's rows that did not fail, each with the commit that it was measured at.

    Raises:
        ValueError: it was of another GPU, other versions, another model or compiled otherwise, so its figures do not
            belong beside these.
    """
    new, old = _conditions(record), _conditions(before)
    for name in new:
        if new[name] != old[name]:
            raise ValueError(
                f"resume: the earlier run has another {name} ({old[name]} instead of {new[name]}); save to "
                "another file."
            )
    kept = [row for row in before["rows"] if "error" not in row or row.get("oom")]
    known = {key_of(row) for row in record["rows"]}
    record["rows"] += [{"commit": before.get("commit"), **row} for row in kept if key_of(row) not in known]
    record["resumed"] = [
        *record.get("resumed", []),
        *before.get("resumed", []),
        {name: before.get(name) for name in ("commit", "date", "settings")},
    ]
    for name in ("modes", "schemes"):
        record[name] = {**before.get(name, {}), **record[name]}


def key_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a row measures: kind, engine, batch, context, and new tokens where it has any."""
    return (*(row[name] for name in ("kind", "engine", "batch", "context")), row.get("new_tokens"))


def file_name(path: Path, model: str, gpu: str, suffix: str) -> Path:
    """The file itself, or ``generate-<model>-<gpu><suffix>`` in a folder."""
    if not path.is_dir():
        return path
    words = [word for word in gpu.lower().replace("/", " ").split() if word not in ("nvidia", "geforce")]
    name = Path(model).name.lower().replace(" ", "-")
    return path / f"generate-{name}-{'-'.join(words)}{suffix}"


# Speed-ups.


def _best(rows: Sequence[Row], names: Sequence[str]) -> Row | None:
    ran = [row for row in rows if row["engine"] in names and "ms" in row]
    return min(ran, key=lambda row: row["ms"]["p50"]) if ran else None


def add_speedups(rows: Sequence[Row]) -> None:
    """Puts into each row how many times faster it is than stock bf16 caches at the same size.

    "speedup_eager" is against the better of `EAGER_BASELINES`, "speedup_compiled" likewise; "against_eager" and
    "against_compiled" name it. Where no baseline ran, they are left out.
    """
    sizes: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if "ms" in row:
            sizes.setdefault((row["kind"], *key_of(row)[2:]), []).append(row)
    for own in sizes.values():
        for which, names in (("eager", EAGER_BASELINES), ("compiled", COMPILED_BASELINES)):
            best = _best(own, names)
            if best is None:
                continue
            for row in own:
                row[f"speedup_{which}"] = best["ms"]["p50"] / row["ms"]["p50"]
                row[f"against_{which}"] = best["engine"]


# Answers.


def _reference(row: Row, own: Sequence[Row]) -> Row | None:
    """What a row's tokens are held against: the same scheme run eagerly, or else a stock cache, or else the first."""
    by_name = {other["engine"]: other for other in own}
    for name in (f"{scheme_of(row['engine'])}:eager", *EAGER_BASELINES, own[0]["engine"]):
        if name == row["engine"] and name in EAGER_BASELINES:
            # The others are held against it.
            return None
        if name != row["engine"] and name in by_name:
            return by_name[name]
    return None


def add_agreement(rows: Sequence[Row]) -> None:
    """Puts into each row with tokens how many of the first row's are those of another cache, and whether all rows' are.

    "agrees" has "with", the other engine's name, "tokens" and "all". Random weights make near ties, so that caches that
    round differently soon part; graphs and what they were recorded from should not.
    """
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if "digest" in row:
            groups.setdefault((row["kind"], *key_of(row)[2:]), []).append(row)
    for own in groups.values():
        for row in own:
            other = _reference(row, own)
            row.pop("agrees", None)
            if other is not None:
                pairs = zip(row["tokens"].split(), other["tokens"].split(), strict=False)
                same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
                row["agrees"] = {"with": other["engine"], "tokens": same, "all": row["digest"] == other["digest"]}
