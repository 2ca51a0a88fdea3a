"""Accuracy of every preset on the reference model, plain and with outlier channels: JSON, pictures.

    PYTHONPATH=. python evals/accuracy.py [measure | slice | table] [--device auto] [--samples 64] [--commit NAME]

"measure" takes minutes on a GPU and hours on a CPU; it writes results/accuracy.json and two pictures.
With --only, of presets, options or typed forms such as best-2.5:fit=0, the rows of these are put among those that are
there.
"slice" writes results/accuracy-slice.json, the small fixed part that the tests measure again, on the CPU. "table"
prints the table of docs/results.md, which `evals/docs.py --write` puts there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from evals.charts import BITS, KLD, Column, Mark, save_chart, share
from evals.figures import described, has_changed
from evals.reference.outliers import with_outliers
from hfkvq.caches import Scheme, get_scheme
from hfkvq.caches.schemes.preset import get_preset
from hfkvq.measure.demo import Settings, choose_schemes, run_demo
from hfkvq.measure.demo.prompts import load
from hfkvq.measure.presets import describe
from hfkvq.measure.records import BASELINE

RESULTS = Path(__file__).parent / "results"

OUTLIERS = 8.0
"""Factor on some key channels of the second model; large models have such channels."""

SLICE = Settings(tasks=("recall-60",), samples=2, batch_size=2, kl_tokens=32)
"""Small enough for every run of the tests; prompts long enough to fill pages."""

AS_IT_WAS = ", as it was"
"""Words behind a preset whose knobs have changed since it was measured."""

app = typer.Typer(add_completion=False)


OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "kitty, values rotated": ("kitty", {"rotate_values": True}),
    "kvarn-k2v2, no factors": ("kvarn-k2v2", {"rounds": 0}),
    "kvarn-k2v2, not rotated": ("kvarn-k2v2", {"rotate": "none"}),
    "mixkvq, 64 channels INT4": ("mixkvq", {"most_bf16": 0.0, "most_int4": 0.5}),
    "the same, error only": ("mixkvq-error-only", {"most_bf16": 0.0, "most_int4": 0.5}),
    "arkv, 256 KiB a head": ("arkv", {"budget_bytes": 2**18}),
    "arkv-origin, 256 KiB": ("arkv-origin", {"budget_bytes": 2**18}),
    "arkv-quant, 256 KiB": ("arkv-quant", {"budget_bytes": 2**18}),
    "arkv-quant, INT4, 256 KiB": ("arkv-quant", {"budget_bytes": 2**18, "low_bits": 4}),
    "snapkv over kitty-pro": ("snapkv", {"pages": "kitty-pro"}),
    "snapkv over saw-int4": ("snapkv", {"pages": "saw-int4"}),
    "pyramidkv over kitty-pro": ("pyramidkv", {"pages": "kitty-pro"}),
}
"""Options that are off by default, to be measured beside the presets."""


def _schemes(options: bool) -> dict[str, Scheme]:
    more = {name: get_scheme(preset, **knobs) for name, (preset, knobs) in OPTIONS.items()} if options else {}
    return choose_schemes(("all",)) | more


def _chosen(names: Sequence[str]) -> dict[str, Scheme]:
    """Presets and options that are named, or all; a preset may have other options in its name."""
    known = _schemes(True)
    return {name: known[name] if name in known else get_preset(name).scheme for name in names or known}


def _measure(settings: Settings, device: str, outliers: float | None, schemes: dict[str, Scheme]) -> dict[str, Any]:
    subject = load(None, device=torch.device(device))
    if outliers is not None:
        name = f"{subject.name}, outliers x{outliers:g}"
        subject = replace(subject, name=name, model=with_outliers(subject.model, outliers))
    return run_demo(subject, settings, schemes=schemes)


def measure(
    settings: Settings, device: str, outliers: float | None, jobs: int, only: Sequence[str] = ()
) -> dict[str, Any]:
    """All presets and options (or only some), by processes: one model's steps hardly keep a GPU, or cores, busy."""
    schemes = _chosen(only)
    names = list(schemes)
    shares = [{name: schemes[name] for name in names[at::jobs]} for at in range(min(jobs, len(names)))]
    with ProcessPoolExecutor(len(shares), mp_context=get_context("spawn")) as pool:
        work = [pool.submit(_measure, settings, device, outliers, share) for share in shares]
        results = [each.result() for each in work]
    rows = {row["name"]: row for result in results for row in result["rows"]}
    return results[0] | {"rows": [rows[name] for name in (BASELINE, *names)]}


