"""Confidence intervals: whole windows are drawn anew, since the tokens of one window are not independent."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence

CONFIDENCE = 0.95
RESAMPLES = 9_999

Interval = tuple[float, float]


def check_scipy() -> None:
    """Raises ImportError, naming the extra, where SciPy is missing."""
    if importlib.util.find_spec("scipy") is None:
        raise ImportError("SciPy, which makes the intervals, is not installed; pip install 'hfkvq[eval]'.")


def mean_interval(values: Sequence[float], seed: int = 0) -> Interval | None:
    """Percentile bootstrap interval of the mean of independent values, the same every time.

    Args:
        values: one a window, or one a sample.
        seed: of the draws.

    Returns:
        Lower and upper end; None if there are fewer than two values, or not all are finite.
    """
    import numpy as np
    from scipy.stats import bootstrap

    if len(values) < 2 or not all(map(math.isfinite, values)):
        return None
    # Percentile: BCa is undefined where all values are the same, as those of `full` may be.
    found = bootstrap(
        (np.asarray(values, dtype=np.float64),),
        np.mean,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(seed),
        # Resamples at a time: all at once would take gigabytes for some ten thousand samples.
        batch=max(1, 2**22 // len(values)),
    ).confidence_interval
    return float(found.low), float(found.high)
