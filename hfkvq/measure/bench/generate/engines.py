"""The caches that are measured, ours and Transformers', each with how its model is run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, StaticCache

from hfkvq.caches.cache import DEFAULT_SCHEME, MixedKVCache
from hfkvq.caches.preset import Preset, get_preset
from hfkvq.caches.registry import listed
from hfkvq.caches.scheme import nearest
from hfkvq.caches.schemes import TriAxial
from hfkvq.caches.tags import Tagger, parse_tag
from hfkvq.caches.triaxial import TriAxialCache
from hfkvq.measure.divergence.naming import QUANTIZED, PlainCache

NARROW, OTHER = "older|text|obs", "current|text|user"
NARROW_SHARE = 0.7
"""Share of a random prompt that TriAxialKV's default table holds in 2 bits, as in its paper's conversations."""

Mode = Literal["graphs", "fixed", "compiled", "eager", "offloaded"]
MODES: tuple[Mode, ...] = ("fixed", "compiled", "eager", "offloaded")
"""What may stand behind a scheme's name; without any of them its cache is made as users make it: "graphs"."""


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
        graphs: whether the cache may run decode steps as CUDA graphs of its own.
        fixed: whether the cache has a capacity, and so can be reset and used again.
        offloaded: whether the cache keeps what it can in the host's memory.
        cudnn: whether PyTorch's attention may take cuDNN; None leaves it as it is.
        preset: what a cache of ours holds.
    """

    name: str
    make: Callable[[Any, int], Cache]
    ours: bool = False
    compiled: bool = False
    graphs: bool = False
    fixed: bool = False
    offloaded: bool = False
    cudnn: bool | None = None
    preset: Preset | None = None

    @property
    def mode(self) -> str:
        """How steps are run, whether the cache has a capacity, and where it lies, in a word."""
        if self.offloaded:
            return "offloaded"
        if self.compiled:
            return "compiled"
        if self.graphs:
            return "fixed" if self.fixed else "graphs"
        return "eager"

    @property
    def warms_up(self) -> bool:
        """Whether the first steps record what later ones run."""
        return self.compiled or self.graphs

    @property
    def croppable(self) -> bool:
        """Whether the cache may be one that gives the newest tokens back, as drafts need it."""
        return not self.compiled and (self.ours or not self.fixed)

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
        cache = self.fresh(model, room)
        with self.running(cache):
            yield cache

    def fresh(self, model: Any, room: int) -> Cache:
        """An empty cache; see `cache`."""
        cache = self.make(model, room)
        if self.compiled and not cache.is_compileable:
            _detach(cache)
            scheme = scheme_of(self.name)
            raise ValueError(f"{self.name}: this cache cannot be compiled (is_compileable is False); measure {scheme}.")
        return cache

    @contextlib.contextmanager
    def settings(self, model: Any) -> Iterator[None]:
        """For caches that are made inside, one after the other: attention as they need it, and after it as before."""
        try:
            with _cudnn(self.cudnn):
                yield
        finally:
            if self.preset is not None:
                # Whatever cache of this model does it.
                MixedKVCache(_config(model), self.preset, attach=False).detach()

    @contextlib.contextmanager
    def running(self, cache: Cache) -> Iterator[None]:
        """The settings that a cache of this engine is to be measured with, and after it those that were before."""
        if isinstance(cache, MixedKVCache):
            cache.attach()
        try:
            with _cudnn(self.cudnn):
                yield
        finally:
            _detach(cache)


@contextlib.contextmanager
def _cudnn(allowed: bool | None) -> Iterator[None]:
    """Whether PyTorch's attention may take cuDNN within this context; None leaves it as it is."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(before if allowed is None else allowed)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def _detach(cache: Cache) -> None:
    # The next cache may be a stock one, with stock attention.
    if isinstance(cache, MixedKVCache):
        cache.detach()


def _config(model: Any) -> Any:
    return getattr(model, "config", model).get_text_config(decoder=True)


def _dynamic(model: Any, room: int) -> Cache:
    return DynamicCache(config=_config(model))


def _offloaded(model: Any, room: int) -> Cache:
    return DynamicCache(config=_config(model), offloading=True)


def _static(model: Any, room: int) -> Cache:
    return StaticCache(config=_config(model), max_cache_len=room)


