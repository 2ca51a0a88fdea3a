"""Keys in the pages of one scheme, values in those of another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Any

from torch import Tensor

from .base import Entry, Layout, Scheme, get_scheme, knob


@dataclass(frozen=True, kw_only=True)
class Sides(Scheme):
    """Keys in the pages of one scheme, values in those of another; a cache with a budget goes down by these.

    Layout: each side's windows and pages are those of its scheme; both sides share the sink.

    Paper: none.
    Differs from the paper: not applicable.
    Differs from the released code: not applicable.

    Attributes:
        keys: the scheme of the keys: a preset, a `Scheme`, or the description of one.
        values: the scheme of the values, likewise, of the same page size.
        sink_length: first tokens kept in full precision, on both sides.
    """

    name = "sides"
    place = 65
    presets = {"sides": Entry("Keys as one preset holds them (best-4.3), values as another does (best-2.5).")}

    keys: str | Scheme | Mapping[str, Any] = "best-4.3"
    values: str | Scheme | Mapping[str, Any] = "best-2.5"
    sink_length: int = knob(32, low=0, high=1024)

    def __post_init__(self) -> None:
        """Checks that each side is of one run of pages."""
        super().__post_init__()
        for side, own in (("keys", self.key_scheme), ("values", self.value_scheme)):
            if own.evicts or own.latents or isinstance(own, Sides) or own.needs & {"tags", "history"}:
                raise ValueError(f"{side}: got {own.name!r}, allowed schemes that give all tokens one kind of page.")

    @cached_property
    def key_scheme(self) -> Scheme:
        return get_scheme(self.keys)

    @cached_property
    def value_scheme(self) -> Scheme:
        return get_scheme(self.values)

    def in_layer(self, layer: int, layers: int) -> Scheme:
        """Both sides as their schemes have them in that layer."""
        keys, values = (own.in_layer(layer, layers) for own in (self.key_scheme, self.value_scheme))
        return (
            self if (keys, values) == (self.key_scheme, self.value_scheme) else replace(self, keys=keys, values=values)
        )

    def layout(self, key_dim: int, value_dim: int) -> Layout:
        """Keys of the one layout and values of the other, behind a sink of this scheme's length."""
        keys, values = (own.layout(key_dim, value_dim) for own in (self.key_scheme, self.value_scheme))
        return Layout(keys.keys, values.values, self.sink_length)

    # Channels of keys are raised, and keys smoothed, as their scheme says.

    needs = property(attrgetter("key_scheme.needs"))  # pyright: ignore[reportIncompatibleMethodOverride]
    smooths_keys = property(attrgetter("key_scheme.smooths_keys"))  # pyright: ignore[reportIncompatibleMethodOverride]
    channel_rule = property(attrgetter("key_scheme.channel_rule"))  # pyright: ignore[reportIncompatibleMethodOverride]

    def step_rule(self, head_dim: int, seen: bool = True) -> str | None:
        return self.key_scheme.step_rule(head_dim, seen)

    def channel_bits(self, keys: Tensor, q_abs: Tensor | None) -> Tensor | None:
        return self.key_scheme.channel_bits(keys, q_abs)
