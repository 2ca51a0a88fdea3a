"""Tags of a prompt, from its token ids: one scan on the CPU, no model. Placeholders of images among them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from .formats import KINDS, PAD, SEMANTIC, TEMPORAL, ChatFormat, Span, find_format, parse_tag

Value = TypeVar("Value")

# Neighbours of a marker that is no token of its own: tokens that span its edge count to the marker.
_AROUND = ("", "\n", "\n\n", " ")
_AFTER = (*_AROUND, "{", '{"', "[", '"', "a")


class Sequences(Generic[Value]):
    """Values by token sequence; of several that fit, the longest counts."""

    def __init__(self, entries: Iterable[tuple[tuple[int, ...], Value]] = ()) -> None:
        self.by_first: dict[int, list[tuple[tuple[int, ...], Value]]] = {}
        for sequence, value in sorted(dict(entries).items(), key=lambda entry: -len(entry[0])):
            self.by_first.setdefault(sequence[0], []).append((sequence, value))

    def match(self, ids: list[int], at: int) -> tuple[Value | None, int]:
        """Value and length of the sequence that begins at ``ids[at]``, else None and 0."""
        for sequence, value in self.by_first.get(ids[at], ()):
            if tuple(ids[at : at + len(sequence)]) == sequence:
                return value, len(sequence)
        return None, 0


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
                    whole_text = left + text + right
                    made = self.tokenizer(whole_text, add_special_tokens=False, return_offsets_mapping=True)
                    pieces = zip(made["input_ids"], made["offset_mapping"], strict=True)
                    pieces = [(token, last) for token, (first, last) in pieces if last > begin and first < end]
                    found.add(tuple(token for token, last in pieces if whole or last <= end))
        return {form for form in found if form}

    def blanks(self) -> tuple[set[int], set[int]]:
        """Tokens of white space alone, and those of them that begin with a newline."""
        names = [token for token in self.vocab if token in _BYTES or (token and not token.strip(_BLANK))]
        lines = [name for name in names if name[0] in _NEWLINE or name in _BYTES[:2]]
        return {self.vocab[name] for name in names}, {self.vocab[name] for name in lines}


# Byte-level vocabularies write \n, \r, tab and space as Ċ, č, ĉ and Ġ; sentencepiece has ▁ and the names of bytes.
_NEWLINE = "\n\rĊč"
_BLANK = _NEWLINE + "\t ĉĠ▁"
_BYTES = ("<0x0A>", "<0x0D>", "<0x09>", "<0x20>")


class Grammar:
    """A `ChatFormat` in token ids, for the scan; ``images`` are placeholders beside those that the format names."""

    def __init__(self, tokenizer: Any, chat_format: ChatFormat, images: Iterable[int] = ()) -> None:
        encoder, form = Encoder(tokenizer), chat_format
        self.format = form
        events = _events(form)
        self.events: Sequences[Event] = Sequences(
            (sequence, event) for text, event in events.items() for sequence in encoder.forms(text)
        )
        self.blanks, self.newlines = encoder.blanks()
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
        channels = encoder.forms(form.channel) if form.channel else ()
        self.channel = Sequences((sequence, True) for sequence in channels)
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
    """One pass over the ids of a row.

    Attributes:
        kinds: (T,) uint8, ``modal · 7 + semantic``.
        beginnings: Positions at which turns begin, in order.
        place: State of the scan behind the tokens read so far.
    """

    def __init__(self, grammar: Grammar, ids: np.ndarray) -> None:
        self.grammar, self.place = grammar, Place()
        self.ids: list[int] = ids.tolist()
        self.kinds = np.full(len(ids), DELIM, dtype=np.uint8)
        self.beginnings: list[int] = []
        at = 0
        for candidate in np.flatnonzero(look_up(grammar.candidates, ids)).tolist():
            # Candidates inside a header, or a marker of several tokens, are no markers.
            if candidate >= at:
                self._fill(at, candidate)
                at = self._marker(candidate)
        self._fill(at, len(self.ids))
        self.kinds[look_up(grammar.images, ids)] += _IMAGE

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

    def _begin(self, header: int, message: int) -> None:
        """Begins a message whose header is at ``header``; its role may depend on its first token."""
        self.place = Place(self.place.turns, message, None, True, header)
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
        found, _ = self.grammar.openings[place.message].match(self.ids, at)
        self._settle_message(place.message if found is None else found)

    def _marker(self, at: int) -> int:
        """Reads the marker, or the text, at a candidate; returns the position after it."""
        event, length = self.grammar.events.match(self.ids, at)
        if event is None:
            self._fill(at, at + 1)
            return at + 1
        end = at + length
        if event.start:
            return self._header(at, end)
        if event.message is not None:
            self._close(at)
            self._begin(at, event.message)
        elif event.end:
            self._close(at)
            self.place = self.place._replace(scaffold=True)
        elif event.delim or event.header_end or self._bracket(event, at):
            self.place = self.place._replace(scaffold=True)
        else:
            self._fill(at, end)
        return end

    def _close(self, at: int) -> None:
        """Ends the present message here."""
        self._decide(at)
        self.place = Place(self.place.turns)

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
        self._close(at)
        ids, grammar = self.ids, self.grammar
        if begin == len(ids):
            self.place = self.place._replace(scaffold=True)
            return begin
        role, length = grammar.roles.match(ids, begin)
        other = SEMANTIC.index(grammar.format.other_role)
        message = other if role is None else role
        if grammar.format.header_end == "\n":
            self._begin(at, message)
            return begin + length
        end = self._header_end(begin)
        if end is None:
            # Headers that are too long, or broken by another marker, have no role.
            self._begin(at, other)
            return begin
        if end < 0:
            self.place = self.place._replace(scaffold=True)
            return len(ids)
        if message == ASSISTANT:
            message = self._channel(begin, end)
        self._begin(at, message)
        return end + grammar.events.match(ids, end)[1]

    def _header_end(self, begin: int) -> int | None:
        """Position of the marker that ends a header; -1 if the ids end before it, None if there is none."""
        ids = self.ids
        for at in range(begin, min(begin + _HEADER_LIMIT, len(ids))):
            event, _ = self.grammar.events.match(ids, at)
            if event is not None and event.header_end:
                return at
            if event is not None and (event.start or event.end or event.message is not None):
                return None
        return -1 if begin + _HEADER_LIMIT > len(ids) else None

    def _channel(self, begin: int, end: int) -> int:
        """Semantic of an assistant's message by the rest of its header."""
        header, grammar = self.ids[begin:end], self.grammar
        if any(grammar.recipient.match(header, at)[0] for at in range(len(header))):
            return TOOL_CALL
        for at in range(len(header)):
            found, length = grammar.channel.match(header, at)
            if found and at + length < len(header):
                name, _ = grammar.channels.match(header, at + length)
                return ASSISTANT if name is None else name
        return ASSISTANT


