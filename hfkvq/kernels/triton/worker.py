"""The processes that compile: one that imports what it needs, and its children, a kernel each at a time."""

from __future__ import annotations

import atexit
import contextlib
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import MockTensor

from ..step import StepPlan
from ._lib import Gpu, stand_in
from .ahead import Wanted, compile_one

MOST = 16
"""Kernels that are compiled at a time."""

MOST_BESIDE = 4
"""The same beside a model whose steps want cores, too: the longest takes as long as all others of a preset."""

SLOWEST = ("decode_kernel", "seal_channel_kernel", "page_norms_kernel", "seal_token_kernel")
"""Kernels that take longest to compile, the longest first."""

# With the path of the process that asks, and the package without its own `__init__`, which imports Transformers: that
# takes longer than to compile. Triton reads all of itself for the names in its cache, some 400 MB: meanwhile PyTorch is
# imported, and processes that are forked find it done.
_START = """
import pickle, sys, threading, types
sys.path[:], where = pickle.load(sys.stdin.buffer)
def read():
    from triton.runtime.cache import triton_key
    triton_key()
import triton
reading = threading.Thread(target=read)
reading.start()
import torch
reading.join()
package = types.ModuleType("hfkvq")
package.__path__ = [where]
sys.modules["hfkvq"] = package
from hfkvq.kernels.triton.worker import main
main()
"""

_READY, _ANSWER = "hfkvq is ready", "hfkvq compiled "
"""The line that says that all is imported, and how the one begins that says how it went: imports may print, too."""

LONGEST = 600.0
"""Seconds after which a process beside a model is given up."""


class Order(NamedTuple):
    """A layer whose kernels are to be compiled; see `hfkvq.kernels.warm.start`."""

    plan: StepPlan
    query_heads: int
    rule: str | None
    steps: tuple[int, ...]


class Compiled(NamedTuple):
    """What has become of a kernel.

    Attributes:
        name: of the kernel.
        seconds: how long that took: next to nothing if it was in Triton's cache.
        error: what went wrong, or "".
    """

    name: str
    seconds: float
    error: str


