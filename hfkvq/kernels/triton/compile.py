"""Variants of kernels compiled side by side before their first launch, into Triton's cache on disk.

Threads of this process do it, by Triton's `AsyncCompileMode`: MLIR, LLVM and ptxas release Python's lock (in Triton 3.6
and 3.7), and what holds it, making IR, is done for one kernel after the other. Another process would first import
PyTorch for some seconds, and a spawned one would run the user's script again where that has no ``__main__`` guard.
Variants in Triton's cache are loaded, some hundredths of a second each.
"""

from __future__ import annotations

import contextlib
import contextvars
import gc
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import ModuleType
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

from ._lib import ABSENT, Gpu
from .limits import LIMITS

MOST = 16
"""Kernels that are compiled at a time."""

TURN = 5e-4
"""Seconds after which a thread hands on Python's lock, while kernels are compiled."""

SLOWEST = ("decode_kernel", "latent_kernel", "seal_channel_kernel", "page_norms_kernel", "seal_token_kernel")
"""Kernels that take longest to compile, the longest first."""

GPUS = {10 * x + y: Gpu(f"sm_{x}{y}", x, y, 128, limits.shared) for (x, y), limits in LIMITS.items()}
"""GPUs by compute capability. Nothing that is compiled depends on how many multiprocessors there are."""

# One thread compiles at a time: two caches of a kind want the same kernels, and the second finds them all.
_ONE = threading.Lock()


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


class _Thread(threading.local):
    """A thread's hold on the turn of making IR; None where it has none."""

    turn: threading.Lock | None = None

    def end_turn(self) -> None:
        """Lets the next thread make its IR."""
        turn, self.turn = self.turn, None
        if turn is not None:
            turn.release()


_THREAD = _Thread()


