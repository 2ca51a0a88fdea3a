"""A run as a table, as JSON, as a picture, and against an earlier run."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from hfkvq.bounded import load_json

from ..charts import Column, Mark, save_chart
from ..records import now, versions
from ..tables import NOTHING, new_table, number
from .cases import Shape, short
from .checks import checkout
from .rows import Row
from .timing import METHOD, Timing

KIND = "hfkvq bench kernels"
REGRESSION = 5.0
"""Per cent of time that a line may take more than before without being flagged."""

Record = dict[str, Any]

KINDS = ("baseline", "bound", "peer", "format")
"""Of lines, in the order of tables."""

_SHAPE = ("batch", "context", "heads", "kv_heads", "head_dim", "dtype")


def shape_of(row: Row) -> Shape:
    """The shape a line was measured at."""
    # Rotary parts are of latents alone.
    return Shape(
        **{field: row[field] for field in _SHAPE}, rope_dim=row.get("rope_dim", 0), queries=row.get("queries", 1)
    )


def rows_at(record: Record, shape: Shape) -> list[Row]:
    """The lines of a shape, ours last, other packages' before them."""
    rows = [row for row in record["rows"] if shape_of(row) == shape]
    return sorted(rows, key=lambda row: KINDS.index(row["kind"]))


# The record.


def _output(*command: str) -> str:
    """First line that a command prints; nothing if it is not there or fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip().partition("\n")[0] if done.returncode == 0 else ""


def commit_of(root: Path | None) -> str:
    """What git calls the checkout's state; nothing where there is no repository."""
    if root is None or not (root / ".git").exists():
        return ""
    return _output("git", "-C", str(root), "describe", "--always", "--dirty", "--tags")


def environment(device: torch.device, commit: str) -> Record:
    """GPU, versions, commit and date."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "kind": KIND,
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "memory_bytes": properties.total_memory,
        "versions": {
            **versions("torch", "triton", "transformers"),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        },
        "commit": commit or commit_of(checkout()),
        "date": now(),
        "method": METHOD,
    }


def describe_copy(nbytes: int, timing: Timing) -> Record:
    """The copy that bandwidths are compared with."""
    us = {"p20": timing.p20, "p50": timing.p50, "p80": timing.p80}
    return {"bytes": nbytes, "us": us, "tb_per_s": nbytes / timing.p50 / 1e6}


def save(record: Record, path: Path) -> None:
    """Writes the record as JSON, at once: whenever the run ends, the file is whole."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(record, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    new.replace(path)


def load(path: Path) -> Record:
    """Reads a record. Raises ValueError if the file is none."""
    try:
        record = load_json(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"compare: {path} cannot be read: {error}") from error
    if not isinstance(record, dict) or record.get("kind") != KIND:
        raise ValueError(f"compare: {path} was not written by `{KIND} --json`.")
    return record


def file_name(path: Path, gpu: str, suffix: str) -> Path:
    """The file itself, or ``kernels-<gpu><suffix>`` in a folder."""
    if not path.is_dir():
        return path
    words = [word for word in gpu.lower().replace("/", " ").split() if word not in ("nvidia", "geforce")]
    return path / f"kernels-{'-'.join(words)}{suffix}"


# Tables.


def table(rows: Sequence[Row]) -> Table:
    """The lines of one shape."""
    columns = ("name", "us", "p20 to p80", "MB", "TB/s", "of copy", "speed-up", "")
    view = new_table(shape_of(rows[0]).title, columns)
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        last = after is not None and after["kind"] != row["kind"]
        if "error" in row:
            view.add_row(row["name"], *[NOTHING] * 6, row["error"], end_section=last)
            continue
        us, share = row["us"], row["share_of_copy"]
        view.add_row(
            row["name"],
            number(us["p50"], 1),
            f"{us['p20']:,.1f} to {us['p80']:,.1f}",
            number(row["bytes"] / 1e6, 1),
            number(row["tb_per_s"], 2),
            number(None if share is None else 100 * share, 0, " %"),
            number(row.get("speedup"), 2, "x"),
            row["remark"],
            end_section=last,
        )
    return view


