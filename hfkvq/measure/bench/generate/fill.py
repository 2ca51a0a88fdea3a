"""A full cache without a prefill: random keys and values through the cache's own update.

A prompt of 480 x 8k tokens would take an 8B model a minute; this takes seconds, and leaves the cache as a prompt that
came in chunks would have.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from hfkvq.caches.eviction import EvictionScheme
from hfkvq.caches.layers import KVLayer
from hfkvq.caches.triaxial import TriAxialCache
from hfkvq.kernels.arguments import AttentionArguments

from .cases import Case
from .models import Heads

QUERIES = 64
"""Newest queries that a scheme is shown, where it asks for any and does not say how many."""


def chunk_tokens(heads: Heads, batch: int, dtype: torch.dtype, most_bytes: int) -> int:
    """Tokens that a chunk may have for its keys and values of one layer to stay below ``most_bytes``; at least 128."""
    whole = most_bytes // (batch * heads.token_bytes(dtype))
    return max(whole // 128 * 128, 128)


def fill(
    cache: Cache,
    heads: Heads,
    case: Case,
    vocabulary: int,
    device: torch.device,
    dtype: torch.dtype,
    most_bytes: int = 2**30,
    seed: int = 0,
) -> None:
    """Gives every layer of an empty cache ``case.context`` random tokens a row.

    Chunks come as in a chunked prefill, each through all layers, because caches that evict compare their layers. Caches
    of this library seal and evict as if attention had run; only its output is never computed.

    Args:
        cache: empty.
        heads: of the model.
        case: rows and tokens.
        vocabulary: token ids, for caches that read them.
        device: of keys and values.
        dtype: of keys and values.
        most_bytes: made at a time.
        seed: of the random numbers.

    Raises:
        RuntimeError: the cache does not hold as many tokens as it was given.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(count: int, tokens: int) -> Tensor:
        size = (case.batch, count, tokens, heads.dim)
        return torch.randn(size, generator=generator, device=device, dtype=dtype)

    if isinstance(cache, TriAxialCache):
        cache.see(torch.randint(vocabulary, (case.batch, case.context), generator=torch.Generator().manual_seed(seed)))
    most = chunk_tokens(heads, case.batch, dtype, most_bytes)
    for start in range(0, case.context, most):
        tokens = min(most, case.context - start)
        for index in range(heads.layers):
            cache.update(normal(heads.kv_heads, tokens), normal(heads.kv_heads, tokens), index)
            layer = cache.layers[index]
            if isinstance(layer, KVLayer):
                # What attention does but attend: see `hfkvq.caches.attention`.
                queries = min(_queries(layer), tokens)
                layer.begin(None, queries)
                layer.finish(normal(heads.heads, queries), AttentionArguments(heads.dim**-0.5))
    held = length(cache)
    if held != case.context:
        raise RuntimeError(f"filled with {case.context} tokens, but the cache holds {held}.")


def _queries(layer: KVLayer) -> int:
    """Newest queries to show a layer."""
    scheme = layer.scheme
    if not isinstance(scheme, EvictionScheme):
        return QUERIES if "query" in scheme.needs else 1
    # All that came with an update, where all are asked.
    return max(QUERIES, layer.new_columns if "received" in scheme.evidence else scheme.queries)


def length(cache: Cache) -> int:
    """Tokens that a cache has seen; static ones count on the device."""
    return int(cache.get_seq_length())
