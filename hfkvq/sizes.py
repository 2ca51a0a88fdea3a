"""Sizes as they are typed: tokens (``32k``) and bytes (``24GiB``)."""

from __future__ import annotations

import re

_COUNTS = {"": 1, "k": 1024, "m": 1024**2}
_UNITS = {"b": 1, "": 1} | {
    f"{letter}{end}": base**power
    for power, letter in enumerate("kmgt", 1)
    for end, base in (("", 1024), ("ib", 1024), ("b", 1000))
}
_COUNT = re.compile(r"\s*([0-9]+)\s*([kKmM]?)\s*")
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-zA-Z]*)\s*")


def parse_count(text: str | int, name: str = "", least: int = 1) -> int:
    """A number of tokens: ``32k`` (of 1,024) or ``32768``.

    Args:
        text: what was typed.
        name: of the option, for the error.
        least: smallest one that is allowed.

    Raises:
        ValueError: anything else, or less.
    """
    match = _COUNT.fullmatch(str(text))
    found = -1 if match is None else int(match[1]) * _COUNTS[match[2].lower()]
    if found < least:
        said = f"{name}: got" if name else "got"
        at_least = f", from {least} on" if match is not None else ""
        raise ValueError(f"{said} {text!r}, allowed numbers like 8192 or 8k{at_least}.")
    return found


def parse_size(size: str | int, name: str = "size") -> int:
    """Bytes of ``"24GiB"`` (1024), ``"24GB"`` (1000), ``"24G"`` (1024), or a number of bytes.

    Raises:
        ValueError: anything else, nothing, or a number below 2**20 that is typed without a unit.
    """
    match = None if isinstance(size, int) else _SIZE.fullmatch(size)
    unit = None if match is None else _UNITS.get(match[2].lower())
    found = size if isinstance(size, int) else 0 if match is None or unit is None else int(float(match[1]) * unit)
    if match is not None and not match[2] and 1 <= found < 2**20:
        # So few bytes are a mistake.
        raise ValueError(f"{name}: got {size!r} without a unit; write {match[1]}GiB or {match[1]}MiB.")
    if found < 1:
        raise ValueError(f"{name}: got {size!r}, allowed a size such as '24GiB', '24GB' or '500MiB'.")
    return found
