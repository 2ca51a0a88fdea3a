"""Rows of evaluation data: from a local folder if there is one, else from the Hugging Face hub."""

from __future__ import annotations

import csv
import gzip
import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import datasets

from hfkvq.bounded import parse_json

Row = dict[str, Any]

ENVIRONMENT = "HFKVQ_DATA"
"""Variable that names the folder when ``--metadata data_dir=DIR`` does not."""


@dataclass(frozen=True)
class Source:
    """Where one data set lies.

    Fields:
        files: by split, path inside the folder; "x.jsonl" may also be there as "x.jsonl.gz".
        hub: name on the hub, and of the configuration.
        fields: what the rows must have; by name, the names that it goes by in the files and on the hub.
        hub_splits: by split, the hub's name for it, where they differ.
        gated: whether the hub asks for an account that accepted the terms.
    """

    files: Mapping[str, str]
    hub: tuple[str, str | None]
    fields: Mapping[str, tuple[str, ...]]
    hub_splits: Mapping[str, str] | None = None
    gated: bool = False


def data_folder(data_dir: str | os.PathLike[str] | None) -> Path | None:
    """The folder of local data: ``data_dir``, else what the environment names, else None for the hub.

    Raises:
        FileNotFoundError: it is named, and not there.
    """
    named = data_dir or os.environ.get(ENVIRONMENT)
    if not named:
        return None
    folder = Path(named).expanduser()
    if not folder.is_dir():
        by = "--metadata data_dir" if data_dir else ENVIRONMENT
        raise FileNotFoundError(
            f"data_dir: got {str(named)!r} ({by}), which is not a folder; name one that is laid out as "
            "evals/tasks/README.md says, or leave it out to read from the Hugging Face hub."
        )
    return folder


def find_file(folder: Path, name: str) -> Path:
    """The file ``name`` of a data folder, or the same compressed.

    Raises:
        FileNotFoundError: neither is there.
    """
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"data_dir: {folder} has neither {name} nor {name}.gz; put the file there (evals/tasks/README.md says where it "
        f"comes from), or name another folder with --metadata data_dir=DIR or {ENVIRONMENT}."
    )


def read_text(path: Path) -> str:
    """Text of a file that may be compressed.

    Raises:
        ValueError: it is damaged.
    """
    raw = path.read_bytes()
    try:
        return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path}: cannot be read ({error}); it must be UTF-8, plain or gzip. Fetch it again."
        ) from error


def read_jsonl(path: Path) -> list[Row]:
    """Rows of a file with one JSON object a line.

    Raises:
        ValueError: a line is no JSON object, or there is none.
    """
    rows: list[Row] = []
    # Not splitlines(): JSON may hold other line separators, U+2028 for one, as they are.
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError as error:
            raise ValueError(
                f"{path}: line {number} is not JSON ({error}); got {line[:60]!r}, allowed one "
                "JSON object per line. The file is damaged or truncated; fetch it again."
            ) from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}: line {number} is {type(row).__name__}, allowed one JSON object per line.")
        rows.append(row)
    if not rows:
        raise ValueError(f"{path}: has no rows; fetch it again.")
    return rows


def read_csv(path: Path, header: Iterable[str] | None = None) -> list[Row]:
    """Rows of a CSV file; ``header`` names the columns of a file that has no first line for that."""
    names = list(header) if header else None
    rows = list(csv.DictReader(io.StringIO(read_text(path)), fieldnames=names))
    for number, row in enumerate(rows, start=1):
        if None in row or (names and None in row.values()):
            raise ValueError(f"{path}: row {number} does not have {len(names or row)} columns.")
    if not rows:
        raise ValueError(f"{path}: has no rows; fetch it again.")
    return rows


def _pick(rows: Iterable[Mapping[str, Any]], fields: Mapping[str, tuple[str, ...]], where: str) -> Iterator[Row]:
    """Rows with the wanted fields only: of any others, types may change from row to row."""
    for number, row in enumerate(rows, start=1):
        picked: Row = {}
        for field, names in fields.items():
            found = next((name for name in names if name in row), None)
            if found is None:
                raise ValueError(
                    f"{where}: row {number} has no field {' or '.join(map(repr, names))}; got "
                    f"{', '.join(map(repr, sorted(map(str, row))))}. It is another data set, or another version of it."
                )
            picked[field] = row[found]
        yield picked


def read_source(
    source: Source, data_dir: str | None, keep: Callable[[Row], bool] | None = None
) -> dict[str, list[Row]]:
    """All rows of a data set, by split.

    Args:
        source: where it lies.
        data_dir: the folder, as lm-eval's metadata has it; None asks the environment.
        keep: tells which rows to keep.

    Raises:
        FileNotFoundError: a local file is missing.
        ValueError: a file is damaged, or has other fields.
        ConnectionError: there is no local folder, and the hub does not answer.
    """
    folder = data_folder(data_dir)
    found: dict[str, list[Row]] = {}
    for split, name in source.files.items():
        if folder is not None:
            path = find_file(folder, name)
            rows: Iterable[Mapping[str, Any]] = read_csv(path) if name.endswith(".csv") else read_jsonl(path)
            where = str(path)
        else:
            rows, where = _from_hub(source, split), f"{source.hub[0]} on the hub"
        found[split] = [row for row in _pick(rows, source.fields, where) if keep is None or keep(row)]
        if not found[split]:
            raise ValueError(f"{where}: no row is of the kind this task asks for.")
    return found


def _from_hub(source: Source, split: str) -> Iterable[Mapping[str, Any]]:
    name, configuration = source.hub
    split = (source.hub_splits or {}).get(split, split)
    try:
        return cast("Iterable[Mapping[str, Any]]", datasets.load_dataset(name, configuration, split=split))
    except (OSError, ValueError, RuntimeError) as error:
        # No network, offline mode, a gated or a renamed data set: each has its own exception.
        gate = " It is gated: accept its terms there and log in with `hf auth login`." if source.gated else ""
        raise ConnectionError(
            f"data_dir: no local folder is named, and {name} (split {split}) could not be had from the hub: {error}\n"
            f"Pass --metadata data_dir=DIR or set {ENVIRONMENT}; the folder must have "
            f"{', '.join(source.files.values())}.{gate}"
        ) from error


def as_dataset(rows: Mapping[str, list[Row]]) -> datasets.DatasetDict:
    """Rows by split, as lm-eval takes them."""
    return datasets.DatasetDict({split: datasets.Dataset.from_list(part) for split, part in rows.items()})
