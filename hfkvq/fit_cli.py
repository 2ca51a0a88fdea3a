"""The commands ``hfkvq fit`` and ``hfkvq recommend``."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hfkvq.progress import duration, progress_bar, stop
from hfkvq.terminal import (
    Device,
    DType,
    fail,
    input_file,
    make_console,
    number_option,
    pick_device,
    print_notes,
    tokens_option,
)

# Imports of torch and Transformers are inside the commands, so that help is fast.
if TYPE_CHECKING:
    from rich.table import Table

    from hfkvq.measure.divergence.report import Record
    from hfkvq.tuning.fit.compute import Computed
    from hfkvq.tuning.fit.model import Plan, Weights
    from hfkvq.tuning.fit.recommend import Choice, Row

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
    from hfkvq.tuning.fit.compute import compute

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
    console.print(_fit_table(about, plans, done.weights))
    for note in _fit_notes(done, plans):
        console.print(note, style="dim", highlight=False)


def _fit_table(about: dict[str, Any], plans: list[Plan], weights: Weights) -> Table:
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


def _fit_notes(done: Computed, plans: list[Plan]) -> list[str]:
    from hfkvq.caches.layers.memory import format_bytes
    from hfkvq.caches.schemes.base import get_scheme, list_schemes
    from hfkvq.tuning.fit.model import PEAK, peak

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


@app.command()
def recommend(
    model: Annotated[
        str | None,
        typer.Option(
            help="Model: a name on the Hub, a folder with a config.json, a GGUF file, or smollm2. Its weights are read "
            r"only with --text. \[default: the reference model]"
        ),
    ] = None,
    gpu_memory: Annotated[str, typer.Option(help="Memory of the device: 24GiB (1024) or 24GB (1000).")] = "24GiB",
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
    overhead: Annotated[str, typer.Option(help="As in hfkvq fit: other memory in use.")] = "1GiB",
    beyond: Annotated[bool, typer.Option("--beyond", help="As in hfkvq fit: allow a longer context.")] = False,
    dtype: Annotated[
        DType, typer.Option(help="Dtype of weights, keys and values; auto: the checkpoint's.")
    ] = DType.auto,
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Choose a preset: what fits on a GPU, what it loses, and one line to copy.

    Bytes are computed from the model's config. The loss is SmolLM2's, from figures in the package; with --text it is
    measured on your model and text.
    """
    from hfkvq.measure.divergence.windows import read_file
    from hfkvq.tuning.fit.compute import compute
    from hfkvq.tuning.fit.recommend import candidates, choose, fits_users, is_unsafe, make_rows, measured_losses

    where = pick_device(device)
    for path in text or ():
        read_file(path, "text")
    done = compute(
        model,
        gpu_memory,
        context=context,
        batch=users or 1,
        prefill_chunk=prefill_chunk,
        schemes=schemes,
        dtype=None if dtype is DType.auto else dtype.value,
        overhead=overhead,
        beyond=beyond,
        default=candidates(),
    )
    if not any(layer.compressed for layer in done.found.layers):
        fail(
            f"model: {done.about['model']} has no layer with only full attention, so nothing is compressed; use "
            "Transformers' own cache.",
            code=1,
        )
    if not any(done.presets.values()):
        fail(f"schemes: got {schemes!r}, allowed one preset or more beside Transformers' own cache.")
    rows, record = make_rows(done), None
    console = make_console()
    if text is not None:
        kept = [row.plan.name for row in rows if row.preset is not None and fits_users(row, users or 1)]
        if kept:
            record = _measure(model, kept, text, windows, window, where, dtype)
            rows = make_rows(done, measured_losses(record))
    choice = choose(rows, users, max_loss / 100)
    if as_json:
        typer.echo(json.dumps(_as_json(model, done, rows, choice, record), indent=2))
    else:
        console.print(_table(done, rows, users, choice, wide=console.width >= 110))
        print_notes(console, _notes(done, record))
        for row in filter(is_unsafe, rows):
            assert row.loss is not None
            words = f"{row.plan.name}: unsafe on this model, and so not recommended: {'; '.join(row.loss.against)}."
            console.print(words, highlight=False, soft_wrap=True, markup=False)
    if choice is None and any(is_unsafe(row) for row in rows if fits_users(row, users or 1)):
        fail(
            "schemes: all that fit are unsafe on this model; use Transformers' own cache, or give other --schemes or "
            "more --gpu-memory.",
            code=1,
        )
    if choice is None:
        fail(_nothing_fits(rows, users), code=1)
    if not as_json:
        for line in _answer(model, done, rows, choice):
            console.print(line, highlight=False, soft_wrap=True, markup=False)


