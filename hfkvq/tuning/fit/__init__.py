"""Bytes of weights and caches by arithmetic, from a model's config alone."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .model import Plan, Weights, cache_bytes, outline_of, plan, weights_of

# Names are loaded at their first use: commands import this package for their help.
_HOMES = {
    **dict.fromkeys(("Plan", "Weights", "cache_bytes", "outline_of", "plan", "weights_of"), "model"),
}

__all__ = ["Plan", "Weights", "cache_bytes", "outline_of", "plan", "weights_of"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
