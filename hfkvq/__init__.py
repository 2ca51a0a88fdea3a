"""hfkvq: KV caches for Hugging Face Transformers that stay compressed and are attended in place."""

from importlib.metadata import PackageNotFoundError, version

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

try:
    __version__ = version("hfkvq")
except PackageNotFoundError:
    # A checkout on the path, not installed.
    __version__ = "0.1.0"

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
