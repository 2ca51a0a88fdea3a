"""The commands ``hfkvq bench kernels`` and ``hfkvq bench tune``; mounts ``hfkvq bench generate``."""

from __future__ import annotations

import math
import time
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hfkvq.progress import progress_bar, stoppable
from hfkvq.sizes import parse_count
from hfkvq.terminal import check_files, fail, make_console, number_option, print_notes, print_saved, split

from .device import bench_device
from .generate.cli import generate_command

# torch is imported inside the commands, so that help comes at once.
if TYPE_CHECKING:
    import torch

    from .cases import Shape
    from .peers import Peer
    from .report import Record

app = typer.Typer(
    help="Time the decode kernels and whole models on this GPU, and tune the kernels for it.", no_args_is_help=True
)
app.command("generate")(generate_command)

_DEFAULT_SHAPES = r"\[default: 32x32k, 1x128k, 32x8k, 1x8k, 1x1k]"
Batches = Annotated[str | None, typer.Option("--batch", help=f"Batch sizes, comma-separated. {_DEFAULT_SHAPES}")]
Contexts = Annotated[str | None, typer.Option("--context", help="Tokens of context, comma-separated, e.g. 8k,32768.")]
Sizes = Annotated[
    str | None, typer.Option(help="Rows x tokens, e.g. 32x32k,1x128k, in place of --batch and --context.")
]
Formats = Annotated[
    str | None,
    typer.Option(help=r"Presets and formats to time, comma-separated. \[default: all]"),
]
Peers = Annotated[
    str | None,
    typer.Option(help=r"Other packages' kernels to time: all, none, or names, comma-separated. \[default: all]"),
]
Heads = Annotated[int, typer.Option(min=1, help="Query heads.")]
KVHeads = Annotated[int, typer.Option(min=1, help="KV heads.")]
HeadDim = Annotated[int, typer.Option(min=1, help="Channels per head.")]
Queries = Annotated[
    str | None,
    typer.Option(
        help=r"Query tokens per row, e.g. 2,16,1k; more than 16 are a prompt behind the context. \[default: 1]"
    ),
]
Minutes = Annotated[
    float | None, number_option(r"Minutes after which nothing new is started. \[default: no limit]", low=0.1)
]
Latents = Annotated[
    int | None,
    typer.Option(min=1, metavar="HEADS", help="Time latent attention (512 + 64 channels) with this many query heads."),
]


class BenchDType(str, Enum):
    """Choices of `hfkvq bench --dtype`."""

    bfloat16 = "bfloat16"
    float16 = "float16"


BenchDTypes = Annotated[BenchDType, typer.Option(help="Dtype of queries and of unquantized tokens.")]


def _bench_cases(
    batch: str | None,
    context: str | None,
    formats: str | None,
    sweep: bool,
    latents: int | None,
    queries: str | None = None,
    sizes: str | None = None,
    **heads: int | str,
) -> tuple[list[Shape], tuple[str, ...]]:
    """Shapes and formats; ends the command if they make no sense."""
    from . import cases

    try:
        if (sweep or sizes) and (batch or context):
            name = "sweep" if sweep else "sizes"
            raise ValueError(f"{name}: it has batches and contexts of its own; leave --batch and --context out.")
        if sweep and sizes:
            raise ValueError("sweep: it has sizes of its own; leave --sizes out.")
        if sweep:
            pairs = [(rows, tokens) for rows in cases.SWEEP_BATCHES for tokens in cases.SWEEP_CONTEXTS]
        elif sizes:
            pairs = [cases.parse_size(part) for part in split(sizes)]
        elif batch or context:
            batches = [parse_count(part) for part in split(batch or "1")]
            pairs = [(rows, parse_count(part)) for rows in batches for part in split(context or "8k")]
        else:
            pairs = list(cases.LATENT_SHAPES if latents else cases.DEFAULT_SHAPES)
        asked = [parse_count(part) for part in split(queries or "1")]
        if latents and asked != [1]:
            raise ValueError("queries: latents are timed with one query a row; leave --queries out.")
        if latents:
            shapes = [cases.Shape.of_latents(rows, tokens, latents, str(heads["dtype"])) for rows, tokens in pairs]
        else:
            shapes = [
                cases.Shape(rows, tokens, queries=count, **heads)  # type: ignore[arg-type]
                for rows, tokens in pairs
                for count in asked
            ]
        default = cases.LATENT_FORMATS if latents else cases.default_formats()
        names = default if formats is None else split(formats)
        cases.check(names, shapes)
    except ValueError as error:
        fail(error)
    return shapes, names


