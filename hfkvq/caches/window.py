"""Layers whose queries see a window of the newest tokens: which they are, and what holds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers.cache_utils import DynamicSlidingWindowLayer
from transformers.configuration_utils import PreTrainedConfig

from .scheme import Scheme
from .schemes.full import Full

PAYS = 4
"""How many times a scheme's own unquantized tokens a window has to have, for its pages to pay."""

PAGE = 32
"""Tokens of a window's 16-bit pages at the most: a ring of large ones would hold much more than the window."""


UNMASKED = {"moshi"}
"""Models whose masks hide nothing of what a window's layer is handed, so that queries of one forward see unlike many
tokens: their layers stay as Transformers makes them."""


def in_window(scheme: Scheme, window: int, dims: tuple[int, int]) -> Scheme:
    """What holds a layer with a window: the scheme where that pays, or else 16-bit pages.

    16-bit pages take windows that are short beside what the scheme keeps unquantized anyway, and schemes that choose
    among all tokens of a row: those that evict, and those that give tokens widths of their own.

    Args:
        scheme: of the layer.
        window: tokens that a query sees.
        dims: of keys and values.
    """
    if isinstance(scheme, Full):
        return Full(page_size=min(PAGE, scheme.page_size))
    if not scheme.evicts and not scheme.latents and not scheme.needs & {"tags", "turns"}:
        layout = scheme.layout(*dims)
        if len(layout.keys.formats) == 1 and window >= PAYS * layout.own_tokens():
            return scheme
    return Full(page_size=PAGE)


def windows_of(config: PreTrainedConfig, layers: Sequence[Any]) -> dict[int, int]:
    """Tokens that a query sees of layers whose windows can be held in pages, by their numbers.

    Not where layers see chunks, or share keys and values.

    Args:
        config: of the decoder.
        layers: what Transformers makes for it.
    """
    shared = getattr(config, "kv_sharing_modes", None) or getattr(config, "num_kv_shared_layers", 0)
    if shared or config.model_type in UNMASKED:
        return {}
    kinds, plain = getattr(config, "layer_types", None), getattr(config, "sliding_window", None) is not None
    return {
        i: layer.sliding_window
        for i, layer in enumerate(layers)
        if type(layer) is DynamicSlidingWindowLayer
        and layer.sliding_window > 0
        and (kinds[i] == "sliding_attention" if kinds else plain)
    }
