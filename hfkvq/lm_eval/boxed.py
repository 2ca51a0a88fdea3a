"""Scoring of mathematics: what the answer is, however it is written."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from .upstream import missing


def after_thoughts(text: str) -> str:
    """What follows the thoughts; the whole text if there are none. The tag that begins them may be in the prompt."""
    return text.rpartition("</think>")[2] if "</think>" in text else text


def score(doc: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    r"""Whether the answer equals ``doc["gold"]``: a ``\boxed`` one first, else what else can be parsed."""
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise missing("math", error) from error
    return {"math_verify": float(verify(gold=parse(doc["gold"]), target=parse(after_thoughts(results[0]))))}


_LETTER = re.compile(r"answer\s*(?:is)?\s*:?\s*[*$({\s]*(?:\\boxed\{|\\text\{)*\s*\(?([A-D])\b", re.IGNORECASE)
_BOXED_LETTER = re.compile(r"\\boxed\{\s*(?:\\text\{)?\s*\(?([A-D])\)?\s*\}")


def chosen_letter(text: str) -> str | None:
    """The letter that a text chooses at last, as "Answer: C", "the answer is (C)" or in a box."""
    found = [*_LETTER.finditer(text), *_BOXED_LETTER.finditer(text)]
    return max(found, key=lambda match: match.start(1))[1].upper() if found else None


def score_letter(doc: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Whether the chosen letter is ``doc["letter"]``."""
    return {"exact_match": float(chosen_letter(after_thoughts(results[0])) == doc["letter"])}
