"""Tables and picture of one layer's decode attention, from what `evals.other_kernels` measured.

`evals/docs.py --write` puts the tables into docs/results.md, and the speed-ups into docs/choosing.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from evals.charts import Column, Mark, save_chart
from evals.kernel_bench import KINDS, Record, Row, unquantized

ROOT = Path(__file__).resolve().parents[1]
RESULTS, DOCS = ROOT / "evals" / "results", ROOT / "docs"
RUN = "kernels-h200"
SHAPES = ((32, 32768), (1, 131072), (32, 8192), (1, 8192), (1, 1024))
HELD = ("2-bit", "kitty-pro", "best-2.5", "saw-int4")
"""Formats that are to be twice as fast as every quantized kernel of others with as many bits or more."""
CLIP = 70
"""Characters of what a peer's error says."""
ALIKE = 1.02
"""Shares of bits up to which they are as many: windows count, and of 32k tokens are a hundredth."""

TITLES = {
    "flashinfer": "FlashInfer",
    "flashinfer-fp8": "FlashInfer, fp8",
    "vllm-fa3": "FlashAttention 3 (vLLM)",
    "vllm-fa2": "FlashAttention 2 (vLLM)",
    "vllm-fa3-fp8": "FlashAttention 3, fp8 (vLLM)",
    "turboquant-k8v4": "TurboQuant, 8-bit keys, 4-bit values (vLLM)",
    "turboquant-4": "TurboQuant, 4 bits (vLLM)",
    "turboquant-3": "TurboQuant, 3 bits (vLLM)",
    "bitdecoding-4": "BitDecoding, 4 bits",
    "bitdecoding-2": "BitDecoding, 2 bits",
    "official-kivi-4": "KIVI's own, 4 bits",
    "official-kivi-2": "KIVI's own, 2 bits",
    "official-kitty-pro": "Kitty-Pro's own",
    "official-kitty": "Kitty's own",
    "2-bit": "2-bit, no windows",
}


def title_of(row: Row) -> str:
    """Name in tables."""
    name = row["name"]
    return TITLES.get(name, f"`{name}`" if row["kind"] == "format" and "," not in name else name)


def bits_of(row: Row) -> float | None:
    """Bits per element that a step reads, windows included; None where nothing was measured."""
    if "us" not in row:
        return None
    elements = 2 * row["batch"] * row["kv_heads"] * row["head_dim"] * row["context"]
    query = row["batch"] * row["heads"] * row["head_dim"] * 2
    return 8 * (row["bytes"] - 2 * query) / elements


def by_name(record: Record, kinds: Sequence[str]) -> dict[str, dict[tuple[int, int], Row]]:
    """Lines of these kinds by name and size."""
    found: dict[str, dict[tuple[int, int], Row]] = {}
    for row in record["rows"]:
        if row["kind"] in kinds and row.get("queries", 1) == 1:
            found.setdefault(row["name"], {})[row["batch"], row["context"]] = row
    return found


def sizes_of(record: Record) -> list[tuple[int, int]]:
    """Sizes that were measured, in the order of tables."""
    there = {(row["batch"], row["context"]) for row in record["rows"] if "us" in row}
    return [size for size in SHAPES if size in there]


def heads(sizes: Sequence[tuple[int, int]]) -> list[str]:
    """Titles of columns."""
    return [f"{batch} x {context // 1024}k" for batch, context in sizes]


def said(record: Record) -> str:
    """Times by kernel and size."""
    row = record["rows"][0]
    return (
        f"{record['gpu']}, {row['heads']} query and {row['kv_heads']} KV heads of {row['head_dim']}, medians of "
        f"{min(row['replays'] for row in record['rows'] if 'us' in row)} replays or more, commit {record['commit']}."
    )


def speedups(record: Record) -> Iterator[str]:
    """The table: what speed-ups are against, and this library's formats."""
    sizes, size = sizes_of(record), SHAPES[0]
    yield said(record)
    yield ""
    yield "| kernel | bits | " + " | ".join(heads(sizes)) + " | of a copy |"
    yield "|---|---|" + "---|" * len(sizes) + "---|"
    others = [rows for rows in by_name(record, ("baseline", "peer")).values() if unquantized(next(iter(rows.values())))]
    ours = by_name(record, ("format",))
    for rows in (*sorted(others, key=lambda rows: -rows.get(size, {}).get("speedup", 0.0)), *ours.values()):
        cells = [f"{rows[x]['speedup']:.2f}x" if "speedup" in rows.get(x, {}) else "" for x in sizes]
        if not any(cells):
            continue
        large = next(rows[x] for x in sizes if "us" in rows.get(x, {}))
        share = rows.get(size, {}).get("share_of_copy")
        bits = "16" if unquantized(large) else f"{bits_of(large):.2f}"
        shown = f"{100 * share:.0f} %" if share else ""
        yield f"| {title_of(large)} | {bits} | " + " | ".join(cells) + f" | {shown} |"


