"""A chat format in the token ids of one tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from .axes import SEMANTIC
from .templates import ChatFormat, Span

Value = TypeVar("Value")

# Neighbours of a marker that is no token of its own: tokens that span its edge count to the marker.
_AROUND = ("", "\n", "\n\n", " ")
_AFTER = (*_AROUND, "{", '{"', "[", '"', "a")


class Match(NamedTuple):
    """Value and length of the sequence at a position, else None and 0; ``open`` if more tokens could change it."""

    value: Any
    length: int
    open: bool


class Sequences(Generic[Value]):
    """Values by token sequence; of several that fit, the longest counts."""

    def __init__(self, entries: Iterable[tuple[tuple[int, ...], Value]] = ()) -> None:
        self.by_first: dict[int, list[tuple[tuple[int, ...], Value]]] = {}
        for sequence, value in sorted(dict(entries).items(), key=lambda entry: -len(entry[0])):
            self.by_first.setdefault(sequence[0], []).append((sequence, value))
        # Most markers are one token, with no other sequence that begins with it.
        self.alone = {
            first: Match(found[0][1], 1, False)
            for first, found in self.by_first.items()
            if len(found) == 1 and len(found[0][0]) == 1
        }

    def match(self, ids: list[int], at: int) -> Match:
        """Match of the sequence that begins at ``ids[at]``."""
        if (alone := self.alone.get(ids[at])) is not None:
            return alone
        unfinished = False
        for sequence, value in self.by_first.get(ids[at], ()):
            window = tuple(ids[at : at + len(sequence)])
            if window == sequence:
                return Match(value, len(sequence), unfinished)
            unfinished |= len(window) < len(sequence) and sequence[: len(window)] == window
        return Match(None, 0, unfinished)


@dataclass
class Event:
    """Meanings of a marker; a marker without a meaning at its place is text."""

    start: bool = False
    header_end: bool = False
    message: int | None = None
    end: bool = False
    delim: bool = False
    opens: tuple[Span, ...] = ()
    closes: tuple[Span, ...] = ()


class Encoder:
    """Token sequences of marker texts."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.vocab: dict[str, int] = tokenizer.get_vocab()
        self.added: dict[str, int] = tokenizer.get_added_vocab()

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _pieces(self, text: str) -> Iterator[tuple[int, int, int]]:
        """Id, begin and end of each token of a text."""
        made = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        for token, (begin, end) in zip(made["input_ids"], made["offset_mapping"], strict=True):
            yield token, begin, end

    def forms(
        self, text: str, before: Sequence[str] = _AROUND, after: Sequence[str] = _AFTER, whole: bool = True
    ) -> set[tuple[int, ...]]:
        """Token sequences of ``text`` among such neighbours; not ``whole`` omits tokens that reach past it."""
        if text in self.added:
            return {(self.added[text],)}
        found = {tuple(self.encode(text))}
        if text in self.vocab:
            found.add((self.vocab[text],))
        if getattr(self.tokenizer, "is_fast", False):
            for left in before:
                for right in after:
                    begin, end = len(left), len(left) + len(text)
                    pieces = [p for p in self._pieces(left + text + right) if p[2] > begin and p[1] < end]
                    found.add(tuple(p[0] for p in pieces if whole or p[2] <= end))
        return {form for form in found if form}

    def blanks(self) -> set[int]:
        """Tokens of white space alone."""
        return {
            number for token, number in self.vocab.items() if token in _BYTES or (token and not token.strip(_BLANK))
        }

    def newlines(self) -> set[int]:
        """Tokens of `blanks` that begin with a newline."""
        names = self.tokenizer.convert_ids_to_tokens(sorted(self.blanks()))
        return {self.vocab[name] for name in names if name[0] in _NEWLINE or name in _BYTES[:2]}


# Byte-level vocabularies write \n, \r, tab and space as Ċ, č, ĉ and Ġ; sentencepiece has ▁ and the names of bytes.
_NEWLINE = "\n\rĊč"
_BLANK = _NEWLINE + "\t ĉĠ▁"
_BYTES = ("<0x0A>", "<0x0D>", "<0x09>", "<0x20>")


