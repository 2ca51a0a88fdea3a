"""The demo's run: every cache answers the same prompts, and is compared with the stock one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hfkvq.caches.preset import get_preset
from hfkvq.caches.registry import listed
from hfkvq.caches.scheme import Scheme, get_scheme, list_schemes
from hfkvq.caches.warm import compile_ahead
from hfkvq.kernels import await_kernels

from ..records import BASELINE
from .answers import (
    Memory,
    Written,
    answer,
    kl_divergence,
    make_cache,
    predictions,
    read_memory,
    texts,
)
from .prompts import CHAT_TASKS, SIZES, Batch, Subject, full_name, is_right, make_batches


@dataclass(frozen=True)
class Settings:
    """What to run.

    Attributes:
        tasks: names, see `hfkvq.measure.demo.prompts.full_name`.
        schemes: preset names, "all", or none for those of a quick look.
        samples: examples of each task.
        batch_size: most prompts run together.
        max_new_tokens: most tokens of an answer; None depends on the task, see `make_batches`.
        kl_tokens: positions of each task over which the KL divergence is measured, about: as many whole rows as it
            would take if all answers were as long as they may be.
        seed: another one gives other examples.
    """

    tasks: tuple[str, ...] = CHAT_TASKS
    schemes: tuple[str, ...] = ()
    samples: int = 4
    batch_size: int = 8
    max_new_tokens: int | None = None
    kl_tokens: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        """Checks everything that can be checked without a model."""
        for name in ("samples", "batch_size", "kl_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, allowed 1 or more.")
        if self.max_new_tokens is not None and self.max_new_tokens < 2:
            raise ValueError(
                f"max_new_tokens: got {self.max_new_tokens}, allowed 2 or more; the first token reads no cache."
            )
        if self.seed < 0:
            raise ValueError(f"seed: got {self.seed}, allowed 0 or more.")
        if not self.tasks:
            raise ValueError(f"tasks: got none, allowed {', '.join(SIZES)}.")
        for task in self.tasks:
            full_name(task)
        choose_schemes(self.schemes)


@dataclass
class TaskScore:
    """How one cache did on one task.

    Attributes:
        right: examples answered rightly.
        total: examples.
        agreeing: generated tokens that are the baseline's, from the second of each answer.
        compared: tokens of the baseline's answers, from the second of each.
        kl: KL divergence to the baseline at each position that was measured, f64 (N,).
    """

    right: int = 0
    total: int = 0
    agreeing: int = 0
    compared: int = 0
    kl: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float64))


@dataclass
class Row:
    """Everything measured for one cache.

    Attributes:
        name: preset name, or "DynamicCache".
        scheme: None for the baseline.
        tasks: scores by full task name.
        memory: after the answers of the batch with the longest prompt.
        prompt_tokens: prompt tokens without padding, of all batches.
        prompt_seconds: until each batch's first answer token.
        decode_tokens: answer tokens from the second on.
        decode_seconds: their time.
    """

    name: str
    scheme: Scheme | None
    tasks: dict[str, TaskScore] = field(default_factory=dict)
    memory: Memory | None = None
    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0

    @property
    def accuracy(self) -> float:
        """Share of right answers, of all examples."""
        return sum(task.right for task in self.tasks.values()) / sum(task.total for task in self.tasks.values())

    @property
    def agreement(self) -> float:
        """Share of tokens that are the baseline's."""
        compared = sum(task.compared for task in self.tasks.values())
        return sum(task.agreeing for task in self.tasks.values()) / compared if compared else math.nan

    @property
    def kl(self) -> torch.Tensor:
        """KL divergence at each measured position of all tasks, f64 (N,)."""
        return torch.cat([task.kl for task in self.tasks.values()])

    @property
    def prompt_speed(self) -> float:
        """Prompt tokens a second, all rows of a batch together."""
        return self.prompt_tokens / self.prompt_seconds

    @property
    def decode_speed(self) -> float:
        """Answer tokens a second, all rows of a batch together."""
        return self.decode_tokens / self.decode_seconds if self.decode_tokens else math.nan


@dataclass
class Result:
    """A finished run.

    Attributes:
        settings: what was asked for.
        model: its name.
        dtype: of the model, e.g. "bfloat16".
        device: kind of device, "cpu" or "cuda".
        rows: the baseline first.
        memory_task: task whose first batch the memory was read on.
        memory_rows: rows of that batch.
        seconds: whole run without loading.
    """

    settings: Settings
    model: str
    dtype: str
    device: str
    rows: list[Row]
    memory_task: str
    memory_rows: int
    seconds: float


def choose_schemes(names: Sequence[str] = ()) -> dict[str, Scheme]:
    """Schemes by preset name.

    Without names a few of each kind; of "all" every distinct one for keys and values, under the last name it has. Those
    for latents alone have to be named.
    """
    if tuple(names) != ("all",):
        return {name: get_scheme(name) for name in names or listed("demo")}
    # The last name says most: "kivi" is an alias of "kivi-2".
    distinct = {scheme: name for name, scheme in list_schemes().items() if not scheme.latents}
    return {name: scheme for scheme, name in distinct.items()}


