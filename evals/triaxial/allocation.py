"""Allocation of 2 or 4 bits to tags under a budget, by a calibration (TriAxialKV, section 3.1.3 and Algorithm 1)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from hfkvq.bounded import DAMAGE
from hfkvq.caches.tags import parse_tag
from hfkvq.caches.tags.bit_table import BitTable, read_json

KIND = "hfkvq.sensitivity"

ENUMERABLE = 22
"""Largest number of tags of which all allocations are tried (section 3.1.3)."""


@dataclass(frozen=True)
class Origin:
    """Source of a calibration.

    Attributes:
        model: name or path, for people.
        config: `config_hash` of the model.
        template: `template_hash` of the tokenizer.
        data: hash of the conversations.
        requests: number of requests measured.
        layers: indices of the layers measured.
        versions: of hfkvq, torch and transformers.
    """

    model: str = ""
    config: str = ""
    template: str = ""
    data: str = ""
    requests: int = 0
    layers: tuple[int, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Origin:
        """Inverse of ``dataclasses.asdict``, also after JSON."""
        return Origin(**{**values, "layers": tuple(values.get("layers", ()))})


@dataclass(frozen=True)
class Sensitivity:
    """Result of a calibration (TriAxialKV, section 3.1.4), from which tables are made for any budget.

    Attributes:
        distortion: (D_k(2), D_k(4)) by tag: error of the attention's output if that tag's tokens alone are quantized.
        counts: N_k by tag, tokens.
        origin: model, chat template and data.
        shared_inst: True if N_k of instructions is a median, for requests that share one copy of them.
    """

    distortion: Mapping[str, tuple[float, float]]
    counts: Mapping[str, float]
    origin: Origin = field(default_factory=Origin)
    shared_inst: bool = True

    def __post_init__(self) -> None:
        """Checks tags and numbers."""
        if self.distortion.keys() != self.counts.keys():
            odd = sorted(self.distortion.keys() ^ self.counts.keys())
            raise ValueError(f"counts: must have the same tags as distortion; only one of them has {', '.join(odd)}.")
        for tag, count in self.counts.items():
            parse_tag(tag)
            if not all(math.isfinite(x) and x >= 0 for x in (*self.distortion[tag], count)):
                raise ValueError(
                    f"{tag}: got distortion {self.distortion[tag]} and {count} tokens, allowed finite numbers from 0."
                )

    def save(self, path: str | Path) -> None:
        """Writes everything as JSON."""
        text = json.dumps({"kind": KIND, **asdict(self)}, indent=2)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> Sensitivity:
        """Reads a result that `save` wrote.

        Raises:
            ValueError: there is no such file, or it holds something else.
        """
        values = read_json(path, KIND, "sensitivity", "python -m evals.triaxial calibrate")
        try:
            return Sensitivity(
                {tag: (float(pair[0]), float(pair[1])) for tag, pair in values["distortion"].items()},
                {tag: float(count) for tag, count in values["counts"].items()},
                Origin.from_dict(values["origin"]),
                bool(values["shared_inst"]),
            )
        except DAMAGE as error:
            raise ValueError(
                f"sensitivity: {path} is damaged ({error}); make it with `evals.triaxial calibrate`."
            ) from None


@dataclass(frozen=True)
class Choice:
    """A tag, or several that share their width.

    Attributes:
        gain: ``D(2) - D(4)``, distortion that 4 bits spare.
        cost: ``2 N``, bits that 4 bits a token cost beyond 2.
    """

    gain: float
    cost: float


def allocate_exact(choices: Sequence[Choice], room: float) -> list[bool]:
    """Choices that get 4 bits: ``max Σ gain s.t. Σ cost <= room``, eq. (3), by trying all sets.

    Args:
        choices: at most `ENUMERABLE`.
        room: ``(B - 2) Σ N``.

    Returns:
        One bool for each choice. Of equally good allocations the one that costs least.

    Raises:
        ValueError: more choices than can be enumerated.
    """
    if len(choices) > ENUMERABLE:
        raise ValueError(f"choices: got {len(choices)}, allowed {ENUMERABLE}; use allocate_greedy.")
    gain, cost = torch.zeros(1, dtype=torch.float64, device="cpu"), torch.zeros(1, dtype=torch.float64, device="cpu")
    for choice in choices:
        # Bit k of an index is set if choice k gets 4 bits.
        gain, cost = torch.cat([gain, gain + choice.gain]), torch.cat([cost, cost + choice.cost])
    gain = gain.masked_fill(cost > room * (1 + 1e-12), -torch.inf)
    best = int(cost.masked_fill(gain < gain.max(), torch.inf).argmin())
    return [bool(best >> k & 1) for k in range(len(choices))]


def allocate_greedy(choices: Sequence[Choice], room: float) -> list[bool]:
    """Choices that get 4 bits, by falling ``ρ = gain / cost``, eq. (4), within the room (Algorithm 1).

    Choices without a gain stay at 2 bits, which the paper's text leaves open.

    Args:
        choices: any number; costs are positive.
        room: ``(B - 2) Σ N``.

    Returns:
        One bool for each choice.
    """
    chosen, left = [False] * len(choices), room * (1 + 1e-12)
    for k in sorted(range(len(choices)), key=lambda k: choices[k].gain / choices[k].cost, reverse=True):
        if choices[k].gain > 0 and choices[k].cost <= left:
            chosen[k] = True
            left -= choices[k].cost
    return chosen


def allocate(
    distortion: Mapping[str, tuple[float, float]], counts: Mapping[str, float], budget: float
) -> dict[str, int]:
    """Bits by tag, ``min Σ D_k(b_k) s.t. Σ N_k b_k <= B Σ N_k``, eq. (3): exact up to 22 tags, greedy above.

    Args:
        distortion: (D_k(2), D_k(4)) by tag.
        counts: N_k by tag; tags without tokens drop out.
        budget: B, mean code bits of a token.

    Returns:
        2 or 4 for each tag that has tokens.

    Raises:
        ValueError: a budget outside 2 to 4, or no tokens at all.
    """
    if not 2 <= budget <= 4:
        raise ValueError(f"budget: got {budget:g}, allowed 2 to 4 bits.")
    tags = [tag for tag, count in counts.items() if count > 0]
    if not tags:
        raise ValueError("counts: no tag has a token, so there is nothing to allocate.")
    choices = [Choice(distortion[tag][0] - distortion[tag][1], 2 * counts[tag]) for tag in tags]
    room = (budget - 2) * sum(counts[tag] for tag in tags)
    solve = allocate_exact if len(tags) <= ENUMERABLE else allocate_greedy
    return {tag: 4 if wide else 2 for tag, wide in zip(tags, solve(choices, room), strict=True)}


def make_table(sensitivity: Sensitivity, budget: float) -> BitTable:
    """Table of bits under a budget.

    Args:
        sensitivity: of `calibrate`.
        budget: B, mean code bits of a token.

    Raises:
        ValueError: see `allocate`.
    """
    bits = allocate(sensitivity.distortion, sensitivity.counts, budget)
    made = {"budget": budget, "distortion": sensitivity.distortion, "counts": sensitivity.counts}
    return BitTable(bits, asdict(sensitivity.origin), made)


@dataclass(frozen=True)
class Point:
    """One budget of a sweep.

    Attributes:
        bits: mean code bits per token, ``Σ N_k b_k / Σ N_k``.
        narrow: share of tokens in 2 bits.
        distortion: ``Σ D_k(b_k)``.
    """

    budget: float
    bits: float
    narrow: float
    distortion: float
    table: BitTable


def sweep(sensitivity: Sensitivity, budgets: Iterable[float]) -> list[Point]:
    """Tables of several budgets, to choose the smallest that a task tolerates (section 3.1.4)."""
    points = []
    for budget in budgets:
        table = make_table(sensitivity, budget)
        total = sum(sensitivity.counts[tag] for tag in table.bits)
        wide = sum(sensitivity.counts[tag] for tag, bits in table.bits.items() if bits == 4)
        error = sum(sensitivity.distortion[tag][bits == 4] for tag, bits in table.bits.items())
        points.append(Point(budget, 2 + 2 * wide / total, 1 - wide / total, error, table))
    return points
