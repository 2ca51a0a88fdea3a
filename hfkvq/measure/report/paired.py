"""Is one run better than the other? Tests on pairs of the same questions, from SciPy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from hfkvq.measure.divergence.intervals import Interval, mean_interval

from .samples import Pairs

PERMUTATIONS = 9_999


@dataclass(frozen=True)
class Verdict:
    """One comparison.

    Attributes:
        task: its name, or "pooled".
        key: "metric,filter", or "main metrics".
        samples: pairs.
        first: mean in the first run.
        second: mean in the second.
        difference: second less first.
        interval: 95 % bootstrap interval of it, None if there is only one pair.
        better: pairs where the second run has more.
        worse: pairs where it has less.
        p: of the hypothesis that the runs do not differ, two-sided.
        test: "McNemar" (exact) where all values are 0 or 1, else "permutation".
        higher: whether more is better.
    """

    task: str
    key: str
    samples: int
    first: float
    second: float
    difference: float
    interval: Interval | None
    better: int
    worse: int
    p: float
    test: str
    higher: bool


def mcnemar(more: int, less: int) -> float:
    """Exact McNemar test: of ``more + less`` pairs that differ, ``more ~ Binomial(more + less, 1/2)``; two-sided p."""
    from scipy.stats import binomtest

    return float(binomtest(more, more + less, 0.5).pvalue) if more + less else 1.0


def permutation(differences: Sequence[float], seed: int = 0) -> float:
    """Two-sided p of the mean difference under random signs; exact for few pairs, else of `PERMUTATIONS` draws."""
    import numpy as np
    from scipy.stats import permutation_test

    values = np.asarray(differences, dtype=np.float64)
    if not values.any():
        return 1.0
    found = permutation_test(
        (values, np.zeros_like(values)),
        lambda a, b, axis: (a - b).mean(axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=PERMUTATIONS,
        batch=max(1, 2**20 // len(values)),
        rng=np.random.default_rng(seed),
    )
    return float(found.pvalue)


def judge(pairs: Pairs, seed: int = 0) -> Verdict:
    """Tests one metric of one task."""
    return _judge(pairs.task, pairs.key, pairs.first, pairs.second, pairs.binary, pairs.higher, seed)


def _judge(
    task: str, key: str, first: Sequence[float], second: Sequence[float], binary: bool, higher: bool, seed: int
) -> Verdict:
    differences = [b - a for a, b in zip(first, second, strict=True)]
    more, less = sum(x > 0 for x in differences), sum(x < 0 for x in differences)
    p = mcnemar(more, less) if binary else permutation(differences, seed)
    return Verdict(
        task,
        key,
        len(first),
        fmean(first),
        fmean(second),
        fmean(differences),
        mean_interval(differences, seed),
        more,
        less,
        p,
        "McNemar" if binary else "permutation",
        higher,
    )


def pool(pairs: Sequence[Pairs], seed: int = 0) -> Verdict | None:
    """Tests the main metrics of all tasks together, every sample once; None if they are fewer than two.

    Metrics of which less is better, such as perplexities, are left out: they are on another scale.
    """
    mains: dict[str, Pairs] = {}
    for one in pairs:
        if one.higher:
            mains.setdefault(one.task, one)
    if len(mains) < 2:
        return None
    first = [x for one in mains.values() for x in one.first]
    second = [x for one in mains.values() for x in one.second]
    return _judge("pooled", "main metrics", first, second, all(x.binary for x in mains.values()), True, seed)
