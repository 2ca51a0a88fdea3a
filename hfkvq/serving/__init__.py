"""Many users at once: compressed pages in Transformers' continuous batching, and its server."""

from .engine import Serving, Usage, enable

__all__ = ["Serving", "Usage", "enable"]
