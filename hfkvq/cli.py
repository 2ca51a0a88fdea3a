"""The command line: ``hfkvq`` with recommend, fit, schemes, demo, kld, tune, serve and others."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from hfkvq.terminal import (
    ChatModel,
    Commands,
    Device,
    DType,
    JsonFile,
    Model,
    ModelDType,
    dtype_of,
    duration,
    fail,
    input_file,
    make_console,
    number_option,
    output_file,
    pick_device,
    print_notes,
    progress_bar,
    save_json,
    split,
    stop,
    stoppable,
    tokens_option,
)

# torch and Transformers are imported inside the commands, so that help comes at once.
app = typer.Typer(
    help="Compressed KV caches for Hugging Face Transformers.",
    no_args_is_help=True,
    add_completion=False,
    cls=Commands,
)


CacheDType = Annotated[DType, typer.Option(help="Dtype of weights, keys and values; auto: the checkpoint's.")]
GPUMemory = Annotated[str, typer.Option(help="Memory of the device: 24GiB (1024) or 24GB (1000).")]
Overhead = Annotated[str, typer.Option(help="Other memory in use: CUDA context, allocator.")]
Beyond = Annotated[
    bool, typer.Option("--beyond", help="Allow a context longer than the config's positions, for RoPE scaling.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


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
def doctor(
    model: Model = None,
    presets: Annotated[
        str | None,
        typer.Option(help=r"Presets, comma-separated, also with options. \[default: fourteen, the main ones]"),
    ] = None,
    text: Annotated[
        list[Path] | None,
        input_file(r"UTF-8 text, or JSON Lines with a text field. \[default: four bundled texts]"),
    ] = None,
    device: Device = "auto",
    dtype: Annotated[
        DType, typer.Option(help="auto: float32 on a CPU; on a GPU bfloat16 for GGUF files, else the checkpoint's.")
    ] = "auto",
    json_file: JsonFile = None,
) -> None:
    """Tell which presets are safe, lossy or unsafe on a model, why, and what to take instead.

    Each preset is compared with DynamicCache: how far its predictions are, and whether it still copies text and finds a
    number in it. The end of the output is for a bug report.
    """
    from hfkvq.measure.doctor import examine_named, print_record

    where = pick_device(device)
    kind = "float32" if dtype == "auto" and where.type == "cpu" else dtype
    words = "nothing is saved, and the same command starts over; fewer --presets take less time."
    with stoppable(words), progress_bar() as show:
        record = examine_named(
            model, split(presets), text, where, dtype_of(kind), lambda what, share: show(f"{what:<17}", share)
        )
    console = make_console()
    print_record(console, record)
    save_json(console, record, json_file)


@app.command()
def env() -> None:
    """Show the versions and GPUs to name in a bug report."""
    from hfkvq.measure.records import environment
    from hfkvq.measure.tables import aligned

    typer.echo("\n".join(aligned(environment().items())))


@app.command()
def fit(
    model: Annotated[
        str | None,
        typer.Option(
            help=r"Model: a name on the Hub, or a folder with a config.json. Its weights are not read. "
            r"\[default: the reference model]"
        ),
    ] = None,
    gpu_memory: GPUMemory = "24GiB",
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
    dtype: CacheDType = "auto",
    overhead: Overhead = "1GiB",
    beyond: Beyond = False,
    as_json: AsJson = False,
) -> None:
    """Compute what fits on a GPU: weights, each cache, largest batch and context. Needs only the model's config."""
    from hfkvq.tuning.fit import compute

    done = compute.compute(
        model,
        gpu_memory,
        context=context,
        batch=batch,
        generated=generated,
        prefill_chunk=prefill_chunk,
        schemes=schemes,
        dtype=dtype_of(dtype),
        overhead=overhead,
        beyond=beyond,
    )
    if as_json:
        typer.echo(json.dumps({**done.about, "caches": [asdict(each) for each in done.plans]}, indent=2))
        return
    console = make_console()
    console.print(compute.table(done))
    print_notes(console, compute.notes(done))


