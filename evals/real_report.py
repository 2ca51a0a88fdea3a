"""What the jobs of `evals/real.py` have found: one record, and its tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evals.compare import judge
from hfkvq.measure.records import now
from hfkvq.measure.tables import NOTHING, markdown_table, number, small_number

Record = dict[str, Any]
Job = tuple[str, str]
"""Part and preset."""

STOCK = "none"
"""Transformers' own cache, `DynamicCache`, which all others are compared with."""


MAIN = {"kvq_gsm8k_cot": "exact_match,strict-match"}
"""Metric by which a task is judged, where it is not the first: behind "The answer is 18." models go on with questions
of their own, and `flexible-extract` takes the last number of all."""


def main_values(name: str, task: Record) -> list[float]:
    """A task's values by question, by its main metric."""
    return unpack(task["values"].get(MAIN.get(name, ""), next(iter(task["values"].values()))))


def pack(values: Sequence[float]) -> str | list[float]:
    """Values of questions, in little room: right and wrong as ``0110``, shares as they are."""
    return "".join(f"{x:.0f}" for x in values) if set(values) <= {0.0, 1.0} else [round(x, 4) for x in values]


def unpack(values: str | Sequence[float]) -> list[float]:
    """Inverse of `pack`."""
    return [float(x) for x in values]


def read_jobs(out: Path, parts: Sequence[str], presets: Sequence[str]) -> dict[Job, Record]:
    """The jobs that are there, in the order of these parts and presets, and others behind them."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in out.glob("*-*.json")]
    jobs = {(job["part"], job["preset"]): job for job in found}

    def rank(job: Job) -> tuple[int, int, str]:
        part, preset = job
        return parts.index(part), presets.index(preset) if preset in presets else len(presets), preset

    return {job: jobs[job] for job in sorted(jobs, key=rank)}


def compare(base: Record, other: Record) -> Record:
    """What a cache lost and gained in a part, question by question, its main metric alone."""
    first: list[float] = []
    second: list[float] = []
    for task, one in base["tasks"].items():
        same = other["tasks"][task]
        if one["asked_sha256"] != same["asked_sha256"]:
            raise ValueError(f"{task}: {other['preset']} was asked other questions than {base['preset']}.")
        first += main_values(task, one)
        second += main_values(task, same)
    found = judge(first, second)
    return {name: found[name] for name in ("lost", "gained", "p", "interval")}


def score(job: Record) -> float:
    """Mean of a part's tasks, each by its main metric, of 100."""
    means = [sum(x := main_values(name, task)) / len(x) for name, task in job["tasks"].items()]
    return 100 * sum(means) / len(means)


def summary(jobs: Mapping[Job, Record]) -> Record:
    """All jobs in one record, with what they share said once."""
    rows: dict[str, Record] = {}
    for (part, preset), job in jobs.items():
        row = {key: value for key, value in job.items() if key not in ("part", "preset", "about", "settings")}
        if "tasks" in job:
            row["score"] = score(job)
            if preset != STOCK and (part, STOCK) in jobs:
                row["against_none"] = compare(jobs[part, STOCK], job)
        rows.setdefault(preset, {})[part] = row
    about, settings = (
        [json.loads(x) for x in dict.fromkeys(json.dumps(job[key]) for job in jobs.values())]
        for key in ("about", "settings")
    )
    return {"kind": "hfkvq real", "date": now(), "about": about, "settings": settings, "rows": rows}


def tables(record: Record) -> str:
    """The summary for a reader: divergence, then tasks."""
    rows, found = record["rows"], []
    # A part's rows are all of divergence, or all of tasks.
    shown = {part: "tasks" in one for row in rows.values() for part, one in row.items()}
    for part in (part for part, asks in shown.items() if not asks):
        lines = []
        for preset, row in rows.items():
            if part not in row:
                continue
            base, own = row[part]["baseline"], row[part].get("row")
            if own is None:
                lines.append((preset, number(16.0, 2), *[NOTHING] * 5, f"{base['perplexity']:.3f}"))
                continue
            kld, interval = own["kld"], own["kld"]["interval"] or (None, None)
            change = 100 * (own["perplexity_ratio"]["value"] - 1)
            ends = " to ".join(number(end, 4) for end in interval)
            figures = (number(own["total_bits"], 2), small_number(kld["mean"]), ends, small_number(kld["median"]))
            lines.append((preset, *figures, f"{kld['p999']:.3f}", f"{own['top1']['share']:.3f}", f"{change:+.2f} %"))
        head = ("cache", "total bits", "KLD", "95 %", "median", "99.9 %", "top-1", "perplexity")
        found.append(f"## {part}\n\n{markdown_table(head, lines)}")
    tasks = [part for part, asks in shown.items() if asks]
    if tasks:
        lines = []
        for preset, row in rows.items():
            cells = []
            for part in tasks:
                one = row.get(part)
                against = (one or {}).get("against_none")
                pairs = f" ({against['lost']}/{against['gained']})" if against else ""
                cells.append(f"{one['score']:.1f}{pairs}" if one else "")
            if any(cells):
                lines.append((preset, *cells))
        found.append(f"## tasks: score (lost/gained)\n\n{markdown_table(('cache', *tasks), lines)}")
    return "\n\n".join(found)
