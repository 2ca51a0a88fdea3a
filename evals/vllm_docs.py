"""The tables of docs/vllm.md and their picture: vLLM with its own caches and with hfkvq's, by `evals/vllm_peer.py`.

`evals/docs.py --write` writes them from evals/results/vllm-plugin-qwen3-8b-*.json. Of each GPU the newest commit
counts, with all its files: a process has one cache, so that a run may be in several.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hfkvq.measure.presets import widest_first
from hfkvq.measure.tables import markdown_table

RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]

OWN = {"auto": "bf16"}
"""vLLM's own caches, by its cache dtypes, where they have other names."""


def engine(row: Row) -> str:
    """A row's cache: hfkvq's scheme, or one of vLLM's own."""
    return row["scheme"] or OWN.get(row["kv"], row["kv"])


def runs() -> dict[str, list[Row]]:
    """Rows on one GPU by its name and date: for each GPU those of the newest commit, newer rows first."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.glob("vllm-plugin-qwen3-8b-*.json")]
    records.sort(key=lambda record: record["date"], reverse=True)
    newest: dict[str, Row] = {}
    found: dict[str, list[Row]] = {}
    for record in records:
        first = newest.setdefault(record["gpu"], record)
        if record["commit"] == first["commit"]:
            name = f"{record['gpu'].replace('NVIDIA ', '').split()[0]}, {first['date'][:10]}"
            found.setdefault(name, []).extend(row for row in record["rows"] if row["tp"] == 1 and "error" not in row)
    return dict(sorted(found.items()))


def engines(rows: list[Row]) -> list[str]:
    """Caches of a run: vLLM's own, bf16 first, then hfkvq's, the widest first."""
    plain = dict.fromkeys(engine(row) for row in rows if not row["scheme"])
    ours = dict.fromkeys(row["scheme"] for row in rows if row["scheme"])
    return sorted(plain, key=lambda name: name != "bf16") + widest_first(ours)


def first(rows: list[Row], name: str, kind: str, field: str, **size: int) -> Any:
    """A field of the first row of a cache that fits; None where there is none."""
    for row in rows:
        if (engine(row), row["kind"]) == (name, kind) and field in row and size.items() <= row.items():
            return row[field]
    return None


def tokens(rows: list[Row], name: str) -> int:
    """Tokens that a cache has room for, as vLLM counts them."""
    return next(row["tokens_that_fit"] for row in rows if engine(row) == name)


def thousands(count: int) -> str:
    """Tokens as they are typed: 2k."""
    return f"{count // 1024}k"


def measures(rows: list[Row]) -> list[tuple[str, list[str]]]:
    """Lines of a table: a measure, and its value for each cache, empty where it was not measured."""
    names = engines(rows)

    def line(words: str, form: str, *where: Any, **size: int) -> tuple[str, list[str]]:
        values = [first(rows, name, *where, **size) for name in names]
        return words, ["" if value is None else form.format(value) for value in values]

    found = [("tokens that fit beside the weights", [f"{tokens(rows, name):,}" for name in names])]
    sizes = sorted({(row["batch"], row["context"], row["new_tokens"]) for row in rows if row["kind"] == "whole"})
    for batch, context, new in sizes:
        size, words = {"batch": batch, "context": context, "new_tokens": new}, f"{batch} x {thousands(context)}"
        found.append(line(f"{words}, ms a step", "{:.2f}", "whole", "step_ms", **size))
        if batch > 1:
            found.append(line(f"{words}, prompts, s", "{:.2f}", "whole", "prompt_s", **size))
            found.append(line(f"{words}, {new} tokens, tokens/s", "{:,.0f}", "whole", "tokens_per_s", **size))
    for batch, prefix in sorted({(row["batch"], row["prefix"]) for row in rows if row["kind"] == "prefixes"}):
        words, values = f"{batch} requests behind one prefix of {prefix} tokens, s", []
        for name in names:
            seconds = first(rows, name, "prefixes", "cached_s", batch=batch, prefix=prefix)
            values.append(f"{sum(seconds) / len(seconds):.1f}" if seconds else "")
        found.append((words, values))
    for batch, context, new in loads(rows):
        words = f"{batch} users, {thousands(context)} + {thousands(new)} tokens, tokens/s"
        size = {"batch": batch, "context": context, "new_tokens": new}
        found.append(line(words, "{:,.0f}", "users", "tokens_per_s", **size))
    return found


def loads(rows: list[Row]) -> list[tuple[int, int, int]]:
    """Users of a run, and the tokens of their prompts and answers."""
    return sorted({(row["batch"], row["context"], row["new_tokens"]) for row in rows if row["kind"] == "users"})


def tables() -> str:
    """A table for each GPU."""
    found = []
    for gpu, rows in runs().items():
        ours = {row["scheme"] for row in rows}
        names = [f"`{name}`" if name in ours else name for name in engines(rows)]
        found.append(markdown_table((gpu, *names), [(words, *values) for words, values in measures(rows)]))
    return "\n\n".join(found)


def readme(text: str) -> str:
    """The README with its figures of `saw-int4` and `best-2.5` in vLLM, in times of bf16's, on an H100."""
    rows = next(rows for gpu, rows in runs().items() if gpu.startswith("H100"))

    def times(measure: Callable[[str], float], digits: int) -> str:
        return " or ".join(f"{measure(name) / measure('bf16'):.{digits}f}" for name in ("saw-int4", "best-2.5"))

    def step(batch: int) -> str:
        return times(lambda name: first(rows, name, "whole", "step_ms", batch=batch), 2)

    users, *_ = loads(rows)[-1]
    speeds = {name: first(rows, name, "users", "tokens_per_s", batch=users) for name in ("bf16", "fp8", "best-2.5")}
    words = (
        f"{times(lambda name: tokens(rows, name), 1)} times bf16's tokens; a step takes {step(1)} of bf16's time with "
        f"one user, {step(16)} with 16. With\n  `best-2.5` {users} users get "
        f"{speeds['best-2.5'] / speeds['bf16']:.1f} times bf16's tokens/s, "
        f"{speeds['best-2.5'] / speeds['fp8']:.1f} times fp8's"
    )
    return re.sub(r"(?s)(?<=\n  hold ).*?(?= \(\[JSON\]\(evals/results/vllm-plugin)", words, text)


