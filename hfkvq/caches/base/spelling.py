"""Schemes as they are typed: ``kitty``, or with knobs ``kitty:boost_ratio=0.2:sink_length=0``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hfkvq.bounded import parse_json

_COLON = re.compile(r":(?=[^:=/\\]*=)")
"""Before a knob, and not that of a drive (``C:\\mine.json``)."""


def parse_value(text: str) -> Any:
    """A knob's value: a number, true, false, null, or the text itself."""
    try:
        return parse_json(text.lower() if text.lower() in ("true", "false", "none") else text)
    except ValueError:
        return None if text.lower() == "none" else text


def split_knobs(text: str, knobs: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
    """Name and knobs of ``NAME:KNOB=VALUE:...``, and further ``knobs``.

    Raises:
        ValueError: a knob that is given twice.
    """
    # Folders may have any name.
    name, *typed = [text] if Path(text).is_file() else _COLON.split(text)
    found: dict[str, Any] = {}
    pairs = [(knob.partition("=")[0].strip(), parse_value(knob.partition("=")[2].strip())) for knob in typed]
    for key, value in (*pairs, *(knobs or {}).items()):
        if key in found:
            raise ValueError(f"scheme: {text!r} gives {key} twice; write each knob once.")
        found[key] = value
    return name.strip(), found
