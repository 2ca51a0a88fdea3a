"""The commands ``hfkvq bench kernels`` and ``hfkvq bench tune``."""

from __future__ import annotations

import importlib.util
import math
import time
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hfkvq.progress import progress_bar, stoppable
from hfkvq.terminal import fail, input_file, make_console, number_option, output_file, print_notes, print_saved, split

# torch is imported inside the commands, so that help comes at once.
if TYPE_CHECKING:
    import torch

    from .cases import Shape

app = typer.Typer(help="Time the decode kernels on this GPU, and tune them for it.", no_args_is_help=True)

Sizes = Annotated[
    str | None,
    typer.Option(
        help=r"Rows x tokens, comma-separated. \[default: 32x32k, 1x128k, 32x8k, 1x8k, 1x1k; of latents the first two "
        r"and 1x8k]"
    ),
]
Formats = Annotated[
    str | None,
    typer.Option(help=r"Presets and formats to time, comma-separated. \[default: the main ones]"),
]
Heads = Annotated[int, typer.Option(min=1, help="Query heads.")]
KVHeads = Annotated[int, typer.Option(min=1, help="KV heads.")]
HeadDim = Annotated[int, typer.Option(min=1, help="Channels per head.")]
Queries = Annotated[
    int, typer.Option(min=1, max=16, help="Query tokens per row: more than one are a step of assisted decoding.")
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


def bench_device() -> torch.device:
    """The current GPU; ends the command where there is none."""
    import torch

    if not torch.cuda.is_available():
        fail(
            f"bench: PyTorch {torch.__version__} sees no CUDA device. Timing needs an NVIDIA GPU (compute capability "
            "8.0 or newer), a CUDA build of PyTorch, and Triton. `hfkvq demo` and `hfkvq kld` run on a CPU."
        )
    if importlib.util.find_spec("triton") is None:
        fail("bench: Triton is not installed; pip install triton.")
    return torch.device("cuda", torch.cuda.current_device())


def _cases(
    sizes: str | None, formats: str | None, latents: int | None, dtype: BenchDType, queries: int = 1, **heads: int
) -> tuple[list[Shape], tuple[str, ...]]:
    """Shapes and formats; ends the command if they make no sense."""
    from . import cases

    pairs = list(cases.LATENT_SHAPES if latents else cases.DEFAULT_SHAPES)
    if sizes is not None:
        pairs = [cases.parse_size(part) for part in split(sizes)]
    if latents:
        shapes = [cases.Shape.of_latents(rows, tokens, latents, dtype.value) for rows, tokens in pairs]
    else:
        shapes = [cases.Shape(*pair, dtype=dtype.value, queries=queries, **heads) for pair in pairs]
    default = cases.LATENT_FORMATS if latents else cases.default_formats()
    names = default if formats is None else split(formats)
    cases.check(names, shapes)
    return shapes, names


@app.command("kernels")
def bench_kernels(
    sizes: Sizes = None,
    heads: Heads = 32,
    kv_heads: KVHeads = 8,
    head_dim: HeadDim = 128,
    queries: Queries = 1,
    latents: Latents = None,
    dtype: BenchDTypes = BenchDType.bfloat16,
    formats: Formats = None,
    replays: Annotated[int, typer.Option(min=20, help="Replays of each CUDA graph.")] = 30,
    minutes: Minutes = None,
    json_file: Annotated[
        Path | None, output_file("Save all figures to a file, or into a folder.", "--json", may_be_folder=True)
    ] = None,
    compare: Annotated[Path | None, input_file("Compare with figures saved earlier.")] = None,
) -> None:
    """Time decode attention of one layer against PyTorch's in bf16, from the call to the merged output.

    Refuses to time kernels that differ from the torch reference.
    """
    end = time.monotonic() + 60 * (math.inf if minutes is None else minutes)

    from . import kernels
    from .compile import compile_formats

    given = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    shapes, names = _cases(sizes, formats, latents, dtype, queries, **given)
    before = kernels.load(compare) if compare is not None else None
    device = bench_device()
    console = make_console()
    waiting = stoppable("nothing has been measured yet; compiled kernels are kept.")
    with waiting, progress_bar() as show:
        show("compiling", 0.0)
        compile_formats(names, shapes, device)
        try:
            errors = kernels.self_check(names, shapes, device)
        except ValueError as error:
            fail(error, code=1)
        record = kernels.new_record(device, {"self_check": errors})
    console.print(f"Self-check: errors up to {max(errors.values()):.2g} of the output.", style="dim")
    if json_file is not None:
        json_file = kernels.file_name(json_file, record["gpu"])
    copied, late = record["copy"]["tb_per_s"] * 1e12, False
    kept = "nothing is saved" if json_file is None else f"{json_file} has the figures so far"
    words = f"{kept}; the same command starts over, and --sizes and --formats choose what is left."
    with stoppable(words), progress_bar() as show:
        for number, shape in enumerate(shapes):

            def tell(name: str, shape: Shape = shape, share: float = number / len(shapes)) -> None:
                show(f"{shape.title}: {name}", share)

            for row in () if late else kernels.measure_shape(shape, names, device, copied, replays, tell):
                record["rows"].append(row)
                kernels.add_speedups(kernels.rows_at(record, shape))
                if json_file is not None:
                    kernels.save(record, json_file)
                late = time.monotonic() > end
                if late:
                    break
    for shape in shapes:
        if rows := kernels.rows_at(record, shape):
            console.print(kernels.table(rows))
    if late:
        console.print(f"Stopped after {minutes:g} minutes; name --formats or --sizes for what is missing.")
    print_notes(console, kernels.notes(record))
    if before is not None:
        console.print(kernels.compare_table(before, record))
    print_saved(console, json_file)
    if any("error" in row for row in record["rows"] if row["kind"] == "format"):
        raise typer.Exit(1)


@app.command("tune")
def bench_tune(
    sizes: Sizes = None,
    heads: Heads = 32,
    kv_heads: KVHeads = 8,
    head_dim: HeadDim = 128,
    latents: Latents = None,
    dtype: BenchDTypes = BenchDType.bfloat16,
    formats: Formats = None,
    minutes: Minutes = None,
    json_file: Annotated[Path | None, output_file("Save times and parameters, too.", "--json")] = None,
) -> None:
    """Search for the fastest launch parameters on this GPU, and save them where attention looks them up."""
    import torch

    from hfkvq.kernels.triton import configs

    from . import tune

    shapes, names = _cases(sizes, formats, latents, dtype, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    device = bench_device()
    found: list[tune.Finding] = []

    def keep(finding: tune.Finding) -> None:
        found.append(finding)
        configs.save(device, tune.to_save([finding]))
        if json_file is not None:
            tune.write(found, device, json_file)

    try:
        # Before the search: there may be no place for its findings.
        path = configs.save(device, {})
    except (OSError, ValueError) as error:
        fail(f"{error} HFKVQ_TUNING names another tuning file." if isinstance(error, OSError) else error)
    limit = math.inf if minutes is None else minutes
    with stoppable(f"the findings until now are in {path}."), progress_bar() as show:
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
    print_saved(console, json_file if found else None, path)
