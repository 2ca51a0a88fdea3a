"""Answers kept while they come in, so that a run that was cut goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hfkvq.bounded import DAMAGE, parse_json

from .bill import Bill


def key_of(kind: str, task: str, arguments: tuple[Any, ...]) -> str:
    """What tells a request from all others of a run."""
    text = json.dumps([kind, task, *arguments], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


class AnswerLog:
    """Writes the answers of one process, a line a batch with the costs so far.

    It takes the place of lm-eval's `CacheHook`, which is told each answer.

    Args:
        folder: of the logs of all runs and processes; None keeps nothing.

    Attributes:
        task: whose answers come.
        on_answer: is called for each.
    """

    # lm-eval looks for a store of its own.
    dbdict = None

    def __init__(self, folder: Path | None = None) -> None:
        self.folder, self.task = folder, ""
        self.on_answer: Callable[[], object] = lambda: None
        self._path: Path | None = None
        self._waiting: list[tuple[str, Any]] = []

    def add_partial(self, kind: str, arguments: tuple[Any, ...], answer: Any) -> None:
        """Takes an answer."""
        self.on_answer()
        if self.folder is not None:
            self._waiting.append((key_of(kind, self.task, arguments), answer))

    def flush(self, bill: Bill) -> None:
        """Writes what is waiting, and what this process's answers have cost so far."""
        if self.folder is None or not self._waiting:
            return
        line = json.dumps({"bill": bill.as_dict(), "answers": self._waiting}) + "\n"
        if self._path is None:
            # The folder may be one that another machine does not see.
            if not self.folder.is_dir():
                self._waiting.clear()
                return
            self._path = self._new_file(self.folder)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line)
        self._waiting.clear()

    @staticmethod
    def _new_file(folder: Path) -> Path:
        number = 0
        while True:
            try:
                path = folder / f"answers-{number}.jsonl"
                path.touch(exist_ok=False)
                return path
            except FileExistsError:
                number += 1


class Known:
    """Answers and costs of runs that were cut.

    Attributes:
        bill: what the answers have cost.
        count: of the answers.

    Raises:
        ValueError: a file is none of `AnswerLog`'s.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.bill, self.count = Bill(), 0
        # A question that is asked several times has several answers.
        self._answers: dict[str, list[Any]] = defaultdict(list)
        for file in sorted(folder.glob("answers-*.jsonl")) if folder is not None else ():
            try:
                self._read(file)
            except DAMAGE as error:
                raise ValueError(f"out: {file} is damaged ({error!r}); move it away.") from None

    def _read(self, file: Path) -> None:
        last = None
        for last in _lines(file):
            for key, answer in last["answers"]:
                self._answers[key].append(tuple(answer) if isinstance(answer, list) else answer)
                self.count += 1
        if last is not None:
            self.bill.merge([Bill.from_dict(last["bill"])])

    def take(self, kind: str, task: str, arguments: tuple[Any, ...]) -> list[Any]:
        """The answer to a request, which is then used up; empty if there is none."""
        found = self._answers.get(key_of(kind, task, arguments))
        return [found.pop(0)] if found else []


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    for line in file.read_text(encoding="utf-8").split("\n"):
        try:
            yield parse_json(line)
        except ValueError:
            # The last line, cut with the run.
            return
