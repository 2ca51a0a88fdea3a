"""A record as tables, as Markdown and as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from ...charts import Column, Mark, save_chart
from ...tables import NOTHING, markdown_table, new_table, number
from ..cases import short
from ..report import Record
from .cases import Case
from .search import Row

_TITLES = {
    "decode": "decode",
    "turns": "decode, not compiled, in turns",
    "prefill": "prefill",
    "whole": "generate, prefill included",
    "assisted": "generate, a model guessing",
    "lookup": "generate, guesses looked up",
    "cold": "first calls of generate, s",
    "largest": "rows that fit",
}


def _gb(count: int | None) -> str:
    return number(None if count is None else count / 1e9, 1)


def remark_of(row: Row) -> str:
    """What else there is to know of a row."""
    said = []
    if row.get("graphs", 1) != 1:
        said.append(f"{row['graphs']} graphs")
    if row.get("cudagraph_skips"):
        said.append(f"CUDA graph skipped {row['cudagraph_skips']} times")
    if row.get("than", row["engine"]) != row["engine"]:
        share = row["times_as_long"]
        said.append(f"{share['p50']:.2f} times {row['than']} ({share['p20']:.2f} to {share['p80']:.2f})")
    if "ms_step" in row:
        said.append(f"prefill {row['ms_prefill']['p50']:,.0f} ms, then {row['ms_step']:,.2f} ms a step")
    if "forwards" in row:
        said.append(f"{row['forwards']} forwards, {row['accepted']:.2f} guesses of {row['draft_tokens']} taken")
    if "agrees" in row:
        said.append(_agreement(row))
    return ", ".join(said)


def _agreement(row: Row) -> str:
    agrees = row["agrees"]
    if agrees["all"]:
        return f"tokens of {agrees['with']}"
    return f"{agrees['tokens']} tokens as {agrees['with']}"


def table(rows: Sequence[Row]) -> Table:
    """Rows of one kind, named by their size too where it differs."""
    sizes = {Case(row["batch"], row["context"]) for row in rows}
    title = _TITLES[rows[0]["kind"]]
    if len(sizes) == 1:
        title = f"{title}, {sizes.pop().title} tokens"
    # Without a cache that was filled first, all that came after the weights.
    held, head = ("cache_bytes", "cache GB") if rows[0]["kind"] in ("decode", "turns") else ("above_bytes", "added GB")
    columns = ("name", "ms", "p20 to p80", "tokens/s", head, "peak GB", "vs dynamic", "vs static", "")
    view = new_table(title, columns)
    for row in rows:
        name = row["engine"] if not sizes else f"{row['engine']}, {Case(row['batch'], row['context']).title}"
        if "error" in row:
            view.add_row(name, *[NOTHING] * 7, row["error"])
            continue
        ms = row["ms"]
        view.add_row(
            name,
            number(ms["p50"], 2),
            f"{ms['p20']:,.2f} to {ms['p80']:,.2f}",
            number(row["tokens_per_s"], 0),
            _gb(row.get(held)),
            _gb(row.get("peak_bytes")),
            number(row.get("speedup_eager"), 2, "x"),
            number(row.get("speedup_compiled"), 2, "x"),
            remark_of(row),
        )
    return view


def largest_table(rows: Sequence[Row]) -> Table:
    """What searches for the largest batch have found."""
    view = new_table("Rows that fit", ("name", "shape", "largest batch", "best tokens/s", "at batch", ""))
    for row in rows:
        if "error" in row:
            view.add_row(row["engine"], short(row["context"]), *[NOTHING] * 3, row["error"])
            continue
        view.add_row(row["engine"], f"{short(row['context'])} tokens", *_largest_cells(row), "")
    return view


def _largest_cells(row: Row) -> list[str]:
    """Largest batch, and the best speed and where it was."""
    most = f"{row['largest']}" if row["full"] else f"{row['largest']} or more"
    return [most, number(row["tokens_per_s"], 0), str(row["best_batch"])]


def cold_table(rows: Sequence[Row]) -> Table:
    """First calls in processes of their own."""
    title = f"{_TITLES['cold']}, {rows[0]['new_tokens']} new tokens"
    view = new_table(title, ("name", "shape", "1st", "2nd", "3rd", "1st token", "GB above weights", ""))
    for row in rows:
        shape = Case(row["batch"], row["context"]).title
        if "error" in row:
            view.add_row(row["engine"], shape, *[NOTHING] * 5, row["error"])
            continue
        said = [f"after {', '.join(row['after'])}"] if row["after"] else []
        said += [_agreement(row)] if "agrees" in row else []
        seconds = [*row["calls_s"], None, None][:3]
        view.add_row(
            row["engine"],
            shape,
            *(number(each, 2) for each in (*seconds, row["first_token_s"][0])),
            _gb(row["above_bytes"]),
            ", ".join(said),
        )
    return view


def view(rows: Sequence[Row]) -> Table:
    """The table for rows of whatever kind."""
    tables = {"largest": largest_table, "cold": cold_table}
    return tables.get(rows[0]["kind"], table)(rows)


def markdown(record: Record) -> str:
    """Tables to paste: a line for each cache, a column for each size, ``ms (tokens/s)``."""
    rows = record["rows"]
    parts = [f"{record['model']['name']}, random weights, {record['gpu']}: milliseconds (tokens/s)."]
    kinds: list[tuple[str, int | None]] = [(kind, None) for kind in ("decode", "turns", "prefill", "cold")]
    # Of other lengths in tables of their own.
    whole = (row for row in rows if row["kind"] in ("whole", "assisted", "lookup"))
    kinds += dict.fromkeys((row["kind"], row.get("new_tokens")) for row in whole)
    for kind, tokens in kinds:
        own = [row for row in rows if row["kind"] == kind and (tokens is None or row.get("new_tokens") == tokens)]
        if not own:
            continue
        sizes = sorted({(row["context"], row["batch"]) for row in own})
        heads = [Case(batch, context).title for context, batch in sizes]
        found = {(row["engine"], row["context"], row["batch"]): row for row in own}
        title = _TITLES[kind] + (f", {tokens} tokens" if tokens else "")
        engines = dict.fromkeys(row["engine"] for row in own)
        lines = [[f"`{engine}`", *(_cell(found.get((engine, *size))) for size in sizes)] for engine in engines]
        parts.append(markdown_table([title, *heads], lines))
    found_largest = [row for row in rows if row["kind"] == "largest" and "error" not in row]
    if found_largest:
        lines = [[f"`{row['engine']}`", short(row["context"]), *_largest_cells(row)] for row in found_largest]
        parts.append(markdown_table(["rows that fit", "context", "largest batch", "best tokens/s", "at batch"], lines))
    return "\n\n".join(parts) + "\n"


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if "error" in row:
        return "out of memory" if row.get("oom") else "failed"
    if "calls_s" in row:
        return ", ".join(number(each, 2) for each in row["calls_s"])
    return f"{number(row['ms']['p50'], 2)} ({number(row['tokens_per_s'], 0)})"


def notes(record: Record) -> list[str]:
    """How to read the tables."""
    model, versions = record["model"], record["versions"]
    floor = model["weight_ms_of_a_step"]
    said = [
        f"{record['gpu']}, torch {versions['torch']}, Triton {versions['triton']}, Transformers "
        f"{versions['transformers']}, commit {record['commit'] or 'unknown'}. Weights: {_gb(model['weight_bytes'])} GB."
    ]
    if floor is not None:
        said[0] += f" At the speed of a copy a step's weights alone take {floor:.2f} ms."
    return [
        *said,
        "vs dynamic: times faster than DynamicCache, the better of with and without cuDNN attention; vs static: than "
        "StaticCache compiled. Peak counts weights, filling and compiling; added leaves weights out.",
        record["method"],
    ]


# The picture.

_STOCK = ("dynamic", "static", "quanto-", "hqq-")
"""How the names of Transformers' own caches begin."""


