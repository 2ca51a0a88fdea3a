"""Search for launch parameters on the present GPU; what `configs.lookup` finds afterwards."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures import TimeoutError as Late
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from hfkvq.caches.make import LayerShape, layer_plan
from hfkvq.kernels.triton import configs
from hfkvq.kernels.triton._lib import Gpu, properties
from hfkvq.kernels.triton.ahead import Wanted, compile_one
from hfkvq.kernels.triton.decode import decode_wanted
from hfkvq.kernels.triton.latent import latent_wanted
from hfkvq.kernels.triton.warm import wanted
from hfkvq.kernels.triton.worker import leave_gpu_alone
from hfkvq.kernels.warm import normal

from ..records import now, versions
from ..tables import new_table
from .cases import DTYPES, Shape, fill, layout_of, scheme_of
from .run import store_calls
from .split_kv import FAILURES
from .timing import cache_size, time_calls

GRID: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "decode": {
        "programs_per_sm": (12, 6, 4, 8),
        "stages": (3, 7, 2, 5),
        "step": (128, 64, 0),
        "loose": (16, 32),
        "max_registers": (168, 128, 0),
    },
    "digits-2": {
        "programs_per_sm": (6, 8, 11, 12),
        "stages": (3, 5, 7),
        "max_registers": (0, 168),
        "step": (0,),
        "loose": (16, 32),
    },
    "digits-4": {
        "programs_per_sm": (6, 8, 12),
        "stages": (3, 5, 7),
        "max_registers": (0, 168),
        "step": (0, 128),
        "loose": (16, 32),
    },
    "latent": {
        "programs_per_sm": (2, 1),
        "stages": (3, 7, 5),
        "warps": (4, 8),
        "step": (64, 32, 0),
        "max_registers": (128, 0),
    },
}
"""Values tried for each knob, one knob at a time, those that may bring most first; then the best of each together."""

REPLAYS = 10
AIM_US = 2000.0
"""Length of a replay."""
WORKERS = 14
"""Most processes that compile side by side; none of them uses the GPU."""
WORTHWHILE = 0.98
"""Share of the time up to which a candidate replaces what is there; less is noise."""
HOPELESS = 1.04
"""Share of the time of the first format and shape from which on a candidate is not measured with the others."""

Progress = Callable[[str, float], None]
Timer = Callable[[], float]
Variant = tuple[str, str]


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
    kernel: str,
    key: str,
    start: configs.Knobs,
    timers: Sequence[Timer],
    progress: Progress,
    ready: Callable[[Mapping[str, int]], bool] = lambda knobs: True,
) -> Finding:
    """Tries the candidates of one kernel variant.

    Args:
        kernel: kernel.
        key: variant.
        start: knobs before.
        timers: measure with the knobs in force, one for each format and shape; raise one of `FAILURES` where these are
            more than the GPU has. A candidate that is slower with the first is not given to the others.
        progress: is told what is tried, and the share done.
        ready: waits until a candidate is compiled; False where there is no time left for it.
    """
    base = [timer() for timer in timers]
    tried: list[tuple[Mapping[str, int], float]] = [(start, 1.0)]

    def share_of(knobs: Mapping[str, int]) -> float:
        ratios: list[float] = []
        try:
            with configs.override(kernel, key, **knobs):
                for timer, was in zip(timers, base, strict=True):
                    ratios.append(timer() / was)
                    if ratios[0] > HOPELESS:
                        break
        except FAILURES:
            return math.inf
        return math.exp(sum(map(math.log, ratios)) / len(ratios))

    todo = candidates(kernel, start)
    for i, knobs in enumerate(todo):
        progress(f"{key} {_difference(start, knobs)}", i / (len(todo) + 1))
        if ready(knobs):
            tried.append((knobs, share_of(knobs)))
    joined = combination(start, tried)
    if all(joined != knobs for knobs, _ in tried) and ready(joined):
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
    uses: dict[Variant, list[str]] = {}
    for name in formats:
        with configs.watch() as seen:
            list(kernels_of(name, shapes[0], device))
        for variant in sorted(seen):
            uses.setdefault(variant, []).append(name)
    findings: list[Finding] = []
    with contextlib.ExitStack() as stack:
        compiler = stack.enter_context(Compiler(shapes[0], device, end))
        compiler.begin(formats, {variant: configs.lookup(device, *variant) for variant in uses}, uses)
        for (kernel, key), names in uses.items():
            progress(f"{key}: compiling", 0.0)
            if not all([compiler.wait((name,)) for name in names]):
                break
            timers = list(_timers(names, shapes, device, progress))
            start = configs.lookup(device, kernel, key)
            own = [(name, kernel, key) for name in names]

            def ready(knobs: Mapping[str, int], own: Sequence[tuple[str, ...]] = own) -> bool:
                return all([compiler.wait((*each, _plain(knobs))) for each in own])

            finding = search(kernel, key, start, timers, progress, ready)
            findings.append(finding)
            keep(finding)
            # Variants of one format run together, so the next is measured beside the best of this one.
            stack.enter_context(configs.override(kernel, key, **finding.after))
    return findings, len(uses)


def _timers(names: Sequence[str], shapes: Sequence[Shape], device: torch.device, progress: Progress) -> Iterator[Timer]:
    """Microseconds of attention, for each shape and format."""
    for shape in shapes:
        query, keys, values = shape.data(device)
        for name in names:
            progress(f"filling {name}, {shape.title}", 0.0)
            calls = store_calls(fill(name, keys, values), query, shape.scaling, cache_size(device))
            yield lambda calls=calls: time_calls(calls, REPLAYS, AIM_US).p50


# Compiling.


def kernels_of(name: str, shape: Shape, device: torch.device) -> Iterator[Wanted]:
    """The variants that attend to a format at such shapes, with the launch parameters in force."""
    form, dtype = layout_of(name, shape.head_dim, shape.rope_dim).store, DTYPES[shape.dtype]
    if form.latent:
        yield from latent_wanted(form, shape.heads, shape.head_dim, shape.rope_dim, dtype, device, shape.queries)
    else:
        dims = shape.kv_heads, shape.heads, shape.head_dim, shape.head_dim
        yield from decode_wanted(form, *dims, dtype, device, shape.queries)


def compile_format(name: str, shape: Shape) -> None:
    """Compiles what storing a format and attending to it takes into Triton's cache."""
    scheme, device = scheme_of(name, shape.head_dim), torch.device("cuda", 0)
    for each in kernels_of(name, shape, device):
        compile_one(each)
    if not shape.rope_dim:
        plan = layer_plan(scheme, LayerShape(shape.heads, shape.kv_heads, shape.head_dim), DTYPES[shape.dtype])
        for each in wanted(normal(plan), shape.heads, scheme.channel_rule, False, device):
            compile_one(each)