def _score(subject: Subject, batch: Batch, mine: Written, baseline: Written, score: TaskScore) -> None:
    written = texts(subject, mine)
    score.right += sum(is_right(subject, x, text) for x, text in zip(batch.examples, written, strict=True))
    score.total += len(batch.examples)
    for got, want, length in zip(mine.ids.tolist(), baseline.ids.tolist(), baseline.lengths, strict=True):
        # An answer may have ended early; what is missing does not agree.
        score.agreeing += sum(a == b for a, b in zip(got[1:length], want[1:length], strict=False))
        score.compared += length - 1


@dataclass
class _Expected(Written):
    """What the baseline made of one batch, without its cache; logits f32 (N, vocabulary), see `predictions`."""

    logits: torch.Tensor


@await_kernels()
def run_demo(
    subject: Subject,
    settings: Settings,
    on_progress: Callable[[str, str, float], Any] | None = None,
    schemes: Mapping[str, Scheme] | None = None,
    on_row: Callable[[Row], Any] | None = None,
) -> Result:
    """Runs every cache on every task, one cache after the other.

    Args:
        subject: the model.
        settings: tasks, schemes, sizes.
        on_progress: called before each batch with the cache's name, the task and the share of the work done, and while
            kernels are compiled.
        schemes: by name, in place of the settings' presets.
        on_row: called with each row when it is complete, the baseline's first.

    Raises:
        ValueError: the model cannot hold a task's prompts, or a scheme cannot hold its heads.
    """
    begin = time.perf_counter()
    model = subject.model
    batches: list[Batch] = []
    for task in dict.fromkeys(map(full_name, settings.tasks)):
        batches += make_batches(
            subject, task, settings.samples, settings.batch_size, settings.seed, settings.max_new_tokens
        )
    longest = max(range(len(batches)), key=lambda i: batches[i].ids.shape[1])
    # The first batch of that task, which is a full one.
    longest = next(i for i, batch in enumerate(batches) if batch.task == batches[longest].task)
    own = choose_schemes(settings.schemes) if schemes is None else schemes
    rows = [
        Row(name, scheme, {batch.task: TaskScore() for batch in batches})
        for name, scheme in {BASELINE: None, **own}.items()
    ]
    for row in rows:
        # Refused heads are told before the first batch is run.
        make_cache(subject, row.scheme)

    def tell(what: str, task: str = "") -> None:
        if on_progress is not None:
            on_progress(what, task, done / total)

    work = [batch.ids.numel() + 8 * batch.ids.shape[0] * batch.limit for batch in batches]
    total, done = sum(work) * len(rows), 0
    counts = _kl_rows(batches, settings.kl_tokens)
    compile_ahead(model, map(get_preset, own.values()), tell=tell)
    expected: dict[int, _Expected] = {}
    for row in rows:
        for index, batch in enumerate(batches):
            tell(row.name, batch.task)
            if index == 0:
                _warm_up(subject, batch, row.scheme)
            expected[index], memory = _run_batch(subject, batch, row, counts[index], expected.get(index))
            row.memory = memory if index == longest else row.memory
            done += work[index]
        if on_row is not None:
            on_row(row)
    return Result(
        settings,
        subject.name,
        str(model.dtype).removeprefix("torch."),
        model.device.type,
        rows,
        batches[longest].task,
        batches[longest].ids.shape[0],
        time.perf_counter() - begin,
    )


def _kl_rows(batches: Sequence[Batch], tokens: int) -> list[int]:
    """Of each batch the rows whose divergence is measured: until each task has so many positions, about."""
    left = {batch.task: tokens for batch in batches}
    counts = []
    for batch in batches:
        counts.append(min(len(batch.ids), -(-max(left[batch.task], 0) // batch.limit)))
        left[batch.task] -= counts[-1] * batch.limit
    return counts


def _run_batch(
    subject: Subject, batch: Batch, row: Row, count: int, expected: _Expected | None
) -> tuple[_Expected, Memory]:
    """Adds a batch to a row; without what is expected of it, the row is the baseline's and its answers are that."""
    mine = answer(subject, batch, make_cache(subject, row.scheme), count)
    logits = predictions(subject, batch, mine, expected or mine) if count else torch.empty(0, 0)
    if expected is None:
        # On the host: what all tasks expect of a large vocabulary would be a burden to the device.
        expected = _Expected(mine.ids, mine.lengths, logits.cpu())
    score = row.tasks[batch.task]
    _score(subject, batch, mine, expected, score)
    score.kl = torch.cat([score.kl, kl_divergence(expected.logits, logits)])
    row.prompt_tokens += int(batch.mask.sum())
    row.prompt_seconds += mine.prompt_seconds
    row.decode_tokens += sum(mine.lengths) - len(mine.lengths)
    row.decode_seconds += mine.decode_seconds
    return expected, read_memory(mine.cache, batch.mask)


def _warm_up(subject: Subject, batch: Batch, scheme: Scheme | None) -> None:
    """Kernels are loaded, and libraries wake up, before the clock runs."""
    rows = batch.ids.shape[0] if subject.model.device.type == "cuda" else 1
    small = Batch(batch.task, batch.examples[:rows], batch.ids[:rows], batch.mask[:rows], 3)
    answer(subject, small, make_cache(subject, scheme))
