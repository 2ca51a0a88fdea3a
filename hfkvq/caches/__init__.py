"""State and the Hugging Face seam: stores, layers, schemes, the cache."""

from . import schemes
from .arkv import ARKVCache
from .cache import MixedKVCache
from .memory import MemoryReport
from .named import KittyCache, SawInt4Cache
from .scheme import Scheme, get_scheme, list_schemes

__all__ = [
    "ARKVCache",
    "KittyCache",
    "MemoryReport",
    "MixedKVCache",
    "SawInt4Cache",
    "Scheme",
    "get_scheme",
    "list_schemes",
    "schemes",
]
