"""Which configs are switched to "hfkvq" attention, for which caches: the last one that goes gives the old name back."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

from .attention import NAME


class _Switched(NamedTuple):
    before: str | None
    users: set[int]


# By id of the config: anything noted on the config itself would be saved with the model.
_SWITCHED: dict[int, _Switched] = {}


def switch(config: Any, cache: Any) -> None:
    """What ``set_attn_implementation`` does, for the decoder only: modules and masks read this attribute."""
    key = id(config)
    if config._attn_implementation_internal != NAME:
        if key not in _SWITCHED:
            weakref.finalize(config, _SWITCHED.pop, key, None)
        users = _SWITCHED[key].users if key in _SWITCHED else set()
        _SWITCHED[key] = _Switched(config._attn_implementation_internal, users)
        config._attn_implementation_internal = NAME
    join(config, cache)


def join(config: Any, cache: Any) -> None:
    """Keeps a switched config as it is while this cache lives, too."""
    held = _SWITCHED.get(id(config))
    if held is not None and id(cache) not in held.users:
        held.users.add(id(cache))
        weakref.finalize(cache, _leave, weakref.ref(config), id(cache)).atexit = False


def restore(config: Any) -> None:
    """Gives the config back the attention implementation that it had, unless its user has chosen another since."""
    held = _SWITCHED.get(id(config))
    if held is not None and config._attn_implementation_internal == NAME:
        config._attn_implementation_internal = held.before


def _leave(config: weakref.ref[Any], cache: int) -> None:
    """The last cache gone, other ways to generate (``generate_batch``) find the name they know."""
    alive = config()
    held = None if alive is None else _SWITCHED.get(id(alive))
    if alive is not None and held is not None:
        held.users.discard(cache)
        if not held.users:
            restore(alive)
