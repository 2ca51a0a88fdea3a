"""What a run's caches cost: bits, bytes and speed, by task, written into lm-eval's own results."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, runtime_checkable

COLUMNS = ("total_bits", "code_bits", "peak_cache_bytes", "tokens_per_second")
"""Entries that each task gets beside its metrics."""


@dataclass
class Cost:
    """Sums over the caches of a task, in all processes; the peak is one cache's, and seconds are each process's own.

    Attributes:
        requests: answered.
        context_tokens: of all prompts, padding left out.
        generated_tokens: of all answers.
        steps: generated tokens less the first of each answer, which the prompt's forward gives.
        seconds: from the first tokens to the last ones.
        held: bytes of the compressed layers when an answer was finished.
        bf16: bytes of the same keys and values in bf16.
        sealed: the part of ``bf16`` in caches that have sealed anything.
        payload: code bits times ``sealed``.
        keys: mean width of the keys' channels times ``sealed``.
        peak: most bytes that one cache held, all layers counted.
    """

    requests: int = 0
    context_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    held: int = 0
    bf16: int = 0
    sealed: int = 0
    payload: float = 0.0
    keys: float = 0.0
    peak: int = 0

    def add_answers(self, context_tokens: int, lengths: Sequence[int], seconds: float) -> None:
        """Counts a batch of prompts and their answers of so many tokens."""
        self.requests += len(lengths)
        self.context_tokens += context_tokens
        self.generated_tokens += sum(lengths)
        self.steps += sum(max(length - 1, 0) for length in lengths)
        self.seconds += seconds

    def hold(self, held: int, bf16: int, code_bits: float, key_bits: float) -> None:
        """Counts what a cache holds."""
        self.held += held
        self.bf16 += bf16
        if not math.isnan(code_bits):
            self.sealed += bf16
            self.payload += code_bits * bf16
            self.keys += key_bits * bf16

    def add(self, other: Cost) -> None:
        """Adds another's figures."""
        for name, value in vars(other).items():
            mine = getattr(self, name)
            setattr(self, name, max(mine, value) if name == "peak" else mine + value)

    def figures(self) -> dict[str, Any]:
        """What is reported: means and rates; None where nothing was measured."""
        return {
            "code_bits": self.payload / self.sealed if self.sealed else None,
            "key_bits": self.keys / self.sealed if self.sealed else None,
            "total_bits": 16 * self.held / self.bf16 if self.bf16 else None,
            "peak_cache_bytes": self.peak,
            "tokens_per_second": self.steps / self.seconds if self.seconds else None,
            "generated_tokens": self.generated_tokens,
            "requests": self.requests,
            "context_tokens": self.context_tokens / self.requests if self.requests else None,
        }


@dataclass
class Bill:
    """Costs by task."""

    tasks: dict[str, Cost] = field(default_factory=dict)

    def of(self, task: str) -> Cost:
        """The task's sums, to add to."""
        return self.tasks.setdefault(task, Cost())

    def merge(self, others: Iterable[Bill]) -> None:
        """Adds the bills of other processes."""
        for other in others:
            for task, cost in other.tasks.items():
                self.of(task).add(cost)

    def summary(self) -> dict[str, Any]:
        """Figures of all tasks together, and of each."""
        whole = Cost()
        for cost in self.tasks.values():
            whole.add(cost)
        return {**whole.figures(), "tasks": {task: cost.figures() for task, cost in self.tasks.items()}}

    def write_into(self, results: Any) -> None:
        """Puts the columns beside each task's metrics, where lm-eval's table and JSON show them."""
        for task, entries in results.get("results", {}).items():
            if task not in self.tasks:
                continue
            figures = self.tasks[task].figures()
            for name in COLUMNS:
                if figures[name] is not None:
                    entries[f"{name},none"] = figures[name]
            better = results.get("higher_is_better", {}).get(task)
            if isinstance(better, dict):
                better |= {"total_bits": False, "code_bits": False, "peak_cache_bytes": False}
                better |= {"tokens_per_second": True}

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Plain sums, for another process."""
        return {task: asdict(cost) for task, cost in self.tasks.items()}

    @staticmethod
    def from_dict(values: dict[str, dict[str, Any]]) -> Bill:
        """Inverse of `as_dict`."""
        return Bill({task: Cost(**sums) for task, sums in values.items()})


@runtime_checkable
class Billed(Protocol):
    """A model that keeps a bill."""

    def run_evaluation(self, evaluate: Callable[[], Any]) -> Any:
        """Does what lm-eval would, and puts the costs into the results; these are None but in the main process."""
        ...


def install() -> None:
    """Has lm-eval leave evaluations of billed models to them.

    lm-eval asks its models for nothing between the last answer and the table but a description of themselves, which has
    no place for a task's figures. Its function ``evaluate`` is therefore wrapped; other models see no difference.
    """
    from lm_eval import evaluator

    if hasattr(evaluator.evaluate, "hfkvq"):
        return
    stock = evaluator.evaluate

    @functools.wraps(stock)
    def evaluate(*args: Any, **kwargs: Any) -> Any:
        model = kwargs.get("lm", args[0] if args else None)
        if isinstance(model, Billed):
            return model.run_evaluation(lambda: stock(*args, **kwargs))
        return stock(*args, **kwargs)

    evaluate.hfkvq = True  # type: ignore[attr-defined]
    evaluator.evaluate = evaluate
