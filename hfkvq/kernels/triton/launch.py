"""Launches that know everything but where their tensors lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import MockTensor

from ._lib import capability
from .compile import Wanted, load, settle_name
from .limits import LIMITS, RESERVED, programs_that_fit

Nest = Callable[[Sequence[Any]], tuple[Any, ...]]

UNASKED = 48 << 10
"""Bytes of shared memory that a program may have without asking the driver first."""


class Launch:
    """A kernel with its grid, numbers and constants, for tensors of known shapes, strides and device.

    A launch through Triton looks at every argument each time, to choose the variant of the kernel, and asks the driver
    where every tensor lies: a multiple of what the launch itself takes. Here only dtypes and the alignment of tensors
    can change, so the variant is looked up by them, and is given addresses.

    Args:
        kernel: a ``triton.jit`` function whose tensors come first.
        grid: programs.
        numbers: arguments behind the tensors, by name in any order.
        constants: the rest by name, options of the launch included.
        nest: makes of tensors in a row (or of their addresses) what the kernel takes: tuples, None, views in another
            dtype. None takes them as they come.
        most: programs that a multiprocessor is to run at a time; 0 for as many as fit. See `room_of`.
    """

    __slots__ = (
        "_device", "_given", "_index", "_kernel", "_most", "_nest", "_packed", "_ready", "_rest", "constants", "grid",
        "numbers",
    )  # fmt: skip

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        numbers: Mapping[str, Any],
        constants: Mapping[str, Any],
        device: torch.device,
        nest: Nest | None = None,
        most: int = 0,
    ) -> None:
        self._kernel, self._nest = kernel, nest
        self._device, self._most = device, most
        settle_name(kernel)
        self.grid = (*grid, 1, 1)[:3]
        self.numbers, self.constants = dict(numbers), dict(constants)
        # Launches go by position: a binary is given values alone.
        self._given = tuple([numbers[name] for name in kernel.arg_names if name in numbers])
        assert len(self._given) == len(numbers), f"{kernel} has no {set(numbers) - set(kernel.arg_names)}"
        self._index = (0 if device.index is None else device.index) if device.type == "cuda" else None
        self._rest: tuple[Any, ...] = ()
        # Keys are dtypes, and say which tensors begin at a multiple of sixteen bytes (`_alignment`): all that Triton
        # asks of a tensor.
        self._ready: dict[tuple[Any, ...], Any] = {}
        # Launches are told of variants that take more shared memory than they need.
        self._packed: dict[Any, tuple[int, ...]] = {}

    def __call__(self, *tensors: Tensor) -> None:
        """Launches, on the tensors' device and its current stream."""
        if self._index is None or torch.cuda.current_device() == self._index:
            self._launch(tensors)
        else:
            # Triton launches on the current device, whatever its arguments are on.
            with torch.cuda.device(self._index):
                self._launch(tensors)

    def bound(self, *tensors: Tensor | None) -> Callable[..., None]:
        """The launch with tensors that stay where they are; it takes those that are None here, in their order.

        Addresses of the others are asked once, and nested once: they must live, and not move, as long as this is used.
        """
        marks = [object() if x is None else x.data_ptr() for x in tensors]
        new = [mark for mark, x in zip(marks, tensors, strict=True) if x is None]
        # The alignment where those that come are aligned.
        alignment = _alignment([0 if x is None else x.data_ptr() for x in tensors])
        nested = list(marks if self._nest is None else self._nest(marks))
        holes = [(at, new.index(x)) for at, x in enumerate(nested) if x in new]
        assert len({which for _, which in holes}) == len(new), "tensors that come with a call lie in no tuple"

        def launch(*given: Tensor) -> None:
            addresses = [x.data_ptr() for x in given]
            rest = iter(given)
            whole = [next(rest) if x is None else x for x in tensors]
            kinds = tuple([x.dtype for x in whole])
            ready = None if reduce(or_, addresses, 0) & 15 else self._ready.get((kinds, alignment))
            if ready is None or (self._index is not None and torch.cuda.current_device() != self._index):
                self(*whole)
                return
            own = nested.copy()
            for at, which in holes:
                own[at] = addresses[which]
            self._run(ready, own)

        return launch

    def wanted(self, kinds: Sequence[torch.dtype]) -> Wanted:
        """The variant for aligned tensors of these dtypes; of fp8 what the kernel reads in its place."""
        given = [MockTensor(kind) for kind in kinds]
        own = tuple(given) if self._nest is None else self._nest(given)
        return Wanted(self._kernel, (*own, *self._given), self.constants)

    def _launch(self, tensors: Sequence[Tensor]) -> None:
        addresses = [x.data_ptr() for x in tensors]
        variant = tuple([x.dtype for x in tensors]), _alignment(addresses)
        ready = self._ready.get(variant)
        if ready is None:
            # The first launch goes through Triton, and notes the variant that it took.
            own = tuple(tensors) if self._nest is None else self._nest(tensors)
            self._note(self._kernel[self.grid](*own, *self._given, **self.constants), own, variant)
            return
        self._run(ready, addresses if self._nest is None else self._nest(addresses))

    def _run(self, ready: Any, own: Sequence[Any]) -> None:
        if is_watched():
            ready[self.grid](*own, *self._rest)
        else:
            # The launcher is called without hooks that are not there.
            stream = driver.active.get_current_stream(self._index)
            packed = self._packed.get(ready, ready.packed_metadata)
            ready.run(*self.grid, stream, ready.function, packed, None, None, None, *own, *self._rest)

    def _note(self, compiled: Any | None, own: Sequence[Any], variant: tuple[Any, ...]) -> None:
        # The interpreter compiles nothing.
        if compiled is not None:
            # Loads it, where only the compiler has been asked: what a GPU has no room for is known before any launch.
            load(compiled)
            names = self._kernel.arg_names[len(own) + len(self._given) :]
            self._rest = (*self._given, *(self.constants[name] for name in names))
            self._ready[variant] = compiled
            if self._most and (room := room_of(compiled, self._device, self._most)):
                self._packed[compiled] = (*compiled.packed_metadata[:-1], room)


def room_of(compiled: Any, device: torch.device, most: int) -> int:
    """Shared memory with which at most so many programs run on a multiprocessor; 0 where no more fit anyway.

    Splits are made for so many. Where registers let in more, programs of loose tokens and those that come when the
    first have ended crowd on some multiprocessors, and others idle.
    """
    limits = LIMITS.get(capability(device))
    if limits is None:
        return 0
    data = compiled.metadata
    # Warps, programs of a cluster, shared memory.
    if len(compiled.packed_metadata) != 3:
        return 0
    if programs_that_fit(limits, compiled.n_regs, data.num_warps, data.shared) <= most:
        return 0
    room = min(limits.shared // most // 128 * 128 - RESERVED, UNASKED)
    return room if room > data.shared else 0


def _alignment(addresses: Sequence[int]) -> tuple[bool, ...]:
    """Alignment of addresses to sixteen bytes; empty where all are aligned, as nearly always."""
    return () if not reduce(or_, addresses) & 15 else tuple([not x & 15 for x in addresses])


def is_watched() -> bool:
    """True if somebody, a profiler for example, wants to be told of launches."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    # Chains of hooks, or single ones, as those of other releases are.
    return bool(
        (enter is not None and getattr(enter, "calls", True)) or (leave is not None and getattr(leave, "calls", True))
    )
