"""Schemes as they are typed: ``kitty``, or with knobs ``kitty:boost_ratio=0.2:sink_length=0``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hfkvq.bounded import parse_json
from hfkvq.caches.preset import Preset, get_preset
from hfkvq.caches.registry import listed

from ..rivals import RIVALS, Rival, find_rival, refuse_rival


def parse_value(text: str) -> Any:
    """A knob's value: a number, true, false, null, or the text itself."""
    try:
        return parse_json(text.lower() if text.lower() in ("true", "false", "none") else text)
    except ValueError:
        return None if text.lower() == "none" else text


def parse_scheme(text: str) -> Preset:
    """A preset of its typed form; the name may be a file's, as `hfkvq tune` writes it.

    Raises:
        ValueError: unknown preset or knob, or a value out of range.
    """
    name, values = _knobs(text)
    refuse_rival(name)
    return get_preset(name, **values)


def _knobs(text: str) -> tuple[str, dict[str, Any]]:
    name, *knobs = text.split(":")
    values: dict[str, Any] = {}
    for knob in knobs:
        key, equals, value = knob.partition("=")
        if not equals:
            raise ValueError(f"schemes: got {text!r}, allowed NAME or NAME:KNOB=VALUE, e.g. kitty:boost_ratio=0.2.")
        values[key.strip()] = parse_value(value.strip())
    return name.strip(), values


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
        name, values = _knobs(text)
        found[text] = find_rival(name, values) if name in RIVALS else get_preset(name, **values)
    return found
