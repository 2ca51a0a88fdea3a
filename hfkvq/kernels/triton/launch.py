"""Launches that know everything but where their tensors lie."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import or_
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import MockTensor

from .ahead import Wanted

Nest = Callable[[Sequence[Any]], tuple[Any, ...]]

_CHAIN = getattr(knobs, "HookChain", None)


class Launch:
    """A kernel with its grid, numbers and constants, for tensors of known shapes, strides, dtypes and device.

    A launch through Triton looks at every argument each time, to choose the variant of the kernel, and asks the driver
    where every tensor lies: a multiple of what the launch itself takes. Here only the alignment of tensors can change,
    so the variant is looked up by that, and is given addresses.

    Args:
        kernel: a ``triton.jit`` function whose tensors come first.
        grid: programs.
        numbers: arguments behind the tensors, by position.
        constants: the rest by name, options of the launch included.
        device: of the tensors.
        nest: makes of tensors in a row (or of their addresses) what the kernel takes: tuples, None, views in another
            dtype. None takes them as they come.
    """

    __slots__ = ("_index", "_kernel", "_nest", "_ready", "_rest", "aligned", "constants", "direct", "grid", "numbers")

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
        self._rest: tuple[Any, ...] = ()
        # By which tensors begin at a multiple of sixteen bytes: all that Triton asks of an address.
        self._ready: dict[tuple[bool, ...], Any] = {}
        # The one where all do; None before a launch has needed it.
        self.aligned: Any | None = None
        # And how it is launched without Triton's own Python, where it can be.
        self.direct: Direct | None = None

    def __call__(self, *tensors: Tensor) -> None:
        """Launches, on the tensors' device and its current stream."""
        if self._index is None or torch.cuda.current_device() == self._index:
            self._launch(tensors)
        else:
            # Triton launches on the current device, whatever its arguments are on.
            with torch.cuda.device(self._index):
                self._launch(tensors)

    def wanted(self, kinds: Sequence[torch.dtype]) -> Wanted:
        """The variant for aligned tensors of these dtypes; of fp8 what the kernel reads in its place."""
        given = [MockTensor(kind) for kind in kinds]
        own = tuple(given) if self._nest is None else self._nest(given)
        return Wanted(self._kernel, (*own, *self.numbers), self.constants)

    def prepare(self, tensors: Sequence[Tensor]) -> None:
        """Compiles, for the current device, the variant for tensors like these, and launches nothing."""
        addresses = [x.data_ptr() for x in tensors]
        if self.ready(addresses) is None:
            own = tuple(tensors) if self._nest is None else self._nest(tensors)
            self._note(self._kernel.warmup(*own, *self.numbers, grid=self.grid, **self.constants), own, addresses)

    def _launch(self, tensors: Sequence[Tensor]) -> None:
        addresses = [x.data_ptr() for x in tensors]
        ready = self.ready(addresses)
        if ready is None:
            self._prepare(tensors, addresses)
        else:
            self.run(ready, addresses, driver.active.get_current_stream(self._index), is_watched())

    def ready(self, addresses: Sequence[int]) -> Any | None:
        """The variant for tensors at these addresses, or None if no launch has needed it yet."""
        if not reduce(or_, addresses) & 15:
            return self.aligned
        return self._ready.get(_alignment(addresses))

    def run(self, ready: Any, addresses: Sequence[int], stream: int, watched: bool) -> None:
        """Launches a variant on a stream of the current device; ``watched`` if hooks want to know (`is_watched`)."""
        own = addresses if self._nest is None else self._nest(addresses)
        if watched:
            ready[self.grid](*own, *self._rest)
        else:
            # What that does, without telling hooks that are not there.
            ready.run(*self.grid, stream, ready.function, ready.packed_metadata, None, None, None, *own, *self._rest)

    def _prepare(self, tensors: Sequence[Tensor], addresses: Sequence[int]) -> None:
        """The first launch, through Triton; notes the variant that it took."""
        own = tuple(tensors) if self._nest is None else self._nest(tensors)
        self._note(self._kernel[self.grid](*own, *self.numbers, **self.constants), own, addresses)

    def _note(self, compiled: Any | None, own: Sequence[Any], addresses: Sequence[int]) -> None:
        # The interpreter compiles nothing.
        if compiled is not None:
            # Loads it, where only the compiler has been asked: what a GPU has no room for is known before any launch.
            compiled.run  # noqa: B018
            names = self._kernel.arg_names[len(own) + len(self.numbers) :]
            self._rest = (*self.numbers, *(self.constants[name] for name in names))
            aligned = _alignment(addresses)
            self._ready[aligned] = compiled
            if all(aligned):
                self.aligned = compiled
                self.direct = way_past(compiled, self.grid, len(own) + len(self._rest))

    def laid_out(self, addresses: Sequence[int | Later]) -> Laid | None:
        """The launch of the aligned variant with these addresses; None where it has to go by `run`."""
        if self.direct is None:
            return None
        own = tuple(addresses) if self._nest is None else self._nest(addresses)
        places = [(at, x.which) for at, x in enumerate(own) if isinstance(x, Later)]
        later = [x.which for x in addresses if isinstance(x, Later)]
        # Within a tuple it could not be put.
        return Laid(self.direct, (*own, *self._rest), places) if {x for _, x in places} == set(later) else None


