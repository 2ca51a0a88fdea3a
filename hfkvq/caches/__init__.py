"""State and the Hugging Face seam: stores, layers, schemes, the cache."""

from . import schemes
from .cache import KittyCache, MixedKVCache, SawInt4Cache
from .memory import MemoryReport
from .scheme import Scheme, get_scheme, list_schemes

__all__ = [
    "KittyCache",
    "MemoryReport",
    "MixedKVCache",
    "SawInt4Cache",
    "Scheme",
    "get_scheme",
    "list_schemes",
    "schemes",
]
