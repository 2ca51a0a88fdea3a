"""Scores of caches, and objectives: KL divergence on text, and lm-eval's tasks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor

from hfkvq.caches.schemes.preset import Preset
from hfkvq.measure.divergence.intervals import mean_interval
from hfkvq.measure.divergence.measurement import measure
from hfkvq.measure.records import finite

Cost = Literal["total_bits", "cache_bytes", "key_bits"]
COSTS: tuple[Cost, ...] = ("total_bits", "cache_bytes", "key_bits")


@dataclass(frozen=True)
class Score:
    """Value and costs of a cache, measured in the same run.

    Attributes:
        value: the objective's: an accuracy, or a KL divergence.
        total_bits: bits per element, every byte counted.
        code_bits: payload bits per element of sealed pages, or None.
        cache_bytes: held at the end of a sample, or None.
        samples: number of independent samples.
        low: end of the value's 95 % interval, or None.
        key_bits: mean width of the keys' channels as raised, without scales (MixKVQ's B_eff, equation 17), or None.
    """

    value: float
    total_bits: float
    code_bits: float | None = None
    cache_bytes: float | None = None
    samples: int = 1
    low: float | None = None
    high: float | None = None
    key_bits: float | None = None

    def cost(self, name: Cost) -> float:
        """Cost of that name.

        Raises:
            ValueError: the objective does not measure it.
        """
        found = getattr(self, name)
        if found is None:
            raise ValueError(
                f"cost: got {name!r}, which this objective does not measure; allowed "
                f"{', '.join(other for other in COSTS if getattr(self, other) is not None)}."
            )
        return found


@runtime_checkable
class Objective(Protocol):
    """Measure of a cache: any callable with these attributes, such as those in `hfkvq.tuning.objectives`.

    Attributes:
        name: of the value, e.g. "KLD".
        direction: "minimize" or "maximize".
    """

    name: str
    direction: Literal["minimize", "maximize"]

    def __call__(self, preset: Preset) -> Score:
        """Measures a cache."""
        ...


class TextKLD:
    """Mean KL divergence from the stock cache on windows of text: quick, and finer than any count of right answers.

    Its arguments are those of `hfkvq.measure.divergence.measure`.
    """

    name = "KLD"
    direction: Literal["minimize", "maximize"] = "minimize"

    def __init__(
        self,
        model: Any,
        tokens: Tensor,
        *,
        prefill: int,
        chunk: int = 16,
        batch_size: int = 1,
        tokenizer: Any = None,
    ) -> None:
        self.model, self.tokens, self.tokenizer = model, tokens, tokenizer
        self.prefill, self.chunk, self.batch_size = prefill, chunk, batch_size

    def __call__(self, preset: Preset) -> Score:
        """Each window counts as one sample: its tokens are not independent."""
        found = measure(
            self.model,
            self.tokens,
            {"": preset},
            prefill=self.prefill,
            chunk=self.chunk,
            batch_size=self.batch_size,
            tokenizer=self.tokenizer,
        ).schemes[0]
        means, bill = found.kld.double().mean(1).tolist(), found.bill
        low, high = mean_interval(means) or (None, None)
        return Score(
            fmean(means),
            bill.total_bits,
            finite(bill.code_bits),
            bill.held_bytes,
            samples=len(means),
            low=low,
            high=high,
            key_bits=finite(bill.key_bits),
        )


class LmEvalTasks:
    """Mean accuracy of lm-eval's tasks, through one loaded model.

    Args:
        model: `hfkvq.lm_eval.model.HFKVQ`.
        tasks: names, with the metric where it is not the task's first: ``"gsm8k:exact_match,strict-match"``.
        samples: numbers of the documents, the same for every task.
        task_manager: of lm-eval, for tasks of other folders.
        **options: of lm-eval's `simple_evaluate`, e.g. ``num_fewshot``.
    """

    name = "accuracy"
    direction: Literal["minimize", "maximize"] = "maximize"

    def __init__(
        self,
        model: Any,
        tasks: Sequence[str],
        samples: Sequence[int],
        *,
        task_manager: Any = None,
        **options: Any,
    ) -> None:
        if not tasks or not samples:
            raise ValueError(f"tasks, samples: got {len(tasks)} and {len(samples)}, allowed one or more of each.")
        self.model, self.samples, self.options = model, list(samples), options
        self.metrics = {name: metric or None for name, _, metric in (task.partition(":") for task in tasks)}
        self.task_manager = task_manager

    def __call__(self, preset: Preset) -> Score:
        """Tasks count alike; the interval is over samples."""
        import lm_eval

        # Arguments of `simple_evaluate` are hidden by its decorator.
        evaluate: Any = lm_eval.simple_evaluate
        self.model.use(preset)
        results = evaluate(
            self.model,
            tasks=list(self.metrics),
            samples={task: self.samples for task in self.metrics},
            task_manager=self.task_manager,
            bootstrap_iters=0,
            **self.options,
        )
        right = {task: _values(results["samples"], task, metric) for task, metric in self.metrics.items()}
        cost = results["config"]["kvq"]
        whole = [value for values in right.values() for value in values]
        low, high = mean_interval(whole) or (None, None)
        value = fmean([fmean(values) for values in right.values()])
        total, code = math.nan if cost["total_bits"] is None else cost["total_bits"], cost["code_bits"]
        spread = {"samples": len(whole), "low": low, "high": high}
        return Score(value, total, code, cost["peak_cache_bytes"], key_bits=cost["key_bits"], **spread)


def _values(samples: Mapping[str, list[dict[str, Any]]], task: str, metric: str | None) -> list[float]:
    """A task's metric, sample by sample; ``metric`` is its name, or name,filter."""
    rows = samples.get(task)
    if not rows:
        raise ValueError(f"tasks: {task!r} gave no samples; groups of tasks must be named task by task.")
    name, _, chosen = (metric or rows[0]["metrics"][0]).partition(",")
    chosen = chosen or rows[0]["filter"]
    found = [row[name] for row in rows if row["filter"] == chosen and name in row]
    if not found:
        known = sorted({f"{each},{row['filter']}" for row in rows for each in row["metrics"]})
        raise ValueError(f"tasks: {task!r} has no metric {metric!r}; it has {', '.join(known)}.")
    return [float(value) for value in found]
