"""Caches named after methods that quantize: `MixedKVCache` with the scheme fixed and its knobs as arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .named import CacheOptions, NamedCache, own_knobs

if TYPE_CHECKING:
    from typing_extensions import Unpack


class KittyCache(NamedCache):
    """`MixedKVCache` with the Kitty scheme: 2-bit pages whose strongest key channels get 4 bits.

    ``KittyCache(model.config)`` is the paper's Kitty (preset ``kitty``); ``boost_ratio=0.25`` makes it Kitty-Pro. The
    default preset of ``MixedKVCache(model.config)`` is another one, ``best-3.4``, with further options of this scheme.
    """

    preset_name = "kitty"

    def __init__(
        self,
        model_or_config: Any,
        *,
        boost_ratio: float = 0.125,
        score: str = "k_abs",
        seed: int = 0,
        sink_length: int = 32,
        local_length: int = 128,
        key_local_length: int = 0,
        page_size: int = 128,
        group_size: int | None = None,
        key_bits: int = 2,
        value_bits: int = 2,
        value_unit: int | None = None,
        wide_from: float = 0.0,
        wide_to: float = 0.0,
        wide_keys_from: float = 0.0,
        wide_keys_to: float = 0.0,
        token_norm: bool = False,
        rotate_values: bool = False,
        clip_values: float = 1.0,
        fit: int = 0,
        fit_values: int = 0,
        exact_keys: int = 0,
        **options: Unpack[CacheOptions],
    ) -> None:
        super().__init__(model_or_config, **own_knobs(locals()), **options)


class KIVICache(NamedCache):
    """`MixedKVCache` with the KIVI scheme: keys per channel, values per token, in 2 or 4 bits.

    ``KIVICache(model.config)`` is the paper's 2 bits, ``KIVICache(model.config, bits=4)`` its 4.
    """

    preset_name = "kivi"

    def __init__(
        self,
        model_or_config: Any,
        *,
        bits: int = 2,
        key_bits: int | None = None,
        value_bits: int | None = None,
        group_size: int = 32,
        local_length: int = 128,
        key_local_length: int = 0,
        sink_length: int = 0,
        rotate_keys: bool = False,
        rotate_values: bool = False,
        token_norm: bool = False,
        fit: int = 0,
        fit_values: int = 0,
        smooth_keys: bool = False,
        exact_keys: int = 0,
        **options: Unpack[CacheOptions],
    ) -> None:
        super().__init__(model_or_config, **own_knobs(locals()), **options)


class MixKVQCache(NamedCache):
    """`MixedKVCache` with the MixKVQ scheme: key channels in 2, 4 or 16 bits, by their error as queries see it.

    ``MixKVQCache(model.config)`` fills the room of each page with its most salient channels;
    ``MixKVQCache(model.config, select="thresholds", tau_bf16=1.44, tau_int4=0.79)`` raises by the paper's thresholds.
    """

    preset_name = "mixkvq"

    def __init__(
        self,
        model_or_config: Any,
        *,
        select: str = "fractions",
        salience: str = "raw_logit",
        accumulate: bool = False,
        tau_bf16: float = 1.44,
        tau_int4: float = 0.79,
        most_bf16: float = 0.0625,
        most_int4: float = 0.25,
        group_size: int = 32,
        sink_length: int = 32,
        page_size: int = 128,
        token_norm: bool = False,
        fit: int = 0,
        fit_values: int = 0,
        **options: Unpack[CacheOptions],
    ) -> None:
        super().__init__(model_or_config, **own_knobs(locals()), **options)


class SawInt4Cache(NamedCache):
    """`MixedKVCache` with the SAW-INT4 scheme: token-wise INT4 after a Hadamard rotation.

    ``SawInt4Cache(model.config)`` rotates keys in blocks of up to 128; ``rotate="both"`` rotates values too.
    """

    preset_name = "saw-int4"

    def __init__(
        self,
        model_or_config: Any,
        *,
        rotate: str = "keys",
        block: int | None = None,
        signs: int = 0,
        quantize_first: bool = False,
        sink_length: int = 16,
        local_length: int = 0,
        page_size: int = 128,
        fit: int = 2,
        fit_values: int = 0,
        smooth_keys: bool = True,
        **options: Unpack[CacheOptions],
    ) -> None:
        super().__init__(model_or_config, **own_knobs(locals()), **options)


class KVarNCache(NamedCache):
    """`MixedKVCache` with the KVarN scheme: keys and values rotated, tokens and channels balanced; keys in 4 bits.

    ``KVarNCache(model.config, value_bits=4)`` is ``kvarn-k4v4``, the closest to bf16 of all measured presets.
    """

    preset_name = "kvarn"

    def __init__(
        self,
        model_or_config: Any,
        *,
        key_bits: int = 4,
        value_bits: int = 2,
        rotate: str = "both",
        rounds: int = 1,
        balance: str = "error",
        sink_length: int = 128,
        page_size: int = 128,
        fit: int = 0,
        fit_values: int = 0,
        smooth_keys: bool = True,
        **options: Unpack[CacheOptions],
    ) -> None:
        super().__init__(model_or_config, **own_knobs(locals()), **options)


class LatentCache(NamedCache):
    """`MixedKVCache` for latent attention (DeepSeek, Kimi, GLM, LongCat): latents in 4 or 8 bits, beside rotary parts.

    ``LatentCache(model.config)`` is ``latent-4``, ``LatentCache(model.config, bits=8, rope_bits=16)`` is ``latent-8``.
    """

    preset_name = "latent-4"

    def __init__(
        self,
        model_or_config: Any,
        *,
        bits: int = 4,
        rope_bits: int = 8,
        group_size: int | None = None,
        block: int | None = None,
        sink_length: int = 32,
        local_length: int = 128,
        page_size: int = 128,
        fit: int = 0,
        **options: Unpack[CacheOptions],
    ) -> None:
        super().__init__(model_or_config, **own_knobs(locals()), **options)


class FullCache(NamedCache):
    """`MixedKVCache` with pages of the model's own dtype: the control, which differs from bf16 only by rounding."""

    preset_name = "full"

    def __init__(
        self,
        model_or_config: Any,
        *,
        page_size: int = 128,
        **options: Unpack[CacheOptions],
    ) -> None:
        super().__init__(model_or_config, **own_knobs(locals()), **options)
