"""hfkvq: KV caches for Hugging Face Transformers that stay compressed and are attended in place."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hfkvq.version import __version__

if TYPE_CHECKING:
    from hfkvq import caches as caches
    from hfkvq import kernels as kernels
    from hfkvq.caches import (
        ARKVCache,
        ExpectedAttentionCache,
        FullCache,
        H2OCache,
        KittyCache,
        KIVICache,
        KVarNCache,
        LatentCache,
        MixedKVCache,
        MixKVQCache,
        PrefixStore,
        PyramidKVCache,
        SawInt4Cache,
        Scheme,
        SnapKVCache,
        StreamingLLMCache,
        TOVACache,
        TriAxialCache,
        get_scheme,
        list_schemes,
        use,
    )
    from hfkvq.measure.watching import watch

__all__ = [
    "ARKVCache",
    "ExpectedAttentionCache",
    "FullCache",
    "H2OCache",
    "KIVICache",
    "KVarNCache",
    "KittyCache",
    "LatentCache",
    "MixKVQCache",
    "MixedKVCache",
    "PrefixStore",
    "PyramidKVCache",
    "SawInt4Cache",
    "Scheme",
    "SnapKVCache",
    "StreamingLLMCache",
    "TOVACache",
    "TriAxialCache",
    "__version__",
    "get_scheme",
    "list_schemes",
    "use",
    "watch",
]

_MODULES = ("caches", "kernels")

# PyTorch and Transformers take seconds to import, so both come with the first name that needs them, and
# `hfkvq --help` at once. Type checkers do not see this function: with it they would take every name for one of ours.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return importlib.import_module(f".{name}", __name__)
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(".measure.watching" if name == "watch" else ".caches", __name__), name)
        # The next time it is found without this function.
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
