"""The samples of an lm-eval run, and the pairs that two runs make."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hfkvq.bounded import DAMAGE, parse_json, read_bounded

from .metrics import main_metrics
from .results import LM_EVAL, kind_of, read_json

Sample = tuple[str, str, dict[str, float]]
"""Hash of the document, hash of the prompt, and the value of each metric."""


@dataclass(frozen=True)
class Run:
    """One results file with its samples.

    Attributes:
        path: of the results.
        content: what it holds.
        samples: by task, then by filter and document number.
        higher: by task and metric, whether more is better.
    """

    path: Path
    content: dict[str, Any]
    samples: dict[str, dict[tuple[str, int], Sample]]

    def higher(self, task: str, metric: str) -> bool:
        """Whether more of a metric is better."""
        return ((self.content.get("higher_is_better") or {}).get(task) or {}).get(metric) is not False


@dataclass(frozen=True)
class Pairs:
    """One metric of one task, sample by sample, in both runs.

    Attributes:
        task: its name.
        key: "metric,filter".
        first: values in the first run.
        second: values in the second, in the same order.
        higher: whether more is better.
    """

    task: str
    key: str
    first: list[float]
    second: list[float]
    higher: bool

    @property
    def binary(self) -> bool:
        """Whether all values are 0 or 1."""
        return set(self.first) | set(self.second) <= {0.0, 1.0}


def newest_results(path: Path) -> Path:
    """The file itself, or the newest results in a folder, by lm-eval's date in the name."""
    if not path.is_dir():
        return path
    found = sorted(path.rglob("results_*.json"), key=lambda file: file.name)
    if not found:
        raise ValueError(f"files: {path} has no results_*.json; lm-eval writes it with --output_path {path}.")
    return found[-1]


def read_run(path: Path) -> Run:
    """Reads results and the samples beside them.

    Raises:
        ValueError: the file is missing, is none of lm-eval's, or has no samples beside it.
    """
    path = newest_results(path)
    content = read_json(path)
    if kind_of(content) != LM_EVAL:
        raise ValueError(f"files: {path} was not written by lm-eval.")
    # lm-eval names both by one date: results_DATE.json (or STEM_DATE.json) and samples_TASK_DATE.jsonl.
    date = path.stem.rpartition("_")[2]
    found = sorted(path.parent.glob(f"samples_*_{date}.jsonl"))
    if not found:
        raise ValueError(
            f"files: there are no samples_*_{date}.jsonl beside {path}; run lm-eval with --log_samples --output_path."
        )
    samples = {file.name[len("samples_") : -len(f"_{date}.jsonl")]: _read_samples(file) for file in found}
    return Run(path, content, samples)


def _read_samples(path: Path) -> dict[tuple[str, int], Sample]:
    found: dict[tuple[str, int], Sample] = {}
    try:
        lines = read_bounded(path).split("\n")
    except (OSError, ValueError) as error:
        raise ValueError(f"files: {path} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = parse_json(line)
            # A tuple, such as F1's pairs, says nothing by sample.
            values = {name: float(x) for name in record["metrics"] if isinstance(x := record[name], (int, float))}
            key = (str(record.get("filter", "none")), int(record["doc_id"]))
            sample = (record["doc_hash"], record["prompt_hash"], values)
        except DAMAGE as error:
            raise ValueError(
                f"files: line {number} of {path} is not a sample of lm-eval: {type(error).__name__} {error}."
            ) from error
        if key in found:
            raise ValueError(f"files: {path} has document {key[1]} twice for the filter {key[0]!r}; run lm-eval again.")
        found[key] = sample
    return found


def _check_same(task: str, first: dict[tuple[str, int], Sample], second: dict[tuple[str, int], Sample]) -> None:
    one, other = first.keys() - second.keys(), second.keys() - first.keys()
    if one or other:
        raise ValueError(
            f"{task}: the samples do not match: the first file has {len(first)}, the second {len(second)}, in both are "
            f"{len(first.keys() & second.keys())}. Run both with the same tasks, --limit and filters."
        )
    for at, name, remedy in (
        (0, "documents", "run both on the same data"),
        (1, "prompts", "run both with the same --num_fewshot, --fewshot_as_multiturn, --apply_chat_template and seed"),
    ):
        differ = sum(first[key][at] != second[key][at] for key in first)
        if differ:
            raise ValueError(f"{task}: {differ} of {len(first)} samples have different {name}; {remedy}.")


def pair(first: Run, second: Run, metrics: Iterable[str] = ()) -> tuple[list[Pairs], list[str]]:
    """Pairs every sample of both runs.

    Args:
        first: one run.
        second: the other.
        metrics: names of metrics; none takes each task's main ones.

    Returns:
        Pairs of each task and metric, the main metric first, and tasks that only one of the runs has.

    Raises:
        ValueError: no task in common, other samples, or an unknown metric.
    """
    wanted = set(metrics)
    common = [task for task in first.samples if task in second.samples]
    if not common:
        raise ValueError(
            f"files: no task in common: {', '.join(first.samples)} in the first, {', '.join(second.samples)} in the "
            "second."
        )
    found: list[Pairs] = []
    seen: set[str] = set()
    for task in common:
        a, b = first.samples[task], second.samples[task]
        _check_same(task, a, b)
        keys = dict.fromkeys(f"{metric},{name}" for (name, _), sample in a.items() for metric in sample[2])
        seen |= {key.partition(",")[0] for key in keys}
        chosen = [key for key in keys if key.partition(",")[0] in wanted] if wanted else main_metrics(keys)
        for key in chosen:
            metric, _, name = key.partition(",")
            own = sorted(at for at in a if at[0] == name)
            ours, theirs = ([run[at][2].get(metric, math.nan) for at in own] for run in (a, b))
            if any(map(math.isnan, ours + theirs)):
                raise ValueError(f"{task}: {metric} is missing in some samples; run lm-eval again, or choose --metric.")
            found.append(Pairs(task, key, ours, theirs, first.higher(task, metric)))
    if wanted - seen:
        raise ValueError(f"metric: got {', '.join(sorted(wanted - seen))}, allowed {', '.join(sorted(seen))}.")
    if not found:
        raise ValueError("files: the tasks have no metric with a number for each sample.")
    return found, sorted(first.samples.keys() ^ second.samples.keys())
