"""Plots of a report: how good caches are beside what they hold, and how fast they are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..charts import BITS, KLD, Column, Mark, save_chart, share
from .leaderboard import Board
from .results import Score

_MIB = 2**20

_MOST_TASKS = 5
"""That have a column each; of more there is one column with their mean."""


def save_quality(board: Board, path: Path) -> bool:
    """Bits, bytes, right answers and KLD, as a PNG; False if there is nothing to draw.

    Raises:
        ImportError: matplotlib is not installed.
    """
    rows = board.rows
    columns = [Column(BITS, _marks({row.label: board.bits(row, "total_bits") for row in rows}), True)]
    if board.scored:
        peaks = {row.label: row.peak_bytes and row.peak_bytes / _MIB for row in rows}
        columns.append(Column("peak of the cache, MiB", _marks(peaks), True))
    columns += _answers(board)
    found = {row.label: row.divergence["kld"] for row in rows if row.divergence is not None}
    marks = {label: Mark(kld["mean"], *(kld["interval"] or (None, None))) for label, kld in found.items()}
    columns.append(Column(KLD, marks, True))
    return save_chart([row.label for row in rows], columns, board.model, path)


def _marks(values: Mapping[str, float | None]) -> dict[str, Mark]:
    return {name: Mark(value) for name, value in values.items() if value}


def _answers(board: Board) -> list[Column]:
    """Right answers by task, with intervals."""
    compared = board.compared
    if len(compared) > _MOST_TASKS:
        means = {row.label: (row.accuracy(compared), row.accuracy_interval(compared)) for row in board.rows}
        marks = {name: Mark(mean, *(ends or (None, None))) for name, (mean, ends) in means.items() if mean is not None}
        return [Column(f"right, mean of {len(compared)} tasks, %", marks)]
    columns = []
    for column in compared:
        scores = {row.label: row.score(column) for row in board.rows}
        marks = {name: _mark(score) for name, score in scores.items() if score is not None}
        columns.append(Column(f"{column[0]}, right, %", marks))
    return columns


def _mark(score: Score) -> Mark:
    return share(score.value * score.samples, score.samples) if score.samples else Mark(100 * score.value)


def save_speed(board: Board, path: Path) -> bool:
    """Generated tokens a second of each task, as a PNG; False if there is nothing to draw.

    Raises:
        ImportError: matplotlib is not installed.
    """
    tasks = dict.fromkeys(task for row in board.rows for task in row.tasks)
    columns = []
    for task in tasks:
        bills = {row.label: row.tasks[task].bill for row in board.rows if task in row.tasks}
        contexts = [bill.context_tokens for bill in bills.values() if bill.context_tokens]
        about = f", {sum(contexts) / len(contexts):,.0f} tokens" if contexts else ""
        marks = _marks({name: bill.tokens_per_second for name, bill in bills.items()})
        columns.append(Column(f"{task}{about}, tokens/s", marks))
    return save_chart([row.label for row in board.rows], columns, board.model, path)
