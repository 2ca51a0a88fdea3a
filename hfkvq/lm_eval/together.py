"""Requests answered by several processes, with one bill, from where an earlier run stopped."""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.models import huggingface
from transformers.utils import logging as transformers_logging

from hfkvq.kernels import await_kernels
from hfkvq.progress import progress_bar

from .answers import AnswerLog, Known
from .bill import Bill
from .ranks import Ranks, deal

# The decorator that registers it hides its type.
HFLM: Any = huggingface.HFLM

Asked = tuple[str, tuple[Any, ...]]
"""Task, and arguments of a request."""


class TogetherLM(HFLM):
    """``hf`` whose first process leads, and deals the requests of an evaluation to all.

    Each request is answered by the methods of `HFLM`, as in a run of one process.

    Attributes:
        ranks: the processes.
        bill: what an evaluation has cost; in the first process, once it is over, in all of them.
    """

    def __init__(self, ranks: Ranks | None, *args: Any, **kwargs: Any) -> None:
        alone = not isinstance(args[0], str) or kwargs.get("tp_plan") is not None
        self.ranks = ranks or (Ranks() if alone else Ranks.join())
        self.bill = Bill()
        self._task = ""
        self._log_folder: Path | None = None
        self._known = Known()
        if self.ranks.rank:
            transformers_logging.disable_progress_bar()
            # What all say is said once.
            logging.getLogger("lm_eval").setLevel(logging.ERROR)
        super().__init__(*args, **kwargs)
        self.cache_hook = AnswerLog()
        if self.ranks.count > 1:
            # Only the first process goes through the documents, and it goes through all of them.
            self._rank, self._world_size = self.ranks.rank, 1

    @property
    def handlers(self) -> dict[str, Callable[[Any], Any]]:
        """What the first process asks of the others."""
        return {"open": self._open, "answer": self._answer_share, "bill": lambda _: self.bill.as_dict()}

    def keep_answers(self, folder: Path | None) -> int:
        """Keeps the next evaluation's answers in a folder, and begins with those that are there; returns their number.

        Args:
            folder: of nothing else, and only of runs whose answers would be the same; None keeps nothing.
        """
        self._log_folder, self._known = folder, Known(folder)
        return self._known.count

    def run_evaluation(self, evaluate: Callable[[], Any]) -> Any:
        """Evaluates in the first process, with the help of the others; see `hfkvq.lm_eval.bill.Billed`."""
        if self.ranks.rank:
            self.ranks.follow(self.handlers)
            return None
        with self.ranks.session():
            self.ranks.ask("open", (self._log_folder, torch.initial_seed(), self._known.count), self._open)
            results = evaluate()
            bills = self.ranks.ask("bill", None, self.handlers["bill"])
        self.bill = Bill()
        self.bill.merge([self._known.bill, *map(Bill.from_dict, bills)])
        self.keep_answers(None)
        if results is not None:
            self.bill.write_into(results)
        return results

    def _open(self, given: tuple[Path | None, int, int]) -> None:
        """An evaluation begins: costs count from here."""
        folder, seed, known = given
        self.bill, self.cache_hook = Bill(), AnswerLog(folder)
        if self.ranks.rank or known:
            # Of a question that is asked several times, no two answers may be drawn with the same random numbers.
            torch.manual_seed(hash((seed, self.ranks.rank, known)) % 2**63)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """See `HFLM.generate_until`."""
        return self._answer("generate_until", requests, disable_tqdm)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """See `TemplateLM.loglikelihood`."""
        return self._answer("loglikelihood", requests, disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """See `HFLM.loglikelihood_rolling`."""
        return self._answer("loglikelihood_rolling", requests, disable_tqdm)

    def _answer(self, kind: str, requests: Sequence[Instance], quiet: bool) -> list[Any]:
        """Answers from what is known, and by all processes."""
        asked: list[Asked] = [(request.task_name or "", request.args) for request in requests]
        found = {i: answer for i, one in enumerate(asked) for answer in self._known.take(kind, *one)}
        todo = [i for i in range(len(asked)) if i not in found]
        rest = [asked[i] for i in todo]
        # One process takes them as they come.
        alone = self.ranks.count == 1
        shares = [list(range(len(rest)))] if alone else deal(rest, self.ranks.count, kind == "loglikelihood")
        parts = [(kind, [rest[i] for i in share], quiet) for share in shares]
        for share, answers in zip(shares, self.ranks.call("answer", parts, self._answer_share), strict=True):
            found |= zip((todo[i] for i in share), answers, strict=True)
        return [found[i] for i in range(len(asked))]

    @await_kernels()
    def _answer_share(self, part: tuple[str, list[Asked], bool]) -> list[Any]:
        """Answers task by task, so that each task's costs are its own."""
        kind, asked, quiet = part
        answer, found = getattr(super(), kind), {}
        # Its bars are for terminals.
        plain = not (quiet or self.ranks.rank or sys.stderr.isatty())
        with progress_bar() if plain else contextlib.nullcontext() as show:
            for task in dict.fromkeys(task for task, _ in asked):
                self._task = self.cache_hook.task = task
                mine = [i for i, (other, _) in enumerate(asked) if other == task]
                requests = [Instance(kind, {}, asked[i][1], n, (task, n, 1)) for n, i in enumerate(mine)]  # type: ignore[arg-type]
                if show is not None:
                    self._tell(show, task, len(found), len(asked))
                try:
                    found |= zip(mine, answer(requests, quiet or plain or bool(self.rank)), strict=True)
                finally:
                    self.cache_hook.flush(self.bill)
        return [found[i] for i in range(len(asked))]

    def _tell(self, show: Callable[[str, float], None], task: str, done: int, of: int) -> None:
        """Has progress shown with each answer of a task."""
        show(task, done / of)
        numbers = itertools.count(done + 1)
        self.cache_hook.on_answer = lambda: show(task, next(numbers) / of)
