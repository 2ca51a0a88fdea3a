"""One dispatch point for every operation, PyTorch's own: a torch reference anywhere, Triton where registered."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

Keep = Callable[[Callable[..., Any]], None]
"""Takes a call that a launcher has made ready: of the same shapes, over tensors that stay where they are."""
P = ParamSpec("P")
R = TypeVar("R")

_OPS: dict[str, CustomOpDef] = {}
_REFERENCES: dict[str, Callable[..., Any]] = {}
_INTERPRETED: set[str] = set()
_LAUNCHERS: dict[str, Callable[..., Any]] = {}
# Device types on which ops that have a kernel take it.
_KERNELS_ON = {"cuda": True, "cpu": False}
# Leaving these contexts would switch the kernels on again, so they are kept.
_SWITCHED_OFF: list[contextlib.AbstractContextManager[None]] = []


def exact(function: Callable[P, R]) -> Callable[P, R]:
    """Lets a function compute in the dtypes that it says, also where its caller is in ``torch.autocast``."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not (torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")):
            return function(*args, **kwargs)
        with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
            return function(*args, **kwargs)

    return run


def define(name: str, mutates: Iterable[str] = ()) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Makes a function the reference body of the custom op ``hfkvq::name``."""

    def wrap(function: Callable[..., Any]) -> CustomOpDef:
        body: Any = exact(function)
        # PyTorch reads the op's schema from types, which are names of the function's own module.
        body.__signature__ = inspect.signature(function, eval_str=True)
        op: Any = torch.library.custom_op(f"hfkvq::{name}", body, mutates_args=tuple(mutates))
        _OPS[name], _REFERENCES[name] = op, body
        return op

    return wrap


def reference(name: str) -> Callable[..., Any]:
    """The torch body of an op, for launchers that meet a format they have no kernel for."""
    return _REFERENCES[name]


def _imported(launcher: str) -> Callable[..., Any]:
    """A launcher ("module:function" under `hfkvq.kernels.triton`), imported at its first call.

    So nothing here needs Triton to be installed. A launcher takes what the reference takes, whose signature is that of
    both.
    """
    module, function = launcher.split(":")

    @functools.cache
    def found() -> Callable[..., Any]:
        return getattr(importlib.import_module(f"hfkvq.kernels.triton.{module}"), function)

    def run(*args: Any, **direct: Any) -> Any:
        return found()(*args, **direct)

    return run


def launched(launcher: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function the reference of an operation, whose launcher takes the same arguments, a tensor first.

    It is no op of PyTorch's: for operations that no graph records, and that nothing differentiates.
    """

    def wrap(function: Callable[P, R]) -> Callable[P, R]:
        body, kernel = exact(function), _imported(launcher)
        _REFERENCES[function.__name__] = body

        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            first: Any = args[0]
            plain = type(first) is Tensor and not torch._C._len_torch_dispatch_stack()
            return (kernel if plain and _is_kernels_own(first) else body)(*args, **kwargs)

        return run

    return wrap


def triton_slot(name: str, launcher: str) -> None:
    """Registers a launcher as the CUDA kernel of an op, see `_imported`.

    It is registered, switched off, for the CPU as well, where `use_interpreter` can switch it on under Triton's
    interpreter.
    """
    found, op = _imported(launcher), _OPS[name]
    defaults = [each.default for each in inspect.signature(_REFERENCES[name]).parameters.values()]

    def run(*args: Any, **direct: Any) -> Any:
        # PyTorch leaves out what is as the schema has it.
        return found(*args, *defaults[len(args) :], **direct)

    _LAUNCHERS[name] = run
    op.register_kernel("cuda")(run)
    op.register_kernel("cpu")(run)
    off = op.set_kernel_enabled("cpu", enabled=False)
    off.__enter__()
    _SWITCHED_OFF.append(off)
    _INTERPRETED.add(name)


def call(op: CustomOpDef, first: Tensor, *args: Any, **direct: Any) -> Any:
    """Calls an op as ``op(*args)``, past PyTorch's dispatcher where nothing looks on.

    The dispatcher takes some twenty microseconds for an op like these, more than a launch. It is needed while a graph
    is recorded, for tensor subclasses, and where gradients are.

    Args:
        op: what `define` returned.
        first: a tensor of the arguments, whose device decides.
        **direct: arguments of a launcher alone, where the call goes straight to it: ``keep``, given by those who call
            again and again, and ``out``, which it may write its result to.
    """
    if not _is_unobserved(first):
        return op(*args)
    name = op._name
    if name in _LAUNCHERS and _is_kernels_own(first):
        return _LAUNCHERS[name](*args, **direct)
    return _REFERENCES[name](*args)


def is_direct(first: Tensor) -> bool:
    """True where `call` goes straight to a launcher: then what it was given to `Keep` stands for the call."""
    return _is_unobserved(first) and _is_kernels_own(first)


def _is_unobserved(first: Tensor) -> bool:
    plain = type(first) is Tensor and not first.is_meta and not (first.requires_grad and torch.is_grad_enabled())
    return plain and not torch.compiler.is_compiling() and not torch._C._len_torch_dispatch_stack()


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


def use_reference() -> contextlib.AbstractContextManager[None]:
    """Within this context CUDA tensors take the torch reference instead of the Triton kernels."""
    return _enabled("cuda", enabled=False)


def use_interpreter() -> contextlib.AbstractContextManager[None]:
    """Within this context CPU tensors take the Triton kernels; needs ``TRITON_INTERPRET=1`` before Triton's import."""
    return _enabled("cpu", enabled=True)
