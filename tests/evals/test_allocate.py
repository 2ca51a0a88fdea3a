"""Bits under a budget: eq. (3) and (4), Algorithm 1, sweeps, and axes left out of account."""

from __future__ import annotations

import itertools
import random

import pytest

from evals.ablations import without_axis
from evals.triaxial.allocation import Choice, Sensitivity, allocate, allocate_exact, allocate_greedy

INST, USER, OBS, OLD = "older|text|inst", "current|text|user", "current|text|obs", "older|text|obs"


def brute_force(choices, room):
    best = None
    for chosen in itertools.product((False, True), repeat=len(choices)):
        cost = sum(c.cost for c, x in zip(choices, chosen, strict=True) if x)
        gain = sum(c.gain for c, x in zip(choices, chosen, strict=True) if x)
        if cost <= room and (best is None or (gain, -cost) > best):
            best = gain, -cost
    return best


def value(choices, chosen):
    picked = [c for c, x in zip(choices, chosen, strict=True) if x]
    return sum(c.gain for c in picked), -sum(c.cost for c in picked)


def test_equation_3_by_hand():
    """100 tokens, B = 3: room for 50 of them in 4 bits. 50 + nothing spares 6, 20 + 30 spare 7."""
    distortion = {INST: (7.0, 1.0), USER: (5.0, 1.0), OBS: (4.0, 1.0)}
    counts = {INST: 50, USER: 20, OBS: 30}
    assert allocate(distortion, counts, 3) == {INST: 2, USER: 4, OBS: 4}
    assert allocate(distortion, counts, 2.4) == {INST: 2, USER: 4, OBS: 2}
    assert allocate(distortion, counts, 2.39) == {INST: 2, USER: 2, OBS: 2}
    assert allocate(distortion, counts, 4) == {INST: 4, USER: 4, OBS: 4}
    assert allocate(distortion, counts, 2) == {INST: 2, USER: 2, OBS: 2}


def test_algorithm_1_by_hand():
    """ρ = 6/100, 4/40, 3/60 with R = 100: the second goes first, the first no longer fits, the third does."""
    choices = [Choice(6, 100), Choice(4, 40), Choice(3, 60)]
    assert allocate_greedy(choices, 100) == [False, True, True]
    assert allocate_greedy(choices, 120) == [False, True, True]
    assert allocate_greedy(choices, 140) == [True, True, False]


def test_greedy_may_miss_what_enumeration_finds():
    choices = [Choice(10, 10), Choice(99, 100)]
    assert allocate_greedy(choices, 100) == [True, False]
    assert allocate_exact(choices, 100) == [False, True]


@pytest.mark.parametrize("seed", range(20))
def test_exact_is_brute_force(seed):
    rng = random.Random(seed)
    choices = [Choice(rng.choice([rng.uniform(-1, 9), 3.0]), rng.randint(1, 20)) for _ in range(rng.randint(1, 9))]
    room = rng.uniform(0, 1) * sum(c.cost for c in choices)
    got = value(choices, allocate_exact(choices, room))
    assert got == pytest.approx(brute_force(choices, room))
    greedy = value(choices, allocate_greedy(choices, room))
    assert greedy[0] <= got[0] + 1e-9
    assert -greedy[1] <= room


FOUR = Sensitivity(
    {INST: (9.0, 1.0), USER: (7.0, 1.0), OBS: (3.0, 1.0), OLD: (1.5, 1.0)}, {INST: 10, USER: 10, OBS: 40, OLD: 40}
)


def test_an_axis_left_out_of_account():
    """Without time the two kinds of results are one, of 80 tokens; without roles, all old tokens are."""
    assert without_axis(FOUR, 2.9, 0) == {INST: 4, USER: 4, OBS: 2, OLD: 2}
    # Both groups have 50 tokens; the old ones gain 8.5, the current ones 8.
    assert without_axis(FOUR, 3, 2) == {INST: 4, OLD: 4, USER: 2, OBS: 2}
