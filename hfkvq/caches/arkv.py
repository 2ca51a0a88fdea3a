"""`ARKVCache`: a budget of tokens per layer and KV head."""

from __future__ import annotations

from .named import NamedCache


class ARKVCache(NamedCache):
    """`MixedKVCache` with the ARKV scheme: the best tokens whole, the next in fp8, the others evicted.

    ``ARKVCache(model.config, budget_tokens=512)`` keeps at most 512 tokens in each KV head of each layer;
    ``budget_bytes=...`` counts bytes instead, so that few bits make room for more tokens. Layers share what they learn
    from a prompt: how many tokens one keeps whole depends on how its attention compares with that of the others. Knobs
    are the fields of `hfkvq.caches.schemes.Arkv`: ``budget_tokens`` (1024), ``budget_bytes``, ``window`` (32),
    ``alpha`` (0.75), ``tiers`` ("mixed"), ``stats`` ("code"), ``score`` ("attention"), ``low_bits`` (8), ``beta`` (0),
    ``gamma``, ``tau_entropy``, ``tau_variance``, ``tau_kurtosis``, ``page_size`` (32). Other arguments and errors:
    `NamedCache`.

    `get_seq_length` counts tokens seen; `memory` shows what is stored.
    """

    preset_name = "arkv"
