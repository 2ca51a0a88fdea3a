"""Presets: a scheme, what differs in some layers, and where the figures come from; from a name or a file."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..tags.bit_table import read_json
from .base import Scheme, get_scheme, nearest, split_knobs

KIND = "hfkvq preset"

_LAYERS = re.compile(r"(-?\d+)|(\d+)-(\d+)")


@dataclass(frozen=True)
class Preset:
    """Forms in which a cache's scheme can be given.

    Attributes:
        scheme: of all layers that ``layers`` does not name.
        layers: (which, scheme) pairs. Which: ``"3"``, ``"-1"`` counted from the end, or ``"0-2"`` with both ends.
        origin: where it comes from, for the record.
    """

    scheme: Scheme
    layers: tuple[tuple[str, Scheme], ...] = ()
    origin: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        for which, _ in self.layers:
            _ends(which)

    def by_layer(self, count: int) -> list[Scheme]:
        """The scheme of each of ``count`` layers; a ValueError for one that there is not, or that is named twice."""
        found: dict[int, Scheme] = {}
        for which, scheme in self.layers:
            first, last = (end + count if end < 0 else end for end in _ends(which))
            if not 0 <= first <= last < count:
                raise ValueError(f"layers: got {which!r}, but the model has layers 0 to {count - 1}.")
            for layer in range(first, last + 1):
                if layer in found:
                    raise ValueError(f"layers: layer {layer} is named twice, the second time by {which!r}.")
                found[layer] = scheme
        return [found.get(layer, self.scheme).in_layer(layer, count) for layer in range(count)]

    @staticmethod
    def of_layers(main: Scheme, own: Sequence[Scheme], origin: Mapping[str, Any] | None = None) -> Preset:
        """A preset whose layers have the schemes ``own``; neighbours of one scheme are named together."""
        pairs = []
        for scheme, group in itertools.groupby(enumerate(own), key=lambda pair: pair[1]):
            first, *others = (i for i, _ in group)
            if scheme != main:
                pairs.append((f"{first}-{others[-1]}" if others else str(first), scheme))
        return Preset(main, tuple(pairs), origin or {})

    @property
    def schemes(self) -> list[Scheme]:
        """Every scheme in it, the main one first."""
        return list(dict.fromkeys([self.scheme, *(scheme for _, scheme in self.layers)]))

    @property
    def needs(self) -> frozenset[str]:
        """Needs of its schemes; see `Scheme.needs`."""
        return frozenset[str]().union(*(scheme.needs for scheme in self.schemes))

    def to_dict(self) -> dict[str, Any]:
        """Plain description: the scheme's, and under "layers" those of the layers that differ."""
        described = self.scheme.to_dict()
        if self.layers:
            described["layers"] = {which: scheme.to_dict() for which, scheme in self.layers}
        return described

    def save(self, path: str | Path) -> None:
        """Writes it as JSON, which `MixedKVCache` and the command line take in place of a name."""
        text = json.dumps({"kind": KIND, "scheme": self.to_dict(), "origin": dict(self.origin)}, indent=2)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> Preset:
        """Reads what `save` wrote, or raises ValueError."""
        values = read_json(path, KIND, "scheme", "hfkvq tune")
        if not isinstance(values.get("scheme"), dict):
            raise ValueError(f"scheme: {path} is damaged (it describes no scheme); make it again with `hfkvq tune`.")
        try:
            return get_preset(values["scheme"], origin=dict(values.get("origin", {})))
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            damage = f"{type(error).__name__} {error}"
            raise ValueError(f"scheme: {path} is damaged ({damage}); make it again with `hfkvq tune`.") from None
        except ValueError as error:
            raise ValueError(f"scheme: {path}: {error}") from None


def _ends(which: str) -> tuple[int, int]:
    match = _LAYERS.fullmatch(which)
    if match is None:
        raise ValueError(f"layers: got {which!r}, allowed a layer ('3', or '-1' from the end) or a range ('0-2').")
    one, first, last = match.groups()
    return (int(one), int(one)) if one is not None else (int(first), int(last))


def get_preset(
    what: Preset | Scheme | str | Path | Mapping[str, Any],
    layers: Mapping[str | int, Any] | None = None,
    origin: Mapping[str, Any] | None = None,
    **knobs: Any,
) -> Preset:
    """A preset from what users write.

    Args:
        what: a preset's name (see `list_schemes`), the ``.json`` file of one (`Preset.save`), either also with knobs
            (``"kitty:boost_ratio=0.2"``), a scheme, or the description of either (``to_dict``).
        layers: schemes of single layers, by layer: a name, a `Scheme`, its description, or knobs of the main scheme.
        **knobs: overrides of the main scheme.

    Raises:
        ValueError: unknown name or knob, a knob out of range, a file that is no preset, or layers named wrongly.
    """
    if isinstance(what, str):
        what, knobs = split_knobs(what, knobs)
    if isinstance(what, Path) or (isinstance(what, str) and what.endswith(".json")):
        base = Preset.load(what)
    elif isinstance(what, Preset):
        base = what
    elif isinstance(what, Mapping):
        described = dict(what)
        below = described.pop("layers", {})
        scheme = get_scheme(described)
        base = Preset(scheme, _layers(below, scheme))
    else:
        base = Preset(get_scheme(what))
    scheme = get_scheme(base.scheme, **knobs) if knobs else base.scheme
    pairs = base.layers if layers is None else _layers(layers, scheme)
    return Preset(scheme, pairs, base.origin if origin is None else origin)


def _layers(given: Mapping[str | int, Any], main: Scheme) -> tuple[tuple[str, Scheme], ...]:
    if not isinstance(given, Mapping):
        raise ValueError(f"layers: got {given!r}, allowed schemes by layer, e.g. {{'0-1': 'full'}}.")
    return tuple(
        (
            str(which),
            get_scheme(main, **what) if isinstance(what, Mapping) and "scheme" not in what else get_scheme(what),
        )
        for which, what in given.items()
    )


_OPTIONS = "memory order evict layers max_cache_len graphs headroom offloading attach debug".split()


def checked_knobs(scheme: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a cache that are none of its options, once each is a knob of its scheme; else a ValueError."""
    known = get_preset(scheme).scheme.knobs() if given else {}
    for name in given:
        if name not in known:
            near = nearest(name, [*_OPTIONS, *known])
            raise ValueError(f"{name}: neither an option of the cache nor of its scheme; {near}")
    return given
