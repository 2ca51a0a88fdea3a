"""Result of a calibration: the distortion D_k(b) and the token count N_k of every tag."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hfkvq.bounded import DAMAGE
from hfkvq.caches.tags import parse_tag
from hfkvq.caches.tags.bit_table import Origin, read_json

KIND = "hfkvq.sensitivity"


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
        values = read_json(path, KIND, "sensitivity", "hfkvq calibrate")
        try:
            return Sensitivity(
                {tag: (float(pair[0]), float(pair[1])) for tag, pair in values["distortion"].items()},
                {tag: float(count) for tag, count in values["counts"].items()},
                Origin.from_dict(values["origin"]),
                bool(values["shared_inst"]),
            )
        except DAMAGE as error:
            raise ValueError(f"sensitivity: {path} is damaged ({error}); make it with `hfkvq calibrate`.") from None
