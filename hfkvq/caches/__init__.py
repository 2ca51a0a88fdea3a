"""State and the Hugging Face seam: stores, layers, schemes, the cache."""

from . import schemes
from .arkv import ARKVCache
from .cache import MixedKVCache
from .memory import MemoryReport
from .named import KittyCache, MixKVQCache, SawInt4Cache
from .scheme import Scheme, get_scheme, list_schemes
from .table import BitTable
from .triaxial import TriAxialCache

__all__ = [
    "ARKVCache",
    "BitTable",
    "KittyCache",
    "MemoryReport",
    "MixKVQCache",
    "MixedKVCache",
    "SawInt4Cache",
    "Scheme",
    "TriAxialCache",
    "get_scheme",
    "list_schemes",
    "schemes",
]
