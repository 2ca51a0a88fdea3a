"""Four kinds of text that come with the package, 160,000 characters each: agent, mathematics, code and play.

Traces of an agent that calls tools (tau-bench, MIT), problems and solutions (MATH, MIT), functions with tests
(HumanEval, MIT) and Shakespeare (public domain); `evals/texts.py` makes them. Models that have read the
web know most of it, so perplexities are low; a divergence compares two caches of one model and does not mind.
"""

from __future__ import annotations

import gzip
from importlib.resources import files

KINDS = ("agent", "mathematics", "code", "play")


def read_text(kind: str) -> str:
    """One of the texts.

    Raises:
        ValueError: there is none of that kind.
    """
    if kind not in KINDS:
        raise ValueError(f"text: got {kind!r}, allowed {', '.join(KINDS)}.")
    return gzip.decompress((files(__name__) / f"{kind}.txt.gz").read_bytes()).decode("utf-8")
