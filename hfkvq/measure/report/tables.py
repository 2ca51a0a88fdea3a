"""A leaderboard as Markdown, and shortened for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.table import Table

from ..records import BASELINE
from ..tables import NOTHING, markdown_table, new_table, number, small_number
from .leaderboard import Board, Row, is_share
from .metrics import title
from .results import Score


def _bits(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _range(interval: Sequence[float] | None, show: Callable[[float], str]) -> str:
    return "" if interval is None else f" ({show(interval[0])} to {show(interval[1])})"


def _cell(score: Score | None, share: bool) -> str:
    if score is None:
        return ""
    scale, digits = (100, 1) if share else (1, 4 if abs(score.value) < 100 else 1)
    error = "" if score.stderr is None else f" ± {scale * score.stderr:.{digits}f}"
    return f"{scale * score.value:.{digits}f}{error}"


def _divergence_cells(row: Row) -> list[str]:
    found = row.divergence
    if found is None:
        return [""] * 4
    kld, top1, ratio = found["kld"], found["top1"], found["perplexity_ratio"]
    return [
        small_number(kld["mean"]) + _range(kld["interval"], small_number),
        small_number(kld["p999"]),
        f"{100 * top1['share']:.2f}" + _range(top1["interval"], lambda share: f"{100 * share:.2f}"),
        f"{ratio['value']:.4f}" + _range(ratio["interval"], lambda value: f"{value:.4f}"),
    ]


def cells_of(board: Board) -> tuple[list[str], list[list[str]]]:
    """Titles and rows of a model's table; columns that nobody measured are left out."""
    columns, compared = board.columns, board.compared
    shares = {
        column: is_share(column[1], [score for row in board.rows if (score := row.score(column))]) for column in columns
    }
    head, body = ["cache", "code bits", "total bits"], [[row.label] for row in board.rows]
    for row, cells in zip(board.rows, body, strict=True):
        cells += [_bits(board.bits(row, "code_bits")), _bits(board.bits(row, "total_bits"))]

    def add(name: str, values: Sequence[str]) -> None:
        if any(values):
            head.append(name)
            for cells, value in zip(body, values, strict=True):
                cells.append(value)

    peaks = [row.peak_bytes for row in board.rows]
    add("peak MiB", ["" if peak is None else f"{peak / 2**20:.2f}" for peak in peaks])
    for column in columns:
        lower = any(score and not score.higher for score in (row.score(column) for row in board.rows))
        unit = ", %" if shares[column] else ", less is better" if lower else ""
        name = f"{column[0]}: {title(column[1])}{unit}"
        add(name, [_cell(row.score(column), shares[column]) for row in board.rows])
    if len(compared) > 1:
        means = [row.accuracy(compared) for row in board.rows]
        add(f"mean of {len(compared)} tasks, %", ["" if mean is None else f"{mean:.1f}" for mean in means])
    if board.scored:
        add("total bits of KLD", [_bits(row.divergent("total_bits")) for row in board.rows])
    names = ("KLD mean, nats", "KLD 99.9 %", "top-1, %", "perplexity / bf16")
    for name, values in zip(names, zip(*map(_divergence_cells, board.rows), strict=True), strict=True):
        add(name, values)
    speeds = [row.mean("tokens_per_second") for row in board.rows]
    add("tokens/s", ["" if speed is None else f"{speed:,.1f}" for speed in speeds])
    return head, body


def board_table(board: Board) -> str:
    """The table of a model."""
    head, body = cells_of(board)
    return markdown_table(head, [[f"`{cells[0]}`", *cells[1:]] for cells in body])


def _explain(board: Board) -> list[str]:
    """How to read the table."""
    said = []
    rows = board.rows
    if board.scored:
        counts = {
            task: found.scores[next(iter(found.scores))].samples for row in rows for task, found in row.tasks.items()
        }
        known = ", ".join(f"{task} {count:,}" for task, count in counts.items() if count)
        said.append(
            "Scores are lm-eval's, ± its standard error. "
            + (f"Questions: {known}. " if known else "")
            + "Bits and bytes are those of the caches that gave these answers, every byte counted; bits are means over "
            "the tasks that all caches did, the peak is that of the largest. The stock cache of plain `hf` is "
            "taken to hold 16 bits."
        )
    if any(row.divergence for row in rows):
        said.append(
            f"KLD is the divergence of a cache's predictions from `{BASELINE}`'s on the same tokens, in nats, with 95 "
            "% intervals; top-1 says how often both have the same most likely token. Bits of that text are "
            "its own: a cache's bits depend on the length."
        )
    return said + board.notes


def markdown(boards: Sequence[Board], heading: str, pictures: Mapping[str, Sequence[tuple[str, str]]]) -> str:
    """The whole report.

    Args:
        boards: one a model.
        heading: of the report.
        pictures: by model, (description, file name) each; those under "" come last.
    """
    parts = [f"# {heading}"]
    for board in boards:
        parts += [f"## {board.model}", board_table(board), *_explain(board)]
        parts += [f"![{words}]({name})" for words, name in pictures.get(board.model, ())]
    parts += [f"![{words}]({name})" for words, name in pictures.get("", ())]
    return "\n\n".join(parts) + "\n"


def console_table(board: Board) -> Table:
    """Bits, mean accuracy and KLD of each cache; the rest is in the report."""
    view = new_table(board.model)
    view.add_column("cache", overflow="fold")
    columns = board.compared
    for name in ("code bits", "total bits", "peak MiB", "right, %", "KLD mean", "KLD's total bits", "tokens/s"):
        view.add_column(name, justify="right", no_wrap=True)
    for row in board.rows:
        mean, peak, speed = row.accuracy(columns), row.peak_bytes, row.mean("tokens_per_second")
        view.add_row(
            row.label,
            number(board.bits(row, "code_bits"), 2),
            number(board.bits(row, "total_bits"), 2),
            number(None if peak is None else peak / 2**20, 2),
            number(mean, 1),
            NOTHING if row.divergence is None else small_number(row.divergence["kld"]["mean"]),
            number(row.divergent("total_bits"), 2),
            number(speed, 1),
        )
    return view
