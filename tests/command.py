"""The command line, as its users type it."""

from __future__ import annotations

from typing import Any

from click.testing import Result
from rich.console import Console
from typer import Typer
from typer.testing import CliRunner

from hfkvq.cli import app


def invoke(*arguments: Any, columns: int = 120, app: Typer = app) -> Result:
    """``hfkvq ARGUMENTS``, or another app's, in a terminal of so many columns."""
    return CliRunner().invoke(app, [str(each) for each in arguments], env={"COLUMNS": str(columns)})


def flat(text: str) -> str:
    """Text without the line breaks and frames of a narrow terminal."""
    return " ".join(text.replace("│", " ").split())


def assert_refused(done: Result, message: str, code: int = 2) -> None:
    """The command ended with an error that says so, and without a traceback."""
    assert done.exit_code == code, done.output
    assert isinstance(done.exception, SystemExit)
    assert message in flat(done.output)
    assert "Traceback" not in done.output


def printed(what: object, width: int = 140) -> str:
    """What a terminal of that width shows."""
    console = Console(width=width, record=True, force_terminal=False)
    with console.capture() as capture:
        console.print(what)
    return capture.get()
