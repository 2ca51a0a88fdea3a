"""Costs of answering a task's requests through a cache: bits, bytes and tokens per second."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass
class Cost:
    """Sums over the caches of a task.

    Attributes:
        requests: number of answers.
        context_tokens: tokens of all prompts, without padding.
        generated_tokens: tokens of all answers.
        steps: generated tokens without the first of each answer, which the prompt's forward gives.
        seconds: time from the first tokens to the last ones.
        held: bytes of the compressed layers when an answer was finished.
        bf16: bytes of the same keys and values in bf16.
        sealed: the part of ``bf16`` in caches that have sealed anything.
        payload: code bits times ``sealed``.
        keys: mean width of the keys' channels times ``sealed``.
        peak: bytes of the largest cache, all layers counted.
    """

    requests: int = 0
    context_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    held: int = 0
    bf16: int = 0
    sealed: int = 0
    payload: float = 0.0
    keys: float = 0.0
    peak: int = 0

    def add_answers(self, context_tokens: int, lengths: Sequence[int], seconds: float) -> None:
        """Adds a batch of prompts, with answers of so many tokens each."""
        self.requests += len(lengths)
        self.context_tokens += context_tokens
        self.generated_tokens += sum(lengths)
        self.steps += sum(max(length - 1, 0) for length in lengths)
        self.seconds += seconds

    def add_cache(self, held: int, bf16: int, code_bits: float, key_bits: float) -> None:
        """Adds a cache's bytes. ``code_bits`` is NaN where it has sealed nothing."""
        self.held += held
        self.bf16 += bf16
        if not math.isnan(code_bits):
            self.sealed += bf16
            self.payload += code_bits * bf16
            self.keys += key_bits * bf16

    def figures(self) -> dict[str, Any]:
        """Means and rates by name; None where nothing was measured."""
        return {
            "code_bits": self.payload / self.sealed if self.sealed else None,
            "key_bits": self.keys / self.sealed if self.sealed else None,
            "total_bits": 16 * self.held / self.bf16 if self.bf16 else None,
            "peak_cache_bytes": self.peak,
            "tokens_per_second": self.steps / self.seconds if self.seconds else None,
            "generated_tokens": self.generated_tokens,
            "requests": self.requests,
            "context_tokens": self.context_tokens / self.requests if self.requests else None,
        }


def total(costs: Iterable[Cost]) -> Cost:
    """Sum of costs; the peak is the largest."""
    whole = Cost()
    for cost in costs:
        for name, value in vars(cost).items():
            mine = getattr(whole, name)
            setattr(whole, name, max(mine, value) if name == "peak" else mine + value)
    return whole
