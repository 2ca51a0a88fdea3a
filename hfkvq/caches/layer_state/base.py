"""Interface of a layer for its parts, and the parts' base."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
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


def uneven(first: int | None, last: int | None) -> RuntimeError:
    """Error text for layers of a cache that hold different tokens."""
    return RuntimeError(
        f"The cache's first layer has seen {first} tokens and its last one {last}: a forward was interrupted, or the "
        "cache was made for a model with more layers. Call reset() to begin again, or level() to take back what came "
        "since the last forward that reached every layer."
    )


@contextlib.contextmanager
def unchanged_on_error(things: Sequence[Any]) -> Iterator[None]:
    """If anything fails, all attributes of these are what they were; what is written in place is not."""
    # Linear attention keeps its states in dicts.
    saved = [{name: dict(x) if type(x) is dict else x for name, x in vars(each).items()} for each in things]
    try:
        yield
    except BaseException:
        for each, was in zip(things, saved, strict=True):
            vars(each).clear()
            vars(each).update(was)
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
    padding: Padding | None
    uncommitted: bool
    evicted: bool
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
    def staged(self) -> tuple[Tensor, Tensor] | None:
        """Keys, smoothed, and values of the last update that are not in the store yet."""
        ...

    @staged.setter
    def staged(self, tokens: tuple[Tensor, Tensor] | None) -> None: ...

    @property
    def staged_length(self) -> int:
        """New tokens that are not in the store yet."""
        ...

    @property
    def columns(self) -> int:
        """Logical columns that handles have."""
        ...

    @property
    def hold(self) -> int:
        """Newest tokens that stay unsealed, beyond what the layout says."""
        ...

    def held(self) -> KVStore:
        """The store."""
        ...

    def staged_step(self, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries as they attend to what the layer holds, and staged keys and values."""
        ...

    def smoothed_query(self, query: Tensor) -> Tensor:
        """Queries as they attend to what the layer holds."""
        ...

    def check_capacity(self, tokens: int) -> None:
        """Raises ValueError if ``tokens`` more exceed a fixed capacity."""

    def update(self, key_states: Tensor, value_states: Tensor) -> Any:
        """Stages new tokens."""

    def forward(
        self,
        query: Tensor,
        arguments: AttentionArguments,
        dense: Callable[[], Tensor],
        padding_mask: Tensor | None,
        after: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Attention of an update's queries over all that the layer holds then."""
        ...

    def store_staged(self, commit: bool = True) -> None:
        """Lets staged tokens join the store."""

    def settle(self, commit: bool = True) -> None:
        """Does what is left of the last update."""

    def close(self) -> None:
        """Lets the device's counters count what the last recorded step has sealed."""

    def bind(self) -> None:
        """Brings what the layer holds to where recorded steps look for it."""

    def dense(self, side: Side) -> Tensor:
        """Dequantized keys or values (B, H, columns, D)."""
        ...


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

    def attach(self, layer: LayerBase) -> None:
        """Makes it this layer's part, after a copy or from a file."""
        self._layer = weakref.ref(layer)

    def copy_for(self, layer: LayerBase, memo: dict[int, Any]) -> Any:
        """A copy for the copy of its layer, which shares everything with it but what the layer replaces."""
        new = memo[id(self)] = copy.copy(self)
        new.attach(layer)
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """The part of the layer's copy."""
        copy.deepcopy(self.layer, memo)
        return memo[id(self)]

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the layer, which attaches its parts again."""
        return {name: value for name, value in self.__dict__.items() if name != "_layer"}
