"""A CUDA graph of one step: captured without emptying the allocator's cache, and without harm where it fails."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class _Pool:
    """Memory of what graphs of one stream compute in between: one replays at a time, so they share it."""

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()


_POOLS: weakref.WeakValueDictionary[Any, _Pool] = weakref.WeakValueDictionary()


def _pool(device: torch.device, stream: int) -> _Pool:
    # PyTorch forgets a pool with its last graph, and takes no new one into it: they keep this.
    found = _POOLS.get((device, stream))
    if found is None:
        found = _POOLS[device, stream] = _Pool()
    return found


class CapturedGraph:
    """A CUDA graph of what ``run`` launches, and what that returned.

    Args:
        device: on which it runs.
        run: launches, for a cache; is called once, and nothing that it launches is carried out.
        cache: is left out of what ``run`` returned.
    """

    def __init__(self, device: torch.device, run: Callable[[Any], Any], cache: Any) -> None:
        current = torch.cuda.current_stream(device)
        pool = _pool(device, current.cuda_stream)
        generator = torch.cuda.default_generators[current.device_index]
        state = generator.clone_state()
        self._graph = torch.cuda.CUDAGraph()
        side = _side_stream(device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            try:
                # Not `torch.cuda.graph`, which empties the allocator's cache first: that takes longer than the capture.
                self._graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
                outputs = run(cache)
                self._graph.capture_end()
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    self._graph.capture_end()
                # A capture that fails leaves it waiting for the end, and nobody could sample from it.
                generator.graphsafe_set_state(state)
                raise
        current.wait_stream(side)
        # Last: it lives as long as the graphs do.
        self._pool = pool
        leaves, self._spec = pytree.tree_flatten(outputs)
        # The cache keeps its graphs, which must not keep the cache.
        self._cache_at = [leaf is cache for leaf in leaves]
        self._leaves = [None if leaf is cache else leaf for leaf in leaves]

    def replay(self, cache: Any) -> Any:
        """Runs it, and returns copies of what it computed, with ``cache`` in its place."""
        self._graph.replay()
        leaves = [
            cache if is_cache else leaf.clone() if isinstance(leaf, Tensor) else leaf
            for leaf, is_cache in zip(self._leaves, self._cache_at, strict=True)
        ]
        return pytree.tree_unflatten(leaves, self._spec)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


RECORDERS: dict[str, Any] = {"cuda": CapturedGraph}
"""What captures steps, by type of device."""
