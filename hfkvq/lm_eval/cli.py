"""The command ``hfkvq leaderboard``."""

from __future__ import annotations

import contextlib
import json
import logging as python_logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hfkvq.bounded import parse_json
from hfkvq.progress import progress_bar, stop
from hfkvq.terminal import (
    Device,
    DType,
    Model,
    ModelDType,
    check_folder,
    fail,
    make_console,
    number_option,
    pick_device,
    split,
    tokens_option,
)

# torch, Transformers and lm-eval are imported inside the command, so that help comes at once.
if TYPE_CHECKING:
    import torch

    from hfkvq.caches import Preset

app = typer.Typer()

BASELINE, FLOOR = "none", "full"


def _presets(names: str | None) -> dict[str, Preset | None]:
    """What is measured, by name; Transformers' own cache first."""
    from hfkvq.caches.registry import listed
    from hfkvq.measure.demo.run import choose_schemes
    from hfkvq.measure.divergence.naming import parse_schemes

    chosen = split(names) if names else ()
    if chosen == ("all",):
        chosen = tuple(choose_schemes(("all",)))
    shown = list(dict.fromkeys((*listed("kld"), *listed("demo"), *listed("leaderboard"))))
    others = [name for name in chosen if name != BASELINE] or shown
    # The second one loses nothing: what it scores less than the first is noise.
    return {BASELINE: None, **parse_schemes(list(dict.fromkeys([FLOOR, *others])))}


def _default_tasks(model: str | None) -> str:
    if model == "smollm2":
        return "plain_passkey,plain_needle,plain_copy,plain_next_ll"
    return "ref_recall,ref_math,ref_tools,ref_recall_ll"


def _metadata(text: str | None) -> dict[str, Any]:
    try:
        values = {} if text is None else parse_json(text)
    except ValueError as error:
        fail(f"metadata: got {text!r}, which is not JSON: {error}")
    if not isinstance(values, dict):
        fail(f"metadata: got {text!r}, allowed a JSON object.")
    return values


def _gen_kwargs(text: str | None) -> dict[str, Any]:
    """As lm-eval takes them."""
    from lm_eval.utils import simple_parse_args_string

    if text is None:
        return {}
    try:
        if text.lstrip().startswith("{"):
            return parse_json(text)
    except ValueError as error:
        fail(f"gen_kwargs: got {text!r}, which is not JSON: {error}")
    if not all("=" in part for part in split(text)):
        fail(f"gen_kwargs: got {text!r}, allowed NAME=VALUE,... or a JSON object.")
    return simple_parse_args_string(text)


def _divergence(
    model: str | None,
    schemes: list[str],
    text: list[Path] | None,
    windows: int,
    context: int,
    device: torch.device,
    dtype: DType,
    path: Path,
) -> None:
    """Measures the divergence of schemes, and writes it when it is whole. Raises ValueError."""
    import torch

    from hfkvq.measure.divergence.naming import parse_schemes
    from hfkvq.measure.divergence.run import measure_text

    with progress_bar() as show:
        record = measure_text(
            model,
            parse_schemes(schemes),
            text=text,
            windows=windows,
            context=context,
            dtype=None if dtype is DType.auto else getattr(torch, dtype.value),
            device=device,
            command="leaderboard",
            on_progress=lambda name, share: show(f"KL divergence: {name:<13}", share),
        )
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


