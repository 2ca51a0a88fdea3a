"""Schemes and caches of others, as commands are told to measure them."""

from __future__ import annotations

from collections.abc import Sequence

from hfkvq.caches.preset import Preset, get_preset
from hfkvq.caches.registry import listed
from hfkvq.caches.spelling import split_knobs

from ..rivals import RIVALS, Rival, find_rival, refuse_rival


def parse_scheme(text: str) -> Preset:
    """A preset of its typed form; the name may be a file's, as `hfkvq tune` writes it.

    Raises:
        ValueError: unknown preset or knob, or a value out of range.
    """
    refuse_rival(split_knobs(text)[0])
    return get_preset(text)


def parse_schemes(texts: Sequence[str]) -> dict[str, Preset]:
    """Schemes by their typed forms; without any, the presets that any model and text can be measured with."""
    return {text: parse_scheme(text) for text in texts or listed("kld")}


def parse_measured(texts: Sequence[str]) -> dict[str, Preset | Rival]:
    """As `parse_schemes`, and caches of others (`hfkvq.measure.rivals`) by their names.

    Raises:
        ValueError: see `parse_scheme`.
    """
    found: dict[str, Preset | Rival] = {}
    for text in texts or listed("kld"):
        name, values = split_knobs(text)
        found[text] = find_rival(name, values) if name in RIVALS else get_preset(text)
    return found
