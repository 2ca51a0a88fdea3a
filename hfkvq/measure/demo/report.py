"""The demo's result as a table, as JSON, and as a picture."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from ..charts import BITS, KLD, Column, Mark, save_chart, share
from ..records import BASELINE, device_name, finite, versions
from ..tables import NOTHING, narrow_table
from .run import Result, Row


def short_name(task: str) -> str:
    """Column title: "recall-80" over two lines."""
    return task.replace("arithmetic", "arith.").replace("-", "\n")


def _kl(row: Row) -> tuple[float, float]:
    """Mean and 99.9 % quantile; NaN if nothing was measured."""
    kl = row.kl
    # Rounding makes a few of the smallest negative.
    return (max(0.0, float(kl.mean())), max(0.0, float(kl.quantile(0.999)))) if len(kl) else (math.nan, math.nan)


def _rounded(value: float, digits: int) -> str:
    """So many digits; what rounds to nothing is said to be less than the least of them."""
    if math.isnan(value):
        return NOTHING
    least = 10.0**-digits
    return f"<{least:.{digits}f}" if 0 < value < least / 2 else f"{value:.{digits}f}"


def _speed(value: float) -> str:
    return NOTHING if math.isnan(value) else f"{value:,.0f}"


def _percent(share: float) -> str:
    """Rounded, but 100.0 only for everything."""
    return NOTHING if math.isnan(share) else f"{100 if share == 1 else min(100 * share, 99.9):.1f}"


class Lines:
    """The table, a row at a time: rows can be shown while others are still being measured.

    Columns are as wide as every row needs, as far as the baseline's can tell.

    Args:
        first: the baseline's row.
        names: of all caches.
        wide: takes up to 120 columns, otherwise 100.
    """

    def __init__(self, first: Row, names: Iterable[str], wide: bool = True) -> None:
        assert first.memory is not None
        self.wide, self._head = wide, True
        mib = f"{2 * max(first.memory.held, first.memory.bf16) / 2**20:.2f}"
        speed = _speed(2 * first.prompt_speed)
        samples = {"cache": max(names, key=len), "total\nbits": "16.00", "code\nbits": "16.00", "held\nMiB": mib}
        samples |= {"bf16\nMiB": mib, "bf16 /\nheld": "10.00"}
        samples |= {short_name(name): f"{task.total}/{task.total}" for name, task in first.tasks.items()}
        samples |= {"agree\n%": "100.0", "KLD\nmean": "<0.0001", "KLD\n99.9%": "10.0000"}
        samples |= {"tok/s\nprompt": speed, "tok/s\ndecode": speed}
        self._columns = [
            (title, max(*map(len, title.split("\n")), len(sample)))
            for title, sample in samples.items()
            if wide or title not in ("bf16\nMiB", "tok/s\nprompt")
        ]

    def of(self, row: Row) -> Table:
        """A row; the first comes with the titles."""
        view = narrow_table(show_header=self._head, show_edge=False)
        for number, (title, width) in enumerate(self._columns):
            side = "right" if number else "left"
            view.add_column(title, justify=side, min_width=width, no_wrap=True, vertical="bottom")
        self._head = False
        memory = row.memory
        assert memory is not None
        mean, high = _kl(row)
        baseline = row.scheme is None
        view.add_row(
            row.name,
            f"{memory.total_bits:.2f}",
            _rounded(memory.code_bits, 2),
            f"{memory.held / 2**20:.2f}",
            *([f"{memory.bf16 / 2**20:.2f}"] if self.wide else []),
            f"{memory.bf16 / memory.held:.2f}",
            *(f"{task.right}/{task.total}" for task in row.tasks.values()),
            "" if baseline else _percent(row.agreement),
            "" if baseline else _rounded(mean, 4),
            "" if baseline else _rounded(high, 4),
            *([_speed(row.prompt_speed)] if self.wide else []),
            _speed(row.decode_speed),
        )
        return view


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def notes(result: Result) -> list[str]:
    """How to read the table, a sentence or two each."""
    base = result.rows[0]
    assert base.memory is not None
    said = [
        f"{result.model}, {result.dtype}, on {result.device}: {_counted(result.settings.samples, 'example')} per task, "
        f"greedy, seed {result.settings.seed}, {result.seconds:.0f} s.",
        f"held is the size of the cache after {_counted(result.memory_rows, 'answer')} to {result.memory_task}, with "
        f"{base.memory.tokens:,} tokens each: codes, scales, windows and tables. bf16 is the size of the same tokens "
        f"without padding, {base.memory.bf16 / 2**20:.2f} MiB; {BASELINE} stores padding too. Windows stay in full "
        "precision, so longer contexts take fewer bits: `hfkvq schemes` shows the limit.",
        f"agree and KLD compare with {BASELINE} from the second token of each answer on; the first one comes from "
        f"the prompt, before any cache is read. KLD is in nats, over {len(base.kl):,} positions of {BASELINE}'s "
        "answers.",
    ]
    if result.device == "cpu":
        said.append("On the CPU, tokens/s are those of the PyTorch reference. They say nothing about the GPU kernels.")
    if result.dtype == "float32":
        said.append("The windows of a float32 model are float32 too, so total bits are higher than in bf16.")
    return said


def next_steps(result: Result) -> list[tuple[str, str]]:
    """Commands to go on with, and what each does."""
    steps = [
        ("hfkvq demo --model NAME", "the same with your own model"),
        (
            "hfkvq demo --schemes all",
            f"every preset; --samples {8 * result.settings.samples} gives more precise figures",
        ),
        ("hfkvq schemes", "all presets, with bits, loss and speed"),
        ("hfkvq recommend --model NAME --gpu-memory 24GiB --context 32k", "the preset that fits your GPU"),
    ]
    return [step for step in steps if not (step[0].endswith("all") and result.settings.schemes)]


def _describe(row: Row) -> dict[str, Any]:
    memory = row.memory
    assert memory is not None
    mean, high = _kl(row)
    return {
        "name": row.name,
        "scheme": row.scheme.to_dict() if row.scheme else None,
        "total_bits": memory.total_bits,
        "code_bits": finite(memory.code_bits),
        "held_bytes": memory.held,
        "bf16_bytes": memory.bf16,
        "ratio": memory.bf16 / memory.held,
        "context_tokens": memory.tokens,
        "accuracy": row.accuracy,
        "agreement": finite(row.agreement),
        "kl_mean": finite(mean),
        "kl_999": finite(high),
        "kl_positions": len(row.kl),
        "prompt_tokens_per_second": row.prompt_speed,
        "decode_tokens_per_second": finite(row.decode_speed),
        "tasks": {
            name: {
                "right": task.right,
                "total": task.total,
                "agreeing_tokens": task.agreeing,
                "compared_tokens": task.compared,
                "kl_mean": float(task.kl.mean()) if len(task.kl) else None,
                "kl_positions": len(task.kl),
            }
            for name, task in row.tasks.items()
        },
    }


def as_json(result: Result) -> dict[str, Any]:
    """Everything in the table, and what it takes to repeat it."""
    return {
        "model": result.model,
        "dtype": result.dtype,
        "device": device_name(torch.device(result.device)),
        "device_type": result.device,
        "threads": torch.get_num_threads(),
        "settings": dataclasses.asdict(result.settings),
        "memory": {"task": result.memory_task, "rows": result.memory_rows},
        "seconds": result.seconds,
        "versions": versions("torch", "transformers"),
        "rows": [_describe(row) for row in result.rows],
    }


def save_picture(result: Result, path: Path) -> None:
    """Total bits, right answers and KL divergence of each cache, as a PNG.

    Raises:
        ImportError: matplotlib is not installed.
    """
    rows = [row for row in result.rows if row.memory]
    bits = {row.name: Mark(row.memory.total_bits) for row in rows if row.memory}
    answers = {}
    for row in rows:
        total = sum(task.total for task in row.tasks.values())
        answers[row.name] = share(sum(task.right for task in row.tasks.values()), total)
    klds = {row.name: Mark(_kl(row)[0]) for row in rows if row.name != BASELINE and not math.isnan(_kl(row)[0])}
    total = sum(task.total for task in rows[0].tasks.values())
    title = f"{result.model}: {total} examples of {', '.join(result.rows[0].tasks)}"
    columns = [Column(BITS, bits, True), Column("right answers, %", answers), Column(KLD, klds, True)]
    save_chart([row.name for row in rows], columns, title, path)
