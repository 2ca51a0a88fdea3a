"""The commands ``hfkvq compare`` and ``hfkvq report``."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hfkvq.terminal import JsonFile, check_files, check_folder, fail, make_console, print_notes, save_json, split

# Torch comes with the schemes' names, matplotlib with the plots; both are imported inside the commands.
if TYPE_CHECKING:
    from . import telling
    from .leaderboard import Board
    from .results import Collection

app = typer.Typer()


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(metavar="A.json", help="Results of lm-eval, or the folder they are in.")],
    second: Annotated[Path, typer.Argument(metavar="B.json", help="The other results, of the same tasks.")],
    metric: Annotated[
        str | None, typer.Option(help=r"Metrics, comma-separated. \[default: the main ones of each task]")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the bootstrap and permutations.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """Test whether two lm-eval runs differ, sample by sample. Both need --log_samples."""
    check_files("png", json_file, None)

    from hfkvq.measure.divergence.intervals import check_scipy

    from . import comparison, paired, samples

    try:
        check_scipy("compare")
        runs = samples.read_run(first), samples.read_run(second)
        pairs, unpaired = samples.pair(*runs, split(metric))
    except (ValueError, ImportError) as error:
        fail(error)
    verdicts = [paired.judge(one, seed) for one in pairs]
    together = paired.pool(pairs, seed)
    record = comparison.as_record(*runs, [*verdicts, *([together] if together else [])], unpaired, seed)
    console = make_console()
    console.print(comparison.table(record))
    print_notes(console, comparison.notes(record))
    save_json(console, record, json_file)


def _told(files: list[Path]) -> tuple[list[list[telling.Telling]], list[str]]:
    """What the boards among the files tell, if their samples are there and SciPy is; and what cannot be read."""
    if importlib.util.find_spec("scipy") is None:
        return [], []
    from . import telling

    found, odd = [], []
    for path in files:
        if (path / "manifest.json").is_file():
            try:
                found.append(telling.tell(path))
            except ValueError as error:
                odd.append(f"Answers in {path} are not compared: {error}")
    return [one for one in found if one], odd


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


def _plots(boards: list[Board], found: Collection, out: Path) -> dict[str, list[tuple[str, str]]]:
    """Draws all pictures; returns by model what the report shows."""
    from . import pictures

    shown: dict[str, list[tuple[str, str]]] = {}
    for board in boards:
        tail = f"-{_slug(board.model)}" if len(boards) > 1 else ""
        for words, name, save in (
            ("Bits, bytes, right answers and KLD, with 95 % intervals", f"quality{tail}.png", pictures.save_quality),
            ("Tokens per second by task", f"speed{tail}.png", pictures.save_speed),
        ):
            if save(board, out / name):
                shown.setdefault(board.model, []).append((words, name))
    return shown


@app.command()
def report(
    files: Annotated[
        list[Path],
        typer.Argument(help="Results of lm-eval, of `hfkvq kld --json` and `hfkvq bench kernels --json`, or folders."),
    ],
    out: Annotated[Path, typer.Option(file_okay=False, metavar="FOLDER", help="Where to write report.md.")] = Path(
        "report"
    ),
    title: Annotated[str, typer.Option(help="Heading of the report.")] = "Compressed KV caches",
    plots: Annotated[bool, typer.Option(help="Whether to draw PNGs too.")] = True,
) -> None:
    """Write all results as one report: a table, and plots of bits, right answers, KLD and speed."""
    check_files("plots", None, Path("x.png") if plots else None)
    check_folder("out", out)

    from . import leaderboard, tables, telling
    from .results import read_files

    try:
        found = read_files(files)
    except ValueError as error:
        fail(error)
    boards = leaderboard.make_boards(found.sources)
    out.mkdir(exist_ok=True)
    shown = _plots(boards, found, out) if plots else {}
    text = tables.markdown(boards, title, shown)
    told, odd = _told(files)
    text += "".join(f"\n{telling.telling_markdown(found)}" for found in told)
    (out / "report.md").write_text(text, encoding="utf-8")
    console = make_console()
    for board in boards:
        console.print(tables.console_table(board))
        print_notes(console, board.notes)
    for found_here in told:
        console.print(telling.telling_table(found_here))
        print_notes(console, [telling.telling_note(found_here)])
    print_notes(console, odd)
    if found.skipped:
        print_notes(console, [f"Left out, no results: {', '.join(found.skipped)}"])
    names = [name for pictures in shown.values() for _, name in pictures]
    console.print(f"Saved {', '.join(str(out / name) for name in ['report.md', *names])}", highlight=False)
