"""State and the Hugging Face seam: stores, layers, schemes, the cache."""

from . import schemes
from .bit_table import BitTable
from .cache import MixedKVCache
from .make import make_cache
from .memory_report import MemoryReport
from .named_evicting import (
    ARKVCache,
    ExpectedAttentionCache,
    H2OCache,
    PyramidKVCache,
    SnapKVCache,
    StreamingLLMCache,
    TOVACache,
)
from .named_quantizing import FullCache, KittyCache, KIVICache, KVarNCache, LatentCache, MixKVQCache, SawInt4Cache
from .prefix_store import PrefixMatch, PrefixStore
from .preset import Preset, get_preset
from .scheme import Scheme, get_scheme, list_schemes
from .triaxial import TriAxialCache

__all__ = [
    "ARKVCache",
    "BitTable",
    "ExpectedAttentionCache",
    "FullCache",
    "H2OCache",
    "KIVICache",
    "KVarNCache",
    "KittyCache",
    "LatentCache",
    "MemoryReport",
    "MixKVQCache",
    "MixedKVCache",
    "PrefixMatch",
    "PrefixStore",
    "Preset",
    "PyramidKVCache",
    "SawInt4Cache",
    "Scheme",
    "SnapKVCache",
    "StreamingLLMCache",
    "TOVACache",
    "TriAxialCache",
    "get_preset",
    "get_scheme",
    "list_schemes",
    "make_cache",
    "schemes",
]
