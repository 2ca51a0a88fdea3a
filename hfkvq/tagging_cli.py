"""Input and output of ``hfkvq tag``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from hfkvq.bounded import json_lines, parse_json, read_bounded
from hfkvq.terminal import fail

if TYPE_CHECKING:
    from rich.console import Console

    from hfkvq.tuning.conversations import Conversation as ShownConversation

# The semantic axis is the colour, the temporal axis how strong it is.
_COLOURS = {
    "inst": "magenta",
    "user": "green",
    "assistant": "cyan",
    "reasoning": "yellow",
    "tool_call": "blue",
    "obs": "red",
    "delim": "bright_black",
}
_STRENGTHS = {"older": "dim", "turn_m2": "dim", "turn_m1": "", "current": "bold"}


@dataclass
class Conversation:
    """Messages and tool schemas, as a chat template takes them."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None


@dataclass
class Tagged:
    """A conversation's tokens: ids, tag names, and the text of each run of equal tags."""

    ids: list[int]
    tags: list[str]
    runs: list[tuple[str, str]] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        """Tokens by tag, as they first occur."""
        counts = dict.fromkeys(self.tags, 0)
        for tag in self.tags:
            counts[tag] += 1
        return counts


def tagged(ids: Sequence[int], tags: Sequence[str], tokenizer: Any) -> Tagged:
    """Ids with their tags, and the text between changes of the tag."""
    found = Tagged(list(ids), list(tags))
    begin = 0
    for tag, run in groupby(tags):
        end = begin + len(list(run))
        found.runs.append((tag, tokenizer.decode(list(ids[begin:end]), skip_special_tokens=False)))
        begin = end
    return found


def read_conversations(path: Path, tools_path: Path | None) -> list[Conversation]:
    """Conversations of a file: one message a line, or one conversation a line, or one JSON document of either.

    Ends the command where the file holds something else.
    """
    tools = None if tools_path is None else [_tool(given) for given in _read_json("tools", tools_path)]
    found, loose = [], []
    for given in _read_json("messages", path):
        if isinstance(given, dict) and "role" in given:
            loose.append(given)
        elif isinstance(given, dict) and isinstance(given.get("messages"), list):
            found.append(Conversation(given["messages"], given.get("tools") or tools))
        elif isinstance(given, list):
            found.append(Conversation(given, tools))
        else:
            fail(
                f"messages: {path} holds {str(given)[:60]!r}, allowed messages, lists of them, or {{'messages': ...}}."
            )
    if loose and found:
        fail(f"messages: {path} mixes messages and conversations; write only one kind, one per line.")
    return found or [Conversation(loose, tools)]


def _read_json(option: str, path: Path) -> Iterator[Any]:
    """Entries of a file of JSON or of lines of it."""
    try:
        text = read_bounded(path)
    except (OSError, ValueError) as error:
        fail(f"{option}: {path} cannot be read: {error}")
    try:
        whole = parse_json(text)
    except ValueError:
        try:
            whole = [line for _, line in json_lines(text)]
        except ValueError as error:
            fail(f"{option}: {path}: {error}.")
    yield from whole if isinstance(whole, list) else [whole]


def with_images(given: Conversation) -> ShownConversation | None:
    """The conversation for a processor if it shows images or videos, else None.

    Raises:
        ValueError: it is no conversation.
    """
    from hfkvq.tuning.conversations import parse_conversation

    if not any(isinstance(message, dict) and isinstance(message.get("content"), list) for message in given.messages):
        return None
    found = parse_conversation({"messages": given.messages, "tools": given.tools})
    return found if found.images else None


def token_ids(given: Conversation, tokenizer: Any, generation_prompt: bool) -> list[int]:
    """Token ids of a conversation; of one with images ``tokenizer`` is the model's processor.

    Raises:
        ValueError: the chat template refuses the messages, or this is no processor, or an image cannot be read.
    """
    from jinja2 import TemplateError

    from hfkvq.tuning.conversations import encode

    shown = with_images(given)
    if shown is not None:
        return encode(shown, tokenizer, generation_prompt)[0]
    options = {"tools": given.tools, "tokenize": False, "add_generation_prompt": generation_prompt}
    try:
        text = tokenizer.apply_chat_template(given.messages, **options)
    except (TemplateError, TypeError, KeyError, ValueError) as error:
        raise ValueError(f"messages: the chat template refuses them: {error}") from error
    ids: list[int] = getattr(tokenizer, "tokenizer", tokenizer).encode(str(text), add_special_tokens=False)
    return ids


def _tool(given: Any) -> dict[str, Any]:
    """A schema as templates take it; benchmarks often store the inner part alone."""
    if not isinstance(given, dict):
        fail(f"tools: got {str(given)[:60]!r}, allowed schemas of functions, which are JSON objects.")
    return given if "function" in given else {"type": "function", "function": given}


def style_of(tag: str) -> str:
    """Rich style of a tag."""
    parts = tag.split("|")
    if len(parts) == 1:
        return "dim"
    temporal, modal, semantic = parts
    return " ".join(part for part in (_STRENGTHS[temporal], _COLOURS[semantic], "reverse" * (modal == "image")) if part)


def print_tagged(console: Console, given: Tagged) -> None:
    """The conversation coloured by tag, then the legend; without colours, one line for each run of equal tags."""
    if console.color_system is None:
        for tag, text in given.runs:
            console.print(Text(f"{tag:<24} {json.dumps(text, ensure_ascii=False)}"), soft_wrap=True)
    else:
        console.print(Text.assemble(*((text, style_of(tag)) for tag, text in given.runs)), soft_wrap=True)
    console.print()
    console.print(legend(given))


def legend(given: Tagged) -> Table:
    """Tokens of each tag, oldest first."""
    from hfkvq.caches.tags import TAGS

    table = Table("tag", box=None, pad_edge=False)
    table.add_column("tokens", justify="right")
    table.add_column("share", justify="right")
    for tag, count in sorted(given.counts.items(), key=lambda entry: TAGS.index(entry[0])):
        table.add_row(Text(tag, style_of(tag)), str(count), f"{100 * count / len(given.ids):.1f} %")
    table.add_row("all", str(len(given.ids)), "")
    return table


def as_json(tokenizer: str, chat_format: str | None, conversations: Sequence[Tagged]) -> dict[str, Any]:
    """Everything, for other programs: ``ids`` and ``tags`` have one entry for each token."""
    return {
        "tokenizer": tokenizer,
        "format": chat_format,
        "conversations": [{"ids": one.ids, "tags": one.tags, "counts": one.counts} for one in conversations],
    }
