"""Files that a report is made of: lm-eval's results, and what `hfkvq kld` and `hfkvq bench kernels` save."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from hfkvq.bounded import load_json

from .metrics import main_metrics
from .names import model_label, scheme_key, scheme_label

KLD, BENCH, BOARD, LM_EVAL = "hfkvq kld", "hfkvq bench kernels", "hfkvq leaderboard", "lm-eval"


@dataclass(frozen=True)
class Score:
    """One metric of one task.

    Attributes:
        value: as lm-eval has it.
        stderr: its standard error, if there is one.
        higher: whether more is better.
        samples: questions behind it, if known.
    """

    value: float
    stderr: float | None = None
    higher: bool = True
    samples: int | None = None


@dataclass(frozen=True)
class Bill:
    """What a cache held, and how fast it was; None where nobody measured."""

    total_bits: float | None = None
    code_bits: float | None = None
    peak_bytes: float | None = None
    tokens_per_second: float | None = None
    context_tokens: float | None = None


@dataclass(frozen=True)
class TaskResult:
    """One cache on one task, from one file.

    Attributes:
        scores: by "metric,filter", the main ones, the first of them first.
        bill: of this task.
    """

    task: str
    scores: Mapping[str, Score]
    bill: Bill


@dataclass(frozen=True)
class Source:
    """One cache's results from one file.

    Attributes:
        file: its name.
        date: seconds since 1970, 0 if unknown.
        model: for the reader.
        key: the same for the same scheme; empty for the stock cache.
        label: the cache's name for the reader.
        tasks: lm-eval's, none if the file is of `hfkvq kld`.
        divergence: a row of `hfkvq kld`.
        remark: how log-likelihoods were scored, where that was not through the cache.
    """

    file: str
    date: float
    model: str
    key: str
    label: str
    tasks: Sequence[TaskResult] = ()
    divergence: Mapping[str, Any] | None = None
    remark: str = ""


@dataclass
class Collection:
    """All that was read.

    Attributes:
        sources: results, one a cache and file.
        benches: records of `hfkvq bench kernels`.
        skipped: JSON files of folders that are none of these.
    """

    sources: list[Source] = field(default_factory=list)
    benches: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def read_json(path: Path) -> Any:
    """The content of a file. Raises ValueError if it cannot be read or is no JSON."""
    try:
        return load_json(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"files: {path} cannot be read as JSON: {error}") from error


def kind_of(content: Any) -> str | None:
    """What wrote a file: `KLD`, `BENCH`, `BOARD` (a manifest, no results), `LM_EVAL`, or None."""
    if not isinstance(content, dict):
        return None
    if content.get("kind") in (KLD, BENCH, BOARD):
        return content["kind"]
    lm_eval = isinstance(content.get("results"), dict) and isinstance(content.get("config"), dict)
    return LM_EVAL if lm_eval else None


def read_files(paths: Iterable[Path]) -> Collection:
    """Reads files, and all JSON files of folders and of what is in them.

    Raises:
        ValueError: nothing was found, a file is missing or unreadable, or one that was named is none of the three.
    """
    found, listed = Collection(), list(paths)
    for path in listed:
        if not path.exists():
            raise ValueError(f"files: {path} does not exist.")
        named = not path.is_dir()
        for file in [path] if named else sorted(path.rglob("*.json")):
            content = read_json(file)
            kind = kind_of(content)
            try:
                if kind == KLD:
                    found.sources += _divergences(file, content)
                elif kind == BENCH:
                    found.benches.append(content)
                elif kind == LM_EVAL:
                    found.sources.append(_evaluation(file, content))
                elif named:
                    raise ValueError(
                        f"files: {file} was not written by lm-eval, `{KLD} --json` or `{BENCH} --json`; leave it out."
                    )
                elif kind != BOARD:
                    found.skipped.append(file.name)
            except (KeyError, TypeError, AttributeError, OverflowError) as error:
                raise ValueError(
                    f"files: {file} looks like a file of {kind}, but is damaged: {type(error).__name__} {error}; "
                    "make it again, or leave it out."
                ) from error
    if not found.sources and not found.benches:
        raise ValueError(
            f"files: no results in {', '.join(map(str, listed))}; lm-eval writes them with --output_path FOLDER, "
            f"`{KLD}` with --json FILE."
        )
    return found


def _number(value: Any) -> float | None:
    """A finite number, or None for what lm-eval writes in its place."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else None


