"""Search for launch parameters on the present GPU; what `configs.lookup` finds afterwards."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import torch
from rich.table import Table

from hfkvq.kernels.arguments import AttentionArguments
from hfkvq.kernels.triton import configs

from ..tables import new_table
from .cases import Shape, fill
from .run import store_calls
from .split_kv import FAILURES
from .timing import cache_size, time_calls

GRID: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "decode": {
        "programs_per_sm": (4, 6, 8, 12),
        "stages": (2, 3, 5, 7),
        "max_registers": (0, 128, 168),
        "step": (0, 64, 128),
    },
    "digits-2": {
        "programs_per_sm": (6, 8, 11, 12),
        "stages": (3, 5, 7),
        "max_registers": (0, 168),
        "step": (0,),
    },
    "digits-4": {
        "programs_per_sm": (6, 8, 12),
        "stages": (3, 5, 7),
        "max_registers": (0, 168),
        "step": (0, 128),
    },
    "latent": {
        "programs_per_sm": (1, 2),
        "stages": (3, 5, 7),
        "max_registers": (0, 128),
        "step": (0, 32, 64),
        "warps": (4, 8),
    },
}
"""Values tried for each knob, one knob at a time; then the best of each together."""

REPLAYS = 10
WORKERS = 8
"""Most processes that compile side by side; each has a context on the GPU."""
WORTHWHILE = 0.98
"""Share of the time up to which a candidate replaces what is there; less is noise."""

Progress = Callable[[str, float], None]
Calls = Sequence[Callable[[], object]]


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found for one kernel variant.

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
    kernel: str, key: str, start: configs.Knobs, times: Callable[[], Sequence[float]], progress: Progress
) -> Finding:
    """Tries the candidates of one kernel variant.

    Args:
        kernel: kernel.
        key: variant.
        start: knobs before.
        times: measures with the knobs in force, one number for each format and shape; raises one of `FAILURES` where
            they are more than the GPU has.
        progress: is told what is tried, and the share done.
    """
    base = times()
    tried: list[tuple[Mapping[str, int], float]] = []

    def share_of(knobs: Mapping[str, int]) -> float:
        try:
            with configs.override(kernel, key, **knobs):
                ratios = [now / was for now, was in zip(times(), base, strict=True)]
        except FAILURES:
            return math.inf
        return math.exp(sum(map(math.log, ratios)) / len(ratios))

    todo = candidates(kernel, start)
    for i, knobs in enumerate(todo):
        progress(f"{key} {_difference(start, knobs)}", i / (len(todo) + 1))
        tried.append((knobs, share_of(knobs)))
    joined = combination(start, tried)
    if joined != start and all(joined != knobs for knobs, _ in tried):
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
    formats: Sequence[str], shapes: Sequence[Shape], device: torch.device, progress: Progress = lambda what, share: None
) -> list[Finding]:
    """Searches for every kernel variant that these formats and shapes use.

    Args:
        formats: names.
        shapes: shapes; a variant's parameters are one set for all of them.
        device: a CUDA device.
        progress: is told what is being done, and the share done of it.
    """
    cases: list[tuple[set[tuple[str, str]], Calls]] = []
    uses: dict[str, set[tuple[str, str]]] = {}
    for i, shape in enumerate(shapes):
        query, keys, values = shape.data(device)
        for j, name in enumerate(formats):
            progress(f"filling {name}, {shape.title}", (i * len(formats) + j) / (len(shapes) * len(formats)))
            store = fill(name, keys, values)
            calls = store_calls(store, query, shape.scaling, cache_size(device))
            with configs.watch() as seen:
                calls[0]()
            cases.append((seen, calls))
            uses[name] = seen
    variants = sorted(set().union(*(seen for seen, _ in cases)))
    starts = {variant: configs.lookup(device, *variant) for variant in variants}
    if device.type == "cuda":
        _compile_apart(uses, shapes[0], starts, progress)
    _compile(cases, starts, progress)

    findings = []
    with contextlib.ExitStack() as stack:
        for kernel, key in variants:
            own = [calls for seen, calls in cases if (kernel, key) in seen]

            def times(own: Sequence[Calls] = own) -> list[float]:
                return [time_calls(calls, REPLAYS).p50 for calls in own]

            finding = search(kernel, key, starts[kernel, key], times, progress)
            findings.append(finding)
            # Variants of one format run together, so the next is measured beside the best of this one.
            stack.enter_context(configs.override(kernel, key, **finding.after))
    return findings


def compile_format(name: str, shape: Shape, kernel: str, key: str, knobs: configs.Knobs, device: str = "cuda") -> None:
    """Attends once over a small store of a format: what is compiled for it stays in Triton's cache of this machine."""
    query, keys, values = shape.data(torch.device(device))
    store = fill(name, keys, values)
    with contextlib.suppress(*FAILURES), configs.override(kernel, key, **knobs):
        store.attend(query, AttentionArguments(shape.scaling))


