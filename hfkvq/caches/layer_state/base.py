"""Interface of a layer for its parts, and the parts' base."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from hfkvq.kernels.arguments import AttentionArguments
from hfkvq.kernels.pages import Side

from ..schemes.base import Scheme
from ..store import KVStore, Padding
from .smoothing import KeySmoothing

ROLLBACK = 64
"""Newest tokens that stay unsealed while tokens may be taken back (assisted decoding)."""


def attributes(things: Sequence[Any]) -> list[dict[str, Any]]:
    """Attributes of these objects, for `restore`; linear attention keeps its states in dicts, which are copied."""
    return [{name: dict(x) if type(x) is dict else x for name, x in vars(each).items()} for each in things]


def restore(things: Sequence[Any], saved: Sequence[Mapping[str, Any]]) -> None:
    """Attributes of these objects are what they were."""
    for each, was in zip(things, saved, strict=True):
        vars(each).clear()
        vars(each).update(was)


@contextlib.contextmanager
def unchanged_on_error(things: Sequence[Any]) -> Iterator[None]:
    """If anything fails, all attributes of these are what they were; what is written in place is not."""
    saved = attributes(things)
    try:
        yield
    except BaseException:
        restore(things, saved)
        raise


class LayerBase(Protocol):
    """Interface of a layer of pages, as its parts and handles see it; `KVLayer` says what each name means.

    Parts come before the layer in the order of imports, so they know it by this.
    """

    scheme: Scheme
    store: KVStore | None
    seen: int
    newest: int
    new_columns: int
    staged: tuple[Tensor, Tensor] | None
    padding: Padding | None
    uncommitted: bool
    evicted: bool
    gone: int
    differentiated: bool
    defer: bool
    debug: bool
    record_past: bool
    latents: bool
    edition: int
    capacity: int | None
    window: int
    offloaded: bool
    smoothing: KeySmoothing | None
    accepted: tuple[Any, ...] | None
    dtype: torch.dtype
    device: torch.device
    heads: int
    batch_size: int

    @property
    def staged_length(self) -> int: ...

    @property
    def columns(self) -> int: ...

    @property
    def hold(self) -> int: ...

    def held(self) -> KVStore: ...
    def smoothed_query(self, query: Tensor) -> Tensor: ...
    def check_capacity(self, tokens: int) -> None: ...
    def update(self, key_states: Tensor, value_states: Tensor) -> Any: ...
    def forward(
        self,
        query: Tensor,
        arguments: AttentionArguments,
        dense: Callable[[], Tensor],
        padding_mask: Tensor | None,
        after: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor: ...
    def store_staged(self, commit: bool = True) -> None: ...
    def settle(self, commit: bool = True) -> None: ...
    def close(self) -> None: ...
    def bind(self) -> None: ...
    def dense(self, side: Side) -> Tensor: ...


class Part:
    """A part of a layer that knows its layer weakly: nothing may keep a layer whose cache is gone."""

    def __init__(self, layer: LayerBase) -> None:
        self._layer = weakref.ref(layer)

    @property
    def layer(self) -> LayerBase:
        """Layer that this part belongs to."""
        layer = self._layer()
        assert layer is not None, "a part is held by its layer"
        return layer

    def copy_for(self, layer: LayerBase, memo: dict[int, Any]) -> Any:
        """A copy for the copy of its layer, which shares everything with it but what the layer replaces."""
        new = memo[id(self)] = copy.copy(self)
        new._layer = weakref.ref(layer)
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """The part of the layer's copy."""
        copy.deepcopy(self.layer, memo)
        return memo[id(self)]