class Absent:
    """Triton's driver of a GPU that this process leaves alone: it knows its target."""

    def __init__(self, gpu: Gpu) -> None:
        self.target = GPUTarget("cuda", 10 * gpu.major + gpu.minor, 32)

    def get_current_device(self) -> int:
        """Of one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """None that is used."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """What is compiled for."""
        return self.target


def compile_elsewhere(orders: Callable[[], Sequence[Order]], gpu: Gpu, beside: bool = False) -> list[Compiled]:
    """Compiles what layers launch into Triton's cache, by other processes, and waits for it.

    Args:
        orders: gives the layers, once the process has imported what it needs: that takes seconds, and more may come.
        gpu: for which it is.
        beside: whether others come first: fewer processes then, of low priority.

    Raises:
        RuntimeError: no process could be started, or it has failed.
    """
    if not sys.executable or getattr(sys, "frozen", False):
        raise RuntimeError("no process that compiles could be started: this Python has no interpreter of its own")
    package = Path(__file__).resolve().parents[2]
    with contextlib.ExitStack() as stack:
        try:
            errors = stack.enter_context(tempfile.TemporaryFile())
            process = subprocess.Popen(
                # Isolated: neither the current folder nor the environment has a say in what is imported.
                [sys.executable, "-I", "-c", _START],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                # An interrupt is meant for this process, which ends the others when it leaves.
                start_new_session=True,
            )
            stack.enter_context(process)
            # Whatever happens here, it does not stay.
            stack.callback(_kill, process)
            if beside:
                watch = threading.Timer(LONGEST, _kill, (process,))
                watch.daemon = True
                watch.start()
                stack.callback(watch.cancel)
            lines = _told(process, pickle.dumps((sys.path, str(package))), lambda: (list(orders()), gpu, beside))
        except OSError as error:
            raise RuntimeError(f"the process that compiles has failed: {error}") from error
        if not lines or not lines[-1].startswith(_ANSWER):
            process.wait()
            errors.seek(0)
            told = errors.read().decode(errors="replace").strip().splitlines()
            raise RuntimeError(f"the process that compiles ended with {process.returncode}: {told[-1] if told else ''}")
        return [Compiled(*each) for each in json.loads(lines[-1].removeprefix(_ANSWER))]


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Ends a process, and with it its children, of which it is the group: they would wait for jobs for ever."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()


def _told(process: subprocess.Popen[bytes], first: bytes, orders: Callable[[], Any]) -> list[str]:
    """What a process prints, up to its answer, that is told ``first``, and the orders as soon as it is ready."""
    given, printed = process.stdin, process.stdout
    assert given is not None
    assert printed is not None
    lines: list[str] = []
    telling, told = threading.Lock(), False

    def tell() -> None:
        nonlocal told
        with telling:
            if not told:
                told = True
                given.write(pickle.dumps(orders()))
                given.flush()

    def leave() -> None:
        # This process ends before that one is ready: it finds its orders then, and the next process the kernels.
        with contextlib.suppress(OSError, ValueError):
            tell()

    atexit.register(leave)
    # One that has ended hears nothing, and has said why.
    try:
        with contextlib.suppress(BrokenPipeError):
            given.write(first)
            given.flush()
            for line in printed:
                lines.append(line.decode(errors="replace"))
                if lines[-1].startswith(_READY):
                    tell()
                elif lines[-1].startswith(_ANSWER):
                    # To end takes it some tenths of a second.
                    break
    finally:
        atexit.unregister(leave)
    return lines


def main() -> None:
    """The first process: is told on its standard input what to compile, and says on its output how it went.

    It goes on where who has asked ends meanwhile: the next process finds the kernels.
    """
    # With it the variants are worked out; what compiles is imported.
    from . import warm  # noqa: F401

    _say(_READY)
    orders, gpu, beside = pickle.load(sys.stdin.buffer)
    if beside:
        os.nice(10)
        _end_in_time()
    _say(f"{_ANSWER}{json.dumps(compile_all(orders, gpu, MOST_BESIDE if beside else MOST))}")


def _say(line: str) -> None:
    """A line for who has asked, if it is still there."""
    try:
        sys.stdout.write(f"\n{line}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # What is left of it is not written once more when this process ends.
        _leave_output()


def _end_in_time() -> None:
    """Nobody may be left who ends this process and its children when it takes too long."""
    if hasattr(signal, "SIGALRM"):
        signal.signal(signal.SIGALRM, lambda *_: os.killpg(0, signal.SIGKILL))
        signal.alarm(int(LONGEST))


_JOBS: list[Wanted] = []


def leave_gpu_alone(gpu: Gpu) -> None:
    """From now on this process compiles for a GPU, which need not be there, and can launch nothing."""
    stand_in(gpu)
    driver.set_active(Absent(gpu))


def compile_all(orders: Sequence[Order], gpu: Gpu, most: int) -> list[Compiled]:
    """Compiles for a GPU that need not be there, ``most`` at a time; from now on this process can launch nothing."""
    from .warm import wanted

    leave_gpu_alone(gpu)
    device = torch.device("cuda", 0)
    every = {key_of(each): each for order in orders for each in wanted(*order, device)}
    _JOBS[:] = sorted(every.values(), key=_rank)
    children = max(1, min(most, _cores(), len(_JOBS)))
    # They find here what has been imported, and nothing of this process is in their way: it has one thread.
    return _side_by_side(children)


def _side_by_side(children: int) -> list[Compiled]:
    """All jobs; a child that dies fails them all (`multiprocessing.Pool` would wait for its job for ever)."""
    with ProcessPoolExecutor(children, multiprocessing.get_context("fork"), _leave_output) as pool:
        return list(pool.map(_compile, range(len(_JOBS))))


def _leave_output() -> None:
    """Of a child: whoever reads what the first process prints learns of its end, though children may outlive it."""
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 1)


def _compile(at: int) -> Compiled:
    each, begun, error = _JOBS[at], time.perf_counter(), ""
    try:
        _make_launcher(compile_one(each))
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    return Compiled(each.kernel.__name__, time.perf_counter() - begun, error)


def _make_launcher(compiled: Any) -> None:
    """Has Triton build the launcher in C (up to 3.6: half a second a kernel), which the first launch finds built."""
    # A launch builds it where this does not.
    with contextlib.suppress(Exception):
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(compiled.src, compiled.metadata)


def _rank(each: Wanted) -> int:
    name = each.kernel.__name__
    return SLOWEST.index(name) if name in SLOWEST else len(SLOWEST)


def key_of(each: Wanted) -> Any:
    """Equal for what is one kernel only. What Triton takes for one may have two keys: then it is compiled twice."""
    return each.kernel.__name__, _kinds(each.arguments), _plain(tuple(sorted(each.constants.items())))


def _kinds(x: Any) -> Any:
    """What Triton asks of arguments: of integers, whether they are 1, multiples of 16, and of 32 bits."""
    if isinstance(x, tuple):
        return tuple(_kinds(part) for part in x)
    return (x == 1, x % 16 == 0, -(1 << 31) <= x < 1 << 31) if type(x) is int else _plain(x)


def _plain(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(_plain(part) for part in x)
    return str(x.dtype) if isinstance(x, MockTensor) else x if isinstance(x, (int, float, str, bool)) else str(x)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
