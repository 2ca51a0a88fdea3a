"""Presets and caches of others, as commands are told to measure them."""

from __future__ import annotations

import importlib
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import Cache

from hfkvq.caches.schemes.base import listed, split_knobs
from hfkvq.caches.schemes.preset import Preset, get_preset

_PATH = re.compile(r"([A-Za-z_][\w.]*):([A-Za-z_]\w*)")
"""Spelling of a class: ``package.module:Class``."""


class OtherCache:
    """A cache that is not this library's, for `hfkvq kld` to measure: ``kind(config=..., **options)``, or a subclass.

    Attributes:
        simulated: True if the cache holds everything in full precision and only rounds as its method would. Its bits
            are then computed by `bits`, not counted.
        about: a sentence for the report: the method, its authors, and how this differs from it.
    """

    simulated: ClassVar[bool] = False
    about: str = ""

    def __init__(self, kind: type[Cache], options: Mapping[str, Any]) -> None:
        self.kind, self.options = kind, dict(options)

    def to_dict(self) -> dict[str, Any]:
        """Settings, for records."""
        return {"cache": self.kind.__name__, "simulated": False, **self.options}

    def check(self, config: Any) -> None:
        """Checks a model's config before its weights are loaded.

        Raises:
            ImportError: a package is missing; the message names it.
            ValueError: the cache cannot hold this model's heads or layers, or does not take its options.
        """
        try:
            self._make(config)
        except TypeError as error:
            raise ValueError(f"schemes: {self.kind.__name__} does not take these options: {error}.") from None

    def prepare(self, model: Any, tokenizer: Any, tokens: Tensor) -> Callable[[], Cache]:
        """Returns a function that makes empty caches of a model.

        Args:
            model: the model to be measured.
            tokenizer: the model's, or None.
            tokens: i64 (W, T), the windows to be measured. A calibration must not read them.
        """
        return lambda: self._make(model.config)

    def _make(self, config: Any) -> Cache:
        return self.kind(config=config.get_text_config(decoder=True), **self.options)  # type: ignore[call-arg]

    def held_bytes(self, cache: Cache) -> float:
        """Bytes of all tensors of a cache; NaN if it is simulated."""
        return sum(x.nbytes for layer in cache.layers for x in held_tensors(vars(layer)))

    def bits(self, cache: Cache) -> tuple[float, float]:
        """Payload bits of a quantized element, and bits per element of everything; NaN where bytes tell them."""
        # Transformers gives the width this name.
        return float(self.options.get("nbits", math.nan)), math.nan


def held_tensors(x: Any) -> Iterator[Tensor]:
    """Every plain tensor in nested containers and in tensors that are made of others, such as quanto's."""
    if isinstance(x, Tensor) and type(x) not in (Tensor, torch.nn.Parameter):
        names, _ = x.__tensor_flatten__()  # type: ignore[attr-defined]
        yield from held_tensors([getattr(x, name) for name in names])
    elif isinstance(x, Tensor):
        yield x
    elif isinstance(x, dict):
        yield from held_tensors(list(x.values()))
    elif isinstance(x, (list, tuple)):
        for part in x:
            yield from held_tensors(part)


def find_other(text: str) -> OtherCache | None:
    """The cache of others that a text names: an import path ``module:Class``, with options.

    The class is an `OtherCache`, made with the options, or a `transformers.Cache`, made with them and a config. Modules
    in the current folder are found, too.

    Returns:
        None if the text is none, and so a preset's.

    Raises:
        ValueError: the class cannot be imported, is of another kind, or does not take the options.
    """
    name, options = split_knobs(text)
    path = _PATH.fullmatch(name)
    if path is None:
        return None
    sys.path.insert(0, os.getcwd())
    try:
        kind = getattr(importlib.import_module(path[1]), path[2])
    except (ImportError, AttributeError) as error:
        raise ValueError(f"schemes: {name} cannot be imported: {error}.") from error
    finally:
        sys.path.remove(os.getcwd())
    if isinstance(kind, type) and issubclass(kind, Cache):
        return OtherCache(kind, options)
    if not (isinstance(kind, type) and issubclass(kind, OtherCache)):
        raise ValueError(f"schemes: {name} is neither a transformers.Cache nor an OtherCache of {__name__}.")
    try:
        return kind(**options)
    except TypeError as error:
        raise ValueError(f"schemes: {name} does not take these options: {error}.") from error


def parse_measured(texts: Sequence[str]) -> dict[str, Preset | OtherCache]:
    """Presets and caches of others by their typed forms; without any, the presets that suit any model and text.

    Raises:
        ValueError: see `get_preset` and `find_other`.
    """
    return {text: find_other(text) or get_preset(text) for text in texts or listed("kld")}
