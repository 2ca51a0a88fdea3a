"""How far a long command is: a bar in a terminal, plain lines elsewhere; and what Ctrl-C leaves behind."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

import typer
from rich.console import Console

INTERVAL = 10.0
"""Seconds between plain lines at the least; of a long run a twentieth of what has passed."""


def duration(seconds: float) -> str:
    """``45 s``, ``2 min 05 s`` or ``1 h 10 min``."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes = whole // 60
    return f"{minutes} min {whole % 60:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


class PlainLines:
    """Progress as lines, for files and logs: what is done, how much of all, time passed and left.

    Args:
        write: takes a line.
        clock: seconds.
        known: whether shares are known; else a line is what is being done.
    """

    def __init__(
        self, write: Callable[[str], object], clock: Callable[[], float] = time.monotonic, known: bool = True
    ) -> None:
        self._write, self._clock, self._known = write, clock, known
        self._begin = clock()
        # What was done before, by an earlier run.
        self._first: float | None = None
        self._told = float("-inf")

    def __call__(self, what: str, share: float = 0.0) -> None:
        """Writes a line, unless the last one is fresh."""
        now = self._clock()
        passed = now - self._begin
        self._first = share if self._first is None else self._first
        if now - self._told < max(INTERVAL, passed / 20):
            return
        self._told = now
        parts = [" ".join(what.split())]
        parts += [f"{100 * share:.0f} %"] if self._known else []
        parts += [duration(passed)] if passed >= 1 else []
        done = share - self._first
        parts += [f"about {duration(passed * (1 - share) / done)} left"] if done > 0 and passed >= 1 else []
        self._write(", ".join(parts))


@contextlib.contextmanager
def progress_bar(output: Console | None = None) -> Iterator[Callable[[str, float], None]]:
    """On standard error; is told what is being done, and the share that is.

    Where something is printed meanwhile, ``output`` is the console that prints it: if that is a terminal, the bar stays
    below.
    """
    console = output if output is not None and output.is_terminal else Console(stderr=True)
    if not console.is_terminal:
        yield PlainLines(lambda line: typer.echo(line, err=True))
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    with Progress(*columns, *times, console=console, transient=True) as view:
        bar = view.add_task("", total=1.0)
        yield lambda what, share: view.update(bar, description=what, completed=share)


@contextlib.contextmanager
def status_line(begin: str = "") -> Iterator[Callable[[str], None]]:
    """On standard error, where nobody knows the share: is told what is being done."""
    console = Console(stderr=True)
    if not console.is_terminal:
        show = PlainLines(lambda line: typer.echo(line, err=True), known=False)
        if begin:
            show(begin)
        yield show
        return
    with console.status(begin) as status:
        yield status.update


def stop(words: str) -> NoReturn:
    """Ends the command after Ctrl-C, and says how to go on."""
    Console(stderr=True, soft_wrap=True).print(f"Stopped: {words}", style="yellow", markup=False, highlight=False)
    raise typer.Exit(130)


@contextlib.contextmanager
def stoppable(words: str | Callable[[], str]) -> Iterator[None]:
    """Ctrl-C within ends the command with these words: what is kept, and how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        stop(words if isinstance(words, str) else words())
