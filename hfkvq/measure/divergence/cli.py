"""The command ``hfkvq kld``."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from hfkvq.terminal import (
    Device,
    DType,
    JsonFile,
    Model,
    ModelDType,
    check_files,
    fail,
    make_console,
    pick_device,
    print_notes,
    progress_bar,
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
            help="Presets, with commas, also with knobs: kivi-2,kitty:boost_ratio=0.2:sink_length=0. Caches of others: "
            "quanto-2, quanto-4, hqq-2, hqq-4; only simulated: simulated-fp4, simulated-oscar, simulated-oscar-omni, "
            "simulated-turboquant-4, simulated-turboquant-3, simulated-saw-hessian, simulated-saw-kmeans. "
            r"\[default: full and the main ones]"
        ),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="UTF-8 text, or JSON Lines (.jsonl) with a text field; several share the windows evenly. "
            r"\[default: four kinds that the package holds; of the reference model its own tasks]",
        ),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Data set of the Hub, or NAME:CONFIG, e.g. wikitext:wikitext-2-raw-v1."),
    ] = None,
    part: Annotated[str, typer.Option("--split", help="Split of the data set.")] = "test",
    field: Annotated[str, typer.Option(help="Field that holds the text.")] = "text",
    context: Annotated[int, tokens_option("Tokens of a window.", 3)] = 2048,
    prefill: Annotated[
        int | None, tokens_option(r"Of these, how many are the prompt, not scored. \[default: half]", 2)
    ] = None,
    chunk: Annotated[
        int,
        typer.Option(
            min=1,
            help="Tokens fed at a time behind the prompt; those of one chunk see each other unquantized. 1 is exactly "
            "generation.",
        ),
    ] = 16,
    windows: Annotated[int, typer.Option(min=1, help="Most windows.")] = 16,
    batch_size: Annotated[int, typer.Option(min=1, help="Windows run together.")] = 1,
    dtype: ModelDType = DType.auto,
    device: Device = "auto",
    seed: Annotated[int, typer.Option(min=0, help="Of the bootstrap, and of the reference model's own text.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """Compare schemes with bf16 on the same tokens: KL divergence, top-1 agreement, perplexity, bits."""
    check_files("png", json_file, None)
    if text and dataset is not None:
        fail("text: got files and a data set; choose --text or --dataset.")
    prompt = context // 2 if prefill is None else prefill
    if not 2 <= prompt < context:
        fail(f"prefill: got {prompt}, allowed 2 to {context - 1}, fewer than --context: what follows is scored.")

    import torch
    from transformers.utils import logging

    from ..models import load_model
    from ..records import device_name
    from . import intervals, measurement, naming, report, subject
    from .windows import cut, find_texts

    logging.disable_progress_bar()
    try:
        intervals.check_scipy("kld")
        chosen = naming.parse_measured(split(schemes))
        where = pick_device(device)
        plan = subject.find_checkpoint(model)
        texts = find_texts(text, dataset, part, field, plan.source.reference, seed)
        subject.check_lengths(plan, context, prompt)
        subject.check_schemes(plan, chosen)
        given = cut(texts, plan.tokenizer, context, windows)
        loaded = load_model(plan.source, where, None if dtype is DType.auto else getattr(torch, dtype.value))
        with progress_bar() as show:
            measured = measurement.measure(
                loaded,
                given.tokens,
                chosen,
                prefill=prompt,
                chunk=chunk,
                batch_size=batch_size,
                tokenizer=plan.tokenizer,
                on_progress=lambda name, share: show(f"{name:<13}", share),
            )
    except (ValueError, ImportError) as error:
        fail(error)
    about = {
        "model": plan.source.name,
        "model_file": plan.source.origin or None,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "device": device_name(where),
        "device_type": where.type,
        "settings": {"context": context, "prefill": prompt, "chunk": chunk, "batch_size": batch_size, "seed": seed},
        "text": {
            "source": ", ".join(dict.fromkeys(given.names)),
            "windows": Counter(given.names),
            "tokens_sha256": given.sha256,
            "first_token": given.first_token,
        },
    }
    about["settings"] |= {"schemes": list(chosen), "windows": windows}
    record = report.as_record(measured, seed, about, given.names)
    console = make_console()
    console.print(report.table(record, wide=console.width >= 112))
    print_notes(console, report.notes(record))
    save_json(console, record, json_file)
