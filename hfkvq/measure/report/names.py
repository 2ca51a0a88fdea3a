"""Schemes and models by the names that a reader knows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hfkvq.caches.scheme import list_schemes

from ..records import BASELINE

REFERENCE = "reference model"


def scheme_key(scheme: Mapping[str, Any] | None) -> str:
    """The same text for the same scheme; empty for the stock cache."""
    return "" if scheme is None else json.dumps(scheme, sort_keys=True)


def _words(value: Any) -> str:
    # A table of widths by tag would take the whole line.
    return f"{len(value)} entries" if isinstance(value, (list, tuple)) else str(value)


def scheme_label(scheme: Mapping[str, Any] | None, preset: str | None = None) -> str:
    """A preset's name, with the knobs that differ from it as they are typed: ``kitty:boost_ratio=0.2``.

    Args:
        scheme: ``Scheme.to_dict``'s; None is the stock cache.
        preset: what was asked for, where that is known.
    """
    if scheme is None:
        return BASELINE
    known = {name: json.loads(json.dumps(preset.to_dict())) for name, preset in list_schemes().items()}
    # As JSON has it: lists for tuples.
    own = json.loads(json.dumps(dict(scheme)))
    equal = [name for name, knobs in known.items() if knobs == own]
    if equal:
        # The last name says most: "kivi" is an alias of "kivi-2".
        return preset if preset in equal else equal[-1]
    base = preset if preset in known else str(own.get("scheme", "?"))
    defaults = known.get(base, {})
    changed = [f"{key}={_words(own[key])}" for key in own if key != "scheme" and own[key] != defaults.get(key)]
    return ":".join([base, *changed])


def model_label(name: str) -> str:
    """A name on the Hub as it is; of a folder its last part, so that reports hold no paths of one machine."""
    parts = Path(name).parts
    if parts[-2:] == ("reference", "checkpoint") or name in (REFERENCE, "reference"):
        return REFERENCE
    is_folder = name.startswith((".", "/", "~")) or len(parts) > 2
    return Path(name).name if is_folder else name
