"""Kernels compiled before they are launched, by other processes, while this one goes on.

Not by threads: compiling is Python for the most part, and a thread that holds its lock keeps a model's steps waiting,
three times as long a step on the machine where this was measured. The other processes leave what they have compiled in
Triton's cache, on disk, where it is looked for first and from where it is loaded.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
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


def find(each: Wanted) -> bool:
    """Whether a kernel is in Triton's cache; it is loaded then."""
    try:
        with _looking():
            compiled = compile_one(each)
    except _Missing:
        return False
    # A launch says what is wrong, where the GPU has no room for it.
    with contextlib.suppress(Exception):
        compiled.run  # noqa: B018
    return True


class Beside:
    """Kernels on their way: they are looked for, compiled by another process if need be, and loaded.

    Args:
        wanted: which they are.
        compile_them: compiles them into Triton's cache, without this process, and waits for it.
        device: whose they are.
    """

    def __init__(
        self, wanted: Callable[[], Sequence[Wanted]], compile_them: Callable[[], None], device: torch.device
    ) -> None:
        self._wanted, self._compile, self._device = wanted, compile_them, device
        self._looked, self._done = threading.Event(), threading.Event()
        # The modules of those that were not there.
        self._missing: frozenset[str] = frozenset()

    def start(self) -> Beside:
        """Begins, and returns at once."""
        dispatch.compiling.append(self)
        threading.Thread(target=self._work, name="hfkvq-compile", daemon=True).start()
        return self

    def is_done(self) -> bool:
        """Whether all are there, or something went wrong."""
        return self._done.is_set()

    def is_ready(self) -> bool:
        """`is_done`, but what has to be loaded only is waited for: some tenths of a second at the most.

        So what a cache computes depends on time only where kernels are compiled; with PyTorch's deterministic
        algorithms, that is waited for, too.
        """
        self._looked.wait()
        if not self._missing or torch.are_deterministic_algorithms_enabled():
            self._done.wait()
        return self.is_done()

    def lacks(self, module: str) -> bool:
        """Whether a kernel of this module, by its last name, is still being compiled; see `is_ready`."""
        return not self.is_ready() and module in self._missing

    def _work(self) -> None:
        try:
            with torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext():
                missing = [each for each in self._wanted() if not find(each)]
                self._missing = frozenset(each.kernel.__module__.rpartition(".")[2] for each in missing)
                self._looked.set()
                if missing:
                    self._compile()
                    missing = [each.kernel.__name__ for each in missing if not find(each)]
            if missing:
                logger.debug("not compiled ahead: %s", missing)
        except Exception:
            # Nobody waits here. A launch that needs what is missing compiles it, and raises what is wrong.
            logger.debug("compiling ahead has failed", exc_info=True)
        finally:
            dispatch.compiling.remove(self)
            self._done.set()
            self._looked.set()
