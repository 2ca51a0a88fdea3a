"""Times decode attention of one layer against PyTorch's, from the call to the merged output, on this GPU.

    PYTHONPATH=. python evals/kernel_bench.py [--sizes 32x32k,1x8k] [--formats kitty,int4] [--queries 4] [--json FILE]
    PYTHONPATH=. python evals/kernel_bench.py --compare FILE_OF_BEFORE

First every format's kernels are held against the PyTorch reference: wrong ones are not timed. Then every shape has
lines of PyTorch's attention and of the formats, as tables and as JSON.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import math
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from evals.kernel_cases import (
    DEFAULT_SHAPES,
    DTYPES,
    FORMATS,
    LATENT_FORMATS,
    LATENT_SHAPES,
    Shape,
    as_dict,
    bytes_read,
    check,
    compile_formats,
    fill,
    parse_size,
    short,
)
from hfkvq.bounded import load_json
from hfkvq.caches.store import MAX_STEP, KVStore
from hfkvq.kernels import use_reference
from hfkvq.kernels.arguments import AttentionArguments
from hfkvq.measure.records import commit, now, versions
from hfkvq.measure.tables import NOTHING, new_table, number
from hfkvq.terminal import make_console, print_notes

KIND = "hfkvq bench kernels"
"""Kind of the records, also of those that a command of this name saved."""
REGRESSION = 5.0
"""Per cent of time that a line may take more than before without being flagged."""

KINDS = ("baseline", "bound", "peer", "format")
"""Kinds of lines, in the order of tables: PyTorch's attention, what is faster than any right result, other packages,
ours.
"""

LIMIT = 0.02
"""Allowed error, root mean square, relative to the output. Rounding to bf16 makes 0.002; a wrong scale, index, token
or page makes a tenth or more."""

Row = dict[str, Any]
"""One measured line, as it stands in the JSON; see `row_of`."""

Record = dict[str, Any]


# Time on the GPU: calls captured in a CUDA graph, cold caches, quantiles over replays.

REPLAYS = 30
AIM_US = 5000.0
"""Length of one replay: long beside the gap between two of them and the resolution of events."""

COLD = 4
"""Bytes that pass between two reads of the same byte, in sizes of the L2 cache.

Were eviction random, 2 % of the reads would still hit: h = exp(-4 (1 - h)).
"""

MOST_COPIES = 512

METHOD = (
    "Time of one call, from the launch to the merged output, on the GPU. Calls are captured in a CUDA graph, which is "
    f"replayed back to back; a replay lasts some {AIM_US / 1000:g} ms and is divided by its calls. Quantiles are over "
    f"replays; the first is dropped. Caches are cold: successive calls read different copies of keys and values (or "
    f"store), as many as make {COLD} times the L2 cache; the query is one and the same. Formats and baselines alike."
)


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of a call.

    Attributes:
        p20: a fifth of the replays were faster.
        p50: median.
        p80: a fifth of the replays were slower.
        calls: calls in a graph.
        copies: copies of the data that they took turns with.
        replays: replays that the quantiles are over.
    """

    p20: float
    p50: float
    p80: float
    calls: int
    copies: int
    replays: int


def copies_for(nbytes: int, cache: int) -> int:
    """Copies of data of ``nbytes`` that an L2 cache of ``cache`` bytes does not keep."""
    return max(1, min(MOST_COPIES, math.ceil(COLD * cache / max(nbytes, 1))))


def cache_size(device: torch.device) -> int:
    """Bytes of the L2 cache."""
    return torch.cuda.get_device_properties(device).L2_cache_size


def quantiles(times: Sequence[float]) -> tuple[float, float, float]:
    """20 %, 50 % and 80 %."""
    if len(times) == 1:
        return times[0], times[0], times[0]
    tenths = statistics.quantiles(times, n=10, method="inclusive")
    return tenths[1], tenths[4], tenths[7]


