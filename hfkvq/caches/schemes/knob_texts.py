"""Texts of a scheme's knobs from its docstring, for help."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Mapping
from typing import Any

from .base import Scheme

_ENTRY = re.compile(r"    (\w+(?:, \w+)*): (.*)")
_SEE = re.compile(r"see `\w+`[;.]?\s*")


def _own_texts(cls: type) -> dict[str, str]:
    """The section "Attributes" of a class's own docstring, by name, each on one line."""
    doc = inspect.cleandoc(vars(cls).get("__doc__") or "")
    found: dict[str, list[str]] = {}
    names: list[str] = []
    for line in doc.partition("\nAttributes:\n")[2].splitlines():
        if line and not line.startswith("    "):
            break
        if entry := _ENTRY.fullmatch(line):
            first, *others = entry[1].split(", ")
            names = [first]
            found |= {first: [entry[2]]} | {name: [f"with {first}, see there."] for name in others}
        elif line.strip():
            for name in names:
                found[name].append(line.strip())
    return {name: " ".join(lines) for name, lines in found.items()}


def knob_texts(cls: type[Scheme]) -> dict[str, str]:
    """Texts of a scheme's knobs by name, in the order of its docstring.

    A class's own words go before those of the classes that it derives from; "see `TokenEviction`" stands for theirs.
    Nothing where Python was told to drop docstrings.
    """
    found: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        for name, text in _own_texts(each).items():
            base, see = found.get(name, ""), _SEE.match(text)
            # "See there. And more": theirs, and the rest as a sentence of its own.
            rest = text[see.end() :] if see else ""
            found[name] = f"{base} {rest[:1].upper()}{rest[1:]}".strip() if see else text
    fields = {field.name for field in dataclasses.fields(cls)}
    return {name: found[name] for name in dict.fromkeys([*_own_texts(cls), *found]) if name in fields}


def _words(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else repr(value)


def allowed_words(field: dataclasses.Field[Any]) -> str:
    """Legal values of a knob, in words; nothing where any value of its type may do."""
    meta: Mapping[str, Any] = field.metadata
    low, high, choices = (meta.get(name) for name in ("low", "high", "choices"))
    if choices is not None:
        return "" if field.type == "bool" else ", ".join(map(repr, choices))
    if low is None and high is None:
        return ""
    if high is None:
        return f"from {_words(low)}"
    return f"up to {_words(high)}" if low is None else f"{_words(low)} to {_words(high)}"


def default_words(field: dataclasses.Field[Any]) -> str:
    """A knob's default; of long tables how long they are."""
    return f"{len(field.default)} entries" if isinstance(field.default, tuple) else _words(field.default)
