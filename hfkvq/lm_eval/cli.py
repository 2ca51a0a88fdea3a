"""The command ``hfkvq leaderboard``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hfkvq.bounded import parse_json
from hfkvq.terminal import Device, DType, Model, ModelDType, check_folder, fail, make_console, pick_device, split

# torch, Transformers and lm-eval are imported inside the command, so that help comes at once.
if TYPE_CHECKING:
    from hfkvq.caches import Preset

app = typer.Typer()

BASELINE = "none"


def _presets(names: str | None) -> dict[str, Preset | None]:
    """What is measured, by name; Transformers' own cache first."""
    from hfkvq.caches.registry import listed
    from hfkvq.measure.demo.run import choose_schemes
    from hfkvq.measure.divergence.naming import parse_schemes

    chosen = split(names) if names else ()
    if chosen == ("all",):
        chosen = tuple(choose_schemes(("all",)))
    shown = list(dict.fromkeys((*listed("kld"), *listed("demo"))))
    others = [name for name in chosen if name != BASELINE] or shown
    return {BASELINE: None, **parse_schemes(others)}


def _default_tasks(model: str | None) -> str:
    if model == "smollm2":
        return "plain_passkey,plain_needle,plain_copy,plain_next_ll"
    return "ref_recall,ref_math,ref_tools,ref_recall_ll"


def _metadata(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        values = parse_json(text)
    except ValueError as error:
        fail(f"metadata: got {text!r}, which is no JSON: {error}")
    if not isinstance(values, dict):
        fail(f"metadata: got {text!r}, allowed a JSON object.")
    return values


@app.command()
def leaderboard(
    out: Annotated[Path, typer.Option(file_okay=False, metavar="FOLDER", help="Where to write results and report.")],
    model: Model = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="lm-eval's tasks and hfkvq's, with commas. "
            r"\[default: ref_recall,ref_math,ref_tools,ref_recall_ll; of smollm2 those that begin with plain_]"
        ),
    ] = None,
    schemes: Annotated[
        str | None,
        typer.Option(help=r"Presets, with commas, also with knobs or as files, or all. \[default: the main ones]"),
    ] = None,
    limit: Annotated[float | None, typer.Option(help="Documents of each task, or a share of them.")] = None,
    num_fewshot: Annotated[int | None, typer.Option(min=0, help="Examples in the prompt.")] = None,
    batch_size: Annotated[str, typer.Option(help="Prompts run together, or auto.")] = "1",
    chat: Annotated[bool, typer.Option("--chat", help="Apply the model's chat template.")] = False,
    metadata: Annotated[
        str | None, typer.Option(help="""For the tasks, as JSON, e.g. '{"data_dir": "data"}'.""")
    ] = None,
    text: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Text for KL divergence, as for hfkvq kld.")
    ] = None,
    windows: Annotated[int, typer.Option(min=1, help="Windows of it.")] = 16,
    context: Annotated[int, typer.Option(min=3, help="Tokens of a window.")] = 2048,
    device: Device = "auto",
    dtype: ModelDType = DType.auto,
) -> None:
    """Run tasks through every cache, measure KL divergence, and write the report of both.

    Results are lm-eval's, a folder for each cache; what is there already is not run again.
    """
    check_folder("out", out)
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        fail("leaderboard: lm-eval is not installed; pip install 'hfkvq[eval]'.")
    extra = _metadata(metadata)
    try:
        chosen = _presets(schemes)
    except ValueError as error:
        fail(error)

    from hfkvq.measure.divergence.cli import kld
    from hfkvq.measure.report.cli import report

    from .runs import run_tasks

    console = make_console()
    try:
        where = str(pick_device(device))
        out.mkdir(exist_ok=True)
        for name, done in run_tasks(
            model,
            chosen,
            split(tasks or _default_tasks(model)),
            out,
            options={"limit": limit, "num_fewshot": num_fewshot, "apply_chat_template": chat},
            metadata=extra,
            loading={"device": where, "dtype": dtype.value, "batch_size": batch_size},
        ):
            console.print(f"{name}: {done}", highlight=False)
    except (ValueError, OSError) as error:
        fail(error)
    divergence = out / "kld.json"
    if not divergence.exists():
        others = ",".join(name for name in chosen if name != BASELINE)
        kld(
            model=model,
            schemes=others,
            text=text,
            windows=windows,
            context=context,
            device=device,
            dtype=dtype,
            json_file=divergence,
        )
    report([out], out=out)
