"""Many users at once: compressed pages in Transformers' continuous batching."""

from .engine import Serving, enable

__all__ = ["Serving", "enable"]
