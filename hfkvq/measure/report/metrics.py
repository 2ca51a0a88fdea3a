"""Which of a task's many numbers are its result."""

from __future__ import annotations

from collections.abc import Iterable

BILL = ("total_bits", "code_bits", "peak_cache_bytes", "tokens_per_second")
"""What `hf-kvq` adds to each task; no scores."""

# Best first: math_verify reads answers that a task's own exact_match misses.
_FAMILIES = (
    ("math_verify",),
    ("exact_match",),
    ("acc", "acc_norm"),
    ("score",),
    ("pass@1", "pass_at_1", "pass_1"),
    ("f1",),
    ("qa_f1", "rouge", "rougeL", "code_sim"),
)
_FILTERS = ("flexible-extract", "strict-match", "none")

SHARES = tuple(name for family in _FAMILIES for name in family)
"""Metrics between 0 and 1, to be shown as per cent."""


def split_key(key: str) -> tuple[str, str]:
    """Metric and filter of a key of lm-eval's results, e.g. "exact_match,strict-match"."""
    metric, _, name = key.partition(",")
    return metric, name or "none"


def _filter_rank(name: str) -> int:
    return _FILTERS.index(name) if name in _FILTERS else len(_FILTERS)


def main_metrics(keys: Iterable[str]) -> list[str]:
    """The keys that are a task's result, the first of them the one to plot.

    Args:
        keys: "metric,filter" each; standard errors and the bill are left out.

    Returns:
        All filters of the best known family of metrics; all keys if none is known.
    """
    found = [key for key in keys if not split_key(key)[0].endswith("_stderr") and split_key(key)[0] not in BILL]
    for family in _FAMILIES:
        own = [key for key in found if split_key(key)[0] in family]
        if own:
            return sorted(own, key=lambda key: (family.index(split_key(key)[0]), _filter_rank(split_key(key)[1]), key))
    return found


def title(key: str) -> str:
    """A key as a column's title: "exact_match (strict-match)"."""
    metric, name = split_key(key)
    return metric if name == "none" else f"{metric} ({name})"