def _capture(calls: Sequence[Callable[[], object]], rounds: int, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(rounds):
            for call in calls:
                call()
    return graph


def _replays(graph: torch.cuda.CUDAGraph, count: int, stream: torch.cuda.Stream) -> list[float]:
    """Microseconds of each of ``count`` replays, after one to warm up."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    with torch.cuda.stream(stream):
        # Calls do not wait for the GPU in between, so launching a replay hides behind the one before.
        for event in events:
            graph.replay()
            event.record()
    stream.synchronize()
    return [1e3 * before.elapsed_time(after) for before, after in pairwise(events)]


def time_calls(calls: Sequence[Callable[[], object]], replays: int = REPLAYS, aim: float = AIM_US) -> Timing:
    """Times calls that do the same on different copies of the data."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # Compiles, and lets libraries plan, outside the graph.
        for call in calls:
            call()
    stream.synchronize()
    graph, rounds = _capture(calls, 1, stream), 1
    more = math.ceil(aim / max(statistics.median(_replays(graph, 3, stream)), 1.0))
    if more > 1:
        graph.reset()
        graph, rounds = _capture(calls, more, stream), more
    count = rounds * len(calls)
    p20, p50, p80 = (time / count for time in quantiles(_replays(graph, replays, stream)))
    graph.reset()
    return Timing(p20, p50, p80, count, len(calls), replays)


def copy_bandwidth(device: torch.device) -> tuple[int, Timing]:
    """Bytes (read and written) and time of a device-to-device copy too large for any cache."""
    free, _ = torch.cuda.mem_get_info(device)
    # `copy_` of bytes, in a graph, reached two thirds of this on an H200.
    source = torch.zeros(min(2**31, free // 4) // 4, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes, time_calls([lambda: torch.bitwise_not(source, out=target)])


def first_line(error: BaseException) -> str:
    """Error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


# Lines.


def error_of(got: Tensor, exact: Tensor) -> float:
    """Root mean square error relative to the output; infinite if anything is not finite."""
    got, exact = got.float(), exact.float()
    if not torch.isfinite(got).all():
        return float("inf")
    return float((got - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def self_check(formats: Sequence[str], shapes: Sequence[Shape], device: torch.device) -> dict[str, float]:
    """Holds every format's kernels against the torch reference, on two rows of 1,111 tokens with the shapes' heads.

    So long a row has a sink, full pages, a page that is not full, and windows.

    Returns:
        The largest error by name.

    Raises:
        ValueError: an error is above `LIMIT`; such kernels are not worth timing.
    """
    errors: dict[str, float] = {}
    for shape in {dataclasses.replace(shape, batch=2, context=1111, queries=1): None for shape in shapes}:
        query, keys, values = shape.data(device)
        for name in formats:
            got = fill(name, keys, values).attend(query, AttentionArguments(shape.scaling))
            with use_reference():
                exact = fill(name, keys, values).attend(query, AttentionArguments(shape.scaling))
            errors[name] = max(errors.get(name, 0.0), error_of(got, exact))
    wrong = [f"{name} by {error:.3g}" for name, error in errors.items() if not error <= LIMIT]
    if wrong:
        raise ValueError(f"kernels differ from the torch reference: {', '.join(wrong)} (relative, allowed {LIMIT}).")
    return errors


def _sdpa(backend: SDPBackend, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    bias = causal_lower_right(query.shape[2], keys.shape[2]) if query.shape[2] > 1 else None
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(query, keys, values, bias, enable_gqa=True)


def _absorbed(scaling: float, query: Tensor, latents: Tensor, rotary: Tensor) -> Tensor:
    both = torch.cat([latents, rotary], -1)[:, 0]
    return torch.softmax(query[:, :, 0] @ both.mT * scaling, -1) @ both[..., : latents.shape[-1]]


def _baselines(shape: Shape) -> dict[str, Callable[..., Tensor]]:
    """Dense attention of PyTorch, by name: functions of query, keys and values."""
    if shape.rope_dim:
        return {"matmul": partial(_absorbed, shape.scaling)}
    flash = {"flash SDPA": partial(_sdpa, SDPBackend.FLASH_ATTENTION)}
    # cuDNN aligns the triangle of several queries to the upper left, which is another result.
    return flash if shape.queries > 1 else {"cuDNN SDPA": partial(_sdpa, SDPBackend.CUDNN_ATTENTION), **flash}


def row_of(
    shape: Shape,
    name: str,
    kind: str,
    measured: Timing | str,
    nbytes: int,
    copied: float | None,
    *,
    spec: str = "",
    remark: str = "",
) -> Row:
    """A line of the report.

    Args:
        shape: the shape.
        name: of the format or baseline.
        kind: one of `KINDS`.
        measured: the time, or the error.
        nbytes: bytes that have to be read or written.
        copied: bandwidth of a copy within the GPU, bytes a second.
        spec: the store's format.
        remark: for the last column.
    """
    row: Row = {**as_dict(shape), "name": name, "kind": kind, "spec": spec, "remark": remark, "bytes": nbytes}
    if isinstance(measured, str):
        return {**row, "error": measured}
    rate = nbytes / (measured.p50 * 1e-6)
    return {
        **row,
        "us": {"p20": measured.p20, "p50": measured.p50, "p80": measured.p80},
        "calls": measured.calls,
        "copies": measured.copies,
        "replays": measured.replays,
        "tb_per_s": rate / 1e12,
        "share_of_copy": rate / copied if copied else None,
    }


def store_calls(store: KVStore, query: Tensor, scaling: float, cache: int) -> list[Callable[[], Tensor]]:
    """Attention over as many copies of a store as keep an L2 cache of ``cache`` bytes cold."""
    count = copies_for(bytes_read(store, query), cache)
    stores = [store, *(copy.deepcopy(store) for _ in range(count - 1))]
    return [partial(own.attend, query, AttentionArguments(scaling)) for own in stores]


def measure_shape(
    shape: Shape,
    formats: Sequence[str],
    device: torch.device,
    copied: float | None,
    replays: int = REPLAYS,
    progress: Callable[[str], object] = lambda name: None,
) -> Iterator[Row]:
    """The lines of a shape as they are measured: PyTorch's attention, then formats.

    Args:
        shape: the shape.
        formats: names.
        device: a CUDA device.
        copied: bandwidth of a copy, bytes a second.
        replays: replays of each graph.
        progress: called with the name of each line before it is measured.
    """
    try:
        query, keys, values = shape.data(device)
        dense = keys.nbytes + values.nbytes
        copies = [(keys, values)]
        copies += [(keys.clone(), values.clone()) for _ in range(copies_for(dense, cache_size(device)) - 1)]
    except torch.OutOfMemoryError as error:
        yield from (row_of(shape, name, "format", first_line(error), 0, copied) for name in formats)
        return
    for name, attend in _baselines(shape).items():
        progress(name)
        try:
            measured: Timing | str = time_calls([partial(attend, query, *each) for each in copies], replays)
        except RuntimeError as error:
            # Some GPUs and builds lack one of them.
            measured = first_line(error)
        yield row_of(shape, name, "baseline", measured, dense + 2 * query.nbytes, copied)
    del copies
    for name in formats:
        progress(name)
        spec, nbytes = "", 0
        try:
            store = fill(name, keys, values)
            spec, nbytes = store.format.spec, bytes_read(store, query)
            measured = time_calls(store_calls(store, query, shape.scaling, cache_size(device)), replays)
            del store
        # A line that fails, for lack of memory or because its kernel does not fit this GPU, says so; others go on.
        except Exception as error:
            measured = first_line(error)
        yield row_of(shape, name, "format", measured, nbytes, copied, spec=spec)
        # Stores of many shapes leave holes that the next large one may not fit in.
        torch.cuda.empty_cache()


def unquantized(row: Row) -> bool:
    """True if formats are compared with a line: a baseline, or another package's kernel over 16-bit keys and values."""
    return row["kind"] == "baseline" or (row["kind"] == "peer" and not row["quantized"])


def add_speedups(rows: Sequence[Row]) -> None:
    """Puts the speed-up against the fastest unquantized kernel into each line of one shape."""
    times = {row["name"]: row["us"]["p50"] for row in rows if unquantized(row) and "us" in row}
    if not times:
        return
    fastest = min(times, key=lambda name: times[name])
    for row in rows:
        if "us" in row:
            row |= {"speedup": times[fastest] / row["us"]["p50"], "against": fastest}


# The record.


def shape_of(row: Row) -> Shape:
    """The shape a line was measured at."""
    fields = {name: row[name] for name in ("batch", "context", "heads", "kv_heads", "head_dim", "dtype")}
    # Rotary parts are of latents alone.
    return Shape(**fields, rope_dim=row.get("rope_dim", 0), queries=row.get("queries", 1))


def rows_at(record: Record, shape: Shape) -> list[Row]:
    """The lines of a shape, ours last, other packages' before them."""
    rows = [row for row in record["rows"] if shape_of(row) == shape]
    return sorted(rows, key=lambda row: KINDS.index(row["kind"]))


def new_record(device: torch.device, checks: Record) -> Record:
    """A record without lines: GPU, versions, commit, date, and the bandwidth of a copy within the GPU."""
    found = torch.cuda.get_device_properties(device)
    nbytes, timing = copy_bandwidth(device)
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.partition("\n")[0]
    except (OSError, subprocess.CalledProcessError):
        driver = ""
    return {
        "kind": KIND,
        "gpu": found.name,
        "capability": f"{found.major}.{found.minor}",
        "multiprocessors": found.multi_processor_count,
        "l2_bytes": found.L2_cache_size,
        "memory_bytes": found.total_memory,
        "versions": {
            **versions("torch", "triton", "transformers"),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "driver": driver,
        },
        "commit": commit() or "",
        "date": now(),
        "method": METHOD,
        "checks": checks,
        "copy": {
            "bytes": nbytes,
            "us": {"p20": timing.p20, "p50": timing.p50, "p80": timing.p80},
            "tb_per_s": nbytes / timing.p50 / 1e6,
        },
        "rows": [],
    }


def save(record: Record, path: Path) -> None:
    """Writes the record as JSON, whole or not at all."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(record, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    new.replace(path)


def load(path: Path) -> Record:
    """Reads a record. Raises ValueError if the file is none."""
    try:
        record = load_json(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"compare: {path} cannot be read: {error}") from error
    if not isinstance(record, dict) or record.get("kind") != KIND:
        raise ValueError(f"compare: {path} holds no times of kernels.")
    return record


def file_name(path: Path, gpu: str) -> Path:
    """The file itself, or ``kernels-<gpu>.json`` in a folder."""
    if not path.is_dir():
        return path
    words = [word for word in gpu.lower().replace("/", " ").split() if word not in ("nvidia", "geforce")]
    return path / f"kernels-{'-'.join(words)}.json"


# Tables.


def table(rows: Sequence[Row]) -> Table:
    """The lines of one shape."""
    columns = ("name", "us", "p20 to p80", "MB", "TB/s", "of copy", "speed-up", "")
    view = new_table(shape_of(rows[0]).title, columns)
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        last = after is not None and after["kind"] != row["kind"]
        if "error" in row:
            view.add_row(row["name"], *[NOTHING] * 6, row["error"], end_section=last)
            continue
        us, share = row["us"], row["share_of_copy"]
        view.add_row(
            row["name"],
            number(us["p50"], 1),
            f"{us['p20']:,.1f} to {us['p80']:,.1f}",
            number(row["bytes"] / 1e6, 1),
            number(row["tb_per_s"], 2),
            number(None if share is None else 100 * share, 0, " %"),
            number(row.get("speedup"), 2, "x"),
            row["remark"],
            end_section=last,
        )
    return view


def compare_table(before: Record, after: Record) -> Table:
    """Times of every line that both records hold; a line that takes `REGRESSION` per cent longer is flagged."""
    head = f"Time against {before['commit'] or 'a run'} of {before['date'][:10]} on {before['gpu']}"
    view = new_table(head, ("shape", "name", "us before", "us now", "change", ""))
    old = {(shape_of(row), row["name"]): row["us"]["p50"] for row in before["rows"] if "us" in row}
    for row in after["rows"]:
        shape = shape_of(row)
        was = old.get((shape, row["name"]))
        if was is None or "us" not in row:
            continue
        change = 100 * (row["us"]["p50"] / was - 1)
        slower = change > REGRESSION
        view.add_row(
            f"{shape.batch} x {short(shape.context)}" + (f", {short(shape.queries)}" if shape.queries > 1 else ""),
            row["name"],
            number(was, 1),
            number(row["us"]["p50"], 1),
            f"{change:+.1f} %",
            "slower" if slower else "",
            style="red" if slower else None,
        )
    return view


def notes(record: Record) -> list[str]:
    """Legend of the tables."""
    copied = record["copy"]["tb_per_s"]
    return [
        f"{record['gpu']}, torch {record['versions']['torch']}, Triton {record['versions']['triton']}, commit "
        f"{record['commit'] or 'unknown'}. A copy within the GPU moves {copied:.2f} TB/s, read and written.",
        "MB is what has to move: pages and windows as far as they hold tokens, queries and outputs. Speed-up is "
        "against the fastest dense attention of PyTorch at the same shape.",
        record["method"],
    ]


# The run.


def add_cases(parser: argparse.ArgumentParser) -> None:
    """Options that choose shapes and formats."""
    parser.add_argument("--sizes", help="rows x tokens, comma-separated: 32x32k,1x128k,32x8k,1x8k,1x1k if left out")
    parser.add_argument("--heads", type=int, default=32, help="query heads")
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    steps = range(1, MAX_STEP + 1)
    parser.add_argument("--queries", type=int, default=1, choices=steps, metavar="N", help="query tokens per row")
    parser.add_argument("--latents", type=int, metavar="HEADS", help="latent attention (512 + 64 channels)")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16", help="of queries and unquantized tokens")
    parser.add_argument("--formats", help="presets and formats, comma-separated")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which nothing new is started")


def cases_of(asked: argparse.Namespace) -> tuple[list[Shape], tuple[str, ...]]:
    """Shapes and formats of `add_cases`. Raises ValueError if they make no sense."""
    pairs = LATENT_SHAPES if asked.latents else DEFAULT_SHAPES
    if asked.sizes is not None:
        pairs = tuple(parse_size(part) for part in asked.sizes.split(","))
    if asked.latents:
        shapes = [Shape.of_latents(*pair, asked.latents, asked.dtype) for pair in pairs]
    else:
        dims = (asked.heads, asked.kv_heads, asked.head_dim)
        shapes = [Shape(*pair, *dims, asked.dtype, queries=asked.queries) for pair in pairs]
    default = LATENT_FORMATS if asked.latents else FORMATS
    names = default if asked.formats is None else tuple(asked.formats.split(","))
    check(names, shapes)
    return shapes, names


def bench_device() -> torch.device:
    """The current GPU."""
    return torch.device("cuda", torch.cuda.current_device())


def main(given: Sequence[str] | None = None) -> Record:
    """Measures, prints tables, and returns the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_cases(parser)
    parser.add_argument("--replays", type=int, default=REPLAYS, help="of each CUDA graph")
    parser.add_argument("--json", type=Path, help="file, or folder; written again after each line")
    parser.add_argument("--compare", type=Path, help="figures saved earlier")
    asked = parser.parse_args(given)
    end = time.monotonic() + 60 * asked.minutes
    shapes, names = cases_of(asked)
    before = load(asked.compare) if asked.compare is not None else None
    device = bench_device()
    compile_formats(names, shapes, device)
    record = new_record(device, {"self_check": self_check(names, shapes, device)})
    file = None if asked.json is None else file_name(asked.json, record["gpu"])
    copied, late = record["copy"]["tb_per_s"] * 1e12, False
    console = make_console()
    for shape in shapes:
        for row in () if late else measure_shape(shape, names, device, copied, asked.replays):
            record["rows"].append(row)
            add_speedups(rows_at(record, shape))
            if file is not None:
                save(record, file)
            late = time.monotonic() > end
            if late:
                break
        if rows := rows_at(record, shape):
            console.print(table(rows))
    if late:
        console.print(f"Stopped after {asked.minutes:g} minutes; name --formats or --sizes for what is missing.")
    print_notes(console, notes(record))
    if before is not None:
        console.print(compare_table(before, record))
    return record


if __name__ == "__main__":
    main()
