"""Kernels compiled before they are launched, by other processes, while this one goes on.

A thread of this process looks for them in Triton's cache, which is on disk; has another process compile into that cache
what is not there (`hfkvq.kernels.triton.worker`); and loads it. `Beside` says how far that is. The thread does not
compile by itself: compiling is Python for the most part, and would hold the GIL while a model's steps want it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from triton import knobs
from triton.compiler import ASTSource
from triton.runtime import driver

from .. import dispatch

logger = logging.getLogger(__name__)


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


class _Missing(Exception):
    """A kernel is not in Triton's cache."""


class _Thread(threading.local):
    looks = False


_THREAD = _Thread()

# Two threads may meet the same kernel.
_LOADING = threading.Lock()


class _Source(ASTSource):
    """What is compiled; of a thread that only looks, nothing is."""

    def make_ir(self, *args: Any, **kwargs: Any) -> Any:
        # Triton gets here once it has not found the kernel in its cache.
        if _THREAD.looks:
            raise _Missing
        return super().make_ir(*args, **kwargs)


@contextlib.contextmanager
def _looking() -> Iterator[None]:
    _THREAD.looks = True
    try:
        yield
    finally:
        _THREAD.looks = False


def compile_one(each: Wanted) -> Any:
    """Compiles a kernel for the current device, or finds it in Triton's cache."""
    # Chooses the class that stands for the source, which is ours from then on.
    each.kernel.device_caches[driver.active.get_current_device()]
    each.kernel.ASTSource = _Source
    return each.kernel.warmup(*each.arguments, grid=(1,), **each.constants)


def load(compiled: Any) -> None:
    """Loads a compiled kernel onto the current device, and has its launcher made.

    Raises:
        RuntimeError: Triton has no function for it, since loading it has failed before.
        Exception: what Triton raises where the GPU has no room for it.
    """
    # Not its property `run`, which is there before the function is.
    with _LOADING:
        compiled._init_handles()
    if compiled.function is None:
        raise RuntimeError(f"{compiled.name}: this kernel could not be loaded onto the GPU; see the error before.")


def find(each: Wanted) -> bool:
    """Whether a kernel is in Triton's cache; it is loaded then."""
    try:
        with _looking():
            compiled = compile_one(each)
    except _Missing:
        return False
    # A launch says what is wrong, where the GPU has no room for it.
    with contextlib.suppress(Exception):
        load(compiled)
    return True


def _is_new(each: Wanted) -> bool:
    """Whether no kernel of this name is in Triton's cache, which is a second sooner known than by `find`."""
    if os.environ.get("TRITON_CACHE_MANAGER") or os.environ.get("TRITON_REMOTE_CACHE_BACKEND"):
        return False
    return next(Path(knobs.cache.dir).glob(f"*/{each.kernel.__name__}.json"), None) is None


def are_there(every: Sequence[Wanted], device: torch.device) -> bool:
    """Whether all of these kernels are in Triton's cache; they are loaded then."""
    with _on(device):
        return not every or (not _is_new(every[0]) and all(map(find, every)))


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """This thread's kernels are that device's: each thread begins with the first GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _prepare(wanted: Sequence[Wanted], device: torch.device) -> None:
    """Has Triton read itself and the kernels, which it does once in a process, while these are being compiled."""
    # What is wrong is seen once more when they are looked for.
    with contextlib.suppress(Exception), _on(device):
        for each in wanted:
            find(each)


def module_of(kernel: Any) -> str:
    """The module or package of `hfkvq.kernels.triton` that a kernel is in: ops are registered by these names."""
    return kernel.__module__.removeprefix(f"{__package__}.").partition(".")[0]


class Beside:
    """Kernels on their way: they are looked for, compiled by another process if need be, and loaded.

    Args:
        wanted: which they are.
        compile_them: compiles them into Triton's cache, without this process, and waits for it.
        device: whose they are.
    """

    def __init__(
        self,
        wanted: Callable[[], Sequence[Wanted]],
        compile_them: Callable[[], None],
        device: torch.device,
    ) -> None:
        self._wanted, self._compile, self._device = wanted, compile_them, device
        self._looked, self._done = threading.Event(), threading.Event()
        # Modules of kernels that were not there.
        self._missing: frozenset[str] = frozenset()

    def start(self) -> Beside:
        """Begins, and returns at once."""
        dispatch.compiling.append(self)
        try:
            threading.Thread(target=self._work, name="hfkvq-compile", daemon=True).start()
        except RuntimeError:
            # No thread to be had: launches compile, as they do without this.
            self._end()
        return self

    def is_done(self) -> bool:
        """Whether all are there, or something went wrong."""
        return self._done.is_set()

    def is_ready(self) -> bool:
        """`is_done`, but what has to be loaded only is waited for: some tenths of a second at the most.

        So what a cache computes depends on time only where kernels are compiled; with PyTorch's deterministic
        algorithms, or within `dispatch.await_kernels`, that is waited for, too.
        """
        self._looked.wait()
        if not self._missing or dispatch.awaited or torch.are_deterministic_algorithms_enabled():
            self._done.wait()
        return self.is_done()

    def lacks(self, module: str) -> bool:
        """Whether a kernel of this module (see `module_of`) is still being compiled; see `is_ready`."""
        return not self.is_ready() and module in self._missing

    def _work(self) -> None:
        try:
            with _on(self._device):
                wanted = self._wanted()
                new = bool(wanted) and _is_new(wanted[0])
                missing = wanted if new else [each for each in wanted if not find(each)]
                self._missing = frozenset(module_of(each.kernel) for each in missing)
                self._looked.set()
                if new:
                    threading.Thread(
                        target=_prepare, args=(wanted, self._device), name="hfkvq-prepare", daemon=True
                    ).start()
                if missing:
                    self._compile()
                    missing = [each.kernel.__name__ for each in missing if not find(each)]
            if missing:
                logger.debug("not compiled ahead: %s", missing)
        except Exception as error:
            # A launch that needs what is missing compiles it, and raises what is wrong.
            logger.warning("Kernels were not compiled ahead (%s); each is compiled when it is launched first.", error)
        finally:
            self._end()

    def _end(self) -> None:
        dispatch.compiling.remove(self)
        self._done.set()
        self._looked.set()