class _Source(ASTSource):
    """Source of a kernel, whose thread lets the next one make its IR when its own is there."""

    def make_ir(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().make_ir(*args, **kwargs)
        finally:
            _THREAD.end_turn()


class _InTurn:
    """Executor of compilations: they make their IR in the order of submission, and run side by side from then on.

    Python makes IR, and threads share its lock. If all made theirs at once, the largest kernel would have its IR last,
    and it takes longest from then on.

    Args:
        pool: threads.
        finish: is given each compiled kernel in the thread that has compiled it.
    """

    def __init__(self, pool: ThreadPoolExecutor, finish: Callable[[Any], None]) -> None:
        self._pool, self.finish = pool, finish
        self._turn, self._waiting = threading.Lock(), deque[tuple[Future[Any], Callable[[], Any]]]()

    def submit(self, compile: Callable[[], Any]) -> Future[Any]:
        """Future of a compiled kernel, as `triton.AsyncCompileMode` asks for it."""
        future: Future[Any] = Future()
        self._waiting.append((future, compile))
        self._pool.submit(self._run)
        return future

    def _run(self) -> None:
        self._turn.acquire()
        _THREAD.turn = self._turn
        future, compile = self._waiting.popleft()
        try:
            compiled = compile()
        except BaseException as error:
            future.set_exception(error)
        else:
            # Launchers and modules of kernels that are done, while others are compiled.
            _THREAD.end_turn()
            self.finish(compiled)
            future.set_result(compiled)
        finally:
            _THREAD.end_turn()


class _Absent:
    """Triton's driver of a GPU that this process leaves alone: it knows its target."""

    def __init__(self, gpu: Gpu) -> None:
        self.target = GPUTarget("cuda", 10 * gpu.major + gpu.minor, 32)

    def get_current_device(self) -> int:
        """Index of the one device."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """None that is used."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """The target that is compiled for."""
        return self.target


def leave_gpu_alone(gpu: Gpu) -> None:
    """From now on this process compiles for a GPU, which need not be there, and can launch nothing."""
    ABSENT[:] = [gpu]
    driver.set_active(_Absent(gpu))


def settle_name(function: Any) -> None:
    """Has Triton read the functions that a ``triton.jit`` function calls before the function itself.

    A kernel's name in the cache is a hash, of the constants too that its callees read. Triton 3.6 and 3.7 leave out
    those of callees that have not been read yet, so the name would depend on what a process has compiled before, and
    another process would not find the kernel.
    """
    # Read already, or interpreted.
    if getattr(function, "hash", "") is not None:
        return
    names, own = function.fn.__code__.co_names, function.__globals__
    modules = [x for x in map(own.get, names) if isinstance(x, ModuleType) and x.__name__.startswith(str(__package__))]
    for called in (*map(own.get, names), *(getattr(module, name, None) for module in modules for name in names)):
        if called is not function:
            settle_name(called)
    function.cache_key  # noqa: B018


def compile_one(each: Wanted) -> Any:
    """Compiles a variant for the current device, or finds it in Triton's cache."""
    settle_name(each.kernel)
    return each.kernel.warmup(*each.arguments, grid=(1,), **each.constants)


def load(compiled: Any) -> None:
    """Loads a compiled kernel onto the current device, and has its launcher made.

    Raises:
        RuntimeError: Triton has no function for it, since loading it has failed before.
        Exception: what Triton raises where the GPU has no room for it.
    """
    # The property `run` is there before the function is, so it tells nothing.
    compiled._init_handles()
    if compiled.function is None:
        raise RuntimeError(f"{compiled.name}: this kernel could not be loaded onto the GPU; see the error before.")


def compile_all(every: Sequence[Wanted], device: torch.device | None) -> list[tuple[str, str]]:
    """Compiles variants, as many at a time as there are cores, loads them, and waits for all of it.

    A variant that fails is left to its launch, which raises what is wrong.

    Args:
        every: variants; equal ones are compiled once.
        device: a GPU of this process; None after `leave_gpu_alone`.

    Returns:
        Name of each variant's kernel, and the compiler's error or "", the slowest kernels first.
    """
    if not every:
        return []
    # The slowest begin first: the longest takes as long as all others of a preset.
    ranks = {name: rank for rank, name in enumerate(SLOWEST)}
    every = sorted(every, key=lambda each: ranks.get(each.kernel.__name__, len(ranks)))
    here = contextlib.nullcontext() if device is None else torch.cuda.device(device)
    # Threads begin with the first GPU.
    setup: Any = {} if device is None else {"initializer": torch.cuda.set_device, "initargs": (device,)}
    finish = _make_launcher if device is None else _load
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with _ONE, here, _undisturbed(), ThreadPoolExecutor(min(MOST, cores, len(every)), **setup) as pool:
        try:
            # In a context of its own: where Triton is interrupted, the mode stays on in it.
            found = contextvars.copy_context().run(_submit, every, _InTurn(pool, finish))
        except BaseException:
            # An interrupt waits for kernels that have begun, not for the others.
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    errors = [f"{type(x).__name__}: {x}" if isinstance(x, Exception) else "" for x in found]
    return [(each.kernel.__name__, error) for each, error in zip(every, errors, strict=True)]


def _submit(every: Sequence[Wanted], pool: _InTurn) -> list[Any]:
    """Each variant's compiled kernel, or the exception that it raised."""
    found: list[Any] = []
    mode: Any = triton.AsyncCompileMode
    with mode(pool, ignore_errors=True):
        for each in every:
            try:
                # Triton sets the class of sources when it first looks for a device's kernels.
                each.kernel.device_caches[driver.active.get_current_device()]
                each.kernel.ASTSource = _Source
                kernel = compile_one(each)
            except Exception as error:
                kernel = error
            else:
                if not isinstance(kernel, triton.FutureKernel):
                    # Compiled by this process before.
                    pool.finish(kernel)
            found.append(kernel)
    futures = [each.future if isinstance(each, triton.FutureKernel) else None for each in found]
    return [
        each if future is None else future.exception() or future.result()
        for each, future in zip(found, futures, strict=True)
    ]


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Leaves cycles uncollected, and has threads hand Python's lock on sooner than after 5 ms.

    A model is many objects, and each search for cycles among them holds the lock. Making IR would hold it so long each
    time that another thread waits for it, and that one may be a step's.
    """
    enabled, before = gc.isenabled(), sys.getswitchinterval()
    gc.disable()
    sys.setswitchinterval(min(before, TURN))
    try:
        yield
    finally:
        sys.setswitchinterval(before)
        if enabled:
            gc.enable()


def _load(compiled: Any) -> None:
    # A launch says what is wrong, where the GPU has no room for it.
    with contextlib.suppress(Exception):
        load(compiled)


def _make_launcher(compiled: Any) -> None:
    """Has Triton build the launcher in C (up to 3.6: half a second a kernel), which the first launch finds built."""
    # A launch builds it where this does not.
    with contextlib.suppress(Exception):
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(compiled.src, compiled.metadata)
