"""TriAxialKV's tables of bits for your own conversations: see tags, measure what few bits cost each, allocate.

    PYTHONPATH=. python -m evals.triaxial tag --tokenizer Qwen/Qwen3-8B --messages conversation.jsonl
    PYTHONPATH=. python -m evals.triaxial calibrate conversations.jsonl --model Qwen/Qwen3-8B --out sensitivity.json
    PYTHONPATH=. python -m evals.triaxial allocate sensitivity.json --budget 2.7 --out table.json

See docs/agents.md; `TriAxialCache(model, tokenizer, table="table.json")` uses the table.
"""

from __future__ import annotations

import json
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from transformers import AutoProcessor
from transformers.utils import logging

from evals.triaxial.allocation import Point, Sensitivity, make_table, sweep
from evals.triaxial.calibration import calibrate as measure
from evals.triaxial.conversations import encode, load_conversations, load_format
from hfkvq.caches.tags import TAGS, Tagger
from hfkvq.measure.demo.prompts import load
from hfkvq.measure.models import Source, find_model, load_tokenizer
from hfkvq.measure.tables import new_table
from hfkvq.terminal import (
    ChatModel,
    Commands,
    Device,
    fail,
    input_file,
    make_console,
    number_option,
    output_file,
    pick_device,
    print_notes,
    progress_bar,
    stoppable,
    tokens_option,
)

app = typer.Typer(help="Tables of bits for TriAxialKV.", no_args_is_help=True, add_completion=False, cls=Commands)


def load_processor(source: Source) -> Any:
    """Processor that makes tokens of text and images together."""
    try:
        return AutoProcessor.from_pretrained(source.path, trust_remote_code=False)
    except (ImportError, OSError, ValueError) as error:
        raise ValueError(f"model: the processor of {source.name!r} cannot be loaded: {error}") from error


@app.command()
def calibrate(
    data: Annotated[
        Path, input_file('Conversations: JSON Lines of {"messages": [...], "tools": [...]}.', argument=True)
    ],
    out: Annotated[Path, output_file("Where to write the sensitivities, as JSON.")],
    model: ChatModel = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Use only this many conversations.")] = None,
    layers: Annotated[int, typer.Option(min=1, help="Layers to measure, evenly spread.")] = 6,
    max_tokens: Annotated[int | None, tokens_option("Leave out longer requests.")] = None,
    shared_inst: Annotated[
        bool, typer.Option(help="Whether requests share one copy of their instructions (prefix caching).")
    ] = True,
    device: Device = "auto",
) -> None:
    """Measure the error of each tag's tokens in 2 and in 4 bits (TriAxialKV)."""
    try:
        where = pick_device(device)
        conversations = load_conversations(data)[:samples]
        source = find_model(model)
        subject = load(source, device=where)
        shown = any(conversation.images for conversation in conversations)
        words = "nothing is saved, and the same command starts over; fewer --samples or --layers take less time."
        with stoppable(words), progress_bar() as show:
            result = measure(
                subject.model,
                load_processor(source) if shown else subject.tokenizer,
                conversations,
                layers=layers,
                shared_inst=shared_inst,
                max_tokens=max_tokens,
                progress=lambda share: show("calibrating", share),
            )
    except (OSError, ValueError, RuntimeError) as error:
        fail(error)
    result.save(out)
    console = make_console()
    console.print(_sensitivities(result))
    note = (
        f"{result.origin.requests} requests, layers {', '.join(map(str, result.origin.layers))}. Saved {out}; next: "
        f"python -m evals.triaxial allocate {out} --budget 2.7 --out table.json"
    )
    print_notes(console, [note])