def _quantized(cache: PlainCache) -> Callable[[Any, int], Cache]:
    return lambda model, room: cache.make(_config(model))


def _stock() -> Iterator[Engine]:
    yield Engine("dynamic", _dynamic, cudnn=True)
    yield Engine("dynamic-nocudnn", _dynamic, cudnn=False)
    yield Engine("dynamic-offloaded", _offloaded, offloaded=True)
    yield Engine("static", _static, fixed=True)
    for name, cudnn in (("static-compiled", None), ("static-compiled-nocudnn", False)):
        yield Engine(name, _static, compiled=True, fixed=True, cudnn=cudnn)
    for name, cache in QUANTIZED.items():
        yield Engine(name, _quantized(cache))


STOCK: dict[str, Engine] = {engine.name: engine for engine in _stock()}
"""Transformers' own caches by name."""

EAGER_BASELINES = ("dynamic", "dynamic-nocudnn")
COMPILED_BASELINES = ("static-compiled", "static-compiled-nocudnn")

DEFAULT_STOCK = ("dynamic", "dynamic-nocudnn", "static-compiled", "quanto-2", "quanto-4", "hqq-2", "hqq-4")


def default_schemes() -> tuple[str, ...]:
    """Our caches that are measured unless others are asked for: presets, and the library's default in other modes."""
    return *listed("bench generate"), f"{DEFAULT_SCHEME}:compiled", f"{DEFAULT_SCHEME}:eager"


def cache_options(mode: Mode, room: int) -> dict[str, Any]:
    """Arguments of a cache's constructor that make it one of a mode; those that users leave out are left out."""
    options: dict[str, Any] = {"max_cache_len": room} if mode in ("fixed", "compiled") else {}
    options |= {"offloading": True} if mode == "offloaded" else {}
    return options | ({"graphs": False} if mode in ("compiled", "eager") else {})


def _ours(preset: Preset, mode: Mode) -> Callable[[Any, int], Cache]:
    def make(model: Any, room: int) -> Cache:
        options = cache_options(mode, room)
        if isinstance(preset.scheme, TriAxial):
            knobs = {name: value for name, value in preset.scheme.to_dict().items() if name != "scheme"}
            layers: dict[str | int, Any] = dict(preset.layers)
            return TriAxialCache(model, tagger=SpreadTags(), layers=layers, **options, **knobs)
        return MixedKVCache(model, preset, **options)

    return make


def scheme_of(name: str) -> str:
    """An engine's name without its mode: ``kitty`` of ``kitty:eager``."""
    head, _, last = name.rpartition(":")
    return head if head and last in MODES else name


def parse_scheme_engine(text: str) -> Engine:
    """A scheme with knobs, then a mode.

    Without a mode, as users get it by default: growing, steps as CUDA graphs of the cache's own. ``:fixed`` is the same
    with ``max_cache_len``; ``:compiled`` has ``max_cache_len`` too, but its steps go through `torch.compile`;
    ``:eager`` grows, and every step is launched operation by operation; ``:offloaded`` is as without a mode, with pages
    in the host's memory.

    Args:
        text: e.g. ``kitty``, or ``arkv:budget_tokens=1024:eager``.

    Raises:
        ValueError: unknown preset, knob or mode, or a value out of range.
    """
    scheme = scheme_of(text)
    known: dict[str, Mode] = {mode: mode for mode in MODES}
    mode: Mode = "graphs" if scheme == text else known[text.rpartition(":")[2]]
    last = text.rpartition(":")[2]
    if scheme == text and ":" in text and "=" not in last and last:
        raise ValueError(f"schemes: got {text!r}, whose mode is unknown; {nearest(last, list(MODES))}")
    preset = get_preset(scheme)
    return Engine(
        text,
        _ours(preset, mode),
        ours=True,
        compiled=mode == "compiled",
        graphs=mode in ("graphs", "fixed", "offloaded"),
        fixed=mode in ("fixed", "compiled"),
        offloaded=mode == "offloaded",
        preset=preset,
    )


def check_heads(engines: Sequence[Engine], config: Any) -> None:
    """Raises ValueError if a scheme cannot hold the heads of a model, or names layers that it does not have."""
    for engine in engines:
        if engine.preset is not None:
            MixedKVCache(config, engine.preset, attach=False, offloading=engine.offloaded)


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
