"""The command line: ``hfkvq`` with recommend, fit, schemes, demo, kld, tune, serve and others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from hfkvq.doctor_cli import app as doctor_app
from hfkvq.env_cli import app as env_app
from hfkvq.measure.divergence.cli import app as divergence_app
from hfkvq.progress import progress_bar, stoppable
from hfkvq.serve_cli import app as serve_app
from hfkvq.terminal import (
    ChatModel,
    Commands,
    Device,
    DType,
    JsonFile,
    ModelDType,
    Outliers,
    fail,
    input_file,
    make_console,
    pick_device,
    print_notes,
    save_json,
    split,
)
from hfkvq.tuning.cli import app as tuning_app
from hfkvq.tuning.fit.cli import app as fit_app
from hfkvq.tuning.fit.recommend_cli import app as recommend_app
from hfkvq.tuning.search_cli import app as search_app
from hfkvq.warm_cli import app as warm_app
from hfkvq.watch_cli import app as watch_app

# torch and Transformers are imported inside the commands, so that help comes at once.
if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hfkvq.caches.tags import ChatFormat

app = typer.Typer(
    help="Compressed KV caches for Hugging Face Transformers.",
    no_args_is_help=True,
    add_completion=False,
    cls=Commands,
)
# Without a name: its commands stand beside the others.
app.add_typer(tuning_app)
app.add_typer(recommend_app)
app.add_typer(doctor_app)
app.add_typer(fit_app)
app.add_typer(divergence_app)
app.add_typer(search_app)
app.add_typer(warm_app)
app.add_typer(serve_app)
app.add_typer(watch_app)
app.add_typer(env_app)


def _version(value: bool) -> None:
    if value:
        from hfkvq import __version__

        Console().print(__version__, highlight=False)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def schemes(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Preset, also with options or as a file: explain it."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List all presets with bits, loss, speed and description. With a NAME, explain that preset and its options."""
    from hfkvq.caches.schemes.preset import get_preset
    from hfkvq.measure import presets

    if name is not None:
        item = presets.explain(name, get_preset(name))
        if as_json:
            typer.echo(json.dumps(item, indent=2))
        else:
            make_console().print(presets.preset_page(item))
        return
    if as_json:
        typer.echo(json.dumps(presets.describe_all(), indent=2))
        return
    console = make_console(piped=160)
    console.print(presets.schemes_table(console.width))
    print_notes(console, presets.schemes_notes())


@app.command()
def demo(
    model: ChatModel = None,
    schemes: Annotated[
        str | None, typer.Option(help=r"Presets, comma-separated, or all. \[default: the main ones]")
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="recall, arithmetic, tools; passkey, needle, copy, which are plain text; also with a size, "
            r"e.g. recall-40. \[default: the first three; of smollm2 the others]"
        ),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Examples per task.")] = 2,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts run together.")] = 8,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(min=2, help=r"Most tokens per answer. \[default: by task; 256 with --model]"),
    ] = None,
    device: Device = "auto",
    dtype: ModelDType = DType.auto,
    outliers: Outliers = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the questions.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """Compare caches on short tasks: memory, right answers, divergence from DynamicCache, speed."""
    if outliers is not None and model not in (None, "reference"):
        fail("outliers: only the reference model can be given outliers; leave --model out.")
    if outliers is not None and outliers <= 0:
        fail(f"outliers: got {outliers:g}, allowed a positive factor, e.g. 8.")

    import torch
    from transformers.utils import logging

    from hfkvq.measure.demo import Settings, report, run_demo
    from hfkvq.measure.demo.prompts import default_tasks, load

    logging.disable_progress_bar()
    words = "nothing is saved, and the same command starts over; fewer --samples, --tasks or --schemes take less time."
    settings = Settings(
        tasks=default_tasks(model) if tasks is None else split(tasks),
        schemes=split(schemes),
        samples=samples,
        batch_size=batch_size,
        max_new_tokens=max_new_tokens,
        seed=seed,
    )
    where = pick_device(device)
    kind = None if dtype is DType.auto else getattr(torch, dtype.value)
    subject = load(model, device=where, dtype=kind, outliers=outliers)
    if subject.reference and where.type == "cpu":
        # Its operations are so small that several threads gain little, and on a busy machine wait for each other.
        torch.set_num_threads(1)
    with stoppable(words), progress_bar() as show:
        record = run_demo(subject, settings, lambda cache, task, share: show(f"{cache:<13} {task:<13}", share))
    console = make_console()
    console.print(report.table(record, wide=console.width >= 118))
    print_notes(console, report.notes(record))
    console.print()
    steps = report.next_steps(record)
    width = max(len(command) for command, _ in steps)
    for command, use in steps:
        console.print(f"{command:<{width}}  {use}", highlight=False)
    save_json(console, record, json_file)


def _chat_format(given: str | None) -> ChatFormat | None:
    """A chat format by name, or from a file."""
    from hfkvq.caches.tags import ChatFormat, get_format

    if given is None:
        return None
    return ChatFormat.from_file(given) if Path(given).suffix else get_format(given)


def _load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    from hfkvq.measure.models import find_model, load_tokenizer

    try:
        return load_tokenizer(find_model(name))
    except (OSError, ValueError) as error:
        fail(f"tokenizer: {error}")


@app.command()
def tag(
    tokenizer: Annotated[str, typer.Option(help="Tokenizer with a chat template: a folder or a name on the Hub.")],
    messages: Annotated[
        Path, input_file("JSON Lines: a message, or a conversation as for calibrate, per line; or one JSON list.")
    ],
    chat_format: Annotated[
        str | None,
        typer.Option("--format", help=r"Name of a chat format, or a .json or .toml file. \[default: by the template]"),
    ] = None,
    generation_prompt: Annotated[bool, typer.Option(help="End with the header of the next answer.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of coloured text.")] = False,
) -> None:
    """Show TriAxialKV's tag of every token of a conversation; images appear as the processor's tokens."""
    from transformers.utils import logging

    from hfkvq import tagging_cli
    from hfkvq.caches.tags import Tagger
    from hfkvq.measure.models import find_model, load_processor
    from hfkvq.tuning.conversations import encode

    form = _chat_format(chat_format)
    conversations = tagging_cli.read_conversations(messages)
    logging.set_verbosity_error()
    reader = _load_tokenizer(tokenizer)
    found = []
    shown = any(one.images for one in conversations)
    maker = load_processor(find_model(tokenizer)) if shown else reader
    if not maker.chat_template:
        fail(f"tokenizer: {tokenizer!r} has no chat template, so it cannot write a conversation.")
    tagger = Tagger.from_tokenizer(maker, form)
    for one in conversations:
        ids = encode(one, maker, generation_prompt)[0]
        found.append(tagging_cli.tagged(ids, [tagger.names[k] for k in tagger.tag(ids)[0].tolist()], reader))
    if as_json:
        name = tagger.grammar.format.name if tagger.grammar else None
        typer.echo(json.dumps(tagging_cli.as_json(tokenizer, name, found)))
        return
    console = make_console()
    for number, one in enumerate(found):
        if number:
            console.rule(style="dim")
        tagging_cli.print_tagged(console, one)


def main() -> None:
    """Entry point of the ``hfkvq`` command."""
    app()


if __name__ == "__main__":
    main()