def placeholders(source: Any, kinds: Iterable[str] = ("image", "video")) -> list[int]:
    """Ids of images and of video frames in a model's prompts, as its config or processor says."""
    names = [f"{kind}_token_{what}" for kind in kinds for what in ("id", "index")]
    found = {getattr(source, name, None) for name in names}
    return sorted(x for x in found if isinstance(x, int))


class Tagger:
    """Gives every token of a prompt a tag ``temporal|modal|semantic`` (TriAxialKV, section 3.1 and Table 1).

    A turn runs from one user message up to the next; the last is ``current``, those before it ``turn_m1``, ``turn_m2``
    and ``older``. Tokens before the first turn are ``older``, so that the tags of a shared system prompt never
    change. Tool results never begin a turn, under any role. An answer before any user message
    begins one: its question was cut off. A header at the end of the ids whose message may still turn out to be a tool
    result, as it has no token yet, belongs to the turn before it.

    Roles give ``inst``, ``user``, ``assistant`` and ``obs``; brackets give ``reasoning`` and ``tool_call``. Markers,
    headers, the newlines right after them and the white space between messages are ``delim``. Text outside any message,
    such as a prompt that begins in the middle of one, is ``inst``. Placeholders of images and of video frames are
    ``image``, with the semantic of the message they stand in: those that the format names, and those of the model's
    config.

    Limits of the ids: markers that a user types are markers if the tokenizer makes them so. Inside a user's or
    the system's message this is harmless for brackets, which count in an assistant's message only, but ends of messages
    and headers count everywhere, and so does ``<tool_response>`` at the beginning of a user's message. Formats without
    a system role (Gemma, Llama 3 with tools, Mistral before v7) write instructions into a user message, where they are
    ``user``. Bare JSON calls (Llama 3) are known by their first key alone.

    Args:
        grammar: Markers in token ids; None for no chat format: all is ``current|text|user``, and
            ``current|image|user`` at placeholders.
        images: Placeholders of images, used without a grammar.
    """

    def __init__(self, grammar: Grammar | None, images: Iterable[int] = ()) -> None:
        self.grammar, self.images = grammar, tuple(images)

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, chat_format: ChatFormat | None = None, config: Any = None) -> Tagger:
        """Tagger of a tokenizer's chat template; without a template, all tags are ``current|text|user``.

        Args:
            tokenizer: A Transformers tokenizer, or a processor that holds one.
            chat_format: Format, e.g. one of `FORMATS`, in place of the one that the template is recognized as.
            config: Config of the model, which names the placeholders of images and videos (``image_token_id``); a
                processor names them too.

        Raises:
            ValueError: No known format fits the chat template.
        """
        processor, template = tokenizer, getattr(tokenizer, "chat_template", None)
        tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
        template = template or getattr(tokenizer, "chat_template", None)
        if chat_format is None and template:
            # Templates of some tokenizers are several by name, e.g. one for tools.
            text = template if isinstance(template, str) else "\n".join(template.values())
            chat_format = find_format(text, tokenizer.get_added_vocab())
        # Processors give the unknown token's id for a placeholder that their tokenizer does not have.
        named = set(placeholders(processor)) - {getattr(tokenizer, "unk_token_id", None)}
        images = sorted({*placeholders(config), *named})
        grammar = None if chat_format is None else Grammar(tokenizer, chat_format, images)
        return cls(grammar, images)

    def tag(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Tags of a batch of prompts: (B, T) uint8 numbers on the CPU, see `TAGS`.

        Args:
            input_ids: (B, T) token ids, on any device.
            attention_mask: (B, T), 0 at padding; None for none.
        """
        ids = input_ids.cpu().numpy().astype(np.int64)
        real = np.ones(ids.shape, dtype=bool) if attention_mask is None else attention_mask.cpu().numpy() != 0
        tags = np.full(ids.shape, PAD, dtype=np.uint8)
        for own, row, which in zip(tags, ids, real, strict=True):
            own[which] = self._tag_row(row[which])
        return torch.from_numpy(tags)

    def _tag_row(self, ids: np.ndarray) -> np.ndarray:
        """Tags (T,) of a row without padding."""
        if self.grammar is None:
            image, text = (parse_tag(f"current|{modal}|user") for modal in ("image", "text"))
            return np.where(np.isin(ids, self.images), image, text).astype(np.uint8)
        scan = Scan(self.grammar, ids)
        turns = np.searchsorted(np.array(scan.beginnings, dtype=np.int64), np.arange(len(ids)), "right")
        temporal = np.where(turns == 0, 0, np.maximum(len(TEMPORAL) - 1 - (len(scan.beginnings) - turns), 0))
        return (temporal * KINDS + scan.kinds).astype(np.uint8)
