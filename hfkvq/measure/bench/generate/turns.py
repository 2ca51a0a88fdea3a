"""Eager steps of several caches in turns: what the host does meanwhile falls on all of them alike.

An eager step waits for the host, whose speed changes by more than caches differ. So a few steps of each cache are timed
in every round, and a cache is compared with the baseline round by round.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache

from ..timing import quantiles
from .cases import Case, Settings
from .decode import Decoder, Figures, as_ms, time_repeats
from .engines import EAGER_BASELINES, Engine
from .fill import length


class Turn:
    """A filled cache and its model, warmed up.

    Args:
        engine: not compiled.
        model: the model.
        cache: of the engine, with ``case.context`` tokens.
        case: rows and tokens.
        settings: how long, and how.

    Attributes:
        times: seconds of each round.
    """

    def __init__(self, engine: Engine, model: Any, cache: Cache, case: Case, settings: Settings) -> None:
        self.engine, self.cache, self.case, self.settings = engine, cache, case, settings
        self.decoder = Decoder(model, cache, case.batch, None, settings.seed)
        self.device, self.times = model.device, list[float]()
        with engine.running(cache):
            self.decoder.check()
            self._run(settings.warmup - 1)

    def _run(self, steps: int) -> None:
        for _ in range(steps):
            self.decoder.step()

    def take(self) -> None:
        """A round."""
        with self.engine.running(self.cache):
            self.times += time_repeats(lambda: self._run(self.settings.steps), 1, self.device)

    def figures(self) -> Figures:
        """``ms`` a step (p20, p50, p80 over rounds), ``tokens_per_s``, ``steps`` and ``repeats``.

        Raises:
            RuntimeError: the cache did not grow by a token a step.
        """
        steps = self.settings.warmup + self.settings.steps * len(self.times)
        taken = length(self.cache)
        if taken != self.case.context + steps:
            raise RuntimeError(f"{steps} steps were taken, but the cache holds {taken} tokens.")
        ms = as_ms(self.times, self.settings.steps)
        return {
            "ms": ms,
            "tokens_per_s": 1e3 * self.case.batch / ms["p50"],
            "steps": self.settings.steps,
            "repeats": len(self.times),
        }


@torch.no_grad()
def take_turns(turns: Sequence[Turn], rounds: int) -> dict[str, Figures]:
    """Times them, round after round.

    Args:
        turns: ready.
        rounds: how often each has its turn; in each round another one is the first.

    Returns:
        By name of the engine: `Turn.figures`, and where a baseline ran, ``times_as_long`` (p20, p50, p80 over rounds)
        as a step of the faster one, which is ``than``.
    """
    for i in range(rounds):
        first = i % len(turns)
        for turn in (*turns[first:], *turns[:first]):
            turn.take()
    found = {turn.engine.name: turn.figures() for turn in turns}
    stock = [turn for turn in turns if turn.engine.name in EAGER_BASELINES]
    if stock:
        best = min(stock, key=lambda turn: statistics.median(turn.times))
        for turn in turns:
            ratios = [own / other for own, other in zip(turn.times, best.times, strict=True)]
            share = dict(zip(("p20", "p50", "p80"), quantiles(ratios), strict=True))
            found[turn.engine.name] |= {"times_as_long": share, "than": best.engine.name}
    return found