@app.command()
def recommend(
    model: Annotated[
        str | None,
        typer.Option(
            help="Model: a name on the Hub, a folder with a config.json, a GGUF file, or smollm2. Its weights are read "
            r"only with --text. \[default: the reference model]"
        ),
    ] = None,
    gpu_memory: GPUMemory = "24GiB",
    context: Annotated[
        int | None, tokens_option(r"Tokens per user, generated ones included. \[default: 32k, or the model's limit]")
    ] = None,
    users: Annotated[
        int | None,
        typer.Option(min=1, help=r"Concurrent users that must fit. \[default: as many as fit, at a small loss]"),
    ] = None,
    max_loss: Annotated[
        float,
        number_option("Without --users: largest increase in perplexity, in %; per %, the KLD may be 0.02 nats.", low=0),
    ] = 1.0,
    text: Annotated[
        list[Path] | None,
        input_file("Measure the loss on your model, on this text; see hfkvq kld."),
    ] = None,
    windows: Annotated[int, typer.Option(min=1, help="With --text: windows to measure.")] = 4,
    window: Annotated[int, tokens_option("With --text: tokens per window, half of them the prompt.", 3)] = 2048,
    schemes: Annotated[
        str | None,
        typer.Option(help=r"Presets or preset files, comma-separated. \[default: those that keep all tokens]"),
    ] = None,
    prefill_chunk: Annotated[int, tokens_option("As in hfkvq fit: tokens per chunk of the prompt.", 0)] = 2048,
    overhead: Overhead = "1GiB",
    beyond: Beyond = False,
    dtype: CacheDType = "auto",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Choose a preset: what fits on a GPU, what it loses, and one line to copy.

    Bytes are computed from the model's config. The loss is SmolLM2's, from figures in the package; with --text it is
    measured on your model and text.
    """
    from hfkvq.tuning.fit import recommend
    from hfkvq.tuning.fit.compute import compute

    where = pick_device(device)
    done = compute(
        model,
        gpu_memory,
        context=context,
        batch=users or 1,
        prefill_chunk=prefill_chunk,
        schemes=schemes,
        dtype=dtype_of(dtype),
        overhead=overhead,
        beyond=beyond,
        default=recommend.candidates(),
    )
    if not any(layer.compressed for layer in done.found.layers):
        fail(
            f"model: {done.about['model']} has no layer with only full attention, so nothing is compressed; use "
            "Transformers' own cache.",
            code=1,
        )
    if not any(done.presets.values()):
        fail(f"schemes: got {schemes!r}, allowed one preset or more beside Transformers' own cache.")
    rows, record = recommend.make_rows(done), None
    fitting = [row.plan.name for row in rows if row.preset is not None and row.plan.batch >= (users or 1)]
    console = make_console()
    if text is not None and fitting:
        record = _measure(model, fitting, text, windows, window, where, dtype)
        rows = recommend.make_rows(done, recommend.measured_losses(record))
    choice = recommend.choose(rows, users, max_loss / 100)
    unsafe = [row for row in rows if recommend.is_unsafe(row)]
    if as_json:
        typer.echo(json.dumps(recommend.as_json(model, done, rows, choice, record), indent=2))
    else:
        console.print(recommend.table(done, rows, users, choice, wide=console.width >= 110))
        print_notes(console, recommend.notes(done, record))
        for row in unsafe:
            assert row.loss is not None
            words = f"{row.plan.name}: unsafe on this model, and so not recommended: {'; '.join(row.loss.against)}."
            console.print(words, highlight=False, soft_wrap=True, markup=False)
    if choice is None and any(row.plan.name in fitting for row in unsafe):
        fail(
            "schemes: all that fit are unsafe on this model; use Transformers' own cache, or give other --schemes or "
            "more --gpu-memory.",
            code=1,
        )
    if choice is None:
        fail(recommend.nothing_fits(rows, users), code=1)
    if not as_json:
        for line in recommend.answer(model, done, rows, choice):
            console.print(line, highlight=False, soft_wrap=True, markup=False)


def _measure(
    model: str | None, names: list[str], text: list[Path], windows: int, window: int, device: Any, dtype: DType
) -> dict[str, Any]:
    """Losses of the candidates on the text, and of unquantized pages."""
    from hfkvq.caches.schemes.preset import get_preset
    from hfkvq.measure.divergence.run import measure_text

    begin = time.monotonic()
    chosen = {name: get_preset(name) for name in ("full", *names)}
    before = [
        f"Measuring {len(chosen)} caches on {windows} windows of {window:,} tokens; fewer --windows take less time."
    ]

    def tell(name: str, share: float) -> None:
        # Arguments are in order now.
        while before:
            typer.echo(before.pop(), err=True)
        show(f"{name:<13}", share)

    try:
        with progress_bar() as show:
            record = measure_text(
                model,
                chosen,
                text=text,
                windows=windows,
                context=window,
                dtype=dtype_of(dtype),
                device=device,
                on_progress=tell,
            )
    except KeyboardInterrupt as ctrl_c:
        record = getattr(ctrl_c, "record", None)
        if record is None:
            stop(
                "no window was finished; give fewer --windows or --schemes, or leave --text out for SmolLM2's figures."
            )
        said = f"Stopped after {record['windows']} of {windows} windows; the choice rests on these."
    else:
        said = f"Measured in {duration(time.monotonic() - begin)}."
    typer.echo(said, err=True)
    return record


@app.command()
def schemes(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Preset, also with options or as a file: explain it."),
    ] = None,
    as_json: AsJson = False,
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
    dtype: ModelDType = "auto",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the questions.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """Compare caches on short tasks: memory, right answers, divergence from DynamicCache, speed."""
    import torch
    from transformers.utils import logging

    from hfkvq.measure.demo import Settings, run
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
    kind = dtype_of(dtype)
    subject = load(model, device=where, dtype=kind)
    if subject.reference and where.type == "cpu":
        # Its operations are so small that several threads gain little, and on a busy machine wait for each other.
        torch.set_num_threads(1)
    with stoppable(words), progress_bar() as show:
        record = run.run_demo(subject, settings, lambda cache, task, share: show(f"{cache:<13} {task:<13}", share))
    console = make_console()
    console.print(run.table(record, wide=console.width >= 118))
    print_notes(console, run.notes(record))
    console.print()
    for line in run.next_steps(record):
        console.print(line, highlight=False)
    save_json(console, record, json_file)


CURRENT = "current"


@app.command()
def warm(
    preset: Annotated[str, typer.Option(help="Presets or preset files (.json), comma-separated.")],
    model: Annotated[
        str | None,
        typer.Option(help=r"Model, as in other commands; only its config is read. \[default: the reference model]"),
    ] = None,
    dtype: Annotated[Literal["bfloat16", "float16"], typer.Option(help="Dtype of the model.")] = "bfloat16",
    gpu: Annotated[
        str, typer.Option(help="GPU to compile for: current, or e.g. sm_90, which need not be in this machine.")
    ] = CURRENT,
) -> None:
    """Compile the kernels of presets in advance, into Triton's cache, so that first calls are fast."""
    import torch

    from hfkvq.caches.compile import layers_of, shapes_of, widths_of
    from hfkvq.caches.schemes.preset import get_preset
    from hfkvq.kernels.compile import GPUS, compile_layers
    from hfkvq.measure.models import find_model, read_config

    names = split(preset)
    if not names:
        fail("preset: got none; give the names of presets, separated by commas (`hfkvq schemes` lists them).")
    match, known = re.fullmatch(r"(?:sm_?)?(\d+)", gpu), ", ".join(f"sm_{number}" for number in GPUS)
    # A compute capability times ten; None for the current GPU.
    number = int(match[1]) if match else None
    if gpu != CURRENT and number not in GPUS:
        raise ValueError(f"gpu: got {gpu!r}, allowed {CURRENT} or {known}.")
    if gpu == CURRENT and not torch.cuda.is_available():
        raise ValueError(f"gpu: got {gpu!r}, but there is no GPU here; say which one it is for: {known}.")
    source = find_model(model)
    config = read_config(source)
    shapes = shapes_of(config)
    if shapes is None:
        fail(f"model: the config of {source.name!r} names no head dim, so it is not known what to compile.")
    chosen = [scheme for name in names for scheme in get_preset(name).schemes]
    schemes = [scheme.in_layer(layer, 100) for scheme in chosen for layer in range(100)]
    layers = layers_of(schemes, shapes, getattr(torch, dtype))
    if importlib.util.find_spec("triton") is None:
        fail("triton: it is not installed, so there is nothing to compile; pip install triton (Linux).")
    begun = time.perf_counter()
    device = torch.device("cuda", 0 if number is not None else torch.cuda.current_device())
    around = widths_of(config, shapes[0]) if shapes else None
    done = compile_layers(layers, device, absent=number, around=around and (around, getattr(torch, dtype)))
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
    dtype: ModelDType = "auto",
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

    from transformers.utils import logging

    import hfkvq
    from hfkvq.caches.schemes.preset import get_preset
    from hfkvq.measure.models import find_model, load_model, load_tokenizer

    logging.disable_progress_bar()
    source, chosen, where = find_model(model), get_preset(preset), pick_device(device)
    loaded = load_model(source, where, dtype_of(dtype))
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
    dtype: ModelDType = "auto",
    device: Device = "auto",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the bootstrap and of the reference model's text.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """Compare schemes with bf16 on the same tokens: KL divergence, top-1 agreement, perplexity, bits."""
    if text and dataset is not None:
        fail("text: got files and a data set; choose --text or --dataset.")

    from hfkvq.measure.divergence import naming, run

    stopped = False
    try:
        chosen = naming.parse_measured(split(schemes))
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
                dtype=dtype_of(dtype),
                device=pick_device(device),
                seed=seed,
                on_progress=lambda name, share: show(f"{name:<13}", share),
            )
    except KeyboardInterrupt as ctrl_c:
        stopped, record = True, getattr(ctrl_c, "record", None)
        if record is None:
            stop(
                "no window was finished, and the same command starts over; fewer --schemes, or a smaller --context, "
                "take less time."
            )
    console = make_console()
    console.print(run.table(record, wide=console.width >= 112))
    print_notes(console, run.notes(record))
    save_json(console, record, json_file)
    if stopped:
        done = record["windows"]
        stop(
            f"{done} of {windows} windows were finished, and the figures are of those. The same command begins anew; "
            f"with --windows {done} it measures what is here."
        )


