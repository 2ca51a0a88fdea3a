"""Bits under a budget: eq. (3) and (4), Algorithm 1, sweeps, and axes left out of account."""

from __future__ import annotations

import itertools
import json
import random

import pytest

from evals.ablations import without_axis
from evals.triaxial.allocation import Choice, Sensitivity, allocate, allocate_exact, allocate_greedy, make_table
from hfkvq.caches import BitTable
from hfkvq.caches.tags.bit_table import Origin

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


def test_what_gains_nothing_costs_nothing():
    """4 bits that make it no better, or worse, are not spent; of equals the cheaper is taken."""
    distortion = {INST: (1.0, 1.0), USER: (1.0, 2.0), OBS: (3.0, 1.0)}
    for solve in (allocate_exact, allocate_greedy):
        choices = [Choice(a - b, 2.0) for a, b in distortion.values()]
        assert solve(choices, 6) == [False, False, True]
    assert allocate_exact([Choice(1, 8), Choice(1, 2)], 8) == [False, True]


def test_twenty_two_tags_are_enumerated_and_more_are_not():
    choices = [Choice(float(k % 7 + 1), float(k % 5 + 1)) for k in range(22)]
    gain, _ = value(choices, allocate_exact(choices, 20))
    # By dynamic programming over whole costs.
    best = [0.0] * 21
    for c in choices:
        best = [max(best[r], best[r - int(c.cost)] + c.gain if r >= c.cost else 0) for r in range(21)]
    assert gain == best[20]
    with pytest.raises(ValueError, match="choices: got 23, allowed 22"):
        allocate_exact([*choices, Choice(1, 1)], 20)


@pytest.mark.parametrize("budget", [1.9, 4.1, float("nan")])
def test_budget_out_of_range(budget):
    with pytest.raises(ValueError, match=r"budget: got .*, allowed 2 to 4 bits"):
        allocate({INST: (1, 0)}, {INST: 1}, budget)


FOUR = Sensitivity(
    {INST: (9.0, 1.0), USER: (7.0, 1.0), OBS: (3.0, 1.0), OLD: (1.5, 1.0)}, {INST: 10, USER: 10, OBS: 40, OLD: 40}
)


def test_an_axis_left_out_of_account():
    """Without time the two kinds of results are one, of 80 tokens; without roles, all old tokens are."""
    assert without_axis(FOUR, 2.9, 0) == {INST: 4, USER: 4, OBS: 2, OLD: 2}
    # Both groups have 50 tokens; the old ones gain 8.5, the current ones 8.
    assert without_axis(FOUR, 3, 2) == {INST: 4, OLD: 4, USER: 2, OBS: 2}


def test_files_come_back(tmp_path):
    origin = Origin("m", "c", "t", "d", 3, (0, 4), {"torch": "2"})
    own = Sensitivity(FOUR.distortion, FOUR.counts, origin, False)
    own.save(tmp_path / "s.json")
    assert Sensitivity.load(tmp_path / "s.json") == own
    table = make_table(own, 2.4)
    table.save(tmp_path / "t.json")
    loaded = BitTable.load(tmp_path / "t.json")
    assert loaded == table
    assert (loaded.origin, loaded.budget, loaded.counts[INST], loaded.distortion[USER]) == (origin, 2.4, 10, (7.0, 1.0))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "sensitivity: .* cannot be read .*triaxial calibrate"),
        ("nonsense", "sensitivity: .* is not JSON"),
        (json.dumps({"kind": "hfkvq.bit_table"}), "sensitivity: .* holds 'hfkvq.bit_table'"),
        (json.dumps({"kind": "hfkvq.sensitivity"}), "sensitivity: .* is damaged"),
    ],
)
def test_damaged_files(tmp_path, text, message):
    path = tmp_path / "s.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Sensitivity.load(path)
