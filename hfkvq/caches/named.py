"""Caches named after the papers: `MixedKVCache` with the scheme fixed and its knobs as arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from .cache import MixedKVCache
from .preset import Preset
from .scheme import get_scheme

if TYPE_CHECKING:
    from typing_extensions import Self


class NamedCache(MixedKVCache):
    """`MixedKVCache` of the scheme ``preset``.

    Args:
        model_or_config: the model, or its config.
        layers: see `MixedKVCache`.
        max_cache_len: see `MixedKVCache`.
        graphs: see `MixedKVCache`.
        headroom: see `MixedKVCache`.
        offloading: see `MixedKVCache`.
        attach: see `MixedKVCache`.
        debug: see `MixedKVCache`.
        **knobs: fields of the scheme.

    Raises:
        ValueError: unknown knob or one out of range; see `MixedKVCache`.
    """

    preset_name: ClassVar[str]

    def __init__(
        self,
        model_or_config: Any,
        *,
        layers: Mapping[str | int, Any] | None = None,
        max_cache_len: int | None = None,
        graphs: bool | None = None,
        headroom: float = 0.25,
        offloading: bool | int = False,
        attach: bool = True,
        debug: bool = False,
        **knobs: Any,
    ) -> None:
        scheme = get_scheme(self.preset_name, **knobs)
        super().__init__(
            model_or_config,
            scheme,
            layers=layers,
            max_cache_len=max_cache_len,
            graphs=graphs,
            headroom=headroom,
            offloading=offloading,
            attach=attach,
            debug=debug,
        )

    @classmethod
    def of_preset(cls, model_or_config: Any, preset: Preset, **options: Any) -> Self:
        """See `SavedCache.of_preset`."""
        own, knobs = get_scheme(cls.preset_name), preset.scheme.to_dict()
        if knobs.pop("scheme") != own.name:
            raise ValueError(f"it is of the scheme {preset.scheme.name}, and {cls.__name__} of {own.name}")
        return cls(model_or_config, layers=dict(preset.layers), **knobs, **options)


class KittyCache(NamedCache):
    """`MixedKVCache` with the Kitty scheme: 2-bit pages whose strongest key channels get 4 bits.

    ``KittyCache(model.config)`` is Kitty, ``KittyCache(model.config, boost_ratio=0.25)`` Kitty-Pro. Knobs are the
    fields of `hfkvq.caches.schemes.Kitty`: ``boost_ratio`` (0.125), ``score`` ("k_abs"), ``seed`` (0),
    ``sink_length`` (32), ``local_length`` (128), ``page_size`` (128). Other arguments and errors: `NamedCache`.
    """

    preset_name = "kitty"


class MixKVQCache(NamedCache):
    """`MixedKVCache` with the MixKVQ scheme: key channels in 2, 4 or 16 bits, by how much the queries see their error.

    ``MixKVQCache(model.config)`` fills the room of each page with its most salient channels;
    ``MixKVQCache(model.config, select="thresholds", tau_bf16=1.44, tau_int4=0.79)`` raises by the paper's thresholds.
    Knobs are the fields of `hfkvq.caches.schemes.MixKVQ`: ``select`` ("fractions"), ``salience`` ("raw_logit"),
    ``tau_bf16`` (1.44), ``tau_int4`` (0.79), ``most_bf16`` (0.0625), ``most_int4`` (0.25), ``group_size`` (32),
    ``sink_length`` (32), ``page_size`` (128). Other arguments and errors: `NamedCache`.
    """

    preset_name = "mixkvq"


class SawInt4Cache(NamedCache):
    """`MixedKVCache` with the SAW-INT4 scheme: token-wise INT4 after a Hadamard rotation.

    ``SawInt4Cache(model.config)`` rotates keys in blocks of up to 128; ``rotate="both"`` rotates values too. Knobs are
    the fields of `hfkvq.caches.schemes.SawInt4`: ``rotate`` ("keys"), ``block`` (the largest up to 128), ``signs`` (0),
    ``quantize_first`` (False), ``sink_length`` (0), ``local_length`` (0), ``page_size`` (128). Other arguments and
    errors: `NamedCache`.
    """

    preset_name = "saw-int4"
