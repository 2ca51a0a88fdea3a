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

from hfkvq.bounded import json_lines, read_bounded
from hfkvq.measure.texts import KINDS, read_text

SEPARATOR = "\n\n"
"""Between documents, as perplexities of WikiText are usually taken."""


@dataclass(frozen=True)
class Text:
    """One of the texts that windows are cut from.

    Attributes:
        documents: read as far as they are needed.
    """

    name: str
    documents: Iterable[str]
    separator: str = SEPARATOR


@dataclass(frozen=True)
class Windows:
    """Tokens that are scored.

    Attributes:
        tokens: i64 (W, T).
        sha256: of the tokens; two runs with the same hash scored the same.
        first_token: the token that every window begins with, because the tokenizer begins texts with it; or None.
        names: of the texts that the windows are of, one a window.
    """

    tokens: Tensor
    sha256: str
    first_token: int | None
    names: tuple[str, ...]

    def first(self, count: int) -> Windows:
        """The first windows alone."""
        return Windows(self.tokens[:count], _digest(self.tokens[:count]), self.first_token, self.names[:count])


def _digest(tokens: Tensor) -> str:
    return hashlib.sha256(tokens.numpy().astype("<i8").tobytes()).hexdigest()


def read_file(path: Path, field: str) -> list[str]:
    """Documents of a text file, or of a JSON Lines file (``.jsonl``) by a field of theirs.

    Raises:
        ValueError: the file is missing, unreadable or empty, or a line is without the field.
    """
    try:
        text = read_bounded(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"text: {path} cannot be read as UTF-8 text: {error}") from error
    found = [text]
    if path.suffix == ".jsonl":
        try:
            records = list(json_lines(text))
        except ValueError as error:
            raise ValueError(f"text: {path}: {error}.") from None
        found = [_field(record, field, f"line {number} of {path}") for number, record in records]
    if not any(document.strip() for document in found):
        raise ValueError(f"text: {path} holds no text.")
    return found


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
    if not name:
        raise ValueError(f"dataset: got {dataset!r}, allowed NAME or NAME:CONFIG.")
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


def find_texts(
    text: Sequence[Path] | None, dataset: str | None, split: str, field: str, reference: bool, seed: int
) -> list[Text]:
    """Texts of files, or of a data set; without both the reference model's own tasks, or for another model `KINDS`.

    Raises:
        ValueError: see `read_file` and `hub_documents`.
    """
    if text:
        return [Text(path.name, read_file(path, field)) for path in text]
    if dataset is not None:
        name = Path(dataset).name if Path(dataset).is_dir() else dataset
        return [Text(f"{name}, split {split}", hub_documents(dataset, split, field))]
    if reference:
        # Each ends with its own line break, and this is how the model was trained.
        return [Text("the reference tasks", reference_documents(seed), "")]
    return [Text(kind, [read_text(kind)]) for kind in KINDS]


def cut(texts: Sequence[Text], tokenizer: Any, context: int, limit: int) -> Windows:
    """The first windows of each text, one behind the other, divided evenly; the texts take turns.

    So the first windows of the result, and the rest of them, are of all texts.

    Args:
        tokenizer: the model's. If it begins texts with a token of its own (BOS), every window begins with it.
        context: tokens of a window, T.
        limit: most windows.

    Raises:
        ValueError: too little text for one window.
    """
    # BOS, if texts begin with it.
    start = [token for token in tokenizer("a").input_ids[:1] if token == tokenizer.bos_token_id]
    room = context - len(start)
    rows: list[tuple[int, int, list[int]]] = []
    for place, text in enumerate(texts):
        share = (limit - place - 1) // len(texts) + 1
        if share:
            ids = _tokens(text, tokenizer, room, share)
            rows += [(at, place, ids[at * room : (at + 1) * room]) for at in range(min(len(ids) // room, share))]
    rows.sort(key=lambda row: row[:2])
    tokens = torch.tensor([start + ids for _, _, ids in rows], dtype=torch.long, device="cpu")
    return Windows(
        tokens, _digest(tokens), start[0] if start else None, tuple(texts[place].name for _, place, _ in rows)
    )


def _tokens(text: Text, tokenizer: Any, room: int, windows: int) -> list[int]:
    """Enough tokens of a text, or all of them."""
    ids: list[int] = []
    for number, document in enumerate(text.documents):
        piece = text.separator + document if number else document
        # Longer than the model's context on purpose.
        ids += tokenizer(piece, add_special_tokens=False, verbose=False).input_ids
        if len(ids) >= room * windows:
            break
    if len(ids) < room:
        raise ValueError(
            f"text: {text.name} has {len(ids):,} tokens, but a window needs {room:,}; give more text, or "
            "smaller windows."
        )
    return ids
