"""Output of ``hfkvq tag``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import Console

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
