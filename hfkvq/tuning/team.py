"""Workers of one `hfkvq tune`: a process each, on a GPU of its own, with one storage between them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

PATIENCE = 30.0
"""Seconds that workers have to give their trials back when they are stopped."""


@dataclass(frozen=True)
class Place:
    """Where a worker runs.

    Attributes:
        name: for the reader.
        environment: of its process.
    """

    name: str
    environment: Mapping[str, str]


def find_places(workers: int | None, gpus: str | None, kind: str, visible: int) -> tuple[list[Place], list[int]]:
    """Places of workers, and the numbers of their GPUs.

    Args:
        workers: of them; None is one a GPU that is named, or one.
        gpus: numbers with commas, "all", or None.
        kind: of the device, "cpu" or "cuda".
        visible: GPUs there are.

    Raises:
        ValueError: no such GPU, or GPUs named for a CPU.
    """
    cores = os.cpu_count() or 1
    if kind != "cuda":
        if gpus is not None:
            raise ValueError(f"gpus: got {gpus!r}, but the device is {kind}; leave it out, or choose --device cuda.")
        threads = os.environ.get("OMP_NUM_THREADS", str(max(1, cores // (workers or 1))))
        return [Place(f"worker {i}", {"OMP_NUM_THREADS": threads}) for i in range(workers or 1)], []
    named = [*range(visible)] if gpus in (None, "all") else [_number(part, visible) for part in gpus.split(",")]
    count = workers or (1 if gpus is None else len(named))
    # Numbers count what this process sees, which may be a part of the machine.
    seen = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
    used = [named[i % len(named)] for i in range(count)]
    return [
        Place(f"worker {i} on GPU {gpu}", {"CUDA_VISIBLE_DEVICES": seen[gpu] if seen else str(gpu)})
        for i, gpu in enumerate(used)
    ], used


def _number(text: str, visible: int) -> int:
    if not text.strip().isdecimal() or int(text) >= visible:
        raise ValueError(f"gpus: got {text!r}, allowed all, or numbers from 0 to {visible - 1} with commas.")
    return int(text)


def run_team(
    places: Sequence[Place],
    work: Callable[[Callable[[Any], None]], None],
    on_progress: Callable[[Any], None],
    say: Callable[[str], None],
) -> None:
    """Runs workers until all have ended. One that fails or dies ends alone.

    Args:
        places: one a worker.
        work: what each does; picklable. It is given a function that passes plain data to ``on_progress``.
        on_progress: see there.
        say: told about workers that failed, while others go on.

    Raises:
        ValueError: all have failed; the message has the first one's.
        KeyboardInterrupt: passed on, once the workers have been stopped.
    """
    context = multiprocessing.get_context("spawn")
    running: dict[Any, tuple[Place, Any]] = {}
    errors: list[str] = []
    done = 0
    try:
        for place in places:
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(writer, work), name=place.name)
            with _birth(place.environment):
                process.start()
            writer.close()
            running[reader] = place, process
        while running:
            for reader in wait(list(running)):
                assert isinstance(reader, Connection)
                place, process = running[reader]
                try:
                    kind, what = reader.recv()
                except (EOFError, OSError):
                    kind, what = "failed", ""
                if kind == "progress":
                    on_progress(what)
                    continue
                del running[reader]
                process.join()
                if kind == "done":
                    done += 1
                    continue
                errors.append(what or f"It has died: {_reason(process.exitcode)}.")
                if running:
                    say(f"{place.name}: {errors[-1]} The others go on, and take up what it was at.")
    finally:
        for _, process in running.values():
            process.terminate()
        for _, process in running.values():
            process.join(PATIENCE)
            process.kill()
    if not done:
        raise ValueError(f"workers: all have failed; the first one said: {errors[0]}")


def _reason(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


@contextlib.contextmanager
def _birth(environment: Mapping[str, str]) -> Iterator[None]:
    """What a process that starts here inherits: an environment, and deafness to Ctrl-C, of which this one tells it."""
    before, old = signal.signal(signal.SIGINT, signal.SIG_IGN), dict(os.environ)
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(old)
        signal.signal(signal.SIGINT, before)


def _work(tell: Connection, work: Callable[[Callable[[Any], None]], None]) -> None:
    """A worker's process."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    threading.Thread(target=_outlive, daemon=True).start()
    try:
        work(lambda what: tell.send(("progress", what)))
        tell.send(("done", None))
    except KeyboardInterrupt:
        return
    except Exception as error:
        tell.send(("failed", f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error)))
        if not isinstance(error, (ValueError, OSError, ImportError)):
            raise


def _outlive() -> None:
    """Stops the worker when the process that started it is gone."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