def compare(before: Record, after: Record) -> list[dict[str, Any]]:
    """Change of every line that both records hold.

    Returns:
        For each: ``shape``, ``name``, ``before`` and ``after`` in microseconds, ``change`` of the time in per cent, and
        ``regression``, whether it is more than `REGRESSION`.
    """

    def by_name(record: Record) -> dict[tuple[Any, ...], Row]:
        return {(shape_of(row), row["name"]): row for row in record["rows"] if "us" in row}

    old = by_name(before)
    changes = []
    for key, row in by_name(after).items():
        if key not in old:
            continue
        was, now = old[key]["us"]["p50"], row["us"]["p50"]
        change = 100 * (now / was - 1)
        changes.append(
            {
                "shape": shape_of(row),
                "name": row["name"],
                "before": was,
                "after": now,
                "change": change,
                "regression": change > REGRESSION,
            }
        )
    return changes


def compare_table(before: Record, after: Record) -> Table:
    """`compare` to read."""
    what = f"Time against {before['commit'] or 'a run'} of {before['date'][:10]} on {before['gpu']}"
    view = new_table(what, ("shape", "name", "us before", "us now", "change", ""))
    for line in compare(before, after):
        shape = line["shape"]
        view.add_row(
            f"{shape.batch} x {short(shape.context)}" + (f", {short(shape.queries)}" if shape.queries > 1 else ""),
            line["name"],
            number(line["before"], 1),
            number(line["after"], 1),
            f"{line['change']:+.1f} %",
            "slower" if line["regression"] else "",
            style="red" if line["regression"] else None,
        )
    return view


def notes(record: Record) -> list[str]:
    """How to read the tables."""
    copied = record["copy"]["tb_per_s"]
    return [
        f"{record['gpu']}, torch {record['versions']['torch']}, Triton {record['versions']['triton']}, commit "
        f"{record['commit'] or 'unknown'}. A copy within the GPU moves {copied:.2f} TB/s, read and written.",
        "MB is what has to move: pages and windows as far as they hold tokens, queries and outputs. Speed-up is "
        "against the fastest unquantized kernel of the same shape, of whichever package.",
        record["method"],
    ]


# The picture.


def _place(row: Row) -> tuple[int, int, int]:
    return row["batch"], row["context"], row.get("queries", 1)


def save_plot(record: Record, path: Path) -> bool:
    """Speed-up of each line, a column for each shape, as a PNG; False if there is nothing to draw.

    A bar goes from the dot to where the bytes read would take it at the bandwidth of a copy.

    Raises:
        ImportError: matplotlib is not installed.
    """
    rows = [row for row in record["rows"] if "speedup" in row]
    columns = []
    for batch, context, queries in sorted({_place(row) for row in rows}):
        own = [row for row in rows if _place(row) == (batch, context, queries)]
        marks = {row["name"]: _mark(row) for row in own}
        asked = f", {short(queries)} queries" if queries > 1 else ""
        title = f"{batch} x {short(context)}{asked}, speed-up"
        columns.append(Column(title, marks, logarithmic=True, line=1.0, form="{:.2f}"))
    names = list(dict.fromkeys(row["name"] for row in sorted(rows, key=lambda row: KINDS.index(row["kind"]))))
    others = {row["name"] for row in rows if row["kind"] != "format"}
    title = (
        f"Decode attention of one layer against the fastest unquantized kernel, {record['gpu']}\n"
        "bars: to where the bytes read would take it at the bandwidth of a copy; grey: not this library's"
    )
    return save_chart(names, columns, title, path, others)


def _mark(row: Row) -> Mark:
    """Speed-up, and the one that its bytes allow."""
    if not row["share_of_copy"]:
        return Mark(row["speedup"])
    limit = row["speedup"] / row["share_of_copy"]
    return Mark(row["speedup"], min(row["speedup"], limit), max(row["speedup"], limit))
