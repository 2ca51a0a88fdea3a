"""Made-up people, who keep training and evaluation apart, and a random stream for each example."""

from __future__ import annotations

import random
from typing import Literal
from zlib import crc32

Split = Literal["train", "eval"]

# Names are made up of syllables, so that none carries knowledge; there are 1.5 million full names.
_HEADS = "Ab An Ar Ba Bel Bri Ca Cor Da Del Dor El Fa Fen Gar Hal Hol Il Ja Jor Ka Kel Lan Lo Ma Mer Mi Nor Ol Or Pa "
_HEADS += "Per Ra Ros Sa Sel Ta Tor Ul Va Ver Wil Yan Za"
_TAILS = "ba bin bri co da del den dor fa fin ga gan ha ki la lan len lo ma mer min mo na nel ni no ra ren rik ro sa "
_TAILS += "sen so ta ton va vin wen xa zo"
_FIRST = tuple(head + tail for head in _HEADS.split() for tail in _TAILS.split()[::2])
_LAST = tuple(head + tail for head in _HEADS.split()[::-1] for tail in _TAILS.split())
WORDS = tuple((head + tail).lower() for head in _HEADS.split() for tail in _TAILS.split()[1::2])
"""Nouns that mean nothing."""


def _held_out(name: str) -> bool:
    """Tell whether a full name belongs to the evaluation split; one in eight does."""
    return crc32(name.encode()) % 8 == 0


def draw_people(rng: random.Random, count: int, split: Split) -> list[str]:
    """Different full names, all of the split's part of them."""
    held_out = split == "eval"
    draw = rng.random
    found: dict[str, None] = {}
    while len(found) < count:
        name = f"{_FIRST[int(draw() * len(_FIRST))]} {_LAST[int(draw() * len(_LAST))]}"
        if _held_out(name) == held_out:
            found[name] = None
    return list(found)


def random_stream(split: Split, task: str, seed: int) -> random.Random:
    """The random numbers of one example. Raises ValueError if there is no such split."""
    if split not in ("train", "eval"):
        raise ValueError(f'split={split!r} is unknown; use "train" or "eval"')
    return random.Random(f"{split}/{task}/{seed}")