def save_plot(record: Record, path: Path) -> bool:
    """Milliseconds per step of each engine, a column for each shape, as a PNG; False if there is nothing to draw.

    Shapes with a single engine, or with Transformers' caches alone, are left out: they compare nothing.

    Raises:
        ImportError: matplotlib is not installed.
    """
    rows = [row for row in record["rows"] if row["kind"] == "decode" and "ms" in row]
    floor = record["model"]["weight_ms_of_a_step"]
    stock = {row["engine"] for row in rows if row["engine"].startswith(_STOCK)}
    columns = []
    for batch, context in sorted({(row["batch"], row["context"]) for row in rows}):
        own = [row for row in rows if (row["batch"], row["context"]) == (batch, context)]
        marks = {row["engine"]: Mark(row["ms"]["p50"]) for row in own}
        if len(marks) > 1 and not marks.keys() <= stock:
            columns.append(Column(f"{batch} x {short(context)}, ms per step", marks, True, floor))
    # The slowest last, as far as the first column tells.
    first = columns[0].marks if columns else {}
    names = sorted(
        {name for column in columns for name in column.marks},
        key=lambda name: (first[name].value if name in first else math.inf, name),
    )
    title = (
        f"Decode steps: {record['model']['name']}'s shape, random weights, {record['gpu']}; grey: Transformers' caches"
    )
    if floor is not None:
        title += "\ndashed line: reading the weights at the speed of a copy"
    return save_chart(names, columns, title, path, stock)
