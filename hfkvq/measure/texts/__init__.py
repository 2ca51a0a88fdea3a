"""Four kinds of text that come with the package, 160,000 characters each: agent, mathematics, code and play.

Traces of an agent that calls tools (tau-bench, MIT), problems and solutions (MATH, MIT), modules of this library, and
Shakespeare (public domain); `LICENSES` beside this file has the licences, and `evals/texts.py` made the texts.
"""

from __future__ import annotations

import gzip
from functools import cache
from importlib.resources import files

KINDS = ("agent", "mathematics", "code", "play")


@cache
def read_text(kind: str) -> str:
    """One of the texts.

    Raises:
        ValueError: there is none of that kind.
    """
    if kind not in KINDS:
        raise ValueError(f"text: got {kind!r}, allowed {', '.join(KINDS)}.")
    return gzip.decompress((files(__name__) / f"{kind}.txt.gz").read_bytes()).decode("utf-8")
