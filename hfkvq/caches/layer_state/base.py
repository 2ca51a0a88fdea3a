"""Base of a layer's parts, and changes that are taken back where something fails."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

ROLLBACK = 64
"""Newest tokens that stay unsealed while tokens may be taken back (assisted decoding)."""


@contextlib.contextmanager
def unchanged_on_error(things: Sequence[Any], always: bool = False) -> Iterator[None]:
    """If anything fails, or ``always``, all attributes of these are what they were; what is written in place is not."""
    # Linear attention keeps its states in dicts.
    saved = [{name: dict(x) if type(x) is dict else x for name, x in vars(each).items()} for each in things]
    restores = True
    try:
        yield
        restores = always
    finally:
        for each, was in zip(things, saved, strict=True) if restores else ():
            vars(each).clear()
            vars(each).update(was)


class Part:
    """A part of a layer that knows its layer weakly: nothing may keep a layer whose cache is gone."""

    def __init__(self, layer: Any) -> None:
        self._layer = weakref.ref(layer)

    @property
    def layer(self) -> Any:
        """Layer that this part belongs to: a `KVLayer`, which comes later in the order of imports."""
        layer = self._layer()
        assert layer is not None, "a part is held by its layer"
        return layer

    def copy_for(self, layer: Any, memo: dict[int, Any]) -> Any:
        """A copy for the copy of its layer, which shares everything with it but what the layer replaces."""
        new = memo[id(self)] = copy.copy(self)
        new._layer = weakref.ref(layer)
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """The part of the layer's copy."""
        copy.deepcopy(self.layer, memo)
        return memo[id(self)]
