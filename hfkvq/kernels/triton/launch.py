"""Launches that know everything but their tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Nest = Callable[[Sequence[Tensor]], tuple[Any, ...]]


class Launch:
    """A kernel with its grid, numbers and constants, for tensors of known shapes, strides, dtypes and device.

    Where tensors lie may choose the variant of the kernel: Triton sees to that, as to hooks and streams.

    Args:
        kernel: a ``triton.jit`` function whose tensors come first.
        grid: programs.
        numbers: arguments behind the tensors, by position.
        constants: the rest by name, options of the launch included.
        device: of the tensors.
        nest: makes of tensors in a row what the kernel takes: tuples, None, views in another dtype. None takes them as
            they come.
    """

    __slots__ = ("_index", "_kernel", "_nest", "constants", "grid", "numbers")

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        numbers: Sequence[Any],
        constants: Mapping[str, Any],
        device: torch.device,
        nest: Nest | None = None,
    ) -> None:
        self._kernel, self._nest = kernel, nest
        self.grid = (*grid, 1, 1)[:3]
        self.numbers, self.constants = tuple(numbers), dict(constants)
        self._index = (0 if device.index is None else device.index) if device.type == "cuda" else None

    def __call__(self, *tensors: Tensor) -> None:
        """Launches, on the tensors' device and its current stream."""
        own = tensors if self._nest is None else self._nest(tensors)
        if self._index is None or torch.cuda.current_device() == self._index:
            self._kernel[self.grid](*own, *self.numbers, **self.constants)
        else:
            # Triton launches on the current device, whatever its arguments are on.
            with torch.cuda.device(self._index):
                self._kernel[self.grid](*own, *self.numbers, **self.constants)
