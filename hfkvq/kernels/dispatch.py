"""One dispatch point for every operation: a torch reference anywhere, a Triton launcher where kernels run."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

Keep = Callable[[Callable[..., Any]], None]
"""Takes a call that a launcher has made ready: of the same shapes, over tensors that stay where they are."""
P = ParamSpec("P")
R = TypeVar("R")

_REFERENCES: dict[str, Callable[..., Any]] = {}
# Device types on which operations take their kernels.
_KERNELS_ON = {"cuda": True, "cpu": False}


def exact(function: Callable[P, R]) -> Callable[P, R]:
    """Lets a function compute in the dtypes that it says, also where its caller is in ``torch.autocast``."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not (torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")):
            return function(*args, **kwargs)
        with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
            return function(*args, **kwargs)

    return run


def reference(name: str) -> Callable[..., Any]:
    """The torch body of an op, for launchers that meet a format they have no kernel for."""
    return _REFERENCES[name]


def launched(launcher: str, fake: Callable[..., Any] | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function the reference of an operation, whose launcher takes the same arguments, a tensor first.

    The launcher ("module:function" under `hfkvq.kernels.triton`) is imported at its first call: so nothing here needs
    Triton to be installed.

    With a ``fake``, which makes the result's shapes alone, it is an op of PyTorch's as well: where a compiler traces,
    gradients are wanted or something else looks on. Elsewhere PyTorch's dispatcher is passed by, which takes some
    twenty microseconds, more than a launch.
    """

    def wrap(function: Callable[P, R]) -> Callable[P, R]:
        body, name = exact(function), function.__name__.lstrip("_")
        _REFERENCES[name] = body

        @functools.cache
        def kernel() -> Callable[..., Any]:
            module, attribute = launcher.split(":")
            return getattr(importlib.import_module(f"hfkvq.kernels.triton.{module}"), attribute)

        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            first: Any = args[0]
            return (kernel() if is_direct(first) else body)(*args, **kwargs)

        if fake is None:
            return run
        # PyTorch reads the op's schema from types, which are names of the function's own module.
        run.__signature__ = inspect.signature(function, eval_str=True)  # type: ignore[attr-defined]
        op: Any = torch.library.custom_op(f"hfkvq::{name}", run, mutates_args=())
        op.register_fake(fake)

        @functools.wraps(function)
        def observed(*args: P.args, **kwargs: P.kwargs) -> R:
            first: Any = args[0]
            asked = torch.compiler.is_compiling() or (first.requires_grad and torch.is_grad_enabled())
            if asked or type(first) is not Tensor or first.is_meta or torch._C._len_torch_dispatch_stack():
                return op(*args, **kwargs)
            return run(*args, **kwargs)

        return observed

    return wrap


def is_direct(first: Tensor) -> bool:
    """True where an operation goes straight to its launcher: then what it was given to `Keep` stands for the call."""
    if type(first) is not Tensor or torch._C._len_torch_dispatch_stack():
        return False
    # A device's type takes several times as long to ask for.
    return _KERNELS_ON["cuda"] if first.is_cuda else _KERNELS_ON.get(first.device.type, False)


@contextlib.contextmanager
def _enabled(device: str, enabled: bool) -> Iterator[None]:
    before, _KERNELS_ON[device] = _KERNELS_ON[device], enabled
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
