"""The command line: ``hfkvq`` with recommend, fit, schemes, demo, kld, tune, serve and others."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import time
from enum import Enum
from typing import Annotated, Any

import typer
from rich.console import Console

from hfkvq.doctor_cli import app as doctor_app
from hfkvq.fit_cli import app as fit_app
from hfkvq.kld_cli import app as kld_app
from hfkvq.progress import progress_bar, stoppable
from hfkvq.serve_cli import app as serve_app
from hfkvq.terminal import (
    ChatModel,
    Commands,
    Device,
    DType,
    JsonFile,
    ModelDType,
    fail,
    make_console,
    pick_device,
    print_notes,
    save_json,
    split,
)
from hfkvq.tuning_cli import app as tuning_app

# torch and Transformers are imported inside the commands, so that help comes at once.
app = typer.Typer(
    help="Compressed KV caches for Hugging Face Transformers.",
    no_args_is_help=True,
    add_completion=False,
    cls=Commands,
)
# Without a name: its commands stand beside the others.
app.add_typer(tuning_app)
app.add_typer(doctor_app)
app.add_typer(fit_app)
app.add_typer(kld_app)
app.add_typer(serve_app)


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
    from hfkvq.caches.schemes.base import list_schemes
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
        found = [presets.describe(name, scheme) for name, scheme in list_schemes().items()]
        typer.echo(json.dumps(found, indent=2))
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
    seed: Annotated[int, typer.Option(min=0, help="Seed of the questions.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """Compare caches on short tasks: memory, right answers, divergence from DynamicCache, speed."""
    import torch
    from transformers.utils import logging

    from hfkvq.measure.demo import Settings, report, run_demo
    from hfkvq.measure.demo.prompts import CHAT_TASKS, load
    from hfkvq.measure.models import SMOLLM2
    from hfkvq.measure.reference import PLAIN_TASKS

    logging.disable_progress_bar()
    words = "nothing is saved, and the same command starts over; fewer --samples, --tasks or --schemes take less time."
    # SmolLM2 is too small for the chat tasks.
    usual = PLAIN_TASKS if model == SMOLLM2 else CHAT_TASKS
    settings = Settings(
        tasks=usual if tasks is None else split(tasks),
        schemes=split(schemes),
        samples=samples,
        batch_size=batch_size,
        max_new_tokens=max_new_tokens,
        seed=seed,
    )
    where = pick_device(device)
    kind = None if dtype is DType.auto else getattr(torch, dtype.value)
    subject = load(model, device=where, dtype=kind)
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


CURRENT = "current"


class WarmDType(str, Enum):
    """Choices of --dtype."""

    bfloat16 = "bfloat16"
    float16 = "float16"


def pick_gpu(name: str) -> int | None:
    """A compute capability times ten; None for the current GPU.

    Raises:
        ValueError: no such GPU, or none at all.
    """
    import torch

    from hfkvq.kernels.compile import GPUS

    known = ", ".join(f"sm_{number}" for number in GPUS)
    if name == CURRENT:
        if not torch.cuda.is_available():
            raise ValueError(f"gpu: got {name!r}, but there is no GPU here; say which one it is for: {known}.")
        return None
    match = re.fullmatch(r"(?:sm_?)?(\d+)", name)
    number = int(match[1]) if match else 0
    if number not in GPUS:
        raise ValueError(f"gpu: got {name!r}, allowed {CURRENT} or {known}.")
    return number


@app.command()
def warm(
    preset: Annotated[str, typer.Option(help="Presets or preset files (.json), comma-separated.")],
    model: Annotated[
        str | None,
        typer.Option(help=r"Model, as in other commands; only its config is read. \[default: the reference model]"),
    ] = None,
    dtype: Annotated[WarmDType, typer.Option(help="Dtype of the model.")] = WarmDType.bfloat16,
    gpu: Annotated[
        str, typer.Option(help="GPU to compile for: current, or e.g. sm_90, which need not be in this machine.")
    ] = CURRENT,
) -> None:
    """Compile the kernels of presets in advance, into Triton's cache, so that first calls are fast."""
    import torch

    from hfkvq.caches.compile import layers_of, shapes_of, widths_of
    from hfkvq.caches.schemes.preset import get_preset
    from hfkvq.kernels.compile import compile_layers
    from hfkvq.measure.models import find_model, read_config

    names = split(preset)
    if not names:
        fail("preset: got none; give the names of presets, separated by commas (`hfkvq schemes` lists them).")
    number = pick_gpu(gpu)
    source = find_model(model)
    config = read_config(source)
    shapes = shapes_of(config)
    if shapes is None:
        fail(f"model: the config of {source.name!r} names no head dim, so it is not known what to compile.")
    chosen = [scheme for name in names for scheme in get_preset(name).schemes]
    schemes = [scheme.in_layer(layer, 100) for scheme in chosen for layer in range(100)]
    layers = layers_of(schemes, shapes, getattr(torch, dtype.value))
    if importlib.util.find_spec("triton") is None:
        fail("triton: it is not installed, so there is nothing to compile; pip install triton (Linux).")
    begun = time.perf_counter()
    device = torch.device("cuda", 0 if number is not None else torch.cuda.current_device())
    around = widths_of(config, shapes[0]) if shapes else None
    done = compile_layers(layers, device, absent=number, around=around and (around, getattr(torch, dtype.value)))
    if not done:
        fail("warm: nothing was compiled: kernels are interpreted (TRITON_INTERPRET=1), or the GPU is AMD's.")
    errors = [f"{name} does not compile: {error}" for name, error in done if error]
    if errors:
        fail(errors[0])
    make_console().print(
        f"{len(done)} kernels for {gpu if number is None else f'sm_{number}'} in {time.perf_counter() - begun:.1f} s. "
        "They are in Triton's cache now.",
        highlight=False,
    )


