"""The command ``hfkvq bench generate``."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hfkvq.progress import status_line, stoppable
from hfkvq.sizes import parse_count
from hfkvq.terminal import (
    check_files,
    check_folder,
    fail,
    make_console,
    number_option,
    print_notes,
    print_saved,
    split,
    tokens_option,
)

from ..device import bench_device

# torch and Transformers are imported inside the command, so that help comes at once.
if TYPE_CHECKING:
    import torch

    from .engines import Engine
    from .session import Plan

_ARCHITECTURES = "qwen3-8b, llama-3.1-8b, qwen3-32b, qwen3-30b-a3b, qwen3-0.6b"


class GenerateDType(str, Enum):
    """Choices of --dtype."""

    bfloat16 = "bfloat16"
    float16 = "float16"


class Experts(str, Enum):
    """Choices of --experts."""

    auto = "auto"
    batched_mm = "batched_mm"
    grouped_mm = "grouped_mm"
    eager = "eager"


def _names(given: str | None, default: tuple[str, ...]) -> tuple[str, ...]:
    """Names with commas; "none" for none of them."""
    if given is None:
        return default
    return () if given.strip().lower() == "none" else split(given)


def _sizes(cases: str | None, batch: str | None, context: str | None) -> dict[str, Any]:
    """``cases`` and ``contexts`` of a `Plan`. Raises ValueError if they make no sense."""
    from .cases import DEFAULT_CASES, parse_cases

    if cases and (batch or context):
        raise ValueError("cases: they have batches and contexts of their own; leave --batch and --context out.")
    if not (batch or context):
        return {"cases": tuple(parse_cases(split(cases or DEFAULT_CASES)))}
    contexts = list(dict.fromkeys(parse_count(part) for part in split(context or "8k")))
    if not contexts:
        raise ValueError(f"context: got {context!r}, allowed tokens with commas, e.g. 1k,32k.")
    batches = list(dict.fromkeys(split(batch or "1")))
    if not batches:
        raise ValueError(f"batch: got {batch!r}, allowed rows with commas, or auto.")
    # One reading of sizes, and of what is wrong with them.
    pairs = [f"{rows}x{tokens}" for rows in batches if rows != "auto" for tokens in contexts]
    return {
        "cases": tuple(parse_cases(pairs)) if pairs else (),
        "contexts": tuple(contexts) if "auto" in batches else (),
    }


def _prepare(model: str, layers: int | None, engines: str | None, schemes: str | None) -> tuple[Any, list[Engine]]:
    """Config and engines. Raises ValueError if there is none such."""
    from .engines import DEFAULT_STOCK, check_heads, default_schemes, parse_engines
    from .models import get_config

    config = get_config(model, layers)
    chosen = parse_engines(_names(engines, DEFAULT_STOCK), _names(schemes, default_schemes()))
    check_heads(chosen, config)
    return config, chosen


def _cold_names(given: str | None, engines: list[Engine]) -> tuple[str, ...]:
    """Engines to be called in processes of their own. Raises ValueError if one is not among ``engines``."""
    names = [engine.name for engine in engines]
    wanted = names if given is not None and given.strip().lower() == "all" else list(_names(given, ()))
    for name in wanted:
        if name not in names:
            raise ValueError(f"cold: got {name!r}, allowed all or what is measured: {', '.join(names)}.")
    return tuple(dict.fromkeys(wanted))


def _draft_config(draft: str, config: Any) -> Any:
    """Config of a model that guesses. Raises ValueError if it has other tokens."""
    from .models import get_config

    found = get_config(draft)
    own, other = (each.get_text_config(decoder=True).vocab_size for each in (config, found))
    if own != other:
        raise ValueError(f"draft: {draft} has {other} tokens and the model {own}; choose one of the same tokens.")
    return found


def _build(config: Any, device: torch.device, dtype: GenerateDType, seed: int, experts: Experts) -> Any:
    import torch

    from .models import build

    try:
        return build(config, device, getattr(torch, dtype.value), seed, experts.value)
    except torch.OutOfMemoryError:
        fail("model: its weights do not fit into this GPU's memory; choose another, or cut it with --layers.", code=1)
    except ValueError as error:
        fail(error)


def generate_command(
    model: Annotated[
        str, typer.Option(help=f"{_ARCHITECTURES}, or a folder or name on the Hub, of which only the config is read.")
    ] = "qwen3-8b",
    layers: Annotated[int | None, typer.Option(min=1, help=r"Use only this many layers. \[default: all]")] = None,
    cases: Annotated[
        str | None,
        typer.Option(
            help="Sizes as ROWSxTOKENS, comma-separated. "
            r"\[default: 1x1k, 1x32k, 1x128k, 16x8k, 32x8k, 48x8k, 64x8k, 96x8k, 24x32k, 128x8k, 320x8k]"
        ),
    ] = None,
    batch: Annotated[
        str | None, typer.Option(help="Instead of --cases: rows, comma-separated; auto finds the most that fit.")
    ] = None,
    context: Annotated[
        str | None, typer.Option(help=r"Instead of --cases: tokens, comma-separated. \[default with --batch: 8k]")
    ] = None,
    engines: Annotated[
        str | None,
        typer.Option(
            help="Transformers' caches, comma-separated, or none: dynamic, dynamic-nocudnn, dynamic-offloaded, "
            "static, static-compiled, static-compiled-nocudnn, quanto-2, quanto-4, hqq-2, hqq-4. "
            r"\[default: all but dynamic-offloaded, static and static-compiled-nocudnn]"
        ),
    ] = None,
    schemes: Annotated[
        str | None,
        typer.Option(
            help="Our caches, comma-separated, or none: presets, also with options. By default growing (CUDA "
            "graphs of their own); :fixed with max_cache_len; :compiled with it and torch.compile in place of their "
            r"graphs; :eager growing without graphs; :offloaded with pages in the host's memory: "
            r"kivi-2,arkv:budget_tokens=1024:eager. \[default: the main ones, and the library's default also :compiled "
            "and :eager]"
        ),
    ] = None,
    decode: Annotated[bool, typer.Option(help="Time decode steps.")] = True,
    turns: Annotated[
        bool,
        typer.Option(
            "--turns",
            help="Also time steps of all caches that are not compiled in turns, because a host's speed varies. All "
            "are held at a time.",
        ),
    ] = False,
    prefill: Annotated[bool, typer.Option("--prefill", help="Also time prefills, at every context.")] = False,
    prefill_batch: Annotated[int, typer.Option(min=1, help="Rows of a prefill.")] = 1,
    prefill_chunk: Annotated[int | None, tokens_option(r"Tokens of a prefill's forward. \[default: all]")] = None,
    whole: Annotated[
        bool, typer.Option("--whole", help="Also time generate from end to end, prefill included.")
    ] = False,
    new_tokens: Annotated[int, typer.Option(min=2, help="New tokens of --whole.")] = 128,
    assisted: Annotated[
        bool, typer.Option("--assisted", help="Also time generate with a draft model, at sizes of one row.")
    ] = False,
    draft: Annotated[str, typer.Option(help="Its architecture, as --model; random weights.")] = "qwen3-0.6b",
    draft_tokens: Annotated[int, typer.Option(min=1, help="Tokens that the draft model proposes at a time.")] = 5,
    prompt_lookup: Annotated[
        int | None,
        typer.Option(min=1, help="Also time generate with prompt lookup, this many guesses at a time."),
    ] = None,
    assisted_tokens: Annotated[int, typer.Option(min=2, help="New tokens of --assisted and --prompt-lookup.")] = 64,
    cold: Annotated[
        str | None,
        typer.Option(
            help="Also time the first calls of generate in a new process, with no kernel compiled: names among "
            r"--engines and --schemes, comma-separated, or all; each in a process of its own. \[default: none]"
        ),
    ] = None,
    cold_cases: Annotated[
        str, typer.Option(help="Sizes of first calls, in order: three calls at the first, two at each other.")
    ] = "1x6,4x300",
    cold_tokens: Annotated[int, typer.Option(min=2, help="New tokens of a first call.")] = 64,
    tuned: Annotated[
        bool, typer.Option("--tuned", help="Compile with inductor's coordinate descent tuning, all caches alike.")
    ] = False,
    max_autotune: Annotated[
        bool, typer.Option("--max-autotune", help="Also time Triton's matrix products against cuBLAS's.")
    ] = False,
    warmup: Annotated[int, typer.Option(min=4, help="Steps before timing.")] = 8,
    steps: Annotated[int, typer.Option(min=1, help="Steps timed in one go.")] = 24,
    repeats: Annotated[int, typer.Option(min=1, help="Number of repeats.")] = 5,
    seconds: Annotated[
        float, number_option("Time limit for the repeats of a row; slow caches get fewer.", low=0)
    ] = 20.0,
    first_batch: Annotated[int, typer.Option(min=1, help="First batch size of --batch auto.")] = 32,
    batch_step: Annotated[int, typer.Option(min=1, help="Step between batch sizes of --batch auto.")] = 32,
    dtype: Annotated[GenerateDType, typer.Option(help="Dtype of the weights.")] = GenerateDType.bfloat16,
    experts: Annotated[
        Experts, typer.Option(help="How a mixture of experts is computed; auto as generate does.")
    ] = Experts.auto,
    liger: Annotated[
        bool, typer.Option("--liger", help="Norms, rotary embedding and activations by liger-kernel, for all caches.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights, tokens, keys and values.")] = 0,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json", metavar="PATH", help="Save all figures, each as soon as it is measured, to a file or a folder."
        ),
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", metavar="PATH", help="Save a plot as PNG, in the same way.")
    ] = None,
    markdown_file: Annotated[
        Path | None, typer.Option("--markdown", metavar="PATH", help="Save tables as Markdown, in the same way.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep the results in the file of --json, and measure only what is missing.")
    ] = False,
    meet: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="An empty folder through which several runs of this command take turns in timing.",
        ),
    ] = None,
    of: Annotated[int, typer.Option(min=1, help="Number of runs that share that folder.")] = 1,
    merge: Annotated[
        str | None, typer.Option(help="Take over rows from these files, comma-separated, as --resume does.")
    ] = None,
    commit: Annotated[str, typer.Option(help=r"Commit to record. \[default: from git]")] = "",
) -> None:
    """Time whole models with random weights, with our caches and with Transformers', compiled and not.

    Decode steps on a full cache; with --prefill and --whole, prompts and generate as well; with --cold, first calls.
    What fails, for lack of memory or another reason, is a line in the table; the rest is still measured.
    """
    check_files("plot", json_file, plot_file)
    check_folder("markdown", markdown_file)
    if resume and json_file is None:
        fail("resume: there is nothing to go on with; name the earlier run's file with --json.")

    device = bench_device()

    import torch
    from transformers.utils import logging

    from hfkvq.caches.warm import compile_ahead
    from hfkvq.kernels.warm import SEVERAL

    from .. import timing
    from ..report import describe_copy
    from . import record as records
    from . import report
    from .cases import Settings, compile_arguments, parse_cases
    from .cold import ColdCalls
    from .meeting import Meeting
    from .models import apply_liger
    from .run import Bench, sweep
    from .session import Plan, Session, cold_rows, failures

    logging.set_verbosity_error()
    try:
        settings = Settings(
            warmup=warmup,
            steps=steps,
            repeats=repeats,
            seconds=seconds,
            compile=compile_arguments(tuned, max_autotune),
            seed=seed,
        )
        config, chosen = _prepare(model, layers, engines, schemes)
        plan: Plan = Plan(
            **_sizes(cases, batch, context),
            decode=decode,
            turns=turns,
            prefill=prefill,
            prefill_batch=prefill_batch,
            prefill_chunk=prefill_chunk,
            new_tokens=new_tokens if whole else None,
            assisted=draft_tokens if assisted else None,
            lookup=prompt_lookup,
            drafted_tokens=assisted_tokens,
            cold=_cold_names(cold, chosen),
            cold_cases=tuple(parse_cases(split(cold_cases))),
            cold_tokens=cold_tokens,
            first_batch=first_batch,
            batch_step=batch_step,
        )
        meeting = None if meet is None else Meeting(meet, of)
        draft_config = _draft_config(draft, config) if assisted else None
        if liger and cold:
            raise ValueError("liger: first calls (--cold) are those of the model as it is; leave one of the two out.")
        if turns and all(engine.compiled for engine in chosen):
            raise ValueError("turns: every cache asked for is compiled; add dynamic, or a scheme without :compiled.")
    except ValueError as error:
        fail(error)

    console = make_console()

    def kept() -> str:
        if json_file is None:
            return "nothing is saved; with --json FILE, a later --resume continues where it stopped."
        return f"the figures so far are in {json_file}; the same command with --json {json_file} --resume continues."

    with stoppable(kept), status_line("making weights") as tell:
        # Before the weights take the room that it wants.
        copied = describe_copy(*timing.copy_bandwidth(device))
        # Weights come after first calls, whose processes have their own.
        shape = _build(config, torch.device("meta"), dtype, seed, experts)
        options = {"prefill_batch": prefill_batch, "prefill_chunk": prefill_chunk, "experts": experts.value}
        options |= {"draft": draft if assisted else None, "liger": liger}
        record = records.new_record(device, commit, model, shape, chosen, settings, copied, **options)
        json_file, plot_file, markdown_file = (
            path and records.file_name(path, model, record["gpu"], suffix)
            for path, suffix in ((json_file, ".json"), (plot_file, ".png"), (markdown_file, ".md"))
        )
        earlier = [json_file] if resume and json_file is not None and json_file.exists() else []
        try:
            for path in (*earlier, *(Path(part) for part in split(merge or ""))):
                records.resume(record, records.load(path))
        except ValueError as error:
            fail(error)

        def keep() -> None:
            if json_file is not None:
                records.save_record(record, json_file)

        if plan.cold:
            sizes = [(case.batch, case.context) for case in plan.cold_cases]
            where = (model, layers, str(device), dtype.value, seed, experts.value)
            orders = {name: ColdCalls(name, *where, sizes, cold_tokens, settings.compile) for name in plan.cold}
            # The copy's room, for the processes.
            sweep(device)
            console.print(report.view(cold_rows(plan, orders, record, keep, tell)))
        try:
            if plan.warm:
                tell("making weights")
                built = _build(config, device, dtype, seed, experts)
                if liger:
                    try:
                        apply_liger(built)
                    except ValueError as error:
                        fail(error)
                guesses = None if draft_config is None else _build(draft_config, device, dtype, seed, Experts.auto)
                bench = Bench(built, settings, meeting, guesses)
                presets = [engine.preset for engine in chosen if engine.preset is not None]
                compile_ahead(built, presets, SEVERAL if plan.drafts else (1,), tell)
                for rows in Session(bench, chosen, plan, record, keep, tell).groups():
                    console.print(report.view(rows))
        finally:
            if meeting is not None:
                meeting.leave()
    # Rows taken over count too, and speed-ups of the last group.
    keep()
    print_notes(console, report.notes(record))
    if markdown_file is not None:
        markdown_file.write_text(report.markdown(record), encoding="utf-8")
    if plot_file is not None and not report.save_plot(record, plot_file):
        plot_file = None
    print_saved(console, json_file, markdown_file, plot_file)
    if failures(record):
        raise typer.Exit(1)