@app.command()
def allocate(
    sensitivity: Annotated[Path, input_file("File that calibrate wrote.", argument=True)],
    budget: Annotated[float | None, number_option("Mean code bits per token.", low=2, high=4)] = None,
    out: Annotated[Path | None, output_file("Where to write the table, as JSON.")] = None,
) -> None:
    """Give each tag 2 or 4 bits within a budget (TriAxialKV); without --budget, show the result of several budgets."""
    if out is not None and budget is None:
        fail("out: a table has one budget; give --budget too.")
    found = Sensitivity.load(sensitivity)
    budgets = [round(2 + step / 10, 1) for step in range(21)] if budget is None else [budget]
    points = sweep(found, budgets)
    table = None if budget is None else make_table(found, budget)
    console = make_console()
    console.print(_sweep(points))
    if table is not None:
        wide = ", ".join(sorted(tag for tag, bits in table.bits.items() if bits == 4))
        console.print(f"4 bits: {wide or 'none'}", highlight=False)
        if out is not None:
            table.save(out)
            console.print(
                f"Saved {out}; use it with TriAxialCache(model, tokenizer, table={str(out)!r}).", highlight=False
            )


def _sensitivities(result: Sensitivity) -> Table:
    table = new_table("Distortion of the attention output, in 2 and in 4 bits")
    table.add_column("tag")
    for name in ("tokens", "D(2)", "D(4)", "gain per bit"):
        table.add_column(name, justify="right")
    for tag, (two, four) in sorted(result.distortion.items(), key=lambda item: -item[1][0]):
        count = result.counts[tag]
        gain = (two - four) / (2 * count) if count else 0.0
        table.add_row(tag, f"{count:g}", f"{two:.3g}", f"{four:.3g}", f"{gain:.3g}")
    return table


def _sweep(points: list[Point]) -> Table:
    table = new_table("Result of each budget")
    for name in ("budget", "bits", "tokens in 2 bits", "distortion"):
        table.add_column(name, justify="right")
    for point in points:
        table.add_row(f"{point.budget:g}", f"{point.bits:.2f}", f"{point.narrow:.0%}", f"{point.distortion:.3g}")
    return table


@app.command()
def tag(
    tokenizer: Annotated[str, typer.Option(help="Tokenizer with a chat template: a folder or a name on the Hub.")],
    messages: Annotated[
        Path, input_file("Conversations as for calibrate: JSON Lines of lists of messages, or of objects with them.")
    ],
    chat_format: Annotated[
        str | None,
        typer.Option("--format", help=r"Name of a chat format, or a .json file. \[default: by the template]"),
    ] = None,
    generation_prompt: Annotated[bool, typer.Option(help="End with the header of the next answer.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
) -> None:
    """Show TriAxialKV's tag of every token of a conversation; images appear as the processor's tokens."""
    form = None
    if chat_format is not None:
        form = load_format(chat_format)
    conversations = load_conversations(messages, "messages")
    logging.set_verbosity_error()
    try:
        reader = load_tokenizer(find_model(tokenizer))
    except (OSError, ValueError) as error:
        fail(f"tokenizer: {error}")
    found = []
    shown = any(one.images for one in conversations)
    maker = load_processor(find_model(tokenizer)) if shown else reader
    if not maker.chat_template:
        fail(f"tokenizer: {tokenizer!r} has no chat template, so it cannot write a conversation.")
    tagger = Tagger.from_tokenizer(maker, form)
    for one in conversations:
        ids = encode(one, maker, generation_prompt)[0]
        found.append((ids, [TAGS[k] for k in tagger.tag(torch.tensor([ids]))[0].tolist()]))
    if as_json:
        name = tagger.grammar.format.name if tagger.grammar else None
        listed = [{"ids": ids, "tags": tags, "counts": Counter(tags)} for ids, tags in found]
        typer.echo(json.dumps({"tokenizer": tokenizer, "format": name, "conversations": listed}))
        return
    console = make_console()
    for number, (ids, tags) in enumerate(found):
        if number:
            console.rule(style="dim")
        at = 0
        for tag, run in groupby(tags):
            text = reader.decode(ids[at : (at := at + len(list(run)))], skip_special_tokens=False)
            line = f"{tag:<24} {json.dumps(text, ensure_ascii=False)}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        console.print()
        legend = Table("tag", box=None, pad_edge=False)
        for title in ("tokens", "share"):
            legend.add_column(title, justify="right")
        # The oldest first.
        for tag, count in sorted(Counter(tags).items(), key=lambda entry: TAGS.index(entry[0])):
            legend.add_row(tag, str(count), f"{100 * count / len(ids):.1f} %")
        legend.add_row("all", str(len(ids)), "")
        console.print(legend)


if __name__ == "__main__":
    app()