def _compile_apart(
    uses: Mapping[str, set[tuple[str, str]]],
    shape: Shape,
    starts: Mapping[tuple[str, str], configs.Knobs],
    progress: Progress,
) -> None:
    """Compiles every candidate for every format, in processes side by side: seconds each, and there are a hundred.

    What they leave out, `_compile` does.
    """
    small = dataclasses.replace(shape, batch=1, context=512)
    workers = min(WORKERS, os.cpu_count() or 1)
    todo = [
        (name, small, kernel, key, knobs)
        for (kernel, key), start in starts.items()
        for knobs in candidates(kernel, start)
        for name, seen in uses.items()
        if (kernel, key) in seen
    ]
    if workers < 2 or not todo:
        return
    # The GPU has been used in this process, so a copy of it could not.
    context = multiprocessing.get_context("spawn")
    with contextlib.suppress(BrokenProcessPool), ProcessPoolExecutor(workers, context) as pool:
        jobs: list[Future[None]] = [pool.submit(compile_format, *task) for task in todo]
        for i, job in enumerate(as_completed(jobs)):
            progress(f"compiling, {workers} at a time", i / len(jobs))
            # What fails for another reason than the GPU's limits fails again where it is timed.
            job.exception()


def _compile(
    cases: Sequence[tuple[set[tuple[str, str]], Calls]],
    starts: Mapping[tuple[str, str], configs.Knobs],
    progress: Progress,
) -> None:
    """Runs every candidate once, so that no timing waits for a compiler."""
    todo = [
        (kernel, key, knobs, calls)
        for (kernel, key), start in starts.items()
        for knobs in candidates(kernel, start)
        for seen, calls in cases
        if (kernel, key) in seen
    ]
    for i, (kernel, key, knobs, calls) in enumerate(todo):
        progress(f"compiling {key}", i / len(todo))
        # What does not compile for this GPU is found again, and passed over, when it is to be timed.
        with contextlib.suppress(*FAILURES), configs.override(kernel, key, **knobs):
            calls[0]()


def to_save(findings: Sequence[Finding]) -> dict[str, dict[str, dict[str, int]]]:
    """{kernel: {key: knobs}}, what `configs.save` takes: all variants searched, so that defaults may change later."""
    found: dict[str, dict[str, dict[str, int]]] = {}
    for finding in findings:
        found.setdefault(finding.kernel, {})[finding.key] = dict(finding.after)
    return found


def table(findings: Sequence[Finding]) -> Table:
    """What was found."""
    view = new_table("Launch parameters", ("name", "before", "after", "time"))
    for finding in findings:
        view.add_row(
            f"{finding.kernel} {finding.key}",
            ", ".join(f"{knob} {value}" for knob, value in finding.before.items()),
            _difference(finding.before, finding.after),
            f"{100 * (finding.share - 1):+.1f} %",
        )
    return view