def parse_ranges(texts: Sequence[str]) -> dict[str, Any]:
    """``knob=0.1..2`` as a range, ``knob=0,32,64`` as choices.

    Raises:
        ValueError: neither.
    """
    from hfkvq.caches.schemes.base import parse_value

    found: dict[str, Any] = {}
    for text in texts:
        knob, equals, values = text.partition("=")
        low, dots, high = values.partition("..")
        if not equals or not values:
            raise ValueError(f"space: got {text!r}, allowed KNOB=LOW..HIGH or KNOB=A,B,C.")
        found[knob.strip()] = (parse_value(low), parse_value(high)) if dots else [parse_value(x) for x in split(values)]
    return found


@app.command()
def tune(
    scheme: Annotated[str, typer.Argument(help="Preset, also with fixed options: arkv:budget_tokens=512.")],
    model: Model = None,
    objective: Annotated[
        Literal["kld", "tasks"], typer.Option(help="kld (on text) or tasks (lm-eval's, with --tasks).")
    ] = "kld",
    tasks: Annotated[str | None, typer.Option(help="Tasks for --objective tasks.")] = None,
    samples: Annotated[
        int, typer.Option(min=2, help="Windows of text, or documents of each task, that the search sees.")
    ] = 8,
    held_out: Annotated[
        int | None,
        typer.Option(min=2, help=r"Further samples that confirm the best candidates. \[default: as many as --samples]"),
    ] = None,
    text: Annotated[list[Path] | None, input_file("Text, as in hfkvq kld.")] = None,
    dataset: Annotated[str | None, typer.Option(metavar="NAME", help="Data set on the Hub, as in hfkvq kld.")] = None,
    context: Annotated[int, tokens_option("Tokens of a window.", 4)] = 1024,
    prefill: Annotated[int | None, tokens_option(r"Of these, the prompt. \[default: three quarters]", 2)] = None,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens fed at a time after the prompt.")] = 32,
    batch_size: Annotated[int, typer.Option(min=1, help="Windows or prompts run together.")] = 8,
    trials: Annotated[int, typer.Option(min=1, help="Number of finished trials, of all processes together.")] = 30,
    space: Annotated[
        list[str] | None,
        typer.Option(metavar="KNOB=RANGE", help="KNOB=LOW..HIGH or KNOB=A,B,C, instead of the scheme's own range."),
    ] = None,
    coverage: Annotated[
        float,
        number_option(
            "For MixKVQ's thresholds: share of pages in which all raised channels must fit.", low=0.01, high=1
        ),
    ] = 0.99,
    cost: Annotated[
        Literal["total_bits", "cache_bytes", "key_bits"],
        typer.Option(help="key_bits: mean width of key channels, MixKVQ's effective bits."),
    ] = "total_bits",
    max_total_bits: Annotated[float | None, number_option("Limit on bits per element, every byte counted.")] = None,
    max_key_bits: Annotated[float | None, number_option("Limit on the keys' mean width (MixKVQ, C.2).")] = None,
    storage: Annotated[
        str | None,
        typer.Option(
            help=r"Where trials are kept, also for other processes: an SQLAlchemy URL. \[default: "
            "sqlite:///hfkvq-tuning.db]"
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help=r"Study name. \[default: scheme, model and objective]")] = None,
    search_only: Annotated[
        bool, typer.Option("--search-only", help="Leave held-out samples and the choice to another process.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampler and of the reference model's text.")] = 0,
    device: Device = "auto",
    dtype: ModelDType = "auto",
    out: Annotated[Path | None, output_file("Write the recommended preset to this file.")] = None,
) -> None:
    """Search a scheme's options for your model: the best cache at each cost, and the best within a limit.

    Run it once for each GPU (CUDA_VISIBLE_DEVICES=1 hfkvq tune ...), or on several machines, with the same --storage:
    they share the trials. Run the same command again to continue where it stopped.
    """
    try:
        import optuna
    except ImportError:
        fail("tune: Optuna is not installed; pip install 'hfkvq[tune]'.")
    optuna.logging.set_verbosity(optuna.logging.ERROR)

    from hfkvq.tuning import search
    from hfkvq.tuning.search import notes, table
    from hfkvq.tuning.study import hidden

    kept = storage or "sqlite:///hfkvq-tuning.db"
    limited = {"total_bits": max_total_bits, "key_bits": max_key_bits}
    limits: dict[Any, float] = {name: limit for name, limit in limited.items() if limit is not None}
    ranges = parse_ranges(space or ()) or None
    words = f"finished trials are kept in {hidden(kept)}; run the same command again to continue from there."
    with stoppable(words), progress_bar() as show:

        def tell(done: int, best: str) -> None:
            what = f"{done} of {trials} trials" + (", held-out samples" if done >= trials else "")
            show(f"{what}; {best}" if best else what, min(done / trials, 1.0))

        plan = search.make_plan(
            scheme,
            model=model,
            objective=objective,
            tasks=split(tasks),
            samples=samples,
            held_out=samples if held_out is None else held_out,
            text=text,
            dataset=dataset,
            context=context,
            prefill=prefill,
            chunk=chunk,
            batch_size=batch_size,
            cost=cost,
            seed=seed,
            device=pick_device(device),
            dtype=dtype,
            coverage=coverage,
            space=ranges,
            storage=kept,
        )
        study = search.run(plan, tell, name, trials=trials, space=ranges, limits=limits, storage=kept, seed=seed)
        if search_only:
            return
        study.confirm(plan.held_out, limits=limits)
        study.refer(search.beside(plan), plan.objective, plan.held_out)
        picked = study.pick(limits)
    console = make_console()
    console.print(table(study, picked))
    print_notes(console, notes(plan, study, picked))
    if out is not None:
        search.save(plan, study, picked, out)
        console.print(f"Saved {out}; use it with MixedKVCache(model, {str(out)!r}).", highlight=False)


