"""The caches that are measured, ours and Transformers', each with how its model is run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, QuantizedCache, StaticCache

from hfkvq.caches.cache import MixedKVCache
from hfkvq.caches.preset import Preset
from hfkvq.caches.scheme import nearest
from hfkvq.caches.schemes import TriAxial
from hfkvq.caches.tags import Tagger, parse_tag
from hfkvq.caches.triaxial import TriAxialCache
from hfkvq.divergence.naming import parse_scheme

NARROW, OTHER = "older|text|obs", "current|text|user"
NARROW_SHARE = 0.7
"""Share of a random prompt that TriAxialKV's default table holds in 2 bits, as in its paper's conversations."""

Mode = Literal["compiled", "eager", "grow"]
MODES: tuple[Mode, ...] = ("compiled", "eager", "grow")


class SpreadTags(Tagger):
    """Tags without a conversation: a share of the tokens, spread evenly, are old tool results."""

    def __init__(self) -> None:
        super().__init__(None)

    def tag(self, input_ids: Any, attention_mask: Any = None) -> Tensor:
        """(B, T) uint8 tags on the CPU."""
        rows, tokens = torch.as_tensor(input_ids).shape
        # Multiples of the golden ratio fill the unit interval evenly.
        narrow = (torch.arange(tokens).double() * 0.6180339887498949) % 1.0 < NARROW_SHARE
        return torch.where(narrow, parse_tag(NARROW), parse_tag(OTHER)).to(torch.uint8).repeat(rows, 1)


@dataclass(frozen=True)
class Engine:
    """A cache, and how the model is run with it.

    Attributes:
        name: as typed.
        make: (model or config, tokens of room) to an empty cache.
        ours: whether it is one of this library.
        compiled: whether decode steps go through `torch.compile`.
        fixed: whether the cache has a capacity, and so can be reset and used again.
        cudnn: whether PyTorch's attention may take cuDNN; None leaves it as it is.
        preset: what a cache of ours holds.
    """

    name: str
    make: Callable[[Any, int], Cache]
    ours: bool = False
    compiled: bool = False
    fixed: bool = False
    cudnn: bool | None = None
    preset: Preset | None = None

    @contextlib.contextmanager
    def cache(self, model: Any, room: int) -> Iterator[Cache]:
        """An empty cache for a model (or its config), within the settings that it is to be measured with.

        Args:
            model: the model; given its config, a cache is not shown the token ids of forwards.
            room: tokens of context and generation, for caches of a fixed capacity.

        Raises:
            ValueError: the cache is to be compiled and cannot be.
            ImportError: the package behind it is not installed.
        """
        cache = self.make(model, room)
        if self.compiled and not cache.is_compileable:
            _detach(cache)
            raise ValueError(
                f"{self.name}: this cache cannot be compiled (is_compileable is False); measure {self.name}:eager."
            )
        with self.running(cache):
            yield cache

    @contextlib.contextmanager
    def running(self, cache: Cache) -> Iterator[None]:
        """The settings that a cache of this engine is to be measured with, and after it those that were before."""
        before = torch.backends.cuda.cudnn_sdp_enabled()
        torch.backends.cuda.enable_cudnn_sdp(before if self.cudnn is None else self.cudnn)
        if isinstance(cache, MixedKVCache):
            cache.attach()
        try:
            yield
        finally:
            torch.backends.cuda.enable_cudnn_sdp(before)
            _detach(cache)


def _detach(cache: Cache) -> None:
    # The next cache may be a stock one, with stock attention.
    if isinstance(cache, MixedKVCache):
        cache.detach()


def _config(model: Any) -> Any:
    return getattr(model, "config", model).get_text_config(decoder=True)


def _dynamic(model: Any, room: int) -> Cache:
    return DynamicCache(config=_config(model))


def _static(model: Any, room: int) -> Cache:
    return StaticCache(config=_config(model), max_cache_len=room)


def _quantized(backend: str, bits: int, axis: int) -> Callable[[Any, int], Cache]:
    return lambda model, room: QuantizedCache(backend, _config(model), nbits=bits, axis_key=axis, axis_value=axis)


def _stock() -> Iterator[Engine]:
    yield Engine("dynamic", _dynamic, cudnn=True)
    yield Engine("dynamic-nocudnn", _dynamic, cudnn=False)
    yield Engine("static", _static, fixed=True)
    for name, cudnn in (("static-compiled", None), ("static-compiled-nocudnn", False)):
        yield Engine(name, _static, compiled=True, fixed=True, cudnn=cudnn)
    # The axes that Transformers recommends for each.
    for backend, axis in (("quanto", 0), ("hqq", 1)):
        for bits in (2, 4):
            yield Engine(f"{backend}-{bits}", _quantized(backend, bits, axis))


STOCK: dict[str, Engine] = {engine.name: engine for engine in _stock()}
"""Transformers' own caches by name."""

