"""Writes what docs/speed.md says of several queries, from what `hfkvq bench kernels --queries --json` measured.

    PYTHONPATH=. python evals/several.py

Reads evals/results/queries-h200.json, and writes two tables between markers: prompts behind a context, and steps.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from evals.one_layer import DOCS, RESULTS, replace, said
from hfkvq.measure.bench import report
from hfkvq.measure.bench.cases import short
from hfkvq.measure.bench.report import Record
from hfkvq.measure.bench.rows import Row, unquantized
from hfkvq.measure.bench.several import AGAIN, AS_OURS

RUN = "queries-h200"
TORCH = {"flash SDPA": "flash", "cuDNN SDPA, mask": "cuDNN with a mask"}
"""Right kernels of PyTorch over bf16: what prompts are held against."""
PROMPTS = {**TORCH, "vllm-fa3": "FlashAttention 3", "cuDNN SDPA": "cuDNN, not causal", AS_OURS: "dense, as we ask"}
STEPS = {
    "flash SDPA": "flash",
    "vllm-fa3": "FlashAttention 3",
    "flash SDPA, packed": "flash, packed, not causal",
    "cuDNN SDPA, packed": "cuDNN, packed, not causal",
}
PEAK = re.compile(r"peak ([\d,]+) MiB with the output, which has ([\d,]+); dense keys and values ([\d,]+)")

Rows = dict[str, Row]


def by_shape(record: Record, prompts: bool) -> dict[tuple[int, int], Rows]:
    """Lines of one row of tokens, by context and queries, shortest first, and name."""
    found: dict[tuple[int, int], Rows] = {}
    for row in record["rows"]:
        shape = report.shape_of(row)
        if shape.is_prompt is prompts:
            found.setdefault((shape.context, shape.queries), {})[row["name"]] = row
    return dict(sorted(found.items()))


def formats(record: Record) -> list[str]:
    """Names of this library's formats in the order of measuring, each once."""
    again = AGAIN.format("")
    names = (row["name"].removesuffix(again) for row in record["rows"] if row["kind"] == "format")
    return list(dict.fromkeys(names))


def time_of(row: Row | None) -> float | None:
    """Microseconds; None where there are none."""
    return row["us"]["p50"] if row and "us" in row else None


def cell(us: float | None) -> str:
    """Three digits at least."""
    return "" if us is None else f"{us:,.0f}" if us >= 100 else f"{us:.1f}"


def line(title: str, rows: Rows, others: Sequence[str], ours: Sequence[str], held: Sequence[str]) -> str:
    """A line: times, and the time of the slowest of ours over that of the fastest of ``held``."""
    cells = [cell(time_of(rows.get(name))) for name in (*others, *ours)]
    own = [us for name in ours if (us := time_of(rows.get(name)))]
    best = [us for name in held if (us := time_of(rows.get(name)))]
    share = f"{max(own) / min(best):.2f}" if own and best else ""
    return f"| {title} | " + " | ".join([*cells, share]) + " |"


def head(first: str, others: Sequence[str], ours: Sequence[str], last: str) -> Iterator[str]:
    """Titles of columns."""
    titles = [first, *others, *(f"`{name}`" for name in ours), last]
    yield "| " + " | ".join(titles) + " |"
    yield "|---" * len(titles) + "|"


def prompts(record: Record) -> Iterator[str]:
    """The table of prompts, and the most memory that one takes."""
    names = formats(record)
    yield said(record)
    yield ""
    yield from head("prompt behind context", list(PROMPTS.values()), names, "of PyTorch's")
    for (context, queries), rows in by_shape(record, True).items():
        if not any(time_of(rows.get(name)) for name in names):
            # A run that has ended here.
            continue
        title = f"{short(queries)} behind {short(context)}"
        yield line(title, rows, list(PROMPTS), names, list(TORCH))
        again = {name: row for name in (*names, AS_OURS) if (row := rows.get(AGAIN.format(name)))}
        if any(name in again for name in names):
            same = {name: row for name, row in rows.items() if name not in (*names, AS_OURS)}
            yield line(f"{title}, length again", same | again, list(PROMPTS), names, list(TORCH))
    yield ""
    yield from most_memory(record)


def most_memory(record: Record) -> Iterator[str]:
    """The prompt that takes most memory beyond dense keys and values."""
    found = []
    for row in record["rows"]:
        if read := PEAK.search(row["remark"]):
            peak, out, dense = (int(number.replace(",", "")) for number in read.groups())
            found.append((peak - dense, peak, out, dense, row))
    if found:
        _, peak, out, dense, row = max(found, key=lambda each: each[0])
        shape = report.shape_of(row)
        yield (
            f"Most memory beyond dense keys and values: `{row['name']}`, {short(shape.queries)} behind "
            f"{short(shape.context)}, takes {peak:,} MiB, of which the output has {out:,}; dense keys and values have "
            f"{dense:,}."
        )


def steps(record: Record) -> Iterator[str]:
    """The table of steps of a few tokens."""
    names = formats(record)
    yield from head("queries of a row", list(STEPS.values()), names, "of the fastest")
    for (context, queries), rows in by_shape(record, False).items():
        right = [name for name, row in rows.items() if row["kind"] != "format" and unquantized(row)]
        yield line(f"{queries} at {short(context)}", rows, list(STEPS), names, right)


def text_of(text: str, record: Record) -> str:
    """The page with both tables."""
    return replace(replace(text, "prompts", [*prompts(record)]), "several queries", [*steps(record)])


def main() -> None:
    """Both tables."""
    page = DOCS / "speed.md"
    page.write_text(text_of(page.read_text(encoding="utf-8"), report.load(RESULTS / f"{RUN}.json")), encoding="utf-8")


if __name__ == "__main__":
    main()
