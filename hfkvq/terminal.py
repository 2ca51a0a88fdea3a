"""What commands share: a console, errors without a traceback, and small parsers."""

from __future__ import annotations

import importlib.util
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer
from rich.console import Console

if TYPE_CHECKING:
    import torch

# What is piped has no width of its own; the 80 columns that rich then takes would fold the tables.
_PIPED_WIDTH, _UNKNOWN_WIDTH = 120, 80


def make_console() -> Console:
    """Standard output, wide enough for a table."""
    console = Console()
    return console if console.is_terminal or console.width != _UNKNOWN_WIDTH else Console(width=_PIPED_WIDTH)


def fail(message: object, code: int = 2) -> NoReturn:
    """Ends the command as a wrong argument does, without a traceback."""
    Console(stderr=True, soft_wrap=True).print(f"Error: {message}", style="red", markup=False, highlight=False)
    raise typer.Exit(code)


def split(text: str | None) -> tuple[str, ...]:
    """The parts between commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip()) if text else ()


class DType(str, Enum):
    """Choices of --dtype."""

    auto = "auto"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


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


def check_files(picture: str, json_file: Path | None, png_file: Path | None) -> None:
    """Ends the command if its results could not be saved; ``picture`` is the name of the picture's option."""
    for option, path in (("json", json_file), (picture, png_file)):
        if path is not None and not path.absolute().parent.is_dir():
            fail(f"{option}: got {path}, but the folder {path.parent} does not exist.")
    if png_file is not None and importlib.util.find_spec("matplotlib") is None:
        fail(f"{picture}: matplotlib is not installed; pip install 'hfkvq[plot]'.")