def _gate(shapes: list[Shape], names: tuple[str, ...], device: torch.device, skip_tests: bool) -> Record:
    """Tests the kernels before they are timed; ends the command if they are wrong."""
    from . import checks

    console, root = make_console(), checks.checkout()
    try:
        if root is None:
            tests = "not there"
        elif skip_tests:
            tests = "skipped"
        else:
            console.print("GPU tests of the kernels:", style="dim")
            checks.run_tests(root)
            tests = "passed"
        errors = checks.self_check(names, shapes, device)
    except checks.GateError as error:
        fail(error, code=1)
    console.print(f"Self-check: errors up to {max(errors.values()):.2g} of the output; tests {tests}.", style="dim")
    return {"tests": tests, "self_check": errors}


def _peers(names: str | None, latents: int | None) -> list[Peer]:
    """Other packages' kernels that are asked for and there, with a line for each that is not."""
    from .peers import choose, present

    if latents:
        if names not in (None, "none"):
            fail(f"peers: got {names!r} with --latents, which is for keys and values alone; leave one of them out.")
        return []
    try:
        return present(choose("all" if names is None else names), make_console().print)
    except ValueError as error:
        fail(error)


@app.command("kernels")
def bench_kernels(
    batch: Batches = None,
    context: Contexts = None,
    sizes: Sizes = None,
    heads: Heads = 32,
    kv_heads: KVHeads = 8,
    head_dim: HeadDim = 128,
    queries: Queries = None,
    latents: Latents = None,
    dtype: BenchDTypes = BenchDType.bfloat16,
    formats: Formats = None,
    peers: Peers = None,
    sweep: Annotated[bool, typer.Option("--sweep", help="Contexts of 1k to 128k at batch 1 and 32.")] = False,
    replays: Annotated[int, typer.Option(min=20, help="Replays of each CUDA graph.")] = 30,
    minutes: Minutes = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="PATH", help="Save all figures to a file, or into a folder.")
    ] = None,
    plot_file: Annotated[
        Path | None,
        typer.Option("--plot", metavar="PATH", help="Save speed-up against context as PNG, as with --json."),
    ] = None,
    compare: Annotated[
        Path | None, typer.Option(dir_okay=False, metavar="FILE", help="Compare with figures saved earlier.")
    ] = None,
    commit: Annotated[str, typer.Option(help=r"Commit to record. \[default: from git]")] = "",
    skip_tests: Annotated[
        bool, typer.Option("--skip-tests", help="Skip the kernel tests; the self-check still runs.")
    ] = False,
) -> None:
    """Time decode attention of one layer against bf16, from the call to the merged output.

    Refuses to measure kernels that fail their tests or differ from the torch reference.
    """
    check_files("plot", json_file, plot_file)
    end = time.monotonic() + 60 * (math.inf if minutes is None else minutes)
    device = bench_device()

    from . import report, timing
    from .ahead import Compiler
    from .peers.measure import check_peers, taking
    from .rows import add_speedups
    from .run import measure_shape

    shapes, names = _bench_cases(
        batch, context, formats, sweep, latents, queries, sizes, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        dtype=dtype.value,
    )  # fmt: skip
    others = _peers(peers, latents)
    try:
        before = report.load(compare) if compare is not None else None
    except ValueError as error:
        fail(error)
    waiting = stoppable("nothing has been measured yet; what is compiled need not be again.")
    with waiting, Compiler(shapes, device) as compiler, progress_bar() as show:
        compiler.begin(names)
        for i, name in enumerate(names):
            show(f"compiling {name}", i / len(names))
            compiler.wait((name,))
    record: Record = {**report.environment(device, commit), "checks": _gate(shapes, names, device, skip_tests)}
    checked = check_peers(others, shapes, device)
    record["checks"]["peers"] = checked
    record |= {"copy": report.describe_copy(*timing.copy_bandwidth(device)), "rows": []}
    json_file, plot_file = (
        path and report.file_name(path, record["gpu"], suffix)
        for path, suffix in ((json_file, ".json"), (plot_file, ".png"))
    )

    console = make_console()
    # What speed-ups are against comes first, with what is compared: whenever the run ends, that is there.
    plain, quantized = ([peer for peer in others if peer.quantized is kind] for kind in (False, True))
    rounds = [(shape, names, taking(plain, shape), True) for shape in shapes]
    rounds += [(shape, (), taking(quantized, shape), False) for shape in shapes]
    done, work = 0, sum(len(ours) + len(theirs) + first for _, ours, theirs, first in rounds)
    copied = record["copy"]["tb_per_s"] * 1e12
    kept = "nothing is saved" if json_file is None else f"{json_file} has what was measured"
    words = f"{kept}; the same command starts over, and --sizes, --formats and --peers choose what is left."
    with stoppable(words), progress_bar() as show:
        for shape, ours, theirs, first in rounds:
            if not ours and not theirs:
                continue

            def tell(name: str, shape: Shape = shape) -> None:
                nonlocal done
                show(f"{shape.title}: {name}", done / work)
                done += 1

            for row in measure_shape(shape, ours, device, copied, replays, tell, theirs, checked, first):
                record["rows"].append(row)
                add_speedups(report.rows_at(record, shape))
                if json_file is not None:
                    report.save(record, json_file)
                if time.monotonic() > end:
                    break
            if time.monotonic() > end:
                break
    for shape in shapes:
        if rows := report.rows_at(record, shape):
            console.print(report.table(rows))
    if done < work:
        console.print(f"{done} of {work} rows in {minutes:g} minutes; name --formats, --peers or sizes for the others.")
    print_notes(console, report.notes(record))
    if before is not None:
        console.print(report.compare_table(before, record))
    if plot_file is not None and not report.save_plot(record, plot_file):
        plot_file = None
    print_saved(console, json_file, plot_file)
    if any("error" in row for row in record["rows"] if row["kind"] == "format"):
        raise typer.Exit(1)


