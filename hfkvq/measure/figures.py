"""Figures of the presets that the package brings along: `evals/docs.py --write` makes the file."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

KIND = "hfkvq figures"
PATH = Path(__file__).parent / "figures.json"


@functools.cache
def figures() -> dict[str, Any]:
    """Under "loss", "steps" and "attention": what was measured on, and under "presets" the figures of each preset.

    Loss is the divergence from `DynamicCache` on SmolLM2, steps are milliseconds of one row, attention the speed-up of
    one layer of many rows. Presets that nobody measured are missing.
    """
    return json.loads(PATH.read_text(encoding="utf-8"))


def figure(kind: str, preset: str) -> Any:
    """One of `figures`, None if it was not measured."""
    return figures()[kind]["presets"].get(preset)
