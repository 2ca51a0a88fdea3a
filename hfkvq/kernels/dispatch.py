"""One dispatch point for every operation, PyTorch's own: a torch reference anywhere, Triton where registered."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef

_OPS: dict[str, CustomOpDef] = {}
_REFERENCES: dict[str, Callable[..., Any]] = {}
_INTERPRETED: set[str] = set()
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

    def call(*args: Any) -> Any:
        return getattr(importlib.import_module(f"hfkvq.kernels.triton.{module}"), function)(*args)

    op = _OPS[name]
    op.register_kernel("cuda")(call)
    op.register_kernel("cpu")(call)
    off = op.set_kernel_enabled("cpu", enabled=False)
    off.__enter__()
    _SWITCHED_OFF.append(off)
    _INTERPRETED.add(name)


@contextlib.contextmanager
def _enabled(device: str, enabled: bool) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name in sorted(_INTERPRETED):
            stack.enter_context(_OPS[name].set_kernel_enabled(device, enabled=enabled))
        yield


def use_reference() -> contextlib.AbstractContextManager[None]:
    """Within this context CUDA tensors take the torch reference instead of the Triton kernels."""
    return _enabled("cuda", enabled=False)


def use_interpreter() -> contextlib.AbstractContextManager[None]:
    """Within this context CPU tensors take the Triton kernels; needs ``TRITON_INTERPRET=1`` before Triton's import."""
    return _enabled("cpu", enabled=True)
