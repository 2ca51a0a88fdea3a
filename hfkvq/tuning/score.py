"""Scores of caches, and the interface of objectives."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from hfkvq.caches.schemes.preset import Preset

Cost = Literal["total_bits", "cache_bytes", "key_bits"]
COSTS: tuple[Cost, ...] = ("total_bits", "cache_bytes", "key_bits")


@dataclass(frozen=True)
class Score:
    """Value and costs of a cache, measured in the same run.

    Attributes:
        value: the objective's: an accuracy, or a KL divergence.
        total_bits: bits per element, every byte counted.
        code_bits: payload bits per element of sealed pages.
        cache_bytes: held at the end of a sample, or None.
        samples: number of independent samples.
        low: end of the value's 95 % interval, or None.
        key_bits: mean width of the keys' channels as raised, without scales (MixKVQ's B_eff, equation 17), or None.
    """

    value: float
    total_bits: float
    code_bits: float = math.nan
    cache_bytes: float | None = None
    samples: int = 1
    low: float | None = None
    high: float | None = None
    key_bits: float | None = None

    def cost(self, name: Cost) -> float:
        """Cost of that name.

        Raises:
            ValueError: the objective does not measure it.
        """
        found = getattr(self, name)
        if found is None:
            raise ValueError(
                f"cost: got {name!r}, which this objective does not measure; allowed "
                f"{', '.join(other for other in COSTS if getattr(self, other) is not None)}."
            )
        return found

    def to_dict(self) -> dict[str, Any]:
        """Fields as JSON has them; NaN becomes None."""
        fields = asdict(self)
        return {name: None if isinstance(x, float) and math.isnan(x) else x for name, x in fields.items()}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Score:
        """Inverse of `to_dict`."""
        return Score(**{**values, "code_bits": math.nan if values["code_bits"] is None else values["code_bits"]})


@runtime_checkable
class Objective(Protocol):
    """Measure of a cache: any callable with these attributes, such as those in `hfkvq.tuning.objectives`.

    Attributes:
        name: of the value, e.g. "KLD".
        direction: "minimize" or "maximize".
    """

    name: str
    direction: Literal["minimize", "maximize"]

    def __call__(self, preset: Preset) -> Score:
        """Measures a cache."""
        ...