def compile_candidate(name: str, shape: Shape, kernel: str, key: str, knobs: configs.Knobs) -> None:
    """Compiles what attending to a format takes with these launch parameters."""
    with configs.override(kernel, key, **knobs):
        for each in kernels_of(name, shape, torch.device("cuda", 0)):
            compile_one(each)


def _plain(knobs: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(knobs.items()))


class Compiler:
    """Processes that compile side by side, while this one measures: a candidate takes seconds, and there are a hundred.

    Args:
        shape: heads, dims and dtype.
        device: whose kernels they are.
        end: when there is no time left, by `time.monotonic`.
    """

    def __init__(self, shape: Shape, device: torch.device, end: float) -> None:
        self._shape, self._device, self._end = shape, device, end
        self._jobs: dict[tuple[Any, ...], Future[None]] = {}
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def begin(
        self, formats: Sequence[str], starts: Mapping[Variant, configs.Knobs], uses: Mapping[Variant, Sequence[str]]
    ) -> None:
        """Has everything compiled, in the order in which it is measured; returns at once."""
        workers = min(WORKERS, (os.cpu_count() or 1) - 1)
        if self._device.type != "cuda" or workers < 1:
            return
        found = properties(self._device)
        gpu = Gpu(*(getattr(found, field) for field in Gpu._fields))
        # The GPU has been used in this process, so a copy of it could not; what is imported once serves all.
        # Children launch nothing, so that nobody's times are disturbed.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._pool = ProcessPoolExecutor(workers, context, leave_gpu_alone, (gpu,))
        with contextlib.suppress(BrokenProcessPool):
            for name in formats:
                self._jobs[name,] = self._pool.submit(compile_format, name, self._shape)
            for (kernel, key), start in starts.items():
                for knobs in candidates(kernel, start):
                    for name in uses[kernel, key]:
                        job = self._pool.submit(compile_candidate, name, self._shape, kernel, key, knobs)
                        self._jobs[name, kernel, key, _plain(knobs)] = job

    def wait(self, what: tuple[Any, ...]) -> bool:
        """Waits for a format (name,) or a candidate (name, kernel, key, knobs); False if there is no time left.

        What was not asked for is compiled where it is launched, and so is what failed: it says why there.
        """
        left = self._end - time.monotonic()
        if left <= 0:
            return False
        job = self._jobs.get(what)
        if job is not None:
            try:
                job.exception(None if math.isinf(left) else left)
            except (Late, TimeoutError):
                return False
        return True


def to_save(findings: Sequence[Finding]) -> dict[str, dict[str, dict[str, int]]]:
    """{kernel: {key: knobs}}, what `configs.save` takes: all variants searched, so that defaults may change later."""
    found: dict[str, dict[str, dict[str, int]]] = {}
    for finding in findings:
        found.setdefault(finding.kernel, {})[finding.key] = dict(finding.after)
    return found


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
