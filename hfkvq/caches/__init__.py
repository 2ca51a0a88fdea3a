"""State and the Hugging Face seam: stores, layers, schemes, the cache."""

from . import schemes
from .arkv import ARKVCache
from .bit_table import BitTable
from .cache import MixedKVCache
from .make import make_cache
from .memory_report import MemoryReport
from .named import KittyCache, MixKVQCache, SawInt4Cache
from .prefix_store import PrefixMatch, PrefixStore
from .preset import Preset, get_preset
from .scheme import Scheme, get_scheme, list_schemes
from .triaxial import TriAxialCache

__all__ = [
    "ARKVCache",
    "BitTable",
    "KittyCache",
    "MemoryReport",
    "MixKVQCache",
    "MixedKVCache",
    "PrefixMatch",
    "PrefixStore",
    "Preset",
    "SawInt4Cache",
    "Scheme",
    "TriAxialCache",
    "get_preset",
    "get_scheme",
    "list_schemes",
    "make_cache",
    "schemes",
]