def beside(record: Record) -> Iterator[str]:
    """Quantized kernels of others: times, and how much faster the slowest of ours with no more bits is."""
    sizes = sizes_of(record)
    yield "| kernel | bits | " + " | ".join(heads(sizes)) + " | held against |"
    yield "|---|---|" + "---|" * len(sizes) + "---|"
    ours = by_name(record, ("format",))
    for rows in by_name(record, ("peer",)).values():
        first = next((rows[size] for size in sizes if "us" in rows.get(size, {})), None)
        if first is None or unquantized(first):
            continue
        bits = bits_of(first) or 0.0
        size = first["batch"], first["context"]
        held = [x for x in HELD if (own := bits_of(ours.get(x, {}).get(size, {}))) and own <= ALIKE * bits]
        cells = []
        for at in sizes:
            row = rows.get(at, {})
            times = [ours[x][at]["us"]["p50"] for x in held if "us" in ours[x].get(at, {})]
            share = f" ({row['us']['p50'] / max(times):.1f}x)" if times and "us" in row else ""
            cells.append(f"{row['us']['p50']:.1f}{share}" if "us" in row else "")
        yield f"| {title_of(first)} | {bits:.2f} | " + " | ".join(cells) + f" | {', '.join(f'`{x}`' for x in held)} |"
    wrong = [f"{TITLES.get(name, name)} ({words})" for name, words in refused(record)]
    if wrong:
        yield ""
        yield f"Not timed: {'; '.join(wrong)}."


def refused(record: Record) -> Iterator[tuple[str, str]]:
    """Peers that no line has a time of, and why."""
    timed = {row["name"] for row in record["rows"] if "us" in row}
    for name, found in record["checks"].get("peers", {}).items():
        if name not in timed:
            words = next((x for x in found.values() if isinstance(x, str)), "not reached in time")
            yield name, words if len(words) <= CLIP else words[:CLIP].rstrip() + "..."


def choosing(text: str, record: Record) -> str:
    """The last two columns of the table of costs: speed-ups at 32 x 32k and 1 x 1k."""
    ours = by_name(record, ("format",))

    def row(match: re.Match[str]) -> str:
        own = ours.get(match["name"], {})
        cells = [own.get(size, {}).get("speedup") for size in ((32, 32768), (1, 1024))]
        return match["head"] + " | ".join(f"{x:.2f}x" if x else "not measured" for x in cells) + " |"

    times = r"(?:[\d.]+x|not measured)"
    return re.sub(rf"(?m)^(?P<head>\| `(?P<name>[\w.-]+)` \|.*\| ){times} \| {times} \|$", row, text)


def picture(record: Record, path: Path) -> bool:
    """Speed-up of each line, a column for each size; False if there is nothing to draw.

    A bar goes from the dot to where the bytes read would take it at the bandwidth of a copy.
    """
    rows = [row for row in record["rows"] if "speedup" in row and row.get("queries", 1) == 1]
    columns = []
    for batch, context in sorted({(row["batch"], row["context"]) for row in rows}):
        marks = {}
        for row in rows:
            if (row["batch"], row["context"]) == (batch, context):
                ends = sorted((row["speedup"], row["speedup"] / (row["share_of_copy"] or 1)))
                marks[row["name"]] = Mark(row["speedup"], *ends)
        columns.append(Column(f"{batch} x {context // 1024}k, speed-up", marks, True, 1.0, "{:.2f}"))
    names = list(dict.fromkeys(row["name"] for row in sorted(rows, key=lambda row: KINDS.index(row["kind"]))))
    title = (
        f"Decode attention of one layer against the fastest unquantized kernel, {record['gpu']}\n"
        "bars: to where the bytes read would take it at the bandwidth of a copy; grey: not this library's"
    )
    return save_chart(names, columns, title, path, {row["name"] for row in rows if row["kind"] != "format"})
