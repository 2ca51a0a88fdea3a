"""Shared parts of commands: options, a console, progress, errors without a traceback, and small parsers."""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer
from rich.console import Console
from typer.core import TyperGroup

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
    """Ends the command as a wrong argument does, with one line and without a traceback."""
    line = " ".join(f"Error: {message}".encode("utf-8", "backslashreplace").decode("utf-8").split())
    Console(stderr=True, soft_wrap=True).print(line, style="red", markup=False, highlight=False)
    raise typer.Exit(code)


class Commands(TyperGroup):
    """The group of all commands, where errors of arguments and files end with one line and status 2."""

    def main(self, args: Sequence[str] | None = None, *others: Any, standalone_mode: bool = True, **named: Any) -> Any:
        """Runs a command as `TyperGroup.main` does, but for the words of its errors."""
        if not standalone_mode:
            return super().main(args, *others, standalone_mode=False, **named)
        given = sys.argv[1:] if args is None else list(args)
        try:
            try:
                status = super().main(given, *others, standalone_mode=False, **named)
                sys.exit(status if isinstance(status, int) else 0)
            except (OSError, ValueError, ImportError) as error:
                if isinstance(error, BrokenPipeError):
                    sys.exit(1)
                fail(error)
            except Exception as error:
                # Typer raises click's errors, or, in newer versions, its own.
                if isinstance(error, typer.Exit):
                    raise
                if isinstance(error, typer.Abort):
                    fail("aborted.", 1)
                if not hasattr(error, "format_message"):
                    raise
                shown: Any = error
                if type(error).__name__ == "NoArgsIsHelpError":
                    shown.show()
                    sys.exit(shown.exit_code)
                fail(_usage(error, given))
        except typer.Exit as end:
            sys.exit(end.exit_code)


_ALLOWED = re.compile(
    r"(?:.* is not (?:one of|in the range|an?(?= valid))|Input should be) (.*?)(?:, unable to .*)?\.?"
)


def _usage(error: Any, arguments: Sequence[str]) -> str:
    """The words of a command line that cannot be parsed: option, value, allowed values, and where to look."""
    context, parameter = getattr(error, "ctx", None), getattr(error, "param", None)
    more = f" See {context.command_path} --help." if context is not None else ""
    if parameter is None or not error.message:
        return f"{error.format_message().rstrip('.')}.{more}"
    name = max(parameter.opts, key=len)
    words = error.message.removeprefix("Value error, ").strip()
    if allowed := _ALLOWED.fullmatch(words):
        words = f"got {_value(parameter.opts, arguments)!r}, allowed {allowed[1]}"
    return f"{name}: {words.rstrip('.')}.{more}"


def _value(options: Sequence[str], arguments: Sequence[str]) -> str:
    """The value of an option as it was typed, the last one; of an argument's name nothing is known."""
    for at in range(len(arguments) - 1, -1, -1):
        name, equals, value = arguments[at].partition("=")
        if name in options:
            return value if equals else " ".join(arguments[at + 1 : at + 2])
    return ""


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

    def check(value: float | None) -> float | None:
        # Typer's bounds let NaN pass.
        if value is not None and not math.isfinite(value):
            raise typer.BadParameter(f"got {value}, allowed a finite number.")
        return value

    return typer.Option(min=low, max=high, callback=check, help=help)


def check_writable(path: Path | None) -> Path | None:
    """Raises typer.BadParameter if a file could not be made in its folder; gives the path back."""
    try:
        if path is not None:
            with tempfile.TemporaryFile(dir=path.absolute().parent):
                pass
    except OSError as error:
        reason = f"in a folder that cannot be written ({error.strerror}); choose another folder."
        raise typer.BadParameter(f"got {path}, {reason}") from None
    return path


def input_file(help: str, *names: str, argument: bool = False) -> Any:
    """An option, or an argument, of a file or files that are read; missing ones are refused before anything slow."""
    if argument:
        return typer.Argument(exists=True, dir_okay=False, readable=True, help=help)
    return typer.Option(*names, metavar="FILE", exists=True, dir_okay=False, readable=True, help=help)


def output_file(help: str, *names: str) -> Any:
    """An option of a file that is written; refused before anything slow where it could not be."""
    return typer.Option(*names, metavar="FILE", dir_okay=False, writable=True, callback=check_writable, help=help)


DType = Literal["auto", "bfloat16", "float16", "float32"]
"""Choices of --dtype."""


def dtype_of(name: DType) -> torch.dtype | None:
    """PyTorch's dtype of a name; None for auto."""
    import torch

    return None if name == "auto" else getattr(torch, name)


_MODELS = "a folder, a GGUF file, a name on the Hub, or smollm2."

Model = Annotated[str | None, typer.Option(help=rf"Model: {_MODELS} \[default: the reference model]")]
ChatModel = Annotated[str | None, typer.Option(help=rf"Chat model: {_MODELS} \[default: the reference model]")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
ModelDType = Annotated[
    DType, typer.Option(help="auto: bfloat16 for the reference model and GGUF files, otherwise the checkpoint's.")
]
JsonFile = Annotated[Path | None, output_file("Save all figures.", "--json")]


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


def print_notes(console: Console, notes: Iterable[str]) -> None:
    """Legend of the output, in small print."""
    for note in notes:
        console.print(note, style="dim", highlight=False)


def save_json(console: Console, record: Any, path: Path | None) -> None:
    """Writes a record, if a file was asked for."""
    if path is not None:
        path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        console.print(f"Saved {path}", highlight=False)


INTERVAL = 10.0
"""Seconds between plain lines at the least."""


def duration(seconds: float) -> str:
    """``45 s``, ``2 min 05 s`` or ``1 h 10 min``."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes = whole // 60
    return f"{minutes} min {whole % 60:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[str, float], None]]:
    """Progress on standard error, by a function of the present task's name and the share done: a bar or plain lines."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console, told = Console(stderr=True), -math.inf
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    plain = not console.is_terminal
    with Progress(*columns, *times, console=console, transient=True, disable=plain) as view:
        bar = view.add_task("", total=1.0)

        def show(name: str, share: float) -> None:
            nonlocal told
            view.update(bar, description=name, completed=share)
            if plain and time.monotonic() - told >= INTERVAL:
                told = time.monotonic()
                left = view.tasks[0].time_remaining
                words = "" if left is None else f", about {duration(left)} left"
                typer.echo(f"{' '.join(name.split())}, {100 * share:.0f} %{words}", err=True)

        yield show


def stop(words: str) -> NoReturn:
    """Ends the command after Ctrl-C, and says how to go on."""
    Console(stderr=True, soft_wrap=True).print(f"Stopped: {words}", style="yellow", markup=False, highlight=False)
    raise typer.Exit(130)


@contextlib.contextmanager
def stoppable(words: str) -> Iterator[None]:
    """Ctrl-C within ends the command with these words: what is kept, and how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        stop(words)
