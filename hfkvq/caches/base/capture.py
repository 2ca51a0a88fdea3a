"""A CUDA graph of one step: captured without emptying the allocator's cache, and without harm where it fails."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree


class _Pool:
    """Memory of what graphs of one stream compute in between: one replays at a time, so they share it, and keep this.

    PyTorch forgets a pool with its last graph, and takes no new one into it.
    """

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()


_POOLS: weakref.WeakValueDictionary[Any, _Pool] = weakref.WeakValueDictionary()


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class NumbersOnDevice(TorchFunctionMode):
    """Makes ``torch.tensor(number, device=...)`` on the device itself: a graph cannot copy it there.

    Transformers 5.17 writes it in every eager mask.

    Attributes:
        made: whether it has made any.
    """

    made = False

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """``func`` as it is, but for ``torch.tensor`` of a number."""
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if func is torch.tensor and device is not None and len(args) == 1 and isinstance(args[0], (bool, int, float)):
            more = {name: x for name, x in kwargs.items() if name in ("dtype", "requires_grad")}
            if torch.device(device).type != "cpu" and len(more) + 1 == len(kwargs):
                self.made = True
                return torch.full((), args[0], device=device, **more)
        return func(*args, **kwargs)


class CapturedGraph:
    """A CUDA graph of what ``run`` launches for a cache, and what that returned, without the cache.

    ``run`` is called once, and nothing that it launches is carried out. Of its devices the first is where it begins and
    ends.
    """

    def __init__(self, devices: Sequence[torch.device], run: Callable[[Any], Any], cache: Any) -> None:
        self._devices = list(devices)
        current = torch.cuda.current_stream(devices[0])
        key = (devices[0], current.cuda_stream)
        pool = _POOLS.setdefault(key, _Pool())
        generator = torch.cuda.default_generators[current.device_index]
        state = generator.clone_state()
        self._graph = torch.cuda.CUDAGraph()
        side = _side_stream(devices[0])
        others = [_side_stream(device) for device in devices[1:]]
        # A graph's own pool is on its first device.
        self._others = [torch.cuda.MemPool() for _ in others]
        side.wait_stream(current)
        with contextlib.ExitStack() as stack:
            for other, memory in zip(others, self._others, strict=True):
                other.wait_stream(torch.cuda.current_stream(other.device))
                stack.enter_context(torch.cuda.stream(other))
                stack.enter_context(torch.cuda.use_mem_pool(memory, other.device))
            # The default stream's device comes last, since it becomes the current one.
            stack.enter_context(torch.cuda.stream(side))
            # To destroy another graph meanwhile would end the capture.
            collects = gc.isenabled()
            gc.disable()
            try:
                # `torch.cuda.graph` would empty the allocator's cache first, which takes longer than the capture.
                self._graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
                for other in others:
                    other.wait_stream(side)
                outputs = run(cache)
                for other in others:
                    side.wait_stream(other)
                self._graph.capture_end()
            except BaseException:
                _give_up(self._graph, key, pool)
                # It waits for the end of the capture, and nobody could sample from it.
                generator.graphsafe_set_state(state)
                raise
            finally:
                if collects:
                    gc.enable()
        current.wait_stream(side)
        leaves, self._spec = pytree.tree_flatten(outputs)
        # The cache keeps its graphs, which must not keep the cache.
        self._cache_at = [leaf is cache for leaf in leaves]
        self._leaves = [None if leaf is cache else leaf for leaf in leaves]
        # The pool comes last: it lives as long as the graphs do.
        self._pool = pool

    def replay(self, cache: Any) -> Any:
        """Runs it, and returns copies of what it computed, with ``cache`` in its place."""
        if len(self._devices) > 1:
            first, *others = (torch.cuda.current_stream(device) for device in self._devices)
            for other in others:
                first.wait_stream(other)
            self._graph.replay()
            for other in others:
                other.wait_stream(first)
        else:
            self._graph.replay()
        leaves = [
            cache if is_cache else leaf.clone() if isinstance(leaf, Tensor) else leaf
            for leaf, is_cache in zip(self._leaves, self._cache_at, strict=True)
        ]
        return pytree.tree_unflatten(leaves, self._spec)


def _give_up(graph: torch.cuda.CUDAGraph, key: Any, pool: _Pool) -> None:
    """Ends a capture that has failed, and gives its pool up: PyTorch would still take what is allocated for its own."""
    with contextlib.suppress(RuntimeError):
        graph.capture_end()
    with contextlib.suppress(RuntimeError, AttributeError):
        torch._C._cuda_endAllocateToPool(key[0].index, pool.handle)
    _POOLS.pop(key, None)


RECORDERS: dict[str, Any] = {"cuda": CapturedGraph}
"""Recorders of steps, by type of device."""