def _divergences(path: Path, content: dict[str, Any]) -> list[Source]:
    date = datetime.fromisoformat(content["date"]).timestamp()
    model = model_label(content["model"])
    found = []
    for row in content["rows"]:
        # What was typed: a preset, maybe with knobs.
        label = scheme_label(row["scheme"], row["name"].partition(":")[0])
        found.append(Source(path.name, date, model, scheme_key(row["scheme"]), label, divergence=row))
    return found


def model_name(content: dict[str, Any]) -> str:
    """The model of an lm-eval file, for the reader."""
    arguments = content["config"].get("model_args") or {}
    name = arguments.get("pretrained") if isinstance(arguments, dict) else content.get("model_name")
    return model_label(str(name or content.get("model_name") or "model"))


def _bill(own: Mapping[str, Any] | None, kvq: Mapping[str, Any] | None) -> Bill:
    """A task's bill; the whole run's where tasks have none of their own, and 16 bits for plain `hf`."""
    if kvq is None:
        return Bill(total_bits=16.0, code_bits=16.0)
    # Not entry by entry: a task that generates nothing has no speed, whatever the others have.
    source = kvq if own is None else own
    names = ("total_bits", "code_bits", "peak_cache_bytes", "tokens_per_second", "context_tokens")
    return Bill(*(_number(source.get(name)) for name in names))


def _own_bill(by_task: Mapping[str, Any], task: str, content: dict[str, Any]) -> Mapping[str, Any] | None:
    """A task's entry; of a group the means of its tasks', and their largest peak; None if there is none."""
    if task in by_task:
        return by_task[task]
    groups = content.get("group_subtasks") or {}
    members, found = list(groups.get(task) or ()), []
    # Grows while it is read: groups of groups.
    for member in members:
        members += [name for name in groups.get(member) or () if name not in members]
        found += [by_task[member]] if member in by_task else []
    if not found:
        return None
    merged: dict[str, Any] = {}
    for name in ("total_bits", "code_bits", "tokens_per_second", "context_tokens", "peak_cache_bytes"):
        values = [value for entry in found if (value := _number(entry.get(name))) is not None]
        if values:
            merged[name] = max(values) if name == "peak_cache_bytes" else fmean(values)
    return merged


def _evaluation(path: Path, content: dict[str, Any]) -> Source:
    kvq = content["config"].get("kvq")
    scheme = None if kvq is None else kvq.get("scheme")
    by_task = (kvq or {}).get("tasks") or {}
    hidden = _members_of_scored_groups(content)
    tasks = []
    for task, numbers in content["results"].items():
        values = {key: _number(value) for key, value in numbers.items() if "," in key}
        main = main_metrics(key for key, value in values.items() if value is not None)
        if not main or task in hidden:
            continue
        higher = (content.get("higher_is_better") or {}).get(task) or {}
        count = ((content.get("n-samples") or {}).get(task) or {}).get("effective")
        scores = {}
        for key in main:
            metric, _, name = key.partition(",")
            error = values.get(f"{metric}_stderr,{name}")
            value = values[key]
            assert value is not None
            scores[key] = Score(value, error, higher.get(metric) is not False, count)
        tasks.append(TaskResult(task, scores, _bill(_own_bill(by_task, task, content), kvq)))
    mode = "decode" if kvq is None or scheme is None else kvq.get("ll_mode", "decode")
    remark = "" if mode in ("decode", "stepwise") else f"log-likelihoods scored with ll_mode={mode}"
    date = _number(content.get("date")) or path.stat().st_mtime
    label = scheme_label(scheme, (kvq or {}).get("preset"))
    return Source(path.name, date, model_name(content), scheme_key(scheme), label, tasks, remark=remark)


def _members_of_scored_groups(content: dict[str, Any]) -> set[str]:
    """Tasks whose group has a score of its own, such as MMLU's 57 subjects: the group stands for them."""
    results = content["results"]
    hidden: set[str] = set()
    for group, members in (content.get("group_subtasks") or {}).items():
        numbers = results.get(group) or {}
        if main_metrics(key for key, value in numbers.items() if "," in key and _number(value) is not None):
            hidden |= set(members) - {group}
    return hidden
