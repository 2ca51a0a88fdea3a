"""Searches for the fastest launch parameters on this GPU.

    PYTHONPATH=. python evals/kernel_tuning.py [--formats kitty,int4] [--sizes 32x32k] [--minutes 10] --json FILE

`evals/parameters.py FILE` takes what it found into the package, where attention looks it up.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table

from evals.kernel_bench import add_cases, bench_device, cache_size, cases_of, store_calls, time_calls
from evals.kernel_cases import Shape, attending, compile_candidates, compile_formats, fill
from hfkvq.kernels.triton import configs
from hfkvq.kernels.triton._lib import properties
from hfkvq.measure.records import now, versions
from hfkvq.measure.tables import new_table
from hfkvq.terminal import make_console

GRID: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "decode": {
        "programs_per_sm": (12, 6, 4, 8),
        "stages": (3, 7, 2, 5),
        "step": (128, 64, 0),
        "loose": (16, 32),
    },
    "latent": {
        "programs_per_sm": (2, 1),
        "stages": (3, 7, 5),
        "warps": (4, 8),
        "step": (64, 32, 0),
    },
}
"""Values tried for each knob, one knob at a time, those that may bring most first; then the best of each together."""

REPLAYS = 10
AIM_US = 2000.0
"""Length of a replay."""
WORTHWHILE = 0.98
"""Share of the time up to which a candidate replaces what is there; less is noise."""
HOPELESS = 1.04
"""Share of the time of the first format and shape from which on a candidate is not measured with the others."""

Progress = Callable[[str, float], None]
Timer = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Finding:
    """Findings for one kernel variant.

    Attributes:
        kernel: kernel.
        key: variant, see `configs.key_of`.
        before: knobs before.
        after: best knobs; the same where nothing was better.
        share: time with them over the time before, geometric mean over formats and shapes.
    """

    kernel: str
    key: str
    before: configs.Knobs
    after: configs.Knobs
    share: float


def candidates(kernel: str, start: configs.Knobs) -> list[dict[str, int]]:
    """Knobs that differ from ``start`` in one value of the grid."""
    return [{**start, knob: value} for knob, values in GRID[kernel].items() for value in values if value != start[knob]]


def combination(start: configs.Knobs, shares: Sequence[tuple[Mapping[str, int], float]]) -> dict[str, int]:
    """The best value of each knob, where it was better than ``start``; ``shares`` holds times over that of start."""
    best = dict(start)
    for knob in start:
        own = [(share, tried[knob]) for tried, share in shares if tried[knob] != start[knob]]
        if own and min(own)[0] < 1:
            best[knob] = min(own)[1]
    return best


def search(
    kernel: str,
    key: str,
    start: configs.Knobs,
    timers: Sequence[Timer],
    progress: Progress,
) -> Finding:
    """Tries the candidates of one kernel variant.

    Args:
        kernel: kernel.
        key: variant.
        start: knobs before.
        timers: measure with the knobs in force, one for each format and shape; raise where these are more than the
            GPU has. A candidate that is slower with the first is not given to the others.
        progress: is told what is tried, and the share done.
    """
    base = [timer() for timer in timers]
    tried: list[tuple[Mapping[str, int], float]] = [(start, 1.0)]

    def share_of(knobs: Mapping[str, int]) -> float:
        ratios: list[float] = []
        configs.try_out(kernel, key, knobs)
        try:
            for timer, was in zip(timers, base, strict=True):
                ratios.append(timer() / was)
                if ratios[0] > HOPELESS:
                    break
        # A candidate that does not compile, or needs more than the GPU has, fails in many ways; others go on.
        except Exception:
            return math.inf
        finally:
            configs.try_out(kernel, key, start)
        return math.exp(sum(map(math.log, ratios)) / len(ratios))

    todo = candidates(kernel, start)
    for i, knobs in enumerate(todo):
        progress(f"{key} {_difference(start, knobs)}", i / (len(todo) + 1))
        tried.append((knobs, share_of(knobs)))
    joined = combination(start, tried)
    if all(joined != knobs for knobs, _ in tried):
        progress(f"{key} {_difference(start, joined)}", len(todo) / (len(todo) + 1))
        tried.append((joined, share_of(joined)))
    best, share = min(tried, key=lambda pair: pair[1])
    if share > WORTHWHILE:
        best, share = start, 1.0
    return Finding(kernel, key, dict(start), dict(best), share)


def _difference(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    changed = [f"{knob} {value}" for knob, value in after.items() if value != before.get(knob)]
    return ", ".join(changed) or "unchanged"


def tune(
    formats: Sequence[str],
    shapes: Sequence[Shape],
    device: torch.device,
    progress: Progress = lambda what, share: None,
    minutes: float = math.inf,
    keep: Callable[[Finding], None] = lambda finding: None,
) -> tuple[list[Finding], int]:
    """Searches for every kernel variant that these formats and shapes use, those of the first formats first.

    Args:
        formats: names.
        shapes: shapes; a variant's parameters are one set for all of them. The first one decides which candidates are
            measured at the others.
        device: a CUDA device.
        progress: is told what is being done, and the share done of it.
        minutes: time after which nothing new is begun.
        keep: is given each finding at once, so that it is not lost with those to come.

    Returns:
        The findings, and how many variants there are.
    """
    end = time.monotonic() + 60 * minutes
    uses: dict[tuple[str, str], list[str]] = {}
    for name in formats:
        configs.renew()
        list(attending(name, shapes[0], device))
        for variant in sorted({(kernel, key) for _, kernel, key in configs.ANSWERS}):
            uses.setdefault(variant, []).append(name)
    findings: list[Finding] = []
    with contextlib.ExitStack() as stack:
        for variant in uses:
            stack.callback(configs.try_out, *variant, None)
        for (kernel, key), names in uses.items():
            if time.monotonic() >= end:
                break
            progress(f"{key}: compiling", 0.0)
            start = configs.lookup(device, kernel, key)
            compile_formats(names, shapes[:1], device)
            compile_candidates(kernel, key, candidates(kernel, start), names, shapes[0], device)
            timers = list(_timers(names, shapes, device, progress))
            finding = search(kernel, key, start, timers, progress)
            findings.append(finding)
            keep(finding)
            # Variants of one format run together, so the next is measured beside the best of this one.
            configs.try_out(kernel, key, finding.after)
    return findings, len(uses)


def _timers(names: Sequence[str], shapes: Sequence[Shape], device: torch.device, progress: Progress) -> Iterator[Timer]:
    """Microseconds of attention, for each shape and format."""
    for shape in shapes:
        query, keys, values = shape.data(device)
        for name in names:
            progress(f"filling {name}, {shape.title}", 0.0)
            calls = store_calls(fill(name, keys, values), query, shape.scaling, cache_size(device))
            yield lambda calls=calls: time_calls(calls, REPLAYS, AIM_US).p50


def write(findings: Sequence[Finding], device: torch.device, path: Path) -> None:
    """Writes findings with the share of the time they take, as JSON: what `configs.SHIPPED` is made from."""
    found = properties(device)
    record = {
        "kind": "hfkvq bench tune",
        "gpu": found.name,
        "capability": f"{found.major}.{found.minor}",
        "versions": versions("torch", "triton"),
        "date": now(),
        "findings": [dataclasses.asdict(finding) for finding in findings],
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def table(findings: Sequence[Finding]) -> Table:
    """Findings of a search."""
    view = new_table("Launch parameters", ("name", "before", "after", "time"))
    for finding in findings:
        view.add_row(
            f"{finding.kernel} {finding.key}",
            ", ".join(f"{knob} {value}" for knob, value in finding.before.items()),
            _difference(finding.before, finding.after),
            f"{100 * (finding.share - 1):+.1f} %",
        )
    return view


def main(given: Sequence[str] | None = None) -> None:
    """Searches, and saves each finding at once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_cases(parser)
    parser.add_argument("--json", type=Path, required=True, help="file of times and parameters")
    asked = parser.parse_args(given)
    shapes, names = cases_of(asked)
    device = bench_device()
    found: list[Finding] = []

    def keep(finding: Finding) -> None:
        found.append(finding)
        write(found, device, asked.json)

    # Findings need a place before the search begins.
    write(found, device, asked.json)
    _, variants = tune(names, shapes, device, lambda what, share: print(what, flush=True), asked.minutes, keep)
    make_console().print(table(found))
    print(f"{len(found)} of {variants} variants; saved to {asked.json}")


if __name__ == "__main__":
    main()
