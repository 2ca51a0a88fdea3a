"""The commands ``hfkvq calibrate`` and ``hfkvq allocate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hfkvq.progress import progress_bar, stoppable
from hfkvq.terminal import (
    ChatModel,
    Device,
    fail,
    input_file,
    make_console,
    number_option,
    output_file,
    pick_device,
    print_notes,
    tokens_option,
)

# Imports of torch and Transformers are inside the commands, so that help is fast.
if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from .allocation import Point
    from .sensitivity import Sensitivity

app = typer.Typer()


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
    from hfkvq.measure.demo.prompts import load
    from hfkvq.measure.models import find_model, load_processor

    from .calibration import calibrate as measure
    from .conversations import load_conversations

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
        f"hfkvq allocate {out} --budget 2.7 --out table.json"
    )
    print_notes(console, [note])


@app.command()
def allocate(
    sensitivity: Annotated[Path, input_file("File that hfkvq calibrate wrote.", argument=True)],
    budget: Annotated[float | None, number_option("Mean code bits per token.", low=2, high=4)] = None,
    out: Annotated[Path | None, output_file("Where to write the table, as JSON.")] = None,
) -> None:
    """Give each tag 2 or 4 bits within a budget (TriAxialKV); without --budget, show the result of several budgets."""
    if out is not None and budget is None:
        fail("out: a table has one budget; give --budget too.")

    from .allocation import make_table, sweep
    from .sensitivity import Sensitivity

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


def _sensitivities(result: Sensitivity) -> RichTable:
    from hfkvq.measure.tables import new_table

    table = new_table("Distortion of the attention output, in 2 and in 4 bits")
    table.add_column("tag")
    for name in ("tokens", "D(2)", "D(4)", "gain per bit"):
        table.add_column(name, justify="right")
    for tag, (two, four) in sorted(result.distortion.items(), key=lambda item: -item[1][0]):
        count = result.counts[tag]
        gain = (two - four) / (2 * count) if count else 0.0
        table.add_row(tag, f"{count:g}", f"{two:.3g}", f"{four:.3g}", f"{gain:.3g}")
    return table


def _sweep(points: list[Point]) -> RichTable:
    from hfkvq.measure.tables import new_table

    table = new_table("Result of each budget")
    for name in ("budget", "bits", "tokens in 2 bits", "distortion"):
        table.add_column(name, justify="right")
    for point in points:
        table.add_row(f"{point.budget:g}", f"{point.bits:.2f}", f"{point.narrow:.0%}", f"{point.distortion:.3g}")
    return table