DEFAULT = "best-4.3"
"""The preset where the user names none."""

VLLM_REQUESTS = 256
"""Requests at a time in vLLM, where the user does not say: its own default has too many for windows in 16 bits."""


@app.command()
def serve(
    model: ChatModel = None,
    scheme: Annotated[
        str | None,
        typer.Option(
            help=r"Preset, e.g. saw-int4 (which shares prefixes), also with options. \[default: best-4.3]",
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Most memory of the cache, e.g. 6GiB, in place of a preset: 16 bits while there is room; where a "
            "request would have to wait, all go down to 4 bits, then to 2.",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "localhost",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    num_blocks: Annotated[
        int | None,
        typer.Option(min=1, help=r"Memory for the cache, in the engine's 16-bit blocks. \[default: what is free]"),
    ] = None,
    max_requests: Annotated[
        int | None,
        typer.Option(min=1, help=r"Concurrent requests; others wait. \[default: as many as fit]"),
    ] = None,
    request_tokens: Annotated[
        int | None,
        tokens_option(r"Tokens that a usual request holds, prompt and answer: how many fit. \[default: 4096]"),
    ] = None,
    max_batch_tokens: Annotated[int | None, tokens_option("Tokens of a batch.")] = None,
    max_memory_percent: Annotated[
        float | None, number_option("Share of the GPU's free memory for the cache.", low=0.01, high=1)
    ] = None,
    device: Device = "auto",
    dtype: ModelDType = "auto",
    engine: Annotated[
        Literal["transformers", "vllm"], typer.Option(help="Transformers' own server, or vLLM's (0.25).")
    ] = "transformers",
) -> None:
    """Serve a model with an OpenAI-compatible API, streaming, continuous batching and a compressed cache.

    Clients use the model's name as given here. GET /metrics reports users, tokens, bytes and bits.
    """
    from hfkvq.caches.schemes.preset import get_preset
    from hfkvq.measure.models import find_model

    if engine == "vllm":
        refused = {
            "--memory": memory,
            "--num-blocks": num_blocks,
            "--request-tokens": request_tokens,
            "--max-memory-percent": max_memory_percent,
            "--device": None if device in ("auto", "cuda") else device,
        }
        for name, value in refused.items():
            if value is not None:
                fail(
                    f"{name}: got {value}, but vLLM has no such option; leave it out, or use vllm serve (docs/vllm.md)."
                )
        if importlib.util.find_spec("vllm") is None:
            fail("engine: vllm is not installed; pip install 'vllm==0.25.*', or leave out --engine.")

        from hfkvq.caches import get_scheme
        from hfkvq.vllm import DTYPE

        named = DEFAULT if scheme is None else scheme
        get_scheme(named)
        options = {
            "host": host,
            "port": port,
            "max-num-seqs": VLLM_REQUESTS if max_requests is None else max_requests,
            "max-num-batched-tokens": max_batch_tokens,
            "dtype": dtype,
            "served-model-name": model or "reference",
            "attention-backend": "CUSTOM",
            "kv-cache-dtype": DTYPE,
        }
        words = [str(word) for name, value in options.items() if value is not None for word in (f"--{name}", value)]
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", find_model(model).path, *words]
        # This process ends as vLLM's server.
        os.execve(sys.executable, command, {**os.environ, "HFKVQ_SCHEME": named})
    beside = {"--scheme": scheme, "--num-blocks": num_blocks, "--max-memory-percent": max_memory_percent}
    for name, value in beside.items() if memory is not None else ():
        if value is not None:
            fail(f"--memory: got {memory} together with {name} {value}, allowed one of them; leave one out.")
    where = pick_device(device)
    kind = dtype_of(dtype)
    found, preset = find_model(model), get_preset(DEFAULT if scheme is None else scheme)
    if preset.layers:
        raise ValueError(f"scheme: got {scheme!r}, whose layers differ; allowed one scheme for all layers.")
    options = {
        "cb_num_blocks": num_blocks,
        "cb_max_batch_tokens": max_batch_tokens,
        "cb_max_memory_percent": max_memory_percent,
    }
    name = model or "reference"
    missing = [package for package in ("fastapi", "openai", "uvicorn") if importlib.util.find_spec(package) is None]
    if missing:
        fail(f"serve: {', '.join(missing)} not installed; pip install 'hfkvq[serve]'.")
    try:
        from hfkvq.serving.server import Server

        own = preset.scheme if memory is None else None
        server = Server(
            found, name, own, where, kind, host=host, port=port, requests=max_requests, request_tokens=request_tokens,
            memory=memory, **options,
        )  # fmt: skip
    except ImportError as error:
        fail(f"serve: {error}; it needs Transformers 5.19 or newer and pip install 'hfkvq[serve]'.")
    pages = scheme or (DEFAULT if memory is None else f"{memory} of memory")
    make_console().print(f"{name} at {server.url} with {pages}. Ctrl-C ends it.", highlight=False)
    try:
        server.wait()
    except KeyboardInterrupt:
        server.close()


def main() -> None:
    """Entry point of the ``hfkvq`` command."""
    app()


if __name__ == "__main__":
    main()
