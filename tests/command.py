"""The command line, as its users type it."""

from __future__ import annotations

from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from hfkvq.cli import app


def invoke(*arguments: Any, columns: int = 120) -> Result:
    """``hfkvq ARGUMENTS`` in a terminal of so many columns."""
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