@app.command()
def leaderboard(
    out: Annotated[Path, typer.Option(file_okay=False, metavar="FOLDER", help="Where to write results and report.")],
    model: Model = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="lm-eval's tasks and hfkvq's, comma-separated. "
            r"\[default: ref_recall,ref_math,ref_tools,ref_recall_ll; of smollm2 those that begin with plain_]"
        ),
    ] = None,
    schemes: Annotated[
        str | None,
        typer.Option(help=r"Presets, comma-separated, with options or as files, or all. \[default: the main ones]"),
    ] = None,
    limit: Annotated[float | None, number_option("Questions per task, or a share of them.")] = None,
    num_fewshot: Annotated[int | None, typer.Option(min=0, help="Examples in the prompt.")] = None,
    batch_size: Annotated[str, typer.Option(help="Prompts run together, or auto.")] = "1",
    chat: Annotated[bool, typer.Option("--chat", help="Apply the model's chat template.")] = False,
    gen_kwargs: Annotated[
        str | None,
        typer.Option(
            "--gen_kwargs", "--gen-kwargs", help="Instead of the tasks' own, e.g. temperature=0.6,do_sample=true."
        ),
    ] = None,
    metadata: Annotated[
        str | None, typer.Option(help="""For the tasks, as JSON, e.g. '{"data_dir": "data"}'.""")
    ] = None,
    text: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Text for KL divergence, as in hfkvq kld.")
    ] = None,
    windows: Annotated[int, typer.Option(min=1, help="Windows of text for KL divergence.")] = 16,
    context: Annotated[int, tokens_option("Tokens of a window.", 3)] = 2048,
    device: Device = "auto",
    dtype: ModelDType = DType.auto,
) -> None:
    """Run tasks through every cache, measure KL divergence, and write the report of both.

    Results are those of lm-eval, in a folder for each cache. What is there already is not run again, and a stopped run
    continues with the next question. Tasks and schemes can be added; other settings need another folder. Under
    `accelerate launch` or `torchrun` all processes answer.
    """
    check_folder("out", out)
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        fail("leaderboard: lm-eval is not installed; pip install 'hfkvq[eval]'.")
    from transformers.utils import logging

    from hfkvq.measure.models import find_model

    logging.disable_progress_bar()
    # lm-eval advises --metadata for each of our tasks anew.
    python_logging.getLogger("lm_eval.api.task").addFilter(lambda record: "Custom kwargs" not in record.getMessage())
    extra, generation = _metadata(metadata), _gen_kwargs(gen_kwargs)
    try:
        chosen = _presets(schemes)
        where = pick_device(device)
        source = find_model(model)
    except ValueError as error:
        fail(error)

    from hfkvq.measure.report.cli import report

    from .board import Board, fingerprint, texts_hash
    from .ranks import RankError, Ranks
    from .runs import SEEDS, follow_tasks, run_tasks

    console = make_console()
    loading = {"device": str(where), "dtype": dtype.value, "batch_size": batch_size}
    options = {"limit": limit, "num_fewshot": num_fewshot, "apply_chat_template": chat, "gen_kwargs": generation}
    with contextlib.ExitStack() as stack:
        try:
            ranks = Ranks.join()
            if ranks.rank:
                follow_tasks(source, ranks, loading)
                return
            with ranks.session():
                settings = {
                    "model": {"name": source.name, "fingerprint": fingerprint(source)},
                    **options,
                    "metadata": extra,
                    "dtype": dtype.value,
                    "device": where.type,
                    "divergence": {"windows": windows, "context": context, "text": texts_hash(text)},
                    "seeds": SEEDS,
                }
                board = Board(out, settings)
                stack.enter_context(board.locked())
                left, divergence = board.unmeasured({name: preset for name, preset in chosen.items() if preset})
                for name, done in run_tasks(
                    source,
                    chosen,
                    split(tasks or _default_tasks(model)),
                    board,
                    ranks,
                    options={**options, **SEEDS},
                    metadata=extra,
                    loading=loading,
                    tell=lambda what: console.print(what, highlight=False),
                ):
                    console.print(f"{name}: {done}", highlight=False)
            if left:
                _divergence(model, left, text, windows, context, where, dtype, divergence)
        except (ValueError, OSError, RankError) as error:
            fail(error)
        except KeyboardInterrupt:
            stop(f"the answers so far are kept in {out}; run the same command again to continue from there.")
    report([out], out=out)
