"""One dispatch point for every operation, PyTorch's own: a torch reference anywhere, Triton where registered."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef


class Compiling(Protocol):
    """Kernels that are being compiled beside."""

    def lacks(self, module: str) -> bool:
        """Whether one of this module, or package, of `hfkvq.kernels.triton` is not there yet."""
        ...


compiling: list[Compiling] = []
"""What is being compiled beside, see `hfkvq.kernels.warm`."""

awaited = 0
"""Within how many contexts of `await_kernels` this process is."""

MOST_BYTES = 32 << 20
"""Of an op's first tensor, for which the reference goes while the kernel is being compiled."""

_OPS: dict[str, CustomOpDef] = {}
_REFERENCES: dict[str, Callable[..., Any]] = {}
_INTERPRETED: set[str] = set()
_LAUNCHERS: dict[str, Callable[..., Any]] = {}
# Device types on which ops that have a kernel take it.
_KERNELS_ON = {"cuda": True, "cpu": False}
# In which module or package of `hfkvq.kernels.triton` the kernels of an op are.
_MODULES: dict[str, str] = {}
# Leaving these contexts would switch the kernels on again, so they are kept.
_SWITCHED_OFF: list[contextlib.AbstractContextManager[None]] = []


def define(name: str, mutates: Iterable[str] = ()) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Makes a function the reference body of the custom op ``hfkvq::name``."""

    def wrap(function: Callable[..., Any]) -> CustomOpDef:
        op = torch.library.custom_op(f"hfkvq::{name}", function, mutates_args=tuple(mutates))
        _OPS[name], _REFERENCES[name] = op, function
        return op

    return wrap


def reference(name: str) -> Callable[..., Any]:
    """The torch body of an op, for launchers that meet a format they have no kernel for."""
    return _REFERENCES[name]


def triton_slot(name: str, launcher: str) -> None:
    """Registers ``launcher`` ("module:function" under `hfkvq.kernels.triton`) as the CUDA kernel of an op.

    The module is imported at the first call, so that nothing here needs Triton to be installed. The same launcher is
    registered, switched off, for the CPU, where `use_interpreter` can switch it on under Triton's interpreter.
    """
    module, function = launcher.split(":")

    @functools.cache
    def found() -> Callable[..., Any]:
        return getattr(importlib.import_module(f"hfkvq.kernels.triton.{module}"), function)

    def run(*args: Any) -> Any:
        return found()(*args)

    op = _OPS[name]
    _LAUNCHERS[name], _MODULES[name] = run, module.partition(".")[0]
    op.register_kernel("cuda")(run)
    op.register_kernel("cpu")(run)
    off = op.set_kernel_enabled("cpu", enabled=False)
    off.__enter__()
    _SWITCHED_OFF.append(off)
    _INTERPRETED.add(name)


def call(op: CustomOpDef, first: Tensor, *args: Any) -> Any:
    """Calls an op as ``op(*args)``, past PyTorch's dispatcher where nothing looks on.

    The dispatcher takes some twenty microseconds for an op like these, more than a launch. It is needed while a graph
    is recorded, for tensor subclasses, and where gradients are. While a kernel of the op's own module is being compiled
    beside, the reference goes instead. That is so of what prompts need. Attention's kernels have modules of their own:
    cache layers see to their steps themselves.

    Args:
        op: what `define` returned.
        first: a tensor of the arguments, whose device decides.
        *args: the op's arguments.
    """
    if not _is_unobserved(first):
        return op(*args)
    name = op._name
    if name in _LAUNCHERS and _is_kernels_own(first) and not _is_on_its_way(name, first):
        return _LAUNCHERS[name](*args)
    return _REFERENCES[name](*args)


def _is_on_its_way(name: str, first: Tensor) -> bool:
    # A reference takes some twelve times the memory of what it is given: for a long prompt, the kernel is waited for.
    if not compiling or first.nbytes > MOST_BYTES:
        return False
    return any(each.lacks(_MODULES[name]) for each in list(compiling))


def _is_unobserved(first: Tensor) -> bool:
    plain = type(first) is Tensor and not first.is_meta and not (first.requires_grad and torch.is_grad_enabled())
    return plain and not torch.compiler.is_compiling() and not torch._C._len_torch_dispatch_stack()


def launches(first: Tensor) -> bool:
    """Whether `call` would go straight to a kernel, whichever it is."""
    return _is_kernels_own(first) and _is_unobserved(first) and not compiling


def _is_kernels_own(first: Tensor) -> bool:
    # To ask for a device's type takes several times as long.
    return _KERNELS_ON["cuda"] if first.is_cuda else _KERNELS_ON.get(first.device.type, False)


@contextlib.contextmanager
def _enabled(device: str, enabled: bool) -> Iterator[None]:
    before = _KERNELS_ON[device]
    with contextlib.ExitStack() as stack:
        for name in sorted(_INTERPRETED):
            stack.enter_context(_OPS[name].set_kernel_enabled(device, enabled=enabled))
        _KERNELS_ON[device] = enabled
        try:
            yield
        finally:
            _KERNELS_ON[device] = before


@contextlib.contextmanager
def await_kernels() -> Iterator[None]:
    """Within this context kernels that are being compiled are waited for, and no reference goes in their place.

    For whoever measures: figures are those of the kernels from the first token on, and no time is that of compiling.
    """
    global awaited
    awaited += 1
    try:
        yield
    finally:
        awaited -= 1


def use_reference() -> contextlib.AbstractContextManager[None]:
    """Within this context CUDA tensors take the torch reference instead of the Triton kernels."""
    return _enabled("cuda", enabled=False)


def use_interpreter() -> contextlib.AbstractContextManager[None]:
    """Within this context CPU tensors take the Triton kernels; needs ``TRITON_INTERPRET=1`` before Triton's import."""
    return _enabled("cpu", enabled=True)
