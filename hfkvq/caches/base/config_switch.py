"""Registry of configs that are switched to "hfkvq" attention: their last cache gives the old name back."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.torch_version import TorchVersion

NAME = "hfkvq"
"""Contains none of the words Transformers reads a meaning into ("flash", "sdpa", "flex_attention", "/", "paged|")."""


class _Name(str):
    """`NAME` in a switched config; copies and pickles of the config, or of its model, have what was there before."""

    before: str | None

    def __deepcopy__(self, memo: dict[int, Any]) -> str | None:
        """The user's own implementation: no cache switches the copy back."""
        return self.before

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Pickles the user's own implementation, which needs no hfkvq to be read."""
        return (str, (self.before,)) if self.before is not None else (type(None), ())


# Dynamo of earlier releases takes a subclass of str for no constant, and compiles no model with one in its config.
# There a copy keeps `NAME`: it attends as it did, but its pickle can only be read where hfkvq is imported.
_SUBCLASSES_COMPILE = TorchVersion(torch.__version__) >= "2.13"


def _name(before: str | None) -> str:
    if not _SUBCLASSES_COMPILE:
        return NAME
    name = _Name(NAME)
    name.before = before
    return name


class _Switched(NamedTuple):
    before: str | None
    users: set[int]
    undo: dict[int, Callable[[], None]]


# Keys are ids of configs: an attribute of the config would be saved with the model.
_SWITCHED: dict[int, _Switched] = {}

# Likewise: what they go back to, while they are switched for no cache.
_LENT: dict[int, str | None] = {}


def switch(config: Any, cache: Any) -> None:
    """Sets the attention implementation of the decoder only: modules and masks read this attribute."""
    key = id(config)
    lent_from = _LENT.pop(key, NAME)
    before = config._attn_implementation_internal if lent_from == NAME else lent_from
    if key not in _SWITCHED:
        # A config that is a shallow copy of a switched one is switched, and not known.
        before = getattr(before, "before", before)
    if before != NAME:
        if key not in _SWITCHED:
            weakref.finalize(config, _SWITCHED.pop, key, None)
        _, users, undo = _SWITCHED.get(key, _Switched(None, set(), {}))
        _SWITCHED[key] = _Switched(before, users, undo)
        config._attn_implementation_internal = _name(before)
    add_cache(config, cache)


def implementation_before(config: Any) -> str | None:
    """Attention implementation that a switched config had; None for a config that is not switched."""
    held = _SWITCHED.get(id(config))
    return _LENT.get(id(config), None if held is None else held.before)


@contextlib.contextmanager
def temporarily_switched(config: Any) -> Iterator[None]:
    """Within it a config is switched, and afterwards as it was, unless a cache of another thread has switched it."""
    key, before = id(config), config._attn_implementation_internal
    if before == NAME:
        yield
        return
    _LENT[key], config._attn_implementation_internal = before, _name(before)
    try:
        yield
    finally:
        if key in _LENT and config._attn_implementation_internal == NAME:
            config._attn_implementation_internal = before
        _LENT.pop(key, None)


def add_cache(config: Any, cache: Any) -> None:
    """Keeps a switched config as it is while this cache lives, too."""
    held = _SWITCHED.get(id(config))
    if held is not None and id(cache) not in held.users:
        held.users.add(id(cache))
        weakref.finalize(cache, _remove_cache, weakref.ref(config), id(cache)).atexit = False


def restore(config: Any) -> None:
    """Gives the config back the attention implementation that it had, unless its user has chosen another since."""
    held = _SWITCHED.get(id(config))
    if held is None:
        return
    if config._attn_implementation_internal == NAME:
        config._attn_implementation_internal = held.before
    while held.undo:
        held.undo.popitem()[1]()


def on_restore(config: Any, key: int, undo: Callable[[], None]) -> None:
    """Has something else undone when a switched config is given its old attention back, once for each key."""
    held = _SWITCHED.get(id(config))
    if held is not None:
        held.undo[key] = undo


def release(config: Any, caches: Iterable[Any]) -> bool:
    """Switches a config back although these caches live on, unless others need it; whether it is switched still."""
    for cache in caches:
        _remove_cache(weakref.ref(config), id(cache))
    return config._attn_implementation_internal == NAME


def _remove_cache(config: weakref.ref[Any], cache: int) -> None:
    """The last cache gone, other ways to generate (``generate_batch``) find the name they know."""
    alive = config()
    held = None if alive is None else _SWITCHED.get(id(alive))
    if alive is not None and held is not None:
        held.users.discard(cache)
        if not held.users:
            restore(alive)
