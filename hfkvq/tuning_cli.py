"""The command ``hfkvq tune``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hfkvq.progress import progress_bar, stop
from hfkvq.terminal import (
    Device,
    DType,
    Model,
    ModelDType,
    fail,
    input_file,
    make_console,
    number_option,
    output_file,
    pick_device,
    print_notes,
    split,
    tokens_option,
)

# Imports of torch, Transformers and Optuna are inside the commands, so that help is fast.
if TYPE_CHECKING:
    from collections.abc import Sequence

app = typer.Typer()


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
    objective: Annotated[str, typer.Option(help="kld (on text) or tasks (lm-eval's, with --tasks).")] = "kld",
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
        str,
        typer.Option(help="total_bits, cache_bytes or key_bits (mean width of key channels, MixKVQ's effective bits)."),
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
    dtype: ModelDType = DType.auto,
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
    from hfkvq.tuning.storage import hidden

    kept = storage or "sqlite:///hfkvq-tuning.db"
    limited = {"total_bits": max_total_bits, "key_bits": max_key_bits}
    limits: dict[Any, float] = {name: limit for name, limit in limited.items() if limit is not None}
    console = make_console()
    try:
        ranges = parse_ranges(space or ())
        with progress_bar() as show:

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
                dtype=dtype.value,
                coverage=coverage,
                space=ranges or None,
                storage=kept,
            )
            study = search.run(
                plan,
                tell,
                name,
                trials=trials,
                space=ranges or None,
                limits=limits,
                storage=kept,
                seed=seed,
            )
            if search_only:
                return
            picked = search.conclude(plan, study, limits)
    except (ValueError, OSError, ImportError) as error:
        fail(error)
    except KeyboardInterrupt:
        stop(f"finished trials are kept in {hidden(kept)}; run the same command again to continue from there.")
    console.print(table(study, picked))
    print_notes(console, notes(plan, study, picked))
    if out is not None:
        search.save(plan, study, picked, out)
        console.print(f"Saved {out}; use it with MixedKVCache(model, {str(out)!r}).", highlight=False)