@app.command()
def watch(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Model, as in other commands, or the address of a running hfkvq serve: http://localhost:8000. "
            r"\[default: the reference model]",
        ),
    ] = None,
    preset: Annotated[str, typer.Option(help="Preset, also with options or as a file.")] = "best-3.4",
    prompt: Annotated[
        str | None, typer.Option(help=r"One prompt. \[default: a chat, a line of standard input at a time]")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens per answer.")] = 256,
    device: Device = "auto",
    dtype: ModelDType = DType.auto,
) -> None:
    """Show users, tokens, bytes and bits by layer of a cache while a model answers, or of a server while it runs."""
    from hfkvq.measure.watching import watch as look_on

    console = make_console()
    if model is not None and model.startswith(("http://", "https://")):
        with stoppable("the server goes on."), look_on(model, console) as moments:
            last = -1.0
            while moments[-1].seconds > last:
                last = moments[-1].seconds
                time.sleep(15)
        fail(f"model: {model} does not answer any more.")

    import torch
    from transformers.utils import logging

    import hfkvq
    from hfkvq.caches.schemes.preset import get_preset
    from hfkvq.measure.models import find_model, load_model, load_tokenizer

    logging.disable_progress_bar()
    source, chosen, where = find_model(model), get_preset(preset), pick_device(device)
    loaded = load_model(source, where, None if dtype is DType.auto else getattr(torch, dtype.value))
    tokenizer: Any = load_tokenizer(source)
    turns: list[dict[str, str]] = []
    with stoppable("the chat is not kept."), hfkvq.use(loaded, chosen) as used:
        for text in [prompt] if prompt is not None else sys.stdin:
            turns.append({"role": "user", "content": text.rstrip("\n")})
            if tokenizer.chat_template:
                text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
            inputs = tokenizer(text, return_tensors="pt", add_special_tokens=not tokenizer.chat_template).to(where)
            with look_on(used, console):
                out = loaded.generate(**inputs, max_new_tokens=max_new_tokens)
            said = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            turns.append({"role": "assistant", "content": said})
            console.print(said, markup=False, highlight=False)


def main() -> None:
    """Entry point of the ``hfkvq`` command."""
    app()


if __name__ == "__main__":
    main()
