"""Models and schemes that the engine's blocks serve."""

from __future__ import annotations

from transformers import PreTrainedConfig
from transformers.generation.continuous_batching import cache as paged
from transformers.generation.continuous_batching.cache_allocators import FULL_ATTENTION

from hfkvq.caches import Scheme
from hfkvq.caches.base.model_config import attention_shape, text_config

from .pages import has_windows, refusal
from .slots import of_schemes


def schemes_of(config: PreTrainedConfig, scheme: Scheme) -> tuple[Scheme, ...]:
    """Scheme of each layer of a model."""
    layers = text_config(config).num_hidden_layers
    return tuple(scheme.in_layer(layer, layers).shared for layer in range(layers))


def windowed(config: PreTrainedConfig, schemes: tuple[Scheme, ...]) -> bool:
    """True if requests of a model have windows beside their blocks."""
    shape = attention_shape(config)
    return shape is not None and any(has_windows(scheme, shape[2]) for scheme in schemes)


def check(config: PreTrainedConfig, scheme: Scheme) -> None:
    """Raises ValueError if the engine's blocks cannot hold pages of a scheme for a model, with the reason."""
    shape, kinds = attention_shape(config), set(paged.group_layers_by_attn_type(text_config(config)))
    if shape is None or kinds != {FULL_ATTENTION}:
        raise ValueError(
            f"model: got {config.model_type!r} with layers of {', '.join(sorted(kinds))}, allowed models whose layers "
            "all have full attention of one shape; use Transformers' own blocks."
        )
    schemes = schemes_of(config, scheme)
    reason = next((found for found in (refusal(own, shape[2]) for own in schemes) if found), None)
    reason = reason or of_schemes(schemes, shape[2])
    if reason:
        raise ValueError(
            f"scheme: got {scheme.name!r}, allowed schemes of one width a side that keep all tokens (saw-int4, "
            f"kitty-pro, best-2.5, kivi-2, kvarn, mixkvq...): {reason}. MixedKVCache with generate takes every scheme."
        )