class Grammar:
    """A `ChatFormat` in token ids, for the scan.

    Args:
        tokenizer: A Transformers tokenizer.
        chat_format: Format of its chat template.
        images: Ids of placeholders of images, beside those that the format names.

    Raises:
        ValueError: The tokenizer cannot encode a marker.
    """

    def __init__(self, tokenizer: Any, chat_format: ChatFormat, images: Iterable[int] = ()) -> None:
        encoder, form = Encoder(tokenizer), chat_format
        self.format = form
        events = _events(form)
        self.events: Sequences[Event] = Sequences(
            (sequence, event) for text, event in events.items() for sequence in encoder.forms(text)
        )
        self.newlines, self.blanks = encoder.newlines(), encoder.blanks()
        context = (form.start,) if form.start else ("",)
        follow = ["", "\n", "\n\n", *((form.header_end,) if form.header_end != "\n" else ())]
        follow += [text for text in (form.channel, form.recipient) if text]
        self.roles: Sequences[int] = Sequences(
            (sequence, SEMANTIC.index(semantic))
            for role, semantic in form.roles.items()
            for sequence in encoder.forms(role, context, follow)
        )
        self.channels: Sequences[int] = Sequences(
            (sequence, SEMANTIC.index(semantic))
            for name, semantic in form.channels.items()
            for sequence in encoder.forms(name, (form.channel,), ("", form.header_end, " json", " to=a"))
        )
        self.channel = Sequences((sequence, True) for sequence in _optional(encoder, form.channel))
        recipient = _stable(encoder, form.recipient) if form.recipient else ()
        self.recipient = Sequences([(recipient, True)] if recipient else [])
        self.openings: dict[int, Sequences[int]] = {}
        for role in {opening.role for opening in form.openings}:
            self.openings[SEMANTIC.index(role)] = Sequences(
                (sequence, SEMANTIC.index(opening.semantic))
                for opening in form.openings
                if opening.role == role
                for sequence in encoder.forms(opening.text, whole=opening.text in events)
            )
        self.images = _table({encoder.vocab[text] for text in form.images if text in encoder.vocab} | set(images))
        self.candidates = _table(set(self.events.by_first))


def _events(form: ChatFormat) -> dict[str, Event]:
    """Meanings by marker text."""
    events: dict[str, Event] = {}

    def event(text: str) -> Event:
        return events.setdefault(text, Event())

    if form.start:
        event(form.start).start = True
        if form.header_end != "\n":
            event(form.header_end).header_end = True
    for text, semantic in form.markers.items():
        event(text).message = SEMANTIC.index(semantic)
    for text in form.ends:
        event(text).end = True
    for text in form.delims:
        event(text).delim = True
    for span in form.spans:
        event(span.open).opens += (span,)
        if span.close:
            event(span.close).closes += (span,)
    return events


def _optional(encoder: Encoder, text: str) -> set[tuple[int, ...]]:
    return encoder.forms(text) if text else set()


def _stable(encoder: Encoder, text: str) -> tuple[int, ...]:
    """Tokens at the beginning of ``text`` that are the same before any continuation."""
    ways = [encoder.encode(text + name) for name in ("functions.f", "python", "browser.open", "assistant", "repo_x.y")]
    count = next((i for i, column in enumerate(zip(*ways, strict=False)) if len(set(column)) > 1), min(map(len, ways)))
    return tuple(ways[0][:count])


def _table(numbers: set[int]) -> np.ndarray:
    """Table of truth by token id, up to the largest; the last entry stands for all beyond."""
    table = np.zeros(max(numbers, default=-1) + 2, dtype=bool)
    table[list(numbers)] = True
    return table


def look_up(table: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """(T,) truth of each id in a table of `_table`'s."""
    return table[np.where(ids < 0, len(table) - 1, np.minimum(ids, len(table) - 1))]
