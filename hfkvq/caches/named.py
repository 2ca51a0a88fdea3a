"""Caches named after papers: `MixedKVCache` with the preset fixed.

Knobs are keyword arguments, as of `MixedKVCache`: ``hfkvq schemes kitty`` lists them, and the dataclass of the scheme
types them: ``MixedKVCache(model, schemes.Kitty(boost_ratio=0.2))`` is ``KittyCache(model, boost_ratio=0.2)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from .cache import MixedKVCache
from .schemes.base import get_scheme
from .schemes.preset import Preset

if TYPE_CHECKING:
    from typing_extensions import Self


class NamedCache(MixedKVCache):
    """`MixedKVCache` of the preset ``preset_name``.

    Args:
        model_or_config: the model, or its config.
        **given: knobs of the scheme, and further arguments of `MixedKVCache`.

    Raises:
        ValueError: unknown knob or one out of range; see `MixedKVCache`.
    """

    preset_name: ClassVar[str]

    def __init__(self, model_or_config: Any, **given: Any) -> None:
        super().__init__(model_or_config, self.preset_name, **given)

    @classmethod
    def of_preset(cls, model_or_config: Any, preset: Preset, **options: Any) -> Self:
        """See `SavedCache.of_preset`."""
        own, knobs = get_scheme(cls.preset_name), preset.scheme.to_dict()
        if knobs.pop("scheme") != own.name:
            raise ValueError(f"it is of the scheme {preset.scheme.name}, and {cls.__name__} of {own.name}")
        return cls(model_or_config, layers=dict(preset.layers), **knobs, **options)


class KittyCache(NamedCache):
    """`MixedKVCache` with the Kitty scheme: 2-bit pages whose strongest key channels get 4 bits.

    ``KittyCache(model)`` is the paper's Kitty (preset ``kitty``); ``boost_ratio=0.25`` makes it Kitty-Pro. The
    default preset of ``MixedKVCache(model)`` is another one, ``best-3.4``, with further options of this scheme.
    """

    preset_name = "kitty"


class KIVICache(NamedCache):
    """`MixedKVCache` with the KIVI scheme: keys per channel, values per token, in 2 or 4 bits.

    ``KIVICache(model)`` is the paper's 2 bits, ``KIVICache(model, bits=4)`` its 4.
    """

    preset_name = "kivi"


class MixKVQCache(NamedCache):
    """`MixedKVCache` with the MixKVQ scheme: key channels in 2, 4 or 16 bits, by their error as queries see it.

    ``MixKVQCache(model)`` fills the room of each page with its most salient channels;
    ``MixKVQCache(model, select="thresholds", tau_bf16=1.44, tau_int4=0.79)`` raises by the paper's thresholds.
    """

    preset_name = "mixkvq"


class SawInt4Cache(NamedCache):
    """`MixedKVCache` with the SAW-INT4 scheme: token-wise INT4 after a Hadamard rotation.

    ``SawInt4Cache(model)`` rotates keys in blocks of up to 128; ``rotate="both"`` rotates values too.
    """

    preset_name = "saw-int4"


class KVarNCache(NamedCache):
    """`MixedKVCache` with the KVarN scheme: keys and values rotated, tokens and channels balanced; keys in 4 bits.

    ``KVarNCache(model, value_bits=4)`` is ``kvarn-k4v4``, the closest to bf16 of all measured presets.
    """

    preset_name = "kvarn"


class LatentCache(NamedCache):
    """`MixedKVCache` for latent attention (DeepSeek, Kimi, GLM, LongCat): latents in 4 or 8 bits, beside rotary parts.

    ``LatentCache(model)`` is ``latent-4``, ``LatentCache(model, bits=8, rope_bits=16)`` is ``latent-8``.
    """

    preset_name = "latent-4"


class FullCache(NamedCache):
    """`MixedKVCache` with pages of the model's own dtype: the control, which differs from bf16 only by rounding."""

    preset_name = "full"


class ARKVCache(NamedCache):
    """`MixedKVCache` with the ARKV scheme: the best tokens in 16 bits, the next in fp8, the others evicted.

    ``ARKVCache(model, budget_tokens=512)`` keeps at most 512 tokens in each KV head of each layer;
    ``budget_bytes=...`` counts bytes instead, so that few bits make room for more tokens. Layers share what they learn
    from a prompt: how many tokens one keeps whole depends on how its attention compares with that of the others.
    `get_seq_length` counts tokens seen; `memory` shows what is stored.
    """

    preset_name = "arkv"


class SnapKVCache(NamedCache):
    """`MixedKVCache` that evicts as SnapKV does: it keeps the tokens of a prompt that its last queries attend to.

    ``SnapKVCache(model, budget_tokens=1024, pages="kitty-pro")`` stores the kept tokens in Kitty-Pro's pages.
    """

    preset_name = "snapkv"


class PyramidKVCache(NamedCache):
    """`MixedKVCache` that evicts as PyramidKV does: SnapKV's tokens, more of them in lower layers."""

    preset_name = "pyramidkv"


class H2OCache(NamedCache):
    """`MixedKVCache` that evicts as H2O does: it keeps the newest tokens, and those attended to most so far."""

    preset_name = "h2o"


class StreamingLLMCache(NamedCache):
    """`MixedKVCache` that evicts as StreamingLLM does: it keeps the first tokens and the newest."""

    preset_name = "streaming-llm"


class TOVACache(NamedCache):
    """`MixedKVCache` that evicts as TOVA does: it keeps the tokens that the newest query attends to."""

    preset_name = "tova"


class ExpectedAttentionCache(NamedCache):
    """`MixedKVCache` that evicts by expected attention: it keeps what future queries are expected to attend to."""

    preset_name = "expected-attention"
