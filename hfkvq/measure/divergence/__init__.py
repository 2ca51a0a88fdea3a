"""Divergence of a scheme's predictions from the stock cache's, on the same tokens: ``hfkvq kld``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .measurement import Bill, Divergence, Measured, Perplexity, compare_logits, measure

__all__ = ["Bill", "Divergence", "Measured", "Perplexity", "compare_logits", "measure"]


def __getattr__(name: str) -> Any:
    """Loads the measurement when it is asked for: the command line imports this package for its help."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import measurement

    return getattr(measurement, name)
