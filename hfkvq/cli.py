"""The command line: ``hfkvq demo`` and ``hfkvq schemes``."""

from __future__ import annotations

import importlib.util
import json
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console

# torch and Transformers are imported inside the commands, so that help comes at once.
if TYPE_CHECKING:
    import torch

    from hfkvq.demo.prompts import Subject
    from hfkvq.demo.run import Result, Settings

app = typer.Typer(
    help="Compressed KV caches for Hugging Face Transformers.", no_args_is_help=True, add_completion=False
)

# What is piped has no width of its own; the 80 columns that rich then takes would fold the tables.
_PIPED_WIDTH, _UNKNOWN_WIDTH = 120, 80


class DType(str, Enum):
    """Choices of --dtype."""

    auto = "auto"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


def _console() -> Console:
    console = Console()
    return console if console.is_terminal or console.width != _UNKNOWN_WIDTH else Console(width=_PIPED_WIDTH)


def _fail(message: object) -> NoReturn:
    """Ends the command as a wrong argument does, without a traceback."""
    Console(stderr=True, soft_wrap=True).print(f"Error: {message}", style="red", markup=False, highlight=False)
    raise typer.Exit(2)


def _version(value: bool) -> None:
    if value:
        from hfkvq import __version__

        Console().print(__version__, highlight=False)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def schemes(
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
) -> None:
    """List every preset: layout, bits and knobs."""
    from hfkvq.demo.schemes import HEAD_DIM, describe_all, schemes_table

    if as_json:
        typer.echo(json.dumps(describe_all(), indent=2))
        return
    console = _console()
    console.print(schemes_table())
    console.print(
        f"Bits an element for heads of {HEAD_DIM} channels, keys and values together. Code bits are the payload; total "
        "bits count all of a page, scales included, which is what a long context comes to. Knobs are given by name: "
        'get_scheme("kitty", boost_ratio=0.2).',
        style="dim",
        highlight=False,
    )


def _split(text: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip()) if text else ()


def _pick_device(name: str) -> torch.device:
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        _fail(f"device: got {name!r}, allowed auto, cpu, cuda or cuda:N.")
    if device.type not in ("cpu", "cuda"):
        _fail(f"device: got {name!r}, allowed auto, cpu, cuda or cuda:N.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        _fail(f"device: got {name!r}, but PyTorch sees {torch.cuda.device_count()} CUDA devices; use --device cpu.")
    return device


def _check_files(json_file: Path | None, png_file: Path | None) -> None:
    for option, path in (("json", json_file), ("png", png_file)):
        if path is not None and not path.absolute().parent.is_dir():
            _fail(f"{option}: got {path}, but the folder {path.parent} does not exist.")
    if png_file is not None and importlib.util.find_spec("matplotlib") is None:
        _fail("png: matplotlib is not installed; pip install 'hfkvq[plot]'.")


def _load(model: str | None, device: torch.device, dtype: torch.dtype | None, outliers: float | None) -> Subject:
    from transformers.utils import logging

    from hfkvq.demo.prompts import load

    logging.disable_progress_bar()
    try:
        return load(model, device=device, dtype=dtype, outliers=outliers)
    except (OSError, ValueError) as error:
        _fail(str(error) if model is None else f"model: {model!r} cannot be loaded: {error}")


def _run(subject: Subject, settings: Settings) -> Result:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from hfkvq.demo import run_demo

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("", total=1.0)

        def show(cache: str, task: str, share: float) -> None:
            progress.update(bar, description=f"{cache:<13} {task:<13}", completed=share)

        return run_demo(subject, settings, show)


@app.command()
def demo(
    model: Annotated[
        str | None, typer.Option(help="Chat model: a folder or a name on the Hub. [default: the reference model]")
    ] = None,
    schemes: Annotated[str | None, typer.Option(help="Presets, separated by commas. [default: all of them]")] = None,
    tasks: Annotated[
        str, typer.Option(help="recall, arithmetic, tools; also with a size, e.g. recall-40.")
    ] = "recall,arithmetic,tools",
    samples: Annotated[int, typer.Option(min=1, help="Examples of each task.")] = 8,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts run together.")] = 8,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=2, help="Most tokens of an answer. [default: by task; 256 with --model]")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[
        DType, typer.Option(help="auto: bfloat16 for the reference model, otherwise the checkpoint's.")
    ] = DType.auto,
    outliers: Annotated[
        float | None, typer.Option(help="Enlarge some key channels of the reference model by this factor, e.g. 8.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Another seed asks other questions.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", dir_okay=False, metavar="FILE", help="Save all figures.")
    ] = None,
    png_file: Annotated[
        Path | None, typer.Option("--png", dir_okay=False, metavar="FILE", help="Save accuracy against bits.")
    ] = None,
) -> None:
    """Compare the caches: memory, right answers, distance to the stock cache, speed."""
    _check_files(json_file, png_file)
    if outliers is not None and model is not None:
        _fail("outliers: only the reference model can be given outliers; leave --model out.")
    if outliers is not None and not 0 < outliers < float("inf"):
        _fail(f"outliers: got {outliers:g}, allowed a positive factor, e.g. 8.")
    if model is not None and model.startswith((".", "/", "~")) and not Path(model).expanduser().is_dir():
        _fail(f"model: the folder {model} does not exist.")

    import torch

    from hfkvq.demo import Settings
    from hfkvq.demo.report import as_json, notes, save_picture, table

    try:
        settings = Settings(
            tasks=_split(tasks),
            schemes=_split(schemes),
            samples=samples,
            batch_size=batch_size,
            max_new_tokens=max_new_tokens,
            seed=seed,
        )
    except ValueError as error:
        _fail(error)
    where = _pick_device(device)
    kind = None if dtype is DType.auto else getattr(torch, dtype.value)
    subject = _load(str(Path(model).expanduser()) if model else None, where, kind, outliers)
    try:
        result = _run(subject, settings)
    except ValueError as error:
        _fail(error)

    console = _console()
    console.print(table(result, wide=console.width >= 118))
    for note in notes(result):
        console.print(note, style="dim", highlight=False)
    if json_file is not None:
        json_file.write_text(json.dumps(as_json(result), indent=2) + "\n", encoding="utf-8")
        console.print(f"Saved {json_file}", highlight=False)
    if png_file is not None:
        save_picture(result, png_file)
        console.print(f"Saved {png_file}", highlight=False)


def main() -> None:
    """Entry point of the ``hfkvq`` command."""
    app()


if __name__ == "__main__":
    main()