@app.command("tune")
def bench_tune(
    batch: Batches = None,
    context: Contexts = None,
    sizes: Sizes = None,
    heads: Heads = 32,
    kv_heads: KVHeads = 8,
    head_dim: HeadDim = 128,
    latents: Latents = None,
    dtype: BenchDTypes = BenchDType.bfloat16,
    formats: Formats = None,
    minutes: Minutes = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", dir_okay=False, metavar="PATH", help="Save times and parameters, too.")
    ] = None,
) -> None:
    """Search for the fastest launch parameters on this GPU, and save them where attention looks them up."""
    device = bench_device()

    import torch

    from hfkvq.kernels.triton import configs

    from . import tune

    shapes, names = _bench_cases(
        batch, context, formats, False, latents, sizes=sizes, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        dtype=dtype.value,
    )  # fmt: skip
    found: list[tune.Finding] = []

    def keep(finding: tune.Finding) -> None:
        found.append(finding)
        configs.save(device, tune.to_save([finding]))
        if json_file is not None:
            tune.write(found, device, json_file)

    try:
        # Before anything is searched: there may be no place for what is found.
        path = configs.save(device, {})
    except (OSError, ValueError) as error:
        fail(f"{error} HFKVQ_TUNING names another tuning file." if isinstance(error, OSError) else error)
    limit = math.inf if minutes is None else minutes
    with stoppable(f"what was found until now is in {path}."), progress_bar() as show:
        try:
            findings, variants = tune.tune(names, shapes, device, show, limit, keep)
        except torch.OutOfMemoryError as error:
            fail(f"tune: {error} All shapes of a format are held at once; choose fewer or smaller ones.", code=1)
        except ValueError as error:
            fail(error)
    console = make_console()
    if not variants:
        fail(f"tune: no kernel with launch parameters serves {', '.join(names)} at these shapes.")
    console.print(tune.table(findings))
    if len(findings) < variants:
        console.print(f"{len(findings)} of {variants} variants in {minutes:g} minutes; name --formats for the others.")
    if late := sum(finding.late for finding in findings):
        console.print(f"{late} candidates were not compiled in time, and so not tried; allow more --minutes.")
    print_saved(console, json_file if found else None, path)