class Later(NamedTuple):
    """Stands for an address that differs from one launch to the next: the ``which``-th of those."""

    which: int


class Laid:
    """A launch whose arguments stand in a row already, but for its stream and a few addresses."""

    __slots__ = ("_arguments", "_launch", "_own", "_places", "_stream")

    def __init__(self, way: Direct, own: Sequence[Any], places: Sequence[tuple[int, int]]) -> None:
        self._launch, self._arguments, self._stream = way.launch, list(way.arguments), way.stream
        if way.together:
            self._own = list(own)
            self._arguments.append(self._own)
            first = 0
        else:
            self._own = self._arguments
            first = len(self._arguments)
            self._arguments.extend(own)
        self._places = tuple([(first + at, which) for at, which in places])

    def __call__(self, stream: int, addresses: Sequence[int]) -> None:
        """Launches on a stream of the current device."""
        own = self._own
        for at, which in self._places:
            own[at] = addresses[which]
        self._arguments[self._stream] = stream
        self._launch(*self._arguments)


class Direct(NamedTuple):
    """The way past the last layer of Triton that is in Python.

    Attributes:
        launch: Triton's launcher in C.
        arguments: what it takes before the kernel's own arguments.
        stream: where the stream stands in them.
        together: whether the kernel's own are one argument; otherwise each is one.
    """

    launch: Callable[..., Any]
    arguments: tuple[Any, ...]
    stream: int
    together: bool


# All that the `__call__` of Triton's `CudaLauncher` looks up (3.6 and 3.7): where it has nothing to allocate, it only
# hands on. One that looks at anything else does more.
_HANDS_ON = frozenset(
    "global_scratch_size global_scratch_align profile_scratch_size profile_scratch_align _allocation _allocator "
    "_profile_allocator num_ctas get launch launch_cooperative_grid launch_pdl arg_annotations kernel_signature".split()
)


def way_past(compiled: Any, grid: tuple[int, ...], count: int) -> Direct | None:
    """How a kernel of ``count`` arguments is launched past Triton's launcher; None if that does more than hand on."""
    launcher = compiled.run
    # Of a function in C there is none.
    code = getattr(type(launcher).__call__, "__code__", None)
    if code is None or not _names(code) <= _HANDS_ON:
        return None
    sizes = [getattr(launcher, name, None) for name in ("global_scratch_size", "profile_scratch_size")]
    if sizes != [0, 0] or not callable(getattr(launcher, "launch", None)):
        return None
    # What it hands on differs between releases: asked of itself.
    handed: list[tuple[Any, ...]] = []
    asked = copy.copy(launcher)
    asked.launch = lambda *given: handed.append(given)
    stream, own = object(), tuple([object() for _ in range(count)])
    asked(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *own)
    if len(handed) != 1 or not count:
        return None
    (given,) = handed
    together = given[-1] == own
    if not together and given[-count:] != own:
        return None
    first = given[: -1 if together else -count]
    places = [at for at, x in enumerate(first) if x is stream]
    return Direct(launcher.launch, first, places[0], together) if len(places) == 1 else None


def _names(code: CodeType) -> set[str]:
    """What a function looks up in modules and objects, and those within it."""
    return set(code.co_names).union(*(_names(x) for x in code.co_consts if isinstance(x, CodeType)))


def _alignment(addresses: Sequence[int]) -> tuple[bool, ...]:
    return tuple([not x & 15 for x in addresses])


def is_watched() -> bool:
    """Whether somebody, a profiler for example, wants to be told of launches."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    if type(enter) is type(leave) is _CHAIN:
        return bool(enter.calls or leave.calls)
    # Single hooks, or those of another release.
    return bool(
        (enter is not None and getattr(enter, "calls", True)) or (leave is not None and getattr(leave, "calls", True))
    )
