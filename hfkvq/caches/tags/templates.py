"""Chat formats: the markers of a chat template, and the semantic of the text between them."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hfkvq.bounded import DAMAGE, load_json, read_bounded

from .axes import SEMANTIC


@dataclass(frozen=True)
class Span:
    """A bracketed part of a message.

    Attributes:
        open: Marker at its beginning.
        close: Marker at its end; empty for "the rest of the message".
        semantic: Semantic of the text inside. Markers inside it, other than its own closing one, are text.
        within: Semantics of the messages it may stand in. Elsewhere its markers are text: a system prompt may explain
            ``<tool_call>`` and a user may type it.
    """

    open: str
    close: str
    semantic: str
    within: tuple[str, ...] = ("assistant",)


@dataclass(frozen=True)
class Opening:
    """A message whose beginning gives it another semantic than its header.

    Attributes:
        role: Semantic that the header gives the message.
        text: Text at its beginning, newlines aside.
        semantic: Semantic of the message then.
    """

    role: str
    text: str
    semantic: str


@dataclass(frozen=True)
class ChatFormat:
    r"""Markers that a chat template writes around and inside messages.

    A message begins either with ``start``, a role written out as text and ``header_end``, or with one of ``markers``;
    it ends with one of ``ends`` or where the next begins. A string need not be one token of the tokenizer.

    Attributes:
        name: Name, for error messages and for choosing it.
        detect: Strings of a chat template of this format; all must occur in it.
        start: Marker of a header whose role follows as text, e.g. ``<|im_start|>``; empty if there is none.
        header_end: Marker at the end of this header; ``\n`` if it ends with its line.
        roles: Semantic by role name, as written in the header.
        other_role: Semantic of a role that ``roles`` does not name.
        channel: Marker before the name of a channel inside the header; empty if there are none.
        channels: Semantic of an assistant's message by channel name.
        recipient: Text inside an assistant's header that makes the message a tool call, e.g. `` to=``.
        markers: Headers that are complete in themselves, with the semantic of their message, e.g. ``<|user|>``.
        ends: Markers that end a message.
        spans: Brackets inside messages.
        openings: Messages whose beginning gives them another semantic.
        delims: Markers that are ``delim`` anywhere and change nothing, e.g. the token that begins a text.
        images: Placeholders of images and of video frames; those the tokenizer does not know are passed over.

    Raises:
        ValueError: An unknown semantic, no marker that begins a message, or a string in place of several.
    """

    name: str
    detect: tuple[str, ...]
    start: str = ""
    header_end: str = "\n"
    roles: Mapping[str, str] = field(default_factory=dict)
    other_role: str = "inst"
    channel: str = ""
    channels: Mapping[str, str] = field(default_factory=dict)
    recipient: str = ""
    markers: Mapping[str, str] = field(default_factory=dict)
    ends: tuple[str, ...] = ()
    spans: tuple[Span, ...] = ()
    openings: tuple[Opening, ...] = ()
    delims: tuple[str, ...] = ()
    images: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.start and not self.markers:
            raise ValueError(f"chat format {self.name!r}: nothing begins a message; give start with roles, or markers.")
        if self.start and not self.roles:
            raise ValueError(f"chat format {self.name!r}: roles is empty; name the roles that follow {self.start!r}.")
        for name in ("detect", "ends", "delims", "images"):
            # Strings would be taken for their letters.
            if isinstance(value := getattr(self, name), str):
                raise ValueError(f"chat format {self.name!r}: got {name} = {value!r}, allowed a tuple of strings.")
        given = [self.other_role, *self.roles.values(), *self.channels.values(), *self.markers.values()]
        given += [part.semantic for part in (*self.spans, *self.openings)] + [part.role for part in self.openings]
        given += [semantic for span in self.spans for semantic in span.within]
        for semantic in given:
            if semantic not in SEMANTIC:
                allowed = ", ".join(SEMANTIC)
                raise ValueError(f"chat format {self.name!r}: got semantic {semantic!r}, allowed {allowed}.")

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> ChatFormat:
        """Makes a format of plain data, as JSON or TOML give it: lists for tuples, a mapping for a span or an opening.

        Raises:
            ValueError: A field is unknown or missing, or has a value that is not allowed.
        """
        known = {part.name for part in fields(cls)}
        if unknown := sorted(set(given) - known):
            raise ValueError(f"chat format: got {', '.join(unknown)}, allowed {', '.join(sorted(known))}.")
        values = _tuples(given)
        try:
            for name, part in (("spans", Span), ("openings", Opening)):
                values[name] = tuple(part(**_tuples(item)) for item in values.get(name, ()))
            return cls(**values)
        except DAMAGE as error:
            raise ValueError(f"chat format: {error}") from error

    @classmethod
    def from_file(cls, path: str | Path) -> ChatFormat:
        """Reads a ``.json`` file, or with Python 3.11 or newer a ``.toml`` file.

        Raises:
            ValueError: The file holds no chat format, or ends in neither.
            ImportError: This Python reads no TOML.
        """
        path = Path(path)
        if path.suffix == ".json":
            given = load_json(path)
            if not isinstance(given, dict):
                raise ValueError(f"chat format: {path.name} holds a {type(given).__name__}, allowed an object.")
            return cls.from_dict(given)
        if path.suffix == ".toml":
            if importlib.util.find_spec("tomllib") is None:
                raise ImportError(f"chat format: {path.name} needs Python 3.11 or newer; write it as JSON.")
            import tomllib

            try:
                return cls.from_dict(tomllib.loads(read_bounded(path)))
            except RecursionError:
                raise ValueError(f"chat format: {path.name} is nested too deeply.") from None
        raise ValueError(f"chat format: got {path.name}, allowed a file that ends in .json or .toml.")


def _tuples(given: Mapping[str, Any]) -> dict[str, Any]:
    """Lists as tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
