"""Captured steps without a GPU: replayed from a tape of their operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from hfkvq.caches import base
from hfkvq.caches.base import capture


def _refuse(*_: Any) -> None:
    raise RuntimeError("operation not permitted when stream is capturing")


class _Tape(TorchDispatchMode):
    """Notes operations and their tensors; what they write in place is kept from before."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []
        self.written: dict[int, tuple[Any, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.name in ASKS_HOST:
            _refuse()
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[i] if i < len(args) else kwargs.get(argument.name)
                for x in filter(torch.is_tensor, pytree.tree_leaves(given)):
                    storage = x.untyped_storage()
                    self.written.setdefault(storage._cdata, (storage, storage.clone()))
        out = func(*args, **kwargs)
        self.operations.append((func, args, kwargs, out))
        return out


ASKS_HOST = {f"aten::{name}" for name in ("_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2")}


class TapeGraph:
    """Stands for `hfkvq.caches.base.capture.CapturedGraph`, as strictly as a CPU can.

    The operations of a step are noted once, with the addresses that they read and write, and undone; a replay carries
    out these operations at these addresses, without the model's Python. Whatever asks the host fails.
    """

    made = 0
    failing = False

    def __init__(self, devices: list[torch.device], run: Callable[[Any], Any], cache: Any) -> None:
        if TapeGraph.failing:
            _refuse()
        tape = _Tape()
        try:
            # On the CPU, no operation tells of this one.
            with tape, patch.object(torch.Tensor, "tolist", _refuse):
                out = run(cache)
        finally:
            for storage, was in tape.written.values():
                storage.copy_(was)
        TapeGraph.made += 1
        self._operations = tape.operations
        leaves, self._spec = pytree.tree_flatten(out)
        # A graph must not keep its cache.
        self._cache_at = [leaf is cache for leaf in leaves]
        self._leaves = [None if leaf is cache else leaf for leaf in leaves]

    def replay(self, cache: Any) -> Any:
        """The operations again, and copies of their outputs."""
        for func, args, kwargs, out in self._operations:
            again = func(*args, **kwargs)
            for old, new in zip(pytree.tree_leaves(out), pytree.tree_leaves(again), strict=True):
                # Views, and what was written in place, are where they were.
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
        leaves = [
            cache if is_cache else leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
            for leaf, is_cache in zip(self._leaves, self._cache_at, strict=True)
        ]
        return pytree.tree_unflatten(leaves, self._spec)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[TapeGraph]]:
    """Steps on the CPU are captured; how often is counted."""
    monkeypatch.setitem(capture.RECORDERS, "cpu", TapeGraph)
    TapeGraph.made, TapeGraph.failing = 0, False
    base.warn_once.cache_clear()
    yield TapeGraph
    base.warn_once.cache_clear()
