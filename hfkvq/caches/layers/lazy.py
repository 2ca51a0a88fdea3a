"""Tensors in shape only, which are computed when something touches them that does not know how to do without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

# Reading these does not touch the data.
_METADATA = {
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "grad_fn", "grad", "is_cuda",
                 "is_sparse", "is_quantized", "is_meta", "is_mps", "is_xpu", "is_nested", "names", "itemsize", "nbytes")
    if hasattr(getattr(Tensor, name, None), "__get__")
} | {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_contiguous, Tensor.is_floating_point,
    Tensor.is_complex, Tensor.element_size, Tensor.get_device, Tensor.__len__,
}  # fmt: skip


class LazyTensor(torch.Tensor):
    """A tensor without storage; any function that has no handler gets `materialize`.

    Attributes:
        handlers: of a class, functions that need no data; what declines returns NotImplemented.
        sizes: its shape, and
        kind: its dtype, which cost as much as any function if they are asked of PyTorch.
    """

    sizes: tuple[int, ...]
    kind: torch.dtype
    handlers: ClassVar[dict[Any, Callable[..., Any]]] = {}

    # ``x += y`` binds x anew, to another tensor.
    __iadd__ = Tensor.__add__  # type: ignore[assignment]
    __isub__ = Tensor.__sub__  # type: ignore[assignment]
    __imul__ = Tensor.__mul__  # type: ignore[assignment]
    __itruediv__ = Tensor.__truediv__  # type: ignore[assignment]

    def materialize(self) -> Tensor:
        """The tensor that this stands for."""
        raise NotImplementedError

    def write(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What a function does that writes to this tensor, or to any that it is given."""
        raise RuntimeError(
            f"{func.__name__}: cached keys and values cannot be changed in place, the change would be lost; work "
            "on a copy (x.clone())."
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Metadata, then what has a handler, then compute on touch."""
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        handler = cls.handlers.get(func)
        if handler is not None:
            try:
                result = handler(*args, **kwargs)
            except TypeError as error:
                # From inside the handler, or does it not know arguments of these names?
                if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                    raise
                result = NotImplemented
            if result is not NotImplemented:
                return result
        written = _written(func, args, kwargs)
        if written is not None:
            return written.write(func, args, kwargs)
        return cls.compute(func, args, kwargs)

    @classmethod
    def compute(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """A function of what lazy tensors stand for."""
        return func(*tree_map(dense_of, args), **tree_map(dense_of, kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Reached from C++ (custom attention kernels, scripted functions): compute."""
        if func._schema.is_mutable:
            for own, x in zip(func._schema.arguments, args, strict=False):
                if own.alias_info is not None and own.alias_info.is_write and isinstance(x, LazyTensor):
                    return x.write(func, args, kwargs or {})
        return func(*tree_map(dense_of, args), **tree_map(dense_of, kwargs or {}))


def dense_of(x: Any) -> Any:
    """What a lazy tensor stands for; anything else as it is."""
    return x.materialize() if isinstance(x, LazyTensor) else x


def _written(func: Any, args: Any, kwargs: Any) -> LazyTensor | None:
    """The lazy tensor that a function would write to."""
    name = getattr(func, "__name__", "")
    writes = name in ("__setitem__", "__set__") or (name.endswith("_") and not name.endswith("__"))
    first = args[0] if args else None
    if (writes or kwargs.get("inplace") is True) and isinstance(first, LazyTensor):
        return first
    out = kwargs.get("out")
    return out if isinstance(out, LazyTensor) else None
