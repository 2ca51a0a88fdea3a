"""What is measured: rows by tokens, how long, and how models are compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hfkvq.sizes import parse_count

from ..cases import short


@dataclass(frozen=True, slots=True)
class Case:
    """One size.

    Attributes:
        batch: rows.
        context: tokens of each row before the first step.
    """

    batch: int
    context: int

    @property
    def title(self) -> str:
        """E.g. ``32 x 8k``."""
        return f"{self.batch} x {short(self.context)}"


DEFAULT_CASES = "1x1k,1x32k,1x128k,16x8k,32x8k,48x8k,64x8k,96x8k,24x32k,128x8k,320x8k"


def parse_cases(texts: Sequence[str]) -> list[Case]:
    """``64x8k`` as 64 rows of 8192 tokens, each.

    Raises:
        ValueError: none, one of another form, or one given twice.
    """
    cases = []
    for text in texts:
        batch, cross, context = text.partition("x")
        if not cross or not batch or not context:
            raise ValueError(f"cases: got {text!r}, allowed ROWSxTOKENS, e.g. 1x32k,64x8k.")
        try:
            case = Case(parse_count(batch), parse_count(context))
        except ValueError as error:
            raise ValueError(f"cases: got {text!r}, allowed ROWSxTOKENS, e.g. 1x32k,64x8k: {error}") from error
        if case in cases:
            raise ValueError(f"cases: {text!r} is given twice.")
        cases.append(case)
    if not cases:
        raise ValueError("cases: got none.")
    return cases


TUNED = {"triton.cudagraphs": True, "coordinate_descent_tuning": True}
"""Options of inductor that search each kernel's block sizes, and take narrow matrix products out of cuBLAS's hands."""


def compile_arguments(tuned: bool, max_autotune: bool) -> dict[str, Any]:
    """Arguments of `torch.compile`, for every compiled cache alike.

    Args:
        tuned: inductor's coordinate descent; compiles longer.
        max_autotune: it also times Triton's matrix products against cuBLAS's; longer still.
    """
    options = {**(TUNED if tuned or max_autotune else {}), **({"max_autotune": True} if max_autotune else {})}
    # PyTorch takes a mode or options, not both.
    return {"fullgraph": True, **({"options": options} if options else {"mode": "reduce-overhead"})}


@dataclass(frozen=True)
class Settings:
    """How long, and how.

    Attributes:
        warmup: decode steps before timing begins; the first ones compile and capture.
        steps: decode steps timed in one go, without a synchronization in between.
        repeats: how often; quantiles are over these.
        seconds: most time for the repeats of one line: slow caches get fewer steps, then fewer repeats.
        fill_bytes: most bytes of random keys and values made at a time.
        compile: arguments of `torch.compile`.
        seed: of weights, tokens, keys and values.
    """

    warmup: int = 8
    steps: int = 24
    repeats: int = 5
    seconds: float = 20.0
    fill_bytes: int = 2**30
    compile: dict[str, Any] = field(default_factory=lambda: compile_arguments(False, False))
    seed: int = 0

    def __post_init__(self) -> None:
        """Checks what loops rely on."""
        # The first step compiles, the second warms the graph's memory up, the third captures it; one is timed.
        for name, least in (("warmup", 4), ("steps", 1), ("repeats", 1), ("fill_bytes", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: got {getattr(self, name)}, allowed {least} or more.")
        if not self.seconds > 0:
            raise ValueError(f"seconds: got {self.seconds}, allowed more than 0.")

    @property
    def new_tokens(self) -> int:
        """Room that a cache of fixed capacity needs beyond the context."""
        return self.warmup + self.steps * self.repeats

    def affordable(self, seconds: float) -> tuple[int, int]:
        """Steps and repeats for a step that takes so many seconds."""
        count = max(int(self.seconds / max(seconds, 1e-9)), 1)
        repeats = min(self.repeats, count)
        return max(min(self.steps, count // repeats), 1), repeats
