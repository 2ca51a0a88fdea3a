"""The commands ``hfkvq doctor`` and ``hfkvq env``: presets that suit a model, and what a bug report says."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hfkvq.progress import duration, progress_bar, stoppable
from hfkvq.terminal import (
    Device,
    DType,
    JsonFile,
    Model,
    input_file,
    make_console,
    pick_device,
    print_notes,
    save_json,
    split,
)

# torch and Transformers are imported inside the command, so that help comes at once.
if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from rich.table import Table

    Record = dict[str, Any]

app = typer.Typer()

PACKAGES = ("torch", "transformers", "triton", "accelerate", "safetensors", "lm-eval", "optuna", "liger-kernel")

STYLES = {"safe": "green", "lossy": "yellow", "unsafe": "bold red", "refused": "dim"}


@app.command()
def doctor(
    model: Model = None,
    presets: Annotated[
        str | None,
        typer.Option(help=r"Presets, comma-separated, also with options. \[default: fourteen, the main ones]"),
    ] = None,
    text: Annotated[
        list[Path] | None,
        input_file(r"UTF-8 text, or JSON Lines with a text field. \[default: four bundled texts]"),
    ] = None,
    device: Device = "auto",
    dtype: Annotated[
        DType, typer.Option(help="auto: float32 on a CPU; on a GPU bfloat16 for GGUF files, else the checkpoint's.")
    ] = DType.auto,
    json_file: JsonFile = None,
) -> None:
    """Tell which presets are safe, lossy or unsafe on a model, why, and what to take instead.

    Each preset is compared with DynamicCache: how far its predictions are, and whether it still copies text and finds a
    number in it. The end of the output is for a bug report.
    """
    import torch

    begin = time.monotonic()
    where = pick_device(device)
    kind = getattr(torch, dtype.value) if dtype is not DType.auto else torch.float32 if where.type == "cpu" else None
    words = "nothing is saved, and the same command starts over; fewer --presets take less time."
    with stoppable(words), progress_bar() as show:
        record = _examine(model, split(presets), text, where, kind, lambda what, share: show(f"{what:<17}", share))
    record["seconds"] = time.monotonic() - begin
    console = make_console()
    print_record(console, record)
    save_json(console, record, json_file)


def print_record(console: Console, record: Record) -> None:
    """Prints verdicts, reasons, lines to copy and what a bug report needs."""
    from rich.markup import escape

    console.print(_table(record))
    print_notes(console, _notes(record))
    console.print()
    width = max(len(row["name"]) for row in record["rows"])
    for row in record["rows"]:
        if row["name"] == "full":
            continue
        word = f"[{STYLES[row['verdict']]}]{row['verdict']:<7}[/]"
        instead = "" if row["verdict"] == "safe" else "instead: "
        console.print(
            f"{row['name']:<{width}}  {word}  {instead}{escape(row['take'])}", highlight=False, soft_wrap=True
        )
        if instead:
            console.print(f"  {row['reason']}", markup=False, highlight=False, soft_wrap=True)
    console.print("\nFor a bug report:\n\n```text", highlight=False)
    for line in report_lines(record):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print("```")


def _examine(
    model: str | None,
    names: tuple[str, ...],
    text: list[Path] | None,
    where: torch.device,
    kind: torch.dtype | None,
    show: Any,
) -> Record:
    """The record of a model by its name, with what is to be said of the machine."""
    import torch
    from transformers.utils import logging

    import hfkvq
    from hfkvq.caches.schemes.preset import get_preset
    from hfkvq.measure.demo.prompts import Subject
    from hfkvq.measure.divergence import run as runs
    from hfkvq.measure.divergence.windows import cut, find_texts
    from hfkvq.measure.doctor import EFFORTS, FLOOR, PRESETS, examine
    from hfkvq.measure.models import load_model

    logging.disable_progress_bar()
    chosen = {name: get_preset(name) for name in (FLOOR, *(names or PRESETS.split()))}
    found = runs.find_checkpoint(model)
    source, effort = found.source, EFFORTS[where.type]
    refused = {}
    for name in list(chosen):
        try:
            runs.check_schemes(found, {name: chosen[name]})
        except ValueError as error:
            refused[name] = str(error)
            del chosen[name]
    if not chosen.keys() - {FLOOR}:
        raise ValueError(f"presets: {source.name} can use none of them: {'; '.join(refused.values())}")
    room = getattr(found.config.get_text_config(decoder=True), "max_position_embeddings", None) or 1 << 30
    given = cut(
        find_texts(text, None, "", "text", source.reference, 0),
        found.tokenizer,
        min(room, effort.prompt + effort.scored),
        effort.windows,
    )
    if source.reference and where.type == "cpu":
        # Its operations are so small that several threads gain little.
        torch.set_num_threads(1)
    loaded = load_model(source, where, kind)
    subject = Subject(source.name, loaded, found.tokenizer, source.reference)
    record = examine(subject, given.tokens, chosen, effort, refused, show)
    weights = source.origin or {"revision": getattr(loaded.config, "_commit_hash", None)}
    if source.reference:
        weights = {"bundled with hfkvq": hfkvq.__version__}
    texts = ", ".join(dict.fromkeys(given.names))
    return record | {"weights": weights, "text": texts, "environment": environment()}


def _figures(row: Record, record: Record) -> list[str]:
    from hfkvq.measure.tables import NOTHING, small_number

    if "kld" not in row:
        return [NOTHING] * (3 + len(record["stock"]))
    tasks = [row["tasks"].get(task) for task in record["stock"]]
    answers = [NOTHING if each is None else f"{each['right']}/{each['of']}" for each in tasks]
    return [*map(small_number, row["kld"].values()), f"{100 * row['top1']:.1f}", *answers]


def _table(record: Record) -> Table:
    from rich.markup import escape

    from hfkvq.measure.tables import NOTHING, new_table

    view = new_table(f"{escape(record['model'])}, {record['dtype']}, on {record['device_type']}")
    for name in ("preset", "verdict"):
        view.add_column(name, no_wrap=True)
    for name in ("KLD", "99.9 %", "top-1 %", *record["stock"]):
        view.add_column(name, justify="right", no_wrap=True)
    stock = [f"{each['right']}/{each['of']}" for each in record["stock"].values()]
    view.add_row("DynamicCache", "", NOTHING, NOTHING, NOTHING, *stock, end_section=True)
    for row in record["rows"]:
        view.add_row(row["name"], f"[{STYLES[row['verdict']]}]{row['verdict']}[/]", *_figures(row, record))
    return view


def _notes(record: Record) -> list[str]:
    effort = record["effort"]
    said = [
        f"KLD, nats, from DynamicCache's predictions: {effort['windows']} windows of {record['text']}, "
        f"{effort['scored']} tokens each after {effort['prompt']:,}. Tasks: right answers, of short texts. In "
        f"{duration(record['seconds'])}. So few tokens tell garbage from text, not 1 % from 2 %: `hfkvq kld` measures "
        "more.",
    ]
    said += [f"{task} is left out of the verdicts: {words}." for task, words in record["left_out"].items()]
    if keys := record["keys"]:
        said.append(
            f"Keys are most uneven in layer {keys['layer']}: a channel has {keys['times_median']:.0f} times the median."
        )
    floor = next((row for row in record["rows"] if row["name"] == "full"), None)
    if floor is not None and floor["verdict"] in ("lossy", "unsafe"):
        said.append(
            "`full` holds all 16 bits, and yet differs: the attention or the kernels are at fault, not the presets. "
            "Please report it."
        )
    return said


def report_lines(record: Record) -> list[str]:
    """Block for a bug report: model, machine, versions and figures, in plain text."""
    shapes = [
        f"{one['heads']} query and {one['kv_heads']} KV heads of {one['head_dim']}"
        + f", window {one['window']}" * bool(one["window"])
        for one in record["attention_shapes"]
    ]
    weights = ", ".join(f"{name} {value}" for name, value in record["weights"].items() if value)
    about = {
        "model": f"{record['model']}, {record['layers']} layers, {'; '.join(shapes) or 'heads unknown'}",
        "weights": weights or "unknown",
        "run": f"{record['dtype']}, attention {record['attention']}, on {record['device']}, {record['date']}",
    }
    about |= record["environment"]
    if keys := record["keys"]:
        about["keys"] = f"layer {keys['layer']}: a channel {keys['times_median']:.1f} times the median"
    width = max(map(len, about))
    lines = [f"{name:<{width}}  {value}" for name, value in about.items()]
    head = ["preset", "verdict", "KLD", "99.9 %", "top-1 %", *record["stock"]]
    rows = [head, *([row["name"], row["verdict"], *_figures(row, record)] for row in record["rows"])]
    widths = [max(len(cells[at]) for cells in rows) for at in range(len(head))]
    return [
        *lines,
        "",
        *("  ".join(f"{x:<{w}}" for x, w in zip(cells, widths, strict=True)).rstrip() for cells in rows),
    ]


def environment() -> dict[str, str]:
    """Versions, GPUs and settings, by what they are of."""
    import torch

    import hfkvq
    from hfkvq.measure.records import commit, versions

    found = versions(*PACKAGES)
    source = commit()
    # A package is named by its version; its folder stays private.
    said = {"hfkvq": f"{hfkvq.__version__}, {f'checkout at {source}' if source else 'package'}"}
    said |= {"python": str(found["python"]), "platform": platform.platform()}
    said |= {name: found[name] or "not installed" for name in PACKAGES}
    said["cpu"] = f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    said["CUDA of torch"] = torch.version.cuda or "none"
    if not torch.cuda.is_available():
        said["GPU"] = "none"
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        about = torch.cuda.get_device_properties(index)
        room = about.total_memory / 2**30
        said[f"GPU {index}"] = f"{about.name}, {room:.0f} GiB, compute capability {about.major}.{about.minor}"
    return said


@app.command()
def env() -> None:
    """Show the versions and GPUs to name in a bug report."""
    said = environment()
    width = max(map(len, said))
    typer.echo("\n".join(f"{name:<{width}}  {value}" for name, value in said.items()))
