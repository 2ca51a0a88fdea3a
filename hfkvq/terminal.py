"""Shared parts of commands: options, a console, errors without a traceback, and small parsers."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console

from hfkvq.sizes import parse_count

if TYPE_CHECKING:
    import torch

# A pipe has no width; the 80 columns that rich then takes would fold the tables.
_PIPED_WIDTH, _UNKNOWN_WIDTH = 120, 80


def make_console(piped: int = _PIPED_WIDTH) -> Console:
    """Standard output, wide enough for a table; ``piped`` is the width where none is known."""
    console = Console()
    return console if console.is_terminal or console.width != _UNKNOWN_WIDTH else Console(width=piped)


def fail(message: object, code: int = 2) -> NoReturn:
    """Ends the command as a wrong argument does, without a traceback."""
    Console(stderr=True, soft_wrap=True).print(f"Error: {message}", style="red", markup=False, highlight=False)
    raise typer.Exit(code)


def split(text: str | None) -> tuple[str, ...]:
    """The parts between commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip()) if text else ()


def tokens_option(help: str, least: int = 1) -> Any:
    """An option of a number of tokens, ``32k`` or ``32768``; its errors are those of a wrong argument."""

    def read(text: str | int) -> int:
        try:
            return parse_count(text, least=least)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return typer.Option(parser=read, metavar="TOKENS", help=help)


def number_option(help: str, low: float | None = None, high: float | None = None) -> Any:
    """An option of a finite number from ``low`` to ``high``."""
    return typer.Option(min=low, max=high, callback=_finite, help=help)


def _finite(value: float | None) -> float | None:
    """Refuses NaN, which typer's bounds let pass, and infinity."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"got {value}, allowed a finite number.")
    return value


class DType(str, Enum):
    """Choices of --dtype."""

    auto = "auto"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


_MODELS = "a folder, a GGUF file, a name on the Hub, or smollm2."

Model = Annotated[str | None, typer.Option(help=rf"Model: {_MODELS} \[default: the reference model]")]
ChatModel = Annotated[str | None, typer.Option(help=rf"Chat model: {_MODELS} \[default: the reference model]")]
Outliers = Annotated[
    float | None, number_option("Enlarge some key channels of the reference model by this factor, e.g. 8.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
ModelDType = Annotated[
    DType, typer.Option(help="auto: bfloat16 for the reference model and GGUF files, otherwise the checkpoint's.")
]
JsonFile = Annotated[Path | None, typer.Option("--json", dir_okay=False, metavar="FILE", help="Save all figures.")]


def pick_device(name: str) -> torch.device:
    """The device of a name; auto takes a GPU if there is one.

    Raises:
        ValueError: no such device.
    """
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdecimal()):
        raise ValueError(f"device: got {name!r}, allowed auto, cpu, cuda or cuda:N.")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device: got {name!r}, but PyTorch sees {torch.cuda.device_count()} CUDA devices; use --device cpu."
        )
    return torch.device(name)


def check_folder(option: str, path: Path | None) -> None:
    """Ends the command if a file could not be written there."""
    if path is not None and not path.absolute().parent.is_dir():
        fail(f"{option}: got {path}, but the folder {path.parent} does not exist.")


def check_files(picture: str, json_file: Path | None, png_file: Path | None) -> None:
    """Ends the command if its results could not be saved; ``picture`` is the name of the picture's option."""
    check_folder("json", json_file)
    check_folder(picture, png_file)
    if png_file is not None and importlib.util.find_spec("matplotlib") is None:
        fail(f"{picture}: matplotlib is not installed; pip install 'hfkvq[plot]'.")


def print_notes(console: Console, notes: Iterable[str]) -> None:
    """Legend of the output, in small print."""
    for note in notes:
        console.print(note, style="dim", highlight=False)


def save_json(console: Console, record: Any, path: Path | None) -> None:
    """Writes a record, if a file was asked for."""
    if path is not None:
        path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        print_saved(console, path)


def print_saved(console: Console, *paths: Path | None) -> None:
    """Names the files that were written; None for those that nobody asked for."""
    for path in paths:
        if path is not None:
            console.print(f"Saved {path}", highlight=False)
