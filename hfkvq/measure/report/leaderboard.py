"""Results grouped by model and cache."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from ..records import BASELINE
from .metrics import SHARES, split_key
from .results import Score, Source, TaskResult

NORMAL = 1.96
"""Standard errors to either side of a mean that make a 95 % interval."""

Column = tuple[str, str]
"""Task, and "metric,filter"."""


@dataclass
class Row:
    """One cache on one model.

    Attributes:
        label: for the reader.
        key: empty for the stock cache.
        tasks: by name.
        divergence: of `hfkvq kld`, if measured.
    """

    label: str
    key: str
    tasks: dict[str, TaskResult] = field(default_factory=dict)
    divergence: Mapping[str, Any] | None = None

    def mean(self, name: str, tasks: Collection[str] = ()) -> float | None:
        """Mean of a bill's entry over those tasks that have it; over all tasks if none are given."""
        bills = [found.bill for task, found in self.tasks.items() if not tasks or task in tasks]
        values = [value for bill in bills if (value := getattr(bill, name)) is not None]
        return fmean(values) if values else None

    @property
    def peak_bytes(self) -> float | None:
        """Largest of all tasks."""
        values = [task.bill.peak_bytes for task in self.tasks.values() if task.bill.peak_bytes is not None]
        return max(values) if values else None

    def divergent(self, name: str) -> Any:
        """An entry of `hfkvq kld`, None if that was not measured."""
        return None if self.divergence is None else self.divergence[name]

    def score(self, column: Column) -> Score | None:
        """The cell of a column."""
        task = self.tasks.get(column[0])
        return None if task is None else task.scores.get(column[1])

    def accuracy(self, columns: Sequence[Column]) -> float | None:
        """Mean over the columns, in per cent; None if one is missing."""
        found = [self.score(column) for column in columns]
        values = [score.value for score in found if score is not None]
        return 100 * fmean(values) if values and len(values) == len(columns) else None

    def accuracy_interval(self, columns: Sequence[Column]) -> tuple[float, float] | None:
        """95 % interval of `accuracy` by the standard errors of its columns; None where one is unknown."""
        mean, found = self.accuracy(columns), [self.score(column) for column in columns]
        errors = [score.stderr for score in found if score is not None and score.stderr is not None]
        if mean is None or len(errors) != len(columns):
            return None
        half = 100 * NORMAL * math.sqrt(sum(error**2 for error in errors)) / len(errors)
        return max(mean - half, 0.0), min(mean + half, 100.0)


@dataclass
class Board:
    """All caches of one model, in the order of the table.

    Attributes:
        model: for the reader.
        rows: the stock cache, then `full`, then by total bits.
        notes: what was left out, and what else a reader must know.
    """

    model: str
    rows: list[Row]
    notes: list[str]

    @property
    def columns(self) -> list[Column]:
        """Tasks and metrics, in the order of the files."""
        return list(
            dict.fromkeys((task, key) for row in self.rows for task, found in row.tasks.items() for key in found.scores)
        )

    @property
    def compared(self) -> list[Column]:
        """A column for each task that all caches with tasks have done, whose metric is a share of right answers."""
        rows = [row for row in self.rows if row.tasks]
        found = []
        for task in dict.fromkeys(task for row in rows for task in row.tasks):
            keys = [key for key in next(row.tasks[task] for row in rows if task in row.tasks).scores]
            column = (task, keys[0])
            scores = [row.score(column) for row in rows]
            if is_share(keys[0], [score for score in scores if score]) and all(scores):
                found.append(column)
        return found

    @property
    def scored(self) -> bool:
        """Whether any cache has done a task."""
        return any(row.tasks for row in self.rows)

    def bits(self, row: Row, name: str) -> float | None:
        """Mean "total_bits" or "code_bits" over the tasks that all caches have done, so that rows can be compared.

        Over a cache's own tasks if there are no such; of a board without tasks, as `hfkvq kld` measured them.
        """
        return row.mean(name, [task for task, _ in self.compared]) if self.scored else row.divergent(name)


def is_share(key: str, scores: Iterable[Score]) -> bool:
    """Whether a metric is a share of right answers, to be shown in per cent."""
    return split_key(key)[0] in SHARES and all(0 <= score.value <= 1 for score in scores)


def make_boards(sources: Iterable[Source]) -> list[Board]:
    """Groups results by model, cache and task; of several the newest counts, which a note says."""
    rows: dict[str, dict[str, Row]] = {}
    notes: dict[str, list[str]] = {}
    # The newest first, so that what is there stays; files of the same moment by name, for the same report every time.
    for source in sorted(sources, key=lambda source: (-source.date, source.file)):
        own = rows.setdefault(source.model, {})
        said = notes.setdefault(source.model, [])
        row = own.setdefault(source.key, Row(source.label, source.key))
        for task in source.tasks:
            if task.task in row.tasks:
                said.append(f"`{row.label}` on {task.task} was measured again later; {source.file} is left out.")
            else:
                row.tasks[task.task] = task
        if source.divergence is not None:
            if row.divergence is not None:
                said.append(f"The KLD of `{row.label}` was measured again later; {source.file} is left out.")
            else:
                row.divergence = source.divergence
        if source.remark:
            said.append(f"`{row.label}` in {source.file}: {source.remark}.")
    boards = [
        Board(model, sorted(own.values(), key=_order), list(dict.fromkeys(notes[model]))) for model, own in rows.items()
    ]
    return sorted(boards, key=lambda board: board.model)


def _order(row: Row) -> tuple[int, float, str]:
    rank = 0 if row.label == BASELINE else 1 if row.label == "full" else 2
    return rank, row.mean("total_bits") or row.divergent("total_bits") or 0.0, row.label
