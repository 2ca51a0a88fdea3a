"""hfkvq: KV caches for Hugging Face Transformers that stay compressed and are attended in place."""

from .caches import (
    ARKVCache,
    KittyCache,
    MixedKVCache,
    MixKVQCache,
    PrefixStore,
    SawInt4Cache,
    Scheme,
    TriAxialCache,
    get_scheme,
    list_schemes,
)
from .version import __version__

__all__ = [
    "ARKVCache",
    "KittyCache",
    "MixKVQCache",
    "MixedKVCache",
    "PrefixStore",
    "SawInt4Cache",
    "Scheme",
    "TriAxialCache",
    "__version__",
    "get_scheme",
    "list_schemes",
]
