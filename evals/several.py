"""Several queries of each row: steps of up to 16 tokens, as in assisted decoding, and prompts behind a context.

    PYTHONPATH=. python evals/several.py --json FILE

`evals/docs.py --write` puts the tables into docs/speed.md, of evals/results/queries-h200.json. cuDNN aligns its
triangle to the upper left, so it is given a mask, or shows every token: the same work for a context that is long beside
the queries, and a bound, not a baseline. So are a step's queries with the heads of a KV head packed, which keeps a
kernel from reading keys once for each of them.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from evals import kernel_bench as kernels
from evals.kernel_bench import (
    REPLAYS,
    Record,
    Row,
    Timing,
    add_speedups,
    cache_size,
    copies_for,
    first_line,
    measure_shape,
    row_of,
    rows_at,
    time_calls,
    unquantized,
)
from evals.kernel_cases import Shape, bytes_read, fill, parse_size, short
from evals.one_layer import said
from evals.other_kernels.__main__ import check_peers, measure_peer, present
from hfkvq.caches.attention.interface import attend_store
from hfkvq.sizes import parse_count

RUN = "queries-h200"
FORMATS = "saw-int4,kitty-pro,2-bit,best-3.4"
TORCH = {"flash SDPA": "flash", "cuDNN SDPA, mask": "cuDNN with a mask"}
"""Right kernels of PyTorch over bf16: what prompts are held against."""
PROMPTS = {**TORCH, "vllm-fa3": "FlashAttention 3", "cuDNN SDPA": "cuDNN, not causal"}
STEPS = {
    "flash SDPA": "flash",
    "vllm-fa3": "FlashAttention 3",
    "flash SDPA, packed": "flash, packed, not causal",
    "cuDNN SDPA, packed": "cuDNN, packed, not causal",
}
PEAK = re.compile(r"peak ([\d,]+) MiB with the output, which has ([\d,]+); dense keys and values ([\d,]+)")

Rows = dict[str, Row]


def by_shape(record: Record, prompts: bool) -> dict[tuple[int, int], Rows]:
    """Lines of one row of tokens, by context and queries, shortest first, and name."""
    found: dict[tuple[int, int], Rows] = {}
    for row in record["rows"]:
        shape = kernels.shape_of(row)
        if shape.is_prompt is prompts:
            found.setdefault((shape.context, shape.queries), {})[row["name"]] = row
    return dict(sorted(found.items()))


def formats(record: Record) -> list[str]:
    """Names of this library's formats in the order of measuring, each once."""
    return list(dict.fromkeys(row["name"] for row in record["rows"] if row["kind"] == "format"))


def time_of(row: Row | None) -> float | None:
    """Microseconds; None where there are none."""
    return row["us"]["p50"] if row and "us" in row else None


def cell(us: float | None) -> str:
    """Three digits at least."""
    return "" if us is None else f"{us:,.0f}" if us >= 100 else f"{us:.1f}"


def line(title: str, rows: Rows, others: Sequence[str], ours: Sequence[str], held: Sequence[str]) -> str:
    """A line: times, and the time of the slowest of ours over that of the fastest of ``held``."""
    cells = [cell(time_of(rows.get(name))) for name in (*others, *ours)]
    own = [us for name in ours if (us := time_of(rows.get(name)))]
    best = [us for name in held if (us := time_of(rows.get(name)))]
    share = f"{max(own) / min(best):.2f}" if own and best else ""
    return f"| {title} | " + " | ".join([*cells, share]) + " |"


def head(first: str, others: Sequence[str], ours: Sequence[str], last: str) -> Iterator[str]:
    """Titles of columns."""
    titles = [first, *others, *(f"`{name}`" for name in ours), last]
    yield "| " + " | ".join(titles) + " |"
    yield "|---" * len(titles) + "|"


def prompts(record: Record) -> Iterator[str]:
    """The table of prompts, and the most memory that one takes."""
    names = formats(record)
    yield said(record)
    yield ""
    yield from head("prompt behind context", list(PROMPTS.values()), names, "of PyTorch's")
    for (context, queries), rows in by_shape(record, True).items():
        if not any(time_of(rows.get(name)) for name in names):
            # A run that has ended here.
            continue
        yield line(f"{short(queries)} behind {short(context)}", rows, list(PROMPTS), names, list(TORCH))
    yield ""
    yield from most_memory(record)


def most_memory(record: Record) -> Iterator[str]:
    """The prompt that takes most memory beyond dense keys and values."""
    found = []
    for row in record["rows"]:
        if read := PEAK.search(row["remark"]):
            peak, out, dense = (int(number.replace(",", "")) for number in read.groups())
            found.append((peak - dense, peak, out, dense, row))
    if found:
        _, peak, out, dense, row = max(found, key=lambda each: each[0])
        shape = kernels.shape_of(row)
        yield (
            f"Most memory beyond dense keys and values: `{row['name']}`, {short(shape.queries)} behind "
            f"{short(shape.context)}, takes {peak:,} MiB, of which the output has {out:,}; dense keys and values have "
            f"{dense:,}."
        )


