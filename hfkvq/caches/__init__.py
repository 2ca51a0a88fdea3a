"""State and the Hugging Face seam: stores, layers, schemes, the cache."""

from . import schemes
from .cache import MixedKVCache
from .layers.memory import MemoryReport
from .named import (
    ARKVCache,
    ExpectedAttentionCache,
    FullCache,
    H2OCache,
    KittyCache,
    KIVICache,
    KVarNCache,
    LatentCache,
    MixKVQCache,
    PyramidKVCache,
    SawInt4Cache,
    SnapKVCache,
    StreamingLLMCache,
    TOVACache,
    TriAxialCache,
    make_cache,
)
from .prefix_store import PrefixMatch, PrefixStore
from .schemes.base import Scheme, get_scheme, list_schemes
from .schemes.preset import Preset, get_preset
from .tags.bit_table import BitTable
from .using import use

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
    "use",
]
