"""Progress of long commands, a bar in a terminal and plain lines elsewhere, and their end by Ctrl-C."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

import typer
from rich.console import Console

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
def stoppable(words: str | Callable[[], str]) -> Iterator[None]:
    """Ctrl-C within ends the command with these words: what is kept, and how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        stop(words if isinstance(words, str) else words())