def steps(record: Record) -> Iterator[str]:
    """The table of steps of a few tokens."""
    names = formats(record)
    yield from head("queries of a row", list(STEPS.values()), names, "of the fastest")
    for (context, queries), rows in by_shape(record, False).items():
        right = [name for name, row in rows.items() if row["kind"] != "format" and unquantized(row)]
        yield line(f"{queries} at {short(context)}", rows, list(STEPS), names, right)


# Measuring.


def _masked(backend: SDPBackend, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(query, keys, values, mask, enable_gqa=True)


def _packed(backend: SDPBackend, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The query heads of a KV head as more queries of one head."""
    return _masked(backend, query.unflatten(1, (keys.shape[1], -1)).flatten(2, 3), keys, values)


def bounds(shape: Shape, query: Tensor, keys: Tensor, replays: int, copied: float) -> Iterator[Row]:
    """Lines of PyTorch's attention other than causal flash attention; keys are taken for values, too."""
    columns, open_ = keys.shape[2], "not causal: shows later tokens, too"
    cudnn = SDPBackend.CUDNN_ATTENTION
    made: dict[str, tuple[Callable[..., Tensor], str, str]] = {"cuDNN SDPA": (partial(_masked, cudnn), "bound", open_)}
    if not shape.is_prompt:
        made["flash SDPA, packed"] = (partial(_packed, SDPBackend.FLASH_ATTENTION), "bound", open_)
        made["cuDNN SDPA, packed"] = (partial(_packed, cudnn), "bound", open_)
    if shape.queries * columns <= 1 << 28:
        mask = torch.ones(shape.queries, columns, dtype=torch.bool, device=query.device).tril(columns - shape.queries)
        masked = partial(_masked, cudnn, mask=mask[None, None])
        made["cuDNN SDPA, mask"] = (masked, "baseline", "a mask of queries times columns")
    nbytes = 2 * (keys.nbytes + query.nbytes)
    copies = [keys, *(keys.clone() for _ in range(copies_for(nbytes, cache_size(query.device)) - 1))]
    for name, (attend, kind, remark) in made.items():
        try:
            measured: Timing | str = time_calls([partial(attend, query, x, x) for x in copies], replays)
        except RuntimeError as error:
            # Some GPUs and builds lack one.
            measured = first_line(error)
        yield row_of(shape, name, kind, measured, nbytes, copied, remark=remark)


def behind_context(shape: Shape, name: str, data: tuple[Tensor, Tensor, Tensor], replays: int, copied: float) -> Row:
    """A prompt's attention behind a compressed context: dequantized once, then PyTorch's attention; with its memory."""
    query, *sides = data
    store = fill(name, *(x[:, :, : shape.context] for x in sides))
    new = tuple(x[:, :, shape.context :] for x in sides)
    attend = partial(attend_store, store, query, new, shape.context, shape.scaling)
    attend()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    attend()
    torch.cuda.synchronize()
    sizes = (torch.cuda.max_memory_allocated() - before, query.nbytes, sum(x.nbytes for x in sides))
    peak, out, dense = (f"{size / 2**20:,.0f}" for size in sizes)
    remark = f"peak {peak} MiB with the output, which has {out}; dense keys and values {dense}"
    read = bytes_read(store, query)
    timing = time_calls([attend], replays)
    return row_of(shape, name, "format", timing, read, copied, spec=store.format.spec, remark=remark)


def measure(asked: argparse.Namespace) -> None:
    """Steps and prompts of the sizes asked for; the file is written again after each line."""
    device, formats = torch.device("cuda", 0), asked.formats.split(",")
    counts = [parse_count(part) for part in asked.queries.split(",")]
    shapes = [Shape(*parse_size(size), queries=count) for size in asked.sizes.split(",") for count in counts]
    peers = present(["vllm-fa3", "vllm-fa2"])
    checked = check_peers(peers, shapes, device)
    checks = {"self_check": kernels.self_check(formats, shapes, device), "peers": checked}
    record = kernels.new_record(device, checks)
    copied = record["copy"]["tb_per_s"] * 1e12
    for shape in shapes:
        data = shape.data(device)
        found = [] if shape.is_prompt else formats
        rows = [*measure_shape(shape, found, device, copied, REPLAYS), *bounds(shape, *data[:2], REPLAYS, copied)]
        rows += [measure_peer(peer, shape, data, REPLAYS, copied, checked[peer.name]) for peer in peers]
        if shape.is_prompt:
            rows += [behind_context(shape, name, data, REPLAYS, copied) for name in formats]
        record["rows"] += rows
        add_speedups(rows_at(record, shape))
        kernels.save(record, asked.json)
        print(f"{shape.title}: {len(rows)} lines", flush=True)


def main() -> None:
    """Measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="where figures are saved")
    parser.add_argument("--sizes", default="1x8k,1x32k,1x128k")
    parser.add_argument("--queries", default="2,4,8,16,1k,4k")
    parser.add_argument("--formats", default=FORMATS)
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