def _measure(
    model: str | None, names: list[str], text: list[Path], windows: int, window: int, device: Any, dtype: DType
) -> Record:
    """Losses of the candidates on the text, and of unquantized pages."""
    import torch

    from hfkvq.caches.schemes.preset import get_preset
    from hfkvq.measure.divergence.intervals import check_scipy
    from hfkvq.measure.divergence.run import StoppedRun, measure_text

    begin = time.monotonic()
    chosen = {name: get_preset(name) for name in ("full", *names)}
    check_scipy("recommend")
    told = False

    def tell(name: str, share: float) -> None:
        nonlocal told
        if not told:
            told, words = True, f"Measuring {len(chosen)} caches on {windows} windows of {window:,} tokens"
            typer.echo(f"{words}; fewer --windows take less time.", err=True)
        show(f"{name:<13}", share)

    try:
        with progress_bar() as show:
            record = measure_text(
                model,
                chosen,
                text=text,
                windows=windows,
                context=window,
                dtype=None if dtype is DType.auto else getattr(torch, dtype.value),
                device=device,
                command="recommend",
                on_progress=tell,
            )
    except (ValueError, ImportError) as error:
        fail(error)
    except StoppedRun as stopped:
        if stopped.record is None:
            stop(
                "no window was finished; give fewer --windows or --schemes, or leave --text out for SmolLM2's figures."
            )
        typer.echo(
            f"Stopped after {stopped.record['windows']} of {stopped.windows} windows; the choice rests on these.",
            err=True,
        )
        return stopped.record
    except KeyboardInterrupt:
        stop("nothing was measured; leave --text out for SmolLM2's figures.")
    typer.echo(f"Measured in {duration(time.monotonic() - begin)}.", err=True)
    return record


def _loss_words(row: Row) -> tuple[str, str]:
    from hfkvq.measure.tables import NOTHING, small_number

    if row.loss is None:
        return NOTHING, NOTHING
    if row.preset is None:
        return "", ""
    perplexity, kld = f"{100 * (row.loss.perplexity - 1):+.2f} %", small_number(row.loss.kld)
    if row.loss.interval is not None:
        low, high = (100 * (end - 1) for end in row.loss.interval)
        perplexity += f" ({low:+.2f} to {high:+.2f})"
    if row.loss.kld_interval is not None:
        low, high = row.loss.kld_interval
        kld += f" ({small_number(low)} to {small_number(high)})"
    return perplexity, kld


def _table(done: Computed, rows: list[Row], users: int | None, choice: Choice | None, wide: bool) -> Table:
    from rich.markup import escape

    from hfkvq.caches.layers.memory import format_bytes
    from hfkvq.measure.presets import bits_words
    from hfkvq.measure.tables import new_table, number

    about = done.about
    title = (
        f"{escape(about['model'])} on {format_bytes(about['gpu_memory'])}: weights {format_bytes(done.weights.total)}, "
        f"{format_bytes(about['overhead'])} of overhead"
    )
    view = new_table(title)
    view.add_column("cache", no_wrap=True)
    for name in ("bits", "per user", "users", "longest", "perplexity", *(["KLD"] if wide else []), "ms"):
        view.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        fits = row.plan.batch >= (users or 1)
        end = about["positions"]
        longest = f"{row.plan.context:,}" + ("*" if end and row.plan.context == end else "")
        view.add_row(
            row.plan.name,
            bits_words(list(row.bits)),
            format_bytes(row.plan.cache / about["batch"]),
            f"{row.plan.batch:,}" if row.plan.batch else "none",
            longest if row.plan.context else "none",
            *_loss_words(row)[: 1 + wide],
            number(row.step_ms, 1),
            style="bold" if choice is not None and row is choice.row else "" if fits else "dim",
        )
    return view


