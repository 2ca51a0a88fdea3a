"""The command ``hfkvq kld``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hfkvq.progress import progress_bar, stop
from hfkvq.terminal import (
    Device,
    DType,
    JsonFile,
    Model,
    ModelDType,
    fail,
    input_file,
    make_console,
    pick_device,
    print_notes,
    save_json,
    split,
    tokens_option,
)

# torch, Transformers and datasets are imported inside the command, so that help comes at once.
app = typer.Typer()


@app.command()
def kld(
    model: Model = None,
    schemes: Annotated[
        str | None,
        typer.Option(
            help="Presets, comma-separated, also with options: kivi-2,kitty:boost_ratio=0.2:sink_length=0. Others: "
            "the import path of a cache class, module:Class, e.g. transformers:QuantizedCache:backend=quanto. "
            r"\[default: full and the main ones]"
        ),
    ] = None,
    text: Annotated[
        list[Path] | None,
        input_file(
            "UTF-8 text, or JSON Lines (.jsonl) with a text field; several files share the windows evenly. "
            r"\[default: four bundled texts; for the reference model its own tasks]"
        ),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Data set on the Hub, or NAME:CONFIG, e.g. wikitext:wikitext-2-raw-v1."),
    ] = None,
    part: Annotated[str, typer.Option("--split", help="Split of the data set.")] = "test",
    field: Annotated[str, typer.Option(help="Field that holds the text.")] = "text",
    context: Annotated[int, tokens_option("Tokens per window.", 3)] = 2048,
    prefill: Annotated[
        int | None, tokens_option(r"Of these, how many are the prompt, not scored. \[default: half]", 2)
    ] = None,
    chunk: Annotated[
        int,
        typer.Option(
            min=1,
            help="Tokens fed at a time after the prompt; those of one chunk see each other unquantized. 1 is exactly "
            "as in generation.",
        ),
    ] = 16,
    windows: Annotated[int, typer.Option(min=1, help="Largest number of windows.")] = 16,
    batch_size: Annotated[int, typer.Option(min=1, help="Windows run together.")] = 1,
    dtype: ModelDType = DType.auto,
    device: Device = "auto",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the bootstrap and of the reference model's text.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """Compare schemes with bf16 on the same tokens: KL divergence, top-1 agreement, perplexity, bits."""
    if text and dataset is not None:
        fail("text: got files and a data set; choose --text or --dataset.")

    import torch

    from hfkvq.measure.divergence import naming, report, run

    stopped = None
    try:
        run.check_prompt(context, prefill)
        chosen = naming.parse_measured(split(schemes))
        where = pick_device(device)
        with progress_bar() as show:
            record = run.measure_text(
                model,
                chosen,
                text=text,
                dataset=dataset,
                part=part,
                field=field,
                context=context,
                prefill=prefill,
                chunk=chunk,
                windows=windows,
                batch_size=batch_size,
                dtype=None if dtype is DType.auto else getattr(torch, dtype.value),
                device=where,
                seed=seed,
                on_progress=lambda name, share: show(f"{name:<13}", share),
            )
    except (ValueError, ImportError) as error:
        fail(error)
    except run.StoppedRun as stop_of:
        stopped, record = stop_of, stop_of.record
        if record is None:
            stop(
                "no window was finished, and the same command starts over; fewer --schemes, or a smaller --context, "
                "take less time."
            )
    except KeyboardInterrupt:
        stop("nothing was measured yet; the same command starts over.")
    console = make_console()
    console.print(report.table(record, wide=console.width >= 112))
    print_notes(console, report.notes(record))
    save_json(console, record, json_file)
    if stopped is not None:
        done = record["windows"]
        stop(
            f"{done} of {stopped.windows} windows were finished, and the figures are of those. The same command begins "
            f"anew; with --windows {done} it measures what is here."
        )
