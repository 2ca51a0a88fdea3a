"""Scan of token ids by a chat format: kinds of tokens and the beginnings of turns, from one marker to the next."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from .axes import SEMANTIC
from .formats import ChatFormat, Span

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


INST, USER, ASSISTANT, TOOL_CALL, DELIM = (
    SEMANTIC.index(name) for name in ("inst", "user", "assistant", "tool_call", "delim")
)
_IMAGE = len(SEMANTIC)

# Tokens after which a header without an end counts as text.
_HEADER_LIMIT = 256


class Place(NamedTuple):
    """State of a scan between two tokens.

    Attributes:
        turns: Turns that have begun.
        message: Semantic of the message, None between messages.
        span: The span inside it.
        scaffold: True behind a marker, to which newlines belong; between messages, spaces too.
        header: Position of the header whose message has no token yet and so may turn out to be another, else None.
    """

    turns: int = 0
    message: int | None = None
    span: Span | None = None
    scaffold: bool = False
    header: int | None = None


class Scan:
    """One pass over the ids of a row, from a place on.

    Attributes:
        kinds: (T,) uint8, ``modal · 7 + semantic``.
        beginnings: Settled positions at which turns begin, in order.
        settled: Number of tokens whose kind and turn no further token can change.
        settled_place: State of the scan behind them.
        place: State of the scan behind all tokens, if none follow.
    """

    def __init__(self, grammar: Grammar, place: Place, ids: np.ndarray) -> None:
        self.grammar, self.place = grammar, place
        self.ids: list[int] = ids.tolist()
        self.kinds = np.full(len(ids), DELIM, dtype=np.uint8)
        self.beginnings: list[int] = []
        self.settled, self.settled_place = len(ids), place
        # State before the header that is still open.
        self._before = place
        self._unsettled = False
        self._run(np.flatnonzero(look_up(grammar.candidates, ids)).tolist())
        if self.place.header is not None:
            self._unsettle(self.place.header, self._before)
        if not self._unsettled:
            self.settled_place = self.place
        # Turns count once they are settled: a tag that has aged cannot become younger.
        self.beginnings = [at for at in self.beginnings if at < self.settled]
        self.kinds[look_up(grammar.images, ids)] += _IMAGE

    def _run(self, candidates: list[int]) -> None:
        at = 0
        for candidate in candidates:
            # Candidates inside a header, or a marker of several tokens, are no markers.
            if candidate < at:
                continue
            self._fill(at, candidate)
            at = self._marker(candidate)
        self._fill(at, len(self.ids))

    def _unsettle(self, at: int, place: Place) -> None:
        if not self._unsettled:
            self._unsettled, self.settled, self.settled_place = True, at, place

    def _fill(self, begin: int, end: int) -> None:
        """Text between markers."""
        if self.place.scaffold:
            # Spaces inside a message may belong to its text.
            blank = self.grammar.blanks if self.place.message is None else self.grammar.newlines
            while begin < end and self.ids[begin] in blank:
                begin += 1
            if begin < end:
                self.place = self.place._replace(scaffold=False)
        if begin < end:
            self._decide(begin)
            place = self.place
            inside = SEMANTIC.index(place.span.semantic) if place.span else place.message
            self.kinds[begin:end] = INST if inside is None else inside

    def _begin(self, header: int, message: int, before: Place) -> None:
        """Begins a message whose header is at ``header``; its role may depend on its first token."""
        self._before = before
        self.place = Place(before.turns, message, None, True, header)
        if message not in self.grammar.openings:
            self._settle_message(message)

    def _settle_message(self, message: int) -> None:
        header, turns = self.place.header, self.place.turns
        assert header is not None
        # Answers without a question begin a turn: the user's message was cut off.
        if message == USER or (message != INST and turns == 0):
            self.beginnings.append(header)
            turns += 1
        self.place = self.place._replace(turns=turns, message=message, header=None)

    def _decide(self, at: int) -> None:
        """Settles the role of a message by its first token."""
        place = self.place
        if place.header is None or place.message is None:
            return
        found = self.grammar.openings[place.message].match(self.ids, at)
        if found.open:
            self._unsettle(place.header, self._before)
        self._settle_message(place.message if found.value is None else found.value)

    def _marker(self, at: int) -> int:
        """Reads the marker, or the text, at a candidate; returns the position after it."""
        found = self.grammar.events.match(self.ids, at)
        if found.open:
            self._unsettle(self.place.header if self.place.header is not None else at, self._before_open())
        event: Event | None = found.value
        if event is None:
            self._fill(at, at + 1)
            return at + 1
        end = at + found.length
        if event.start:
            return self._header(at, end)
        if event.message is not None:
            before = self._closed(at)
            self._begin(at, event.message, before)
        elif event.end:
            self.place = self._closed(at)._replace(scaffold=True)
        elif event.delim or event.header_end or self._bracket(event, at):
            self.place = self.place._replace(scaffold=True)
        else:
            self._fill(at, end)
        return end

    def _before_open(self) -> Place:
        return self._before if self.place.header is not None else self.place

    def _closed(self, at: int) -> Place:
        """State behind the present message, which ends here."""
        if self.place.header is not None:
            self._decide(at)
        return Place(self.place.turns)

    def _bracket(self, event: Event, at: int) -> bool:
        """Opens or closes a span; False if the marker is text here."""
        self._decide(at)
        place = self.place
        if place.message is None:
            return False
        semantic = SEMANTIC[place.message]
        if place.span is not None:
            if place.span in event.closes:
                self.place = place._replace(span=None)
                return True
            return not place.span.close and place.span in event.opens
        for span in event.opens:
            if semantic in span.within:
                self.place = place._replace(span=span)
                return True
        # Closing markers count alone: the opening one was cut off.
        return any(semantic in span.within for span in event.closes)

    def _header(self, at: int, begin: int) -> int:
        """Reads a header with its role written out, from its first marker at ``at``; returns the position after it."""
        before = self._closed(at)
        ids, grammar = self.ids, self.grammar
        if begin == len(ids):
            self._unsettle(at, before)
            self.place = before._replace(scaffold=True)
            return begin
        role = grammar.roles.match(ids, begin)
        if role.open:
            self._unsettle(at, before)
        other = SEMANTIC.index(grammar.format.other_role)
        message = other if role.value is None else role.value
        if grammar.format.header_end == "\n":
            self._begin(at, message, before)
            return begin + role.length
        end = self._header_end(begin)
        if end is None:
            # Headers that are too long, or broken by another marker, have no role.
            self._begin(at, other, before)
            return begin
        if end < 0:
            self._unsettle(at, before)
            self.place = before._replace(scaffold=True)
            return len(ids)
        stop, after = end, end + grammar.events.match(ids, end).length
        if message == ASSISTANT:
            message = self._channel(begin, stop)
        self._begin(at, message, before)
        return after

    def _header_end(self, begin: int) -> int | None:
        """Position of the marker that ends a header; -1 if the ids end before it, None if there is none."""
        ids = self.ids
        for at in range(begin, min(begin + _HEADER_LIMIT, len(ids))):
            event: Event | None = self.grammar.events.match(ids, at).value
            if event is not None and event.header_end:
                return at
            if event is not None and (event.start or event.end or event.message is not None):
                return None
        return -1 if begin + _HEADER_LIMIT > len(ids) else None

    def _channel(self, begin: int, end: int) -> int:
        """Semantic of an assistant's message by the rest of its header."""
        header, grammar = self.ids[begin:end], self.grammar
        if any(grammar.recipient.match(header, at).value for at in range(len(header))):
            return TOOL_CALL
        for at in range(len(header)):
            found = grammar.channel.match(header, at)
            if found.value and at + found.length < len(header):
                name = grammar.channels.match(header, at + found.length)
                return ASSISTANT if name.value is None else name.value
        return ASSISTANT
