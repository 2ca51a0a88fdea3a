"""Caches named after methods that evict: `MixedKVCache` with the scheme fixed and its knobs as arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .named import CacheOptions, NamedCache, own_knobs

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .scheme import Scheme


class ARKVCache(NamedCache):
    """`MixedKVCache` with the ARKV scheme: the best tokens in 16 bits, the next in fp8, the others evicted.

    ``ARKVCache(model.config, budget_tokens=512)`` keeps at most 512 tokens in each KV head of each layer;
    ``budget_bytes=...`` counts bytes instead, so that few bits make room for more tokens. Layers share what they learn
    from a prompt: how many tokens one keeps whole depends on how its attention compares with that of the others.
    `get_seq_length` counts tokens seen; `memory` shows what is stored.
    """

    preset_name = "arkv"

    def __init__(
        self,
        model_or_config: Any,
        *,
        budget_tokens: int | None = None,
        window: int = 32,
        budget_bytes: int | None = None,
        low_bits: int = 8,
        alpha: float = 0.75,
        gamma: float = 263.8108280337562,
        tau_entropy: float = 7.774380648611771,
        tau_variance: float = 5.407015096778621,
        tau_kurtosis: float = 5.527702582901318,
        stats: str = "code",
        tiers: str = "mixed",
        score: str = "attention",
        beta: float = 0.0,
        page_size: int = 32,
        smooth_keys: bool = True,
        **options: Unpack[CacheOptions],
    ) -> None:
        super().__init__(model_or_config, **own_knobs(locals()), **options)


class SnapKVCache(NamedCache):
    """`MixedKVCache` that evicts as SnapKV does: it keeps the tokens of a prompt that its last queries attend to.

    ``SnapKVCache(model.config, budget_tokens=1024, pages="kitty-pro")`` stores the kept tokens in Kitty-Pro's pages.
    """

    preset_name = "snapkv"

    def __init__(
        self,
        model_or_config: Any,
        *,
        budget_tokens: int | None = None,
        window: int = 64,
        budget_share: float | None = None,
        sink_length: int = 0,
        trim_every: int = 0,
        pages: str | Scheme | Mapping[str, Any] = "full",
        kernel: int = 5,
        **options: Unpack[CacheOptions],
    ) -> None:
        super().__init__(model_or_config, **own_knobs(locals()), **options)


class PyramidKVCache(NamedCache):
    """`MixedKVCache` that evicts as PyramidKV does: SnapKV's tokens, more of them in lower layers."""

    preset_name = "pyramidkv"

    def __init__(
        self,
        model_or_config: Any,
        *,
        budget_tokens: int | None = None,
        window: int = 8,
        budget_share: float | None = None,
        sink_length: int = 0,
        trim_every: int = 0,
        pages: str | Scheme | Mapping[str, Any] = "full",
        beta: int = 20,
        kernel: int = 5,
        **options: Unpack[CacheOptions],
    ) -> None:
        super().__init__(model_or_config, **own_knobs(locals()), **options)


class H2OCache(NamedCache):
    """`MixedKVCache` that evicts as H2O does: it keeps the newest tokens, and those attended to most so far."""

    preset_name = "h2o"

    def __init__(
        self,
        model_or_config: Any,
        *,
        budget_tokens: int | None = None,
        window: int = 512,
        budget_share: float | None = None,
        sink_length: int = 0,
        trim_every: int = 64,
        pages: str | Scheme | Mapping[str, Any] = "full",
        **options: Unpack[CacheOptions],
    ) -> None:
        super().__init__(model_or_config, **own_knobs(locals()), **options)


class StreamingLLMCache(NamedCache):
    """`MixedKVCache` that evicts as StreamingLLM does: it keeps the first tokens and the newest."""

    preset_name = "streaming-llm"

    def __init__(
        self,
        model_or_config: Any,
        *,
        budget_tokens: int | None = None,
        window: int = 1,
        budget_share: float | None = None,
        sink_length: int = 4,
        trim_every: int = 64,
        pages: str | Scheme | Mapping[str, Any] = "full",
        **options: Unpack[CacheOptions],
    ) -> None:
        super().__init__(model_or_config, **own_knobs(locals()), **options)


class TOVACache(NamedCache):
    """`MixedKVCache` that evicts as TOVA does: it keeps the tokens that the newest query attends to."""

    preset_name = "tova"

    def __init__(
        self,
        model_or_config: Any,
        *,
        budget_tokens: int | None = None,
        window: int = 1,
        budget_share: float | None = None,
        sink_length: int = 0,
        trim_every: int = 64,
        pages: str | Scheme | Mapping[str, Any] = "full",
        **options: Unpack[CacheOptions],
    ) -> None:
        super().__init__(model_or_config, **own_knobs(locals()), **options)


class ExpectedAttentionCache(NamedCache):
    """`MixedKVCache` that evicts by expected attention: it keeps what future queries are expected to attend to."""

    preset_name = "expected-attention"

    def __init__(
        self,
        model_or_config: Any,
        *,
        budget_tokens: int | None = None,
        window: int = 1,
        budget_share: float | None = None,
        sink_length: int = 4,
        trim_every: int = 0,
        pages: str | Scheme | Mapping[str, Any] = "full",
        recent: int = 512,
        epsilon: float = 0.0,
        **options: Unpack[CacheOptions],
    ) -> None:
        super().__init__(model_or_config, **own_knobs(locals()), **options)
