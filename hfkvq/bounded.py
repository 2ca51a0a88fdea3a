"""JSON from files and people: plain data comes back, or a ValueError, whatever was given."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MOST_BYTES = 2**30
"""Bytes of the largest file that is read; samples of a long evaluation have some hundred MB."""

MOST_LEVELS = 64
"""Levels of lists and objects within each other: readers copy and write data by recursion."""

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")

DAMAGE = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, AssertionError)
"""Errors raised by reading plain data of an unexpected shape; readers make a ValueError of them."""


def read_bounded(path: str | Path) -> str:
    """A file's text, UTF-8, without a byte-order mark.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no text, or larger than anything that is written for us.
    """
    size = Path(path).stat().st_size
    if size > MOST_BYTES:
        raise ValueError(f"{size / 2**20:.0f} MiB, allowed {MOST_BYTES / 2**20:.0f} MiB")
    return Path(path).read_text(encoding="utf-8-sig")


def load_json(path: str | Path) -> Any:
    """Plain data from a file of JSON; see `read_bounded` and `parse_json`."""
    return parse_json(read_bounded(path))


def parse_json(text: str) -> Any:
    """Plain data from JSON.

    Raises:
        ValueError: it is none, nested too deeply, or holds text that is not valid Unicode.
    """
    try:
        found = json.loads(text)
        if _SURROGATE.search(text):
            json.dumps(found, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise ValueError(f"nested deeper than {MOST_LEVELS} levels") from None
    except UnicodeEncodeError as error:
        raise ValueError(f"half of a surrogate pair ({error.object[error.start]!a}), which is no text") from None
    level = [found]
    for _ in range(MOST_LEVELS + 1):
        parts = [x.values() if isinstance(x, dict) else x for x in level if isinstance(x, (dict, list))]
        if not parts:
            return found
        level = [x for part in parts for x in part]
    raise ValueError(f"nested deeper than {MOST_LEVELS} levels")


def json_lines(text: str) -> Iterator[tuple[int, Any]]:
    """Number and plain data of each line of JSON Lines that is not empty.

    Raises:
        ValueError: a line is no JSON, with its number.
    """
    # Strings in JSON may hold Unicode's other line breaks, at which `splitlines` would cut.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                found = parse_json(line)
            except ValueError as error:
                raise ValueError(f"line {number} is not JSON ({error}); correct it, or delete the line") from None
            yield number, found
