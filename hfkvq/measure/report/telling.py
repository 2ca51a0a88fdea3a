"""What the questions of a board can tell: each cache against Transformers' own, question by question."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.table import Table

from ..records import BASELINE
from ..tables import markdown_table, new_table
from .comparison import describe
from .paired import Verdict, judge, pool
from .samples import Run, pair, read_run

STOCK = "none"
"""Folder of Transformers' own cache on a board."""

FINE = 2.0
"""Points: questions that cannot tell so little apart are too few."""

HEAD = ("cache", "questions", f"points from {BASELINE}", "95 %", "verdict")


@dataclass(frozen=True)
class Telling:
    """One cache against Transformers' own.

    Attributes:
        cache: its name.
        samples: questions that both answered.
        points: difference of right answers, in points.
        interval: of it, 95 %.
        differs: whether it is more than chance.
        needed: questions that would tell `FINE` points, about.
    """

    cache: str
    samples: int
    points: float
    interval: tuple[float, float]
    differs: bool
    needed: float

    @property
    def half(self) -> float:
        """Points that the interval reaches to either side, about."""
        return (self.interval[1] - self.interval[0]) / 2

    @property
    def words(self) -> str:
        """What the questions tell."""
        if self.differs:
            return "worse" if self.points < 0 else "better"
        if self.half <= FINE:
            return f"alike within {self.half:.1f} points"
        return f"too few to tell, ±{self.half:.0f}"


def make_telling(cache: str, verdict: Verdict) -> Telling:
    """Of a paired test. Where no answer differs, as many as three in all may have done so by chance (rule of three)."""
    low, high = verdict.interval or (verdict.difference, verdict.difference)
    least = 3 / verdict.samples
    low, high = min(low, verdict.difference - least), max(high, verdict.difference + least)
    ends = (100 * max(low, -1.0), 100 * min(high, 1.0))
    differs = verdict.p < 0.05 and (ends[0] > 0) == (ends[1] > 0)
    # Intervals shrink with the root of the number, but for answers that never differ.
    wide = 50 * (high - low) / FINE
    needed = verdict.samples * (wide**2 if verdict.better + verdict.worse else wide)
    return Telling(cache, verdict.samples, 100 * verdict.difference, ends, differs, needed)


def _runs(folder: Path) -> Run | None:
    """All results of a cache as one run; None where there are none."""
    found: Run | None = None
    for path in sorted(folder.rglob("results_*.json"), key=lambda file: file.name):
        run = read_run(path)
        found = run if found is None else replace(run, samples={**found.samples, **run.samples})
    return found


def tell(folder: Path, seed: int = 0) -> list[Telling]:
    """Every cache of a board against Transformers' own, over the right answers of all tasks together.

    Empty where the board has no such answers.

    Raises:
        ValueError: samples that are damaged, or of other questions.
    """
    stock = _runs(folder / STOCK) if (folder / STOCK).is_dir() else None
    if stock is None:
        return []
    found = []
    for own in sorted(path for path in folder.iterdir() if path.is_dir() and path.name != STOCK):
        run = _runs(own)
        if run is None or not stock.samples.keys() & run.samples.keys():
            continue
        pairs = [one for one in pair(stock, run)[0] if one.higher and one.binary]
        verdict = pool(pairs, seed) or (judge(pairs[0], seed) if pairs else None)
        if verdict is not None:
            found.append(make_telling(str(describe(run)["cache"]), verdict))
    # The control first: what it does is noise.
    return sorted(found, key=lambda one: one.cache != "full")


def _rows(found: Iterable[Telling]) -> list[tuple[str, ...]]:
    return [
        (
            one.cache,
            f"{one.samples:,}",
            f"{one.points:+.1f}",
            f"{one.interval[0]:+.1f} to {one.interval[1]:+.1f}",
            one.words,
        )
        for one in found
    ]


def telling_table(found: Sequence[Telling]) -> Table:
    """For a terminal."""
    view = new_table(f"Right answers compared with {BASELINE}'s, question by question")
    for name in HEAD:
        view.add_column(name, justify="left" if name in (HEAD[0], HEAD[-1]) else "right", no_wrap=name != HEAD[-1])
    for row in _rows(found):
        view.add_row(*row)
    return view


def telling_markdown(found: Sequence[Telling]) -> str:
    """For the report."""
    rows = [(f"`{row[0]}`", *row[1:]) for row in _rows(found)]
    return f"## What these questions tell\n\n{markdown_table(HEAD, rows)}\n\n{telling_note(found)}\n"


def telling_note(found: Sequence[Telling]) -> str:
    """How to read it."""
    few = [one for one in found if not one.differs and one.half > FINE]
    said = (
        "Both caches answered the same questions. Intervals are bootstrapped over the questions, and extend by at "
        "least three of them to either side. The difference of `full` is noise."
    )
    if few:
        said += (
            f" Too few questions to distinguish {', '.join(one.cache for one in few)} from {BASELINE}: about "
            f"{max(one.needed for one in few):,.0f} would detect a difference of {FINE:g} points. "
            "Raise --limit, or add tasks."
        )
    return said