def joined(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Record with the rows that were measured now; rows that were not there come last."""
    fresh = {row["name"]: row for row in new["rows"] if row["name"] != BASELINE}
    rows = [fresh.pop(row["name"], row) for row in old["rows"]]
    return old | {"rows": [*rows, *fresh.values()]}


def without_speeds(measured: dict[str, Any]) -> dict[str, Any]:
    """Processes that share a device say nothing about speed."""
    for row in measured["rows"]:
        row.pop("prompt_tokens_per_second")
        row.pop("decode_tokens_per_second")
    measured.pop("seconds")
    return measured


def measure_slice(plain: bool = True) -> dict[str, dict[str, Any]]:
    """The slice on the CPU: by preset, what the table has, plain (or not) and with outliers."""
    found: dict[str, dict[str, Any]] = {}
    for kind, factor in (("plain", None), ("outliers", OUTLIERS))[not plain :]:
        for row in _measure(SLICE, "cpu", factor, _schemes(False))["rows"]:
            right = sum(task["right"] for task in row["tasks"].values())
            total = sum(task["total"] for task in row["tasks"].values())
            kept = {"right": right, "total": total, "kl_mean": row["kl_mean"], "total_bits": row["total_bits"]}
            found.setdefault(row["name"], {})[kind] = kept
    return found


def _kl(row: dict[str, Any]) -> str:
    value = row["kl_mean"]
    return "" if row["scheme"] is None else "<0.0001" if value < 0.00005 else f"{value:.4f}"


def _right(row: dict[str, Any]) -> str:
    return "/".join(str(task["right"]) for task in row["tasks"].values())


def _long(row: dict[str, Any]) -> str:
    if row["scheme"] is None:
        return "16.00"
    least, most = describe(row["name"], described(row["scheme"]))["long_context_bits"]
    return f"{least:.2f}" if least == most else f"{least:.2f} to {most:.2f}"


def markdown(measured: dict[str, Any]) -> str:
    """The table of docs/results.md."""
    plain, hard = measured["plain"]["rows"], {row["name"]: row for row in measured["outliers"]["rows"]}
    total = max(task["total"] for task in plain[0]["tasks"].values())
    head = ["cache", "code bits", "total bits", "bf16 / held", "long context", f"right, of {total} each", "KLD"]
    head += ["right, outliers", "KLD, outliers"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in plain:
        other = hard.get(row["name"])
        code = "–" if row["code_bits"] is None else f"{row['code_bits']:.2f}"
        option = row["name"] in OPTIONS
        name = row["name"] if option else f"`{row['name']}`" + (AS_IT_WAS if has_changed(row) else "")
        cells = [name, code, f"{row['total_bits']:.2f}", f"{row['ratio']:.2f}x"]
        cells += [_long(row), _right(row), _kl(row)]
        cells += ["not measured"] * 2 if other is None else [_right(other), _kl(other)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def picture(kind: str, measured: dict[str, Any], path: Path) -> None:
    """Bits, right answers and KLD of all rows, by bits."""
    rows = sorted(measured["rows"], key=lambda row: row["total_bits"])
    # In the table that row follows the one that it varies.
    names = {"the same, error only": "mixkvq, 64 channels INT4, error only"}
    rows = [row | {"name": names.get(row["name"], row["name"])} for row in rows]
    answers = {}
    for row in rows:
        tasks = row["tasks"].values()
        answers[row["name"]] = share(sum(task["right"] for task in tasks), sum(task["total"] for task in tasks))
    klds = {row["name"]: Mark(row["kl_mean"]) for row in rows if row["kl_mean"] is not None}
    bits = {row["name"]: Mark(row["total_bits"]) for row in rows}
    columns = [Column(BITS, bits, True), Column("right answers, %", answers), Column(KLD, klds, True)]
    title = "Reference model, " + (f"outlier key channels times {OUTLIERS:g}" if kind == "outliers" else "no outliers")
    save_chart([row["name"] for row in rows], columns, title, path)


@app.command()
def main(
    what: Annotated[str, typer.Argument(help="measure, slice or table.")] = "measure",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    samples: Annotated[int, typer.Option(min=1, help="Examples of each task.")] = 64,
    tasks: Annotated[str, typer.Option(help="As `hfkvq demo` names them.")] = "recall-160,arithmetic-12,tools",
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    commit: Annotated[str, typer.Option(help="What is measured, for the record.")] = "",
    only: Annotated[str, typer.Option(help="Presets and options to measure; the others stay as they are.")] = "",
    out: Annotated[Path, typer.Option(help="Folder for the files.")] = RESULTS,
) -> None:
    """Measures, writes figures and pictures, and prints the table."""
    if what not in ("measure", "slice", "table"):
        raise typer.BadParameter(f"got {what!r}, allowed measure, slice or table.")
    if what == "slice":
        text = json.dumps({"versions": _versions(), "rows": measure_slice()}, indent=1)
        (out / "accuracy-slice.json").write_text(text + "\n", encoding="utf-8")
        return
    if what == "measure":
        where = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        settings = Settings(tasks=tuple(tasks.split(",")), samples=samples, batch_size=samples)
        names = [name for name in only.split(",") if name]
        try:
            _chosen(names)
        except ValueError as error:
            raise typer.BadParameter(f"only: {error}") from error
        measured: dict[str, Any] = {"commit": commit}
        if names:
            measured = json.loads((out / "accuracy.json").read_text(encoding="utf-8"))
        for kind, factor in (("plain", None), ("outliers", OUTLIERS)):
            found = without_speeds(measure(settings, where, factor, jobs, names))
            if names:
                for row in found["rows"]:
                    row["commit"] = commit
                measured[kind] = joined(measured[kind], found)
            else:
                measured[kind] = found
            # Each time: half of a long run is better than nothing.
            (out / "accuracy.json").write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    measured = json.loads((out / "accuracy.json").read_text(encoding="utf-8"))
    for kind in ("plain", "outliers"):
        picture(kind, measured[kind], out / f"accuracy-{kind}.png")
    typer.echo(markdown(measured))


def _versions() -> dict[str, str]:
    import transformers

    return {"torch": torch.__version__, "transformers": transformers.__version__}


if __name__ == "__main__":
    app()
