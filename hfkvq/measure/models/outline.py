"""Outline of a model from its config: parameters, and each layer's cache. Nothing is downloaded or allocated."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.cache_utils import DynamicCache
from transformers.utils import logging as transformers_logging

from hfkvq.bounded import load_json
from hfkvq.caches.base.model_calls import with_cache
from hfkvq.caches.base.model_config import windows_of
from hfkvq.caches.layers.build import is_held_in_pages

_PROBE = 4
_DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True)
class CachedLayer:
    """Cache of one layer.

    Attributes:
        compressed: held in pages by a compressed cache, for all tokens.
        window: tokens of a sliding window that a compressed cache holds in pages; 0 for none. Layers without either
            stay as Transformers makes them.
        heads: KV heads; 0 if it caches no keys.
    """

    compressed: bool
    heads: int
    key_dim: int
    value_dim: int
    window: int = 0


def positions_of(config: Any) -> int | None:
    """Tokens that a model has positions for, scaled ones included; None if it has no end."""
    text = config.get_text_config(decoder=True)
    room = getattr(text, "max_position_embeddings", None)
    scaling = getattr(text, "rope_parameters", None) or {}
    if room and isinstance(scaling, dict) and isinstance(scaling.get("factor"), (int, float)):
        original = scaling.get("original_max_position_embeddings")
        room = max(room, int(scaling["factor"] * original)) if original else room
    return room


@dataclass(frozen=True)
class Outline:
    """A model without its weights.

    Attributes:
        layers: what the cache's layers hold, in the model's order (with shared layers fewer than the model has).
        parameters: of the model, tied ones once.
        linear: those of linear layers and experts, which quantized checkpoints compress.
        states: bytes a row of states (Mamba, linear attention, convolutions) of all layers, those of one dtype always.
        state_numbers: elements a row of the others, which have the model's dtype.
        dtype: the checkpoint's, as the config says, else bf16.
        captured: presets of which it is known whether a cache's steps are captured.
    """

    config: Any
    layers: tuple[CachedLayer, ...]
    parameters: int
    linear: int
    states: int
    state_numbers: int
    dtype: torch.dtype
    captured: dict[Any, tuple[bool, bool]] = field(default_factory=dict, repr=False, compare=False)
    _stock: dict[tuple[int, int, bool], int] = field(default_factory=dict, repr=False, compare=False)

    @property
    def text(self) -> Any:
        """The decoder's config."""
        return self.config.get_text_config(decoder=True)

    def stock_bytes(self, batch: int, tokens: int, itemsize: int, windows: bool = False) -> int:
        """Bytes of the layers that stay as Transformers makes them: windows, and states of linear attention.

        ``windows``: those are counted too that a compressed cache holds in pages.
        """
        key = (tokens, itemsize, windows)
        if key not in self._stock:
            self._stock[key] = self._windows(tokens, itemsize, windows)
        return batch * (self._stock[key] + self.states + self.state_numbers * itemsize)

    def _windows(self, tokens: int, itemsize: int, windows: bool) -> int:
        dtype = {2: torch.bfloat16, 4: torch.float32}[itemsize]
        held = 0
        stock: list[Any] = DynamicCache(config=self.text).layers
        for layer, shape in zip(stock, self.layers, strict=True):
            if shape.compressed or not shape.heads or not tokens or (shape.window and not windows):
                continue
            # A step behind the rest: until then a window is a view of the whole prompt.
            for new in (tokens - 1, 1) if tokens > 1 else (1,):
                dims = shape.key_dim, shape.value_dim
                layer.update(*(torch.empty(1, shape.heads, new, dim, dtype=dtype, device="meta") for dim in dims))
            held += sum(x.untyped_storage().nbytes() for x in (layer.keys, layer.values) if x is not None)
        return held


@contextmanager
def _quiet() -> Iterator[None]:
    """Transformers warns of kernels that are not installed; nothing is computed here."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)


def outline(config: Any) -> Outline:
    """Builds the model without memory (on the meta device), runs some tokens through it, and looks at its cache.

    Raises:
        ValueError: Transformers cannot build a decoder from this config.
    """
    named = getattr(config, "dtype", None)
    dtype = named if isinstance(named, torch.dtype) else torch.bfloat16
    text = config.get_text_config(decoder=True)
    cache = DynamicCache(config=text)
    try:
        with _quiet(), torch.no_grad():
            model = _build(config)
            ids = torch.zeros(1, _PROBE, dtype=torch.long, device="meta")
            model(input_ids=ids, **with_cache(model, cache), use_cache=True)
    except Exception as error:
        # Whatever a model's code stumbles over.
        raise ValueError(f"model: {type(config).__name__} cannot be laid out without its weights: {error}") from error
    layers, states, windows = [], Counter[torch.dtype](), windows_of(text, cache.layers)
    for i, layer in enumerate(cache.layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        heads = 0 if keys is None or values is None else keys.shape[1]
        dims = (keys.shape[-1], values.shape[-1]) if heads else (0, 0)  # type: ignore[union-attr]
        window = windows.get(i, 0) if heads else 0
        layers.append(CachedLayer(is_held_in_pages(layer, text), heads, *dims, window))
        for held in () if window else vars(layer).values():
            found = held.values() if isinstance(held, dict) else [held]
            for x in found:
                # But for a dict's, counters of sliding windows.
                if isinstance(x, torch.Tensor) and (isinstance(held, dict) or not x.dim()):
                    states[x.dtype] += x.numel()
    linear = {
        id(weight): weight.numel()
        for name, weight in model.named_parameters()
        if weight.dim() >= 2 and not any(word in name for word in ("embed", "lm_head", "wte", "wpe"))
    }
    numbers = states.pop(_DTYPE, 0)
    fixed = sum(kind.itemsize * count for kind, count in states.items())
    return Outline(config, tuple(layers), model.num_parameters(), sum(linear.values()), fixed, numbers, dtype)


def _build(config: Any) -> Any:
    # A quantizer is no concern of shapes, and may not be installed; nor is the dtype, and experts know bf16 alone here.
    given = {k: _with_fixed_rope(v) for k, v in config.to_dict().items() if k != "quantization_config"}
    plain = type(config).from_dict(given)
    with torch.device("meta"):
        try:
            return AutoModelForCausalLM.from_config(plain, dtype=_DTYPE)
        except ValueError:
            return AutoModelForImageTextToText.from_config(plain, dtype=_DTYPE)


def _with_fixed_rope(value: Any) -> Any:
    """A config's value, in which RoPE that asks for the positions' numbers is plain RoPE, of the same shapes."""
    if not isinstance(value, dict):
        return value
    return {
        key: "default" if key in ("rope_type", "type") and own == "dynamic" else _with_fixed_rope(own)
        for key, own in value.items()
    }


def checkpoint_bytes(model: str) -> int | None:
    """Bytes of the weights as an index or the files of a folder or of the Hub's cache say; None if nothing says it."""
    folder = Path(model).expanduser()
    name = "model.safetensors.index.json"
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, name)
        if not isinstance(found, str):
            return None
        folder = Path(found).parent
    index = folder / name
    if index.is_file():
        try:
            return int(load_json(index)["metadata"]["total_size"])
        except (ValueError, KeyError, TypeError):
            return None
    files = list(folder.glob("*.safetensors"))
    return sum(path.stat().st_size for path in files) or None
