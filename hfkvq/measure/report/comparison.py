"""A comparison of two runs as a table and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from hfkvq.measure.divergence.intervals import CONFIDENCE, RESAMPLES

from ..records import now
from ..tables import NOTHING, narrow_table, small_number
from .metrics import title
from .names import scheme_label
from .paired import PERMUTATIONS, Verdict
from .results import model_name
from .samples import Run

Record = dict[str, Any]


def describe(run: Run) -> Record:
    """Model and cache of a run."""
    kvq = run.content["config"].get("kvq") or {}
    scheme = kvq.get("scheme")
    return {
        "file": run.path.name,
        "model": model_name(run.content),
        "cache": scheme_label(scheme, kvq.get("preset")),
        "scheme": scheme,
        "total_bits": kvq.get("total_bits", 16.0),
    }


def as_record(first: Run, second: Run, verdicts: Sequence[Verdict], unpaired: Sequence[str], seed: int) -> Record:
    """Everything in the table, and how it was tested."""
    import scipy

    return {
        "kind": "hfkvq compare",
        "date": now(),
        "first": describe(first),
        "second": describe(second),
        "confidence": CONFIDENCE,
        "resamples": RESAMPLES,
        "permutations": PERMUTATIONS,
        "seed": seed,
        "versions": {"scipy": scipy.__version__},
        "unpaired_tasks": list(unpaired),
        "rows": [dataclasses.asdict(verdict) for verdict in verdicts],
    }


def table(record: Record) -> Table:
    """One row a task and metric."""
    view = narrow_table()
    view.add_column("task", overflow="fold")
    view.add_column("metric", overflow="fold")
    for name in ("samples", "first", "second", "difference", f"{100 * CONFIDENCE:.0f} % interval", "more", "less", "p"):
        view.add_column(name, justify="right", no_wrap=True)
    view.add_column("test")
    rows = record["rows"]
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        interval = row["interval"]
        view.add_row(
            row["task"],
            title(row["key"]),
            f"{row['samples']:,}",
            f"{row['first']:.4f}",
            f"{row['second']:.4f}",
            f"{row['difference']:+.4f}",
            NOTHING if interval is None else f"{interval[0]:+.4f} to {interval[1]:+.4f}",
            str(row["better"]),
            str(row["worse"]),
            small_number(max(row["p"], 1e-9)),
            row["test"],
            end_section=after is not None and after["task"] == "pooled",
        )
    return view


def notes(record: Record) -> list[str]:
    """How to read the table."""
    said = [
        f"{name}: {run['cache']} on {run['model']} ({run['file']})."
        for name, run in (("First", record["first"]), ("Second", record["second"]))
    ]
    said.append(
        "Differences are second minus first; more and less count the samples where the second run has more or less. "
        "p is two-sided, of the same questions in both runs: McNemar's exact test for right and wrong, random signs "
        "for other metrics. It is not corrected for the number of tasks."
    )
    if record["unpaired_tasks"]:
        said.append(f"Left out, because only one of the files has them: {', '.join(record['unpaired_tasks'])}.")
    return said
