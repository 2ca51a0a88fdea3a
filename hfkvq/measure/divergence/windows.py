"""Text for `hfkvq kld`, and its windows of tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hfkvq.bounded import parse_json, read_bounded

SEPARATOR = "\n\n"
"""Between documents, as perplexities of WikiText are usually taken."""


@dataclass(frozen=True)
class Windows:
    """What is scored.

    Attributes:
        tokens: i64 (W, T).
        sha256: of the tokens; two runs with the same hash scored the same.
        first_token: the token that every window begins with, because the tokenizer begins texts with it; or None.
    """

    tokens: Tensor
    sha256: str
    first_token: int | None


def read_files(paths: Sequence[Path], field: str) -> list[str]:
    """Documents of text files, and of JSON Lines files (``.jsonl``) by a field of theirs.

    Raises:
        ValueError: a file that is missing, unreadable or empty, or a line without the field.
    """
    documents: list[str] = []
    for path in paths:
        try:
            text = read_bounded(path)
        except (OSError, ValueError) as error:
            raise ValueError(f"text: {path} cannot be read as UTF-8 text: {error}") from error
        found = list(_lines(path, text, field)) if path.suffix == ".jsonl" else [text]
        if not any(document.strip() for document in found):
            raise ValueError(f"text: {path} holds no text.")
        documents += found
    return documents


def _lines(path: Path, text: str, field: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = parse_json(line)
        except ValueError as error:
            raise ValueError(f"text: line {number} of {path} is no JSON: {error}") from error
        yield _field(record, field, f"line {number} of {path}")


def _field(record: Any, field: str, where: str) -> str:
    value = record.get(field) if isinstance(record, dict) else None
    if not isinstance(value, str):
        names = ", ".join(map(str, record)) if isinstance(record, dict) else f"no fields, but {type(record).__name__}"
        raise ValueError(f"field: {where} has no text in {field!r}; it has {names}. Choose another with --field.")
    return value


def hub_documents(dataset: str, split: str, field: str) -> Iterator[str]:
    """Documents of a data set, by ``NAME`` or ``NAME:CONFIG``, streamed.

    Raises:
        ImportError: datasets is not installed.
        ValueError: the data set cannot be loaded, or has no such field.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError("dataset: datasets is not installed; pip install 'hfkvq[eval]'.") from error
    name, _, config = dataset.partition(":")
    try:
        rows = load_dataset(name, config or None, split=split, streaming=True)
    # The library's own errors derive from these; a hub that cannot be reached is an OSError.
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"dataset: {dataset!r}, split {split!r}, cannot be loaded: {error} Without a network give files: --text."
        ) from error
    for number, row in enumerate(rows, 1):
        yield _field(row, field, f"row {number} of {dataset}")


def reference_documents(seed: int = 0) -> Iterator[str]:
    """Conversations of the reference tasks, answers included, without an end."""
    from hfkvq.measure.reference import evaluation_set

    for number in count(seed * 1_000):
        for task in ("recall-80", "tools", "arithmetic-12"):
            yield evaluation_set(task, 1, seed=number)[0].text


def find_documents(
    text: Sequence[Path] | None, dataset: str | None, split: str, field: str, model: str | None, seed: int
) -> tuple[Iterable[str], str, str]:
    """Documents of files, of a data set, or of the reference model's own tasks; their name, and what stands between.

    Raises:
        ValueError: neither files nor a data set for another model than the reference model; see `read_files`.
    """
    if text:
        return read_files(text, field), ", ".join(path.name for path in text), SEPARATOR
    if dataset is not None:
        name = Path(dataset).name if Path(dataset).is_dir() else dataset
        return hub_documents(dataset, split, field), f"{name}, split {split}", SEPARATOR
    if model is not None:
        raise ValueError("text: only the reference model has a text of its own; give --text FILE or --dataset NAME.")
    # Each ends with its own line break, and this is how the model was trained.
    return reference_documents(seed), "the reference tasks", ""


def cut(documents: Iterable[str], tokenizer: Any, context: int, limit: int, separator: str = SEPARATOR) -> Windows:
    """The first windows of the documents' tokens, one behind the other.

    Args:
        documents: read as far as they are needed.
        tokenizer: the model's. If it begins texts with a token of its own (BOS), every window begins with it.
        context: tokens of a window, T.
        limit: most windows.
        separator: put between documents.

    Raises:
        ValueError: too little text for one window.
    """
    # BOS, if texts begin with it.
    start = [token for token in tokenizer("a").input_ids[:1] if token == tokenizer.bos_token_id]
    room = context - len(start)
    ids: list[int] = []
    for number, document in enumerate(documents):
        text = separator + document if number else document
        # Longer than the model's context on purpose.
        ids += tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        if len(ids) >= room * limit:
            break
    windows = min(len(ids) // room, limit)
    if not windows:
        raise ValueError(
            f"text: it has {len(ids):,} tokens, but a window takes {room:,}; give more text, or a smaller --context."
        )
    tokens = torch.tensor(ids[: windows * room], dtype=torch.long).view(windows, room)
    tokens = torch.cat([torch.tensor([start] * windows, dtype=torch.long), tokens], 1)
    digest = hashlib.sha256(tokens.numpy().astype("<i8").tobytes()).hexdigest()
    return Windows(tokens, digest, start[0] if start else None)