def picture(path: Path) -> None:
    """Users whose tokens fit at once, and tokens/s of the largest load: a row of bars for each GPU."""
    from evals.charts import GREY, RED, new_figure, save_figure

    shown = {gpu: rows for gpu, rows in runs().items() if loads(rows)}
    height = 1.1 + sum(0.3 * len(engines(rows)) + 0.75 for rows in shown.values())
    figure, grid = new_figure(8.6, height, 2, len(shown))
    for (gpu, rows), (fit, speed) in zip(shown.items(), grid, strict=True):
        names, (users, context, new) = engines(rows), loads(rows)[-1]
        size = {"batch": users, "context": context, "new_tokens": new}
        values = {
            fit: [tokens(rows, name) // (context + new) for name in names],
            speed: [first(rows, name, "users", "tokens_per_s", **size) for name in names],
        }
        load = f"{thousands(context)} + {thousands(new)} tokens"
        fit.set_title(f"{gpu}: users of {load} that fit at once", fontsize=9)
        speed.set_title(f"tokens/s of {users} users, {load}", fontsize=9)
        ours = {row["scheme"] for row in rows}
        for axes, heights in values.items():
            for at, (name, value) in enumerate(zip(names, heights, strict=True)):
                axes.barh(at, value or 0, 0.72, color=RED if name in ours else GREY)
                times = f" ({value / heights[0]:.1f}x)" if value and heights[0] and at else ""
                words = f"{value:,.0f}{times}" if value else "not measured"
                color, place = "0.25" if value else "0.55", {"xytext": (4, 0), "textcoords": "offset points"}
                axes.annotate(words, (value or 0, at), **place, va="center", fontsize=8, color=color)
            axes.set_xlim(0, 1.3 * max(value or 0 for value in heights))
            axes.set_ylim(len(names) - 0.4, -0.6)
            axes.set_yticks(range(len(names)), names, fontsize=9)
            axes.xaxis.set_visible(False)
            axes.spines["bottom"].set_visible(False)
            axes.tick_params(axis="y", length=0)
    figure.suptitle("vLLM in the same memory, Qwen3-8B's shape: its own caches (grey), hfkvq's (orange)", fontsize=10.5)
    save_figure(figure, path)
