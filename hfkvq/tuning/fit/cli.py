"""The command ``hfkvq fit``."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hfkvq.terminal import DType, make_console, tokens_option

# Imports of torch and Transformers are inside the command, so that help is fast.
if TYPE_CHECKING:
    from rich.table import Table

    from .compute import Computed
    from .model import Plan, Weights

app = typer.Typer()


@app.command()
def fit(
    model: Annotated[
        str | None,
        typer.Option(
            help=r"Model: a name on the Hub, or a folder with a config.json. Its weights are not read. "
            r"\[default: the reference model]"
        ),
    ] = None,
    gpu_memory: Annotated[str, typer.Option(help="Memory of the device: 24GiB (1024) or 24GB (1000).")] = "24GiB",
    context: Annotated[
        int | None,
        tokens_option(r"Tokens per row, generated ones included, e.g. 32k. \[default: 32k, or the model's limit]"),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows in the batch.")] = 1,
    generated: Annotated[
        int, tokens_option("Tokens of the context that are generated; growing caches reserve room for them.", 0)
    ] = 0,
    prefill_chunk: Annotated[
        int,
        tokens_option("Tokens per chunk of the prompt, as generate's prefill_chunk_size; 0 for one piece.", 0),
    ] = 2048,
    schemes: Annotated[
        str | None,
        typer.Option(
            help=r"Presets or preset files, comma-separated; bf16: the stock cache. \[default: the main ones]"
        ),
    ] = None,
    dtype: Annotated[
        DType, typer.Option(help="Dtype of weights, keys and values; auto: the checkpoint's.")
    ] = DType.auto,
    overhead: Annotated[str, typer.Option(help="Other memory in use: CUDA context, allocator.")] = "1GiB",
    beyond: Annotated[
        bool, typer.Option("--beyond", help="Allow a context longer than the config's positions, for RoPE scaling.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compute what fits on a GPU: weights, each cache, largest batch and context. Needs only the model's config."""
    from .compute import compute

    done = compute(
        model,
        gpu_memory,
        context=context,
        batch=batch,
        generated=generated,
        prefill_chunk=prefill_chunk,
        schemes=schemes,
        dtype=None if dtype is DType.auto else dtype.value,
        overhead=overhead,
        beyond=beyond,
    )
    about, plans = done.about, done.plans
    if as_json:
        typer.echo(json.dumps({**about, "caches": [asdict(each) for each in plans]}, indent=2))
        return
    console = make_console()
    console.print(_table(about, plans, done.weights))
    for note in _notes(done, plans):
        console.print(note, style="dim", highlight=False)


def _table(about: dict[str, Any], plans: list[Plan], weights: Weights) -> Table:
    from rich.markup import escape

    from hfkvq.caches.layers.memory import format_bytes
    from hfkvq.measure.tables import new_table

    title = (
        f"{escape(about['model'])}: {format_bytes(about['gpu_memory'])}, of which weights "
        f"{format_bytes(weights.total)}, {about['batch']} x {about['context']:,} tokens"
    )
    table = new_table(title)
    table.add_column("cache", no_wrap=True)
    for name in ("bytes", "bytes per token", "prompt's peak*", "left", "largest batch", "longest context"):
        table.add_column(name, justify="right")
    for each in plans:
        end = about["positions"]
        longest = f"{each.context:,}" + (" (all)" if end and each.context == end else "")
        table.add_row(
            each.name,
            format_bytes(each.cache),
            format_bytes(each.cache / about["batch"] / about["context"]),
            format_bytes(each.peak),
            format_bytes(each.left) if each.left >= 0 else f"[red]-{format_bytes(-each.left)}[/red]",
            f"{each.batch:,}" if each.batch else "[red]none[/red]",
            longest if each.context else "[red]none[/red]",
        )
    return table


def _notes(done: Computed, plans: list[Plan]) -> list[str]:
    from hfkvq.caches.layers.memory import format_bytes
    from hfkvq.caches.schemes.base import get_scheme, list_schemes

    from .model import PEAK, peak

    about, found, weights, most = done.about, done.found, done.weights, done.most
    size = 4 if about["dtype"] == "float32" else 2
    whole = format_bytes(peak(found, about["batch"], about["context"] - about["generated"], size, None))
    how = f"in pieces of {about['prefill_chunk']}" if about["prefill_chunk"] else "in one piece"
    notes = [
        f"Weights: {weights.parameters:,} parameters, {weights.source}. Overhead: "
        f"{format_bytes(about['overhead'])}, a guess (--overhead).",
        f"* An estimate of the prompt's activations, {how} (in one piece: {whole}): {PEAK}.",
        "Cache bytes are those that cache.memory() counts, for rows of equal length without padding. Largest batch: at "
        "this context. Longest context: at batch size 1.",
    ]
    names = {each.name for each in plans}
    evicting = [name for name in names if name in list_schemes() and get_scheme(name).evicts]
    if evicting:
        notes.append(
            f"{', '.join(sorted(evicting))}: these keep a budget of tokens, 1,024 per KV head by default, and evict "
            "the others."
        )
    if "triaxial" in names:
        notes.append("triaxial: the upper bound, with all tokens in 4 bits.")
    count = sum(layer.compressed or layer.window > 0 for layer in found.layers)
    if not count:
        notes.append("This model has no layer of full attention: nothing is compressed.")
    elif count < len(found.layers):
        notes.append(f"{count} of {len(found.layers)} cached layers are compressed; the others stay as they are.")
    if most is None and about["positions"] and about["context"] > about["positions"]:
        notes.append(f"The config has {about['positions']:,} positions: load the model with RoPE scaling.")
    return notes
