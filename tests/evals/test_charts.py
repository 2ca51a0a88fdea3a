"""Charts: intervals of shares, and what a picture shows."""

import pytest

from evals.charts import share

# SciPy and matplotlib take seconds to import, which processes that collect tests do not need.


@pytest.mark.parametrize(("right", "total"), [(0, 8), (3, 8), (8, 8), (191, 192)])
def test_intervals_of_shares_are_those_of_scipy(right, total):
    from scipy.stats import binomtest

    expected = binomtest(right, total).proportion_ci(0.95, method="wilson")
    found = share(right, total)
    assert found.value == pytest.approx(100 * right / total)
    assert (found.low, found.high) == (pytest.approx(100 * expected.low), pytest.approx(100 * expected.high))