EAGER_BASELINES = ("dynamic", "dynamic-nocudnn")
COMPILED_BASELINES = ("static-compiled", "static-compiled-nocudnn")

DEFAULT_STOCK = ("dynamic", "dynamic-nocudnn", "static-compiled", "quanto-2", "quanto-4", "hqq-2", "hqq-4")
DEFAULT_SCHEMES = ("kitty-pro", "kivi-2", "saw-int4", "kitty-pro:eager")


def _ours(preset: Preset, mode: Mode) -> Callable[[Any, int], Cache]:
    def make(model: Any, room: int) -> Cache:
        capacity = None if mode == "grow" else room
        if isinstance(preset.scheme, TriAxial):
            knobs = {name: value for name, value in preset.scheme.to_dict().items() if name != "scheme"}
            layers: dict[str | int, Any] = dict(preset.layers)
            return TriAxialCache(model, tagger=SpreadTags(), layers=layers, max_cache_len=capacity, **knobs)
        return MixedKVCache(model, preset, max_cache_len=capacity)

    return make


def parse_scheme_engine(text: str) -> Engine:
    """``kitty``, ``kitty:eager`` (not compiled), ``kitty:grow`` (nor of a fixed capacity), with knobs before the mode.

    Args:
        text: e.g. ``arkv:budget_tokens=1024:eager``; without a mode the model is compiled.

    Raises:
        ValueError: unknown preset or knob, or a value out of range.
    """
    name, _, last = text.rpartition(":")
    known: dict[str, Mode] = {mode: mode for mode in MODES}
    asked = known.get(last) if name else None
    preset, mode = parse_scheme(name if asked else text), asked or "compiled"
    return Engine(
        text,
        _ours(preset, mode),
        ours=True,
        compiled=mode == "compiled",
        fixed=mode != "grow",
        preset=preset,
    )


def check_heads(engines: Sequence[Engine], config: Any) -> None:
    """Raises ValueError if a scheme cannot hold the heads of a model, or names layers that it does not have."""
    for engine in engines:
        if engine.preset is not None:
            MixedKVCache(config, engine.preset, attach=False)


def parse_engines(stock: Sequence[str], schemes: Sequence[str]) -> list[Engine]:
    """Engines by name, stock ones first.

    Raises:
        ValueError: an unknown name, one given twice, or none at all.
    """
    found: dict[str, Engine] = {}
    for name in stock:
        if name not in STOCK:
            raise ValueError(f"engines: got {name!r}, which is unknown; {nearest(name, list(STOCK))}")
    for engine in (*(STOCK[name] for name in stock), *(parse_scheme_engine(text) for text in schemes)):
        if engine.name in found:
            raise ValueError(f"engines, schemes: {engine.name!r} is given twice.")
        found[engine.name] = engine
    if not found:
        raise ValueError("engines, schemes: got none.")
    return list(found.values())
