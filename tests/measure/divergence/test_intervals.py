"""Bootstrap intervals."""

from __future__ import annotations

import importlib.util
import math
import random

import pytest

from hfkvq.measure.divergence.intervals import check_scipy, mean_interval


def test_contains_the_mean_and_is_reproducible() -> None:
    random.seed(3)
    values = [random.gauss(2.0, 1.0) for _ in range(40)]
    low, high = mean_interval(values)
    assert low < sum(values) / 40 < high
    assert mean_interval(values) == (low, high)
    assert mean_interval(values, seed=1) != (low, high)
    # About twice 1.96 standard errors.
    assert high - low == pytest.approx(2 * 1.96 / math.sqrt(40), rel=0.25)


def test_without_spread_or_without_values() -> None:
    assert mean_interval([0.0, 0.0, 0.0]) == (0.0, 0.0)
    assert mean_interval([1.0]) is None
    assert mean_interval([]) is None
    assert mean_interval([1.0, math.inf]) is None


def test_coverage() -> None:
    """About 95 of 100 intervals hold the true mean."""
    draw = random.Random(0)
    held = 0
    for _ in range(60):
        low, high = mean_interval([draw.random() for _ in range(30)])
        held += low <= 0.5 <= high
    assert held >= 50


def test_missing_scipy_names_the_extra(monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"kld: SciPy.*hfkvq\[eval\]"):
        check_scipy("kld")
