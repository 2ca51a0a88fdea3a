"""Compiles kernels before they are launched, side by side, while the process does something else.

In threads: Triton lets go of Python's lock wherever it takes long, and another process would first have to import all
that this one has. What is launched while it is on its way is waited for, not compiled a second time: Triton's own
`AsyncCompileMode` sees to that, once it has been told of a kernel.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from triton import AsyncCompileMode
from triton.compiler import ASTSource
from triton.runtime import driver

logger = logging.getLogger(__name__)

MOST_THREADS = 8

_PARSING = threading.Lock()

# Begun, but not told to Triton yet.
_BEGUN: list[threading.Event] = []


class Wanted(NamedTuple):
    """A variant of a kernel.

    Attributes:
        kernel: a ``triton.jit`` function.
        arguments: as a launch gives them, with ``torch.dtype`` or Triton's mock tensors for tensors.
        constants: the rest by name, options of the launch included.
    """

    kernel: Any
    arguments: tuple[Any, ...]
    constants: Mapping[str, Any]


class Compiled(NamedTuple):
    """A kernel that is there now, or why it is not.

    Attributes:
        name: of the kernel.
        seconds: how long that took: next to nothing if it was in Triton's cache.
        error: None if all went well.
    """

    name: str
    seconds: float
    error: BaseException | None


class _InTurn(ASTSource):
    """What is compiled, but of all threads one at a time makes IR of Python.

    Python's own parser (up to 3.12) fails now and then where several threads are in it, which would wait anyway.
    """

    def make_ir(self, *args: Any, **kwargs: Any) -> Any:
        with _PARSING:
            return super().make_ir(*args, **kwargs)


def _make_launcher(compiled: Any) -> None:
    """Has Triton build the launcher in C (up to 3.6: half a second a kernel), which the first launch finds built."""
    make = getattr(driver.active, "launcher_cls", None)
    if make is not None:
        # A launch builds it where this does not.
        with contextlib.suppress(Exception):
            make(compiled.src, compiled.metadata)


class _Timed(ThreadPoolExecutor):
    """Notes how long each task takes, by the name that was set before it was submitted."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads, thread_name_prefix="hfkvq-compile")
        self.naming, self.done = "", list[Compiled]()

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        name = self.naming

        def timed() -> Any:
            begun, error = time.perf_counter(), None
            try:
                compiled = function(*args, **kwargs)
                _make_launcher(compiled)
                return compiled
            except BaseException as raised:
                error = raised
                raise
            finally:
                self.done.append(Compiled(name, time.perf_counter() - begun, error))

        return super().submit(timed)


def threads_here() -> int:
    """Threads that compile: as many as there are cores for."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST_THREADS, cores))


def compile_all(wanted: Sequence[Wanted], told: Callable[[], None] = lambda: None) -> list[Compiled]:
    """Compiles for the current device, in the order given, and waits.

    Args:
        wanted: the variants.
        told: called once Triton knows of all of them.

    Returns:
        What has been compiled, or was in Triton's cache, in the order in which it was done.
    """
    failed = None
    with _Timed(threads_here()) as executor:
        try:
            with AsyncCompileMode(executor):
                # None begins before all are known: launches wait for that, and it parses, too.
                with _PARSING:
                    for each in wanted:
                        executor.naming = each.kernel.__name__
                        # Chooses the class that stands for the source, which is ours from then on.
                        each.kernel.device_caches[driver.active.get_current_device()]
                        each.kernel.ASTSource = _InTurn
                        each.kernel.warmup(*each.arguments, grid=(1,), **each.constants)
                told()
        except Exception as error:
            # The first of those that are noted below, unless it is of another kind.
            failed = error
    if failed is not None and all(failed is not each.error for each in executor.done):
        raise failed
    return executor.done


def compile_beside(wanted: Callable[[], Sequence[Wanted]], device: torch.device) -> threading.Event:
    """Has everything compiled for a GPU by other threads; returns at once what is set when that is done."""
    told, finished = threading.Event(), threading.Event()
    _BEGUN.append(told)

    def done() -> None:
        if not told.is_set():
            _BEGUN.remove(told)
            told.set()

    def work() -> None:
        try:
            with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
                found = compile_all(wanted(), done)
            logger.debug("compiled ahead: %s", found)
        except Exception:
            # Nobody waits here. A launch that needs what is missing compiles it, and raises what is wrong.
            logger.debug("compiling ahead has failed", exc_info=True)
        finally:
            done()
            finished.set()

    threading.Thread(target=work, name="hfkvq-ahead", daemon=True).start()
    return finished


def wait_until_told() -> None:
    """Waits until Triton knows of everything that has been begun: moments, whatever that takes to compile."""
    for told in list(_BEGUN):
        told.wait()