def _notes(done: Computed, record: Record | None) -> list[str]:
    from hfkvq.measure.presets import figures

    about, loss, steps = done.about, figures()["loss"], figures()["steps"]
    said = [
        f"per user: cache of {about['context']:,} tokens. users: how many such caches fit. longest: most tokens of one "
        "user; * is the model's own limit. `hfkvq fit` explains how this is computed.",
    ]
    if record is not None:
        settings = record["settings"]
        said.append(
            f"Perplexity and KLD are measured on the model itself, against DynamicCache: {record['text']['source']}, "
            + ("1 window" if record["windows"] == 1 else f"{record['windows']} windows")
            + f" of {settings['context']:,} tokens"
            + (", with 95 % intervals" if record["windows"] > 1 else "")
            + ". Few or short windows say little about long contexts; `hfkvq kld` measures more."
        )
    elif done.latents:
        said.append("The loss on latents has not been measured; --text measures it on the model itself.")
    else:
        said.append(
            f"Perplexity and KLD (with 95 % interval) were measured on {loss['model']} at {loss['context']:,} tokens. "
            "Large models have not been measured; --text measures the loss on the model itself."
        )
    if not done.latents:
        said.append(
            f"ms: one decode step at batch size 1 after {steps['context']:,} tokens, {steps['model']}, on one "
            f"{steps['device']}; DynamicCache takes {steps['dynamic_ms']:.1f}."
        )
    return said


def _nothing_fits(rows: list[Row], users: int | None) -> str:
    from hfkvq.caches.layers.memory import format_bytes

    best = max(rows, key=lambda row: (row.plan.batch, row.plan.left))
    many = f"the most users at this context are {best.plan.batch:,} ({best.plan.name})"
    long = max(rows, key=lambda row: row.plan.context)
    one = f"the longest context of one user is {long.plan.context:,} tokens ({long.plan.name})"
    return (
        f"gpu-memory: nothing holds {users or 1} of this context, {best.plan.name} lacks "
        f"{format_bytes(-best.plan.left)}; {many if best.plan.batch else one}. Give more memory, or a scheme "
        "that evicts: --schemes snapkv+kitty-pro,arkv."
    )


def _answer(model: str | None, done: Computed, rows: list[Row], choice: Choice) -> list[str]:
    from hfkvq.measure.doctor import python_line
    from hfkvq.tuning.fit.recommend import command_line

    plan, context = choice.row.plan, done.about["context"]
    stock = next((row.plan.batch for row in rows if row.preset is None), None)
    beside = "" if stock is None else f"; bf16 holds {f'{stock:,}' if stock else 'none'}"
    users = f"{plan.batch:,} user{'s' * (plan.batch != 1)} of {context:,} tokens{beside}"
    verdict = []
    if (loss := choice.row.loss) is not None and loss.verdict is not None:
        look = f"hfkvq doctor{'' if model is None else f' --model {model}'} --presets {plan.name}"
        verdict = [f"Verdict: {'; '.join([loss.verdict, *loss.against])} (by divergence; `{look}` also asks it)."]
    return [
        f"{plan.name}: {choice.reason}. It holds {users}.",
        *verdict,
        f"Python:  cache = {python_line(plan.name)}",
        f"Command: {command_line(model, choice.row, done)}",
    ]


def _as_json(
    model: str | None, done: Computed, rows: list[Row], choice: Choice | None, record: Record | None
) -> dict[str, Any]:
    from hfkvq.measure.doctor import python_line
    from hfkvq.tuning.fit.recommend import command_line

    caches = [
        {
            **asdict(row.plan),
            "users": row.plan.batch,
            "bits": list(row.bits),
            "loss": None if row.loss is None else asdict(row.loss),
            "step_ms": row.step_ms,
        }
        for row in rows
    ]
    found = None
    if choice is not None:
        found = {
            "cache": choice.row.plan.name,
            "reason": choice.reason,
            "python": f"cache = {python_line(choice.row.plan.name)}",
            "command": command_line(model, choice.row, done),
        }
    return {**done.about, "caches": caches, "measured": record, "recommended": found}
