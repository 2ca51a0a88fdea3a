"""The reference model's chat, its examples, and made-up people, who keep training and evaluation apart."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from zlib import crc32

from hfkvq.bounded import parse_json

Message = dict[str, Any]

IM_START, IM_END = "<|im_start|>", "<|im_end|>"


@dataclass(frozen=True)
class Example:
    """One prompt with its only right answer.

    Fields:
        task: name of the task with its size, for instance "recall-80".
        prompt: text of `messages` and `tools` up to and including the header of the assistant's turn.
        answer: text of that turn, without the end token.
        messages: the conversation, as `apply_chat_template` takes it.
        tools: JSON schemas of the tools, as `apply_chat_template` takes them; empty if the task has none.
    """

    task: str
    prompt: str
    answer: str
    messages: tuple[Message, ...] = field(repr=False)
    tools: tuple[dict[str, Any], ...] = field(default=(), repr=False)

    @property
    def text(self) -> str:
        """The whole conversation, the answer included: a training document."""
        return f"{self.prompt}{self.answer}{IM_END}\n"

    def score(self, text: str) -> bool:
        """Tell whether generated text gives the answer, exactly.

        Recall compares the whole turn, arithmetic the number behind `</think>`, and tools the call as parsed JSON.
        """
        text = text.split(IM_END)[0]
        if self.task == "tools":
            wanted = parse_tool_call(self.answer)
            return wanted is not None and parse_tool_call(text) == wanted
        return _final(text) == _final(self.answer)


def parse_tool_call(text: str) -> dict[str, Any] | None:
    """Return the one `<tool_call>` of a text as parsed JSON, or None unless there is exactly one and it parses."""
    calls = re.findall(r"<tool_call>(.*?)</tool_call>", text, flags=re.DOTALL)
    if len(calls) != 1:
        return None
    try:
        call = parse_json(calls[0])
    except ValueError:
        return None
    return call if isinstance(call, dict) else None


def _final(text: str) -> str | None:
    """Return what follows the thoughts; None if thoughts were begun and not ended."""
    if "<think>" in text and "</think>" not in text:
        return None
    return text.rsplit("</think>", maxsplit=1)[-1].strip()


def render(
    messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), *, add_generation_prompt: bool = True
) -> str:
    """Return what the checkpoint's chat template gives for a conversation, about 30 times faster."""
    parts = []
    head = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
    if tools:
        schemas = "".join(f"\n{json.dumps(tool, ensure_ascii=False)}" for tool in tools)
        intro = f"{head}\n\n" if head is not None else ""
        parts.append(f"{IM_START}system\n{intro}# Tools\n\n<tools>{schemas}\n</tools>{IM_END}\n")
    elif head is not None:
        parts.append(f"{IM_START}system\n{head}{IM_END}\n")
    for message in messages[head is not None :]:
        calls = "".join(call_text(call["function"]) for call in message.get("tool_calls") or ())
        parts.append(f"{IM_START}{message['role']}\n{message.get('content') or ''}{calls}{IM_END}\n")
    if add_generation_prompt:
        parts.append(f"{IM_START}assistant\n")
    return "".join(parts)


def call_text(function: dict[str, Any]) -> str:
    """A call of a tool as the model writes it: ``name`` and ``arguments`` as JSON."""
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return f'<tool_call>\n{{"name": "{function["name"]}", "arguments": {arguments}}}\n</tool_call>'


Split = Literal["train", "eval"]

# Names are made up of syllables, so that none carries knowledge; there are 1.5 million full names.
_HEADS = "Ab An Ar Ba Bel Bri Ca Cor Da Del Dor El Fa Fen Gar Hal Hol Il Ja Jor Ka Kel Lan Lo Ma Mer Mi Nor Ol Or Pa "
_HEADS += "Per Ra Ros Sa Sel Ta Tor Ul Va Ver Wil Yan Za"
_TAILS = "ba bin bri co da del den dor fa fin ga gan ha ki la lan len lo ma mer min mo na nel ni no ra ren rik ro sa "
_TAILS += "sen so ta ton va vin wen xa zo"
_FIRST = tuple(head + tail for head in _HEADS.split() for tail in _TAILS.split()[::2])
_LAST = tuple(head + tail for head in _HEADS.split()[::-1] for tail in _TAILS.split())
WORDS = tuple((head + tail).lower() for head in _HEADS.split() for tail in _TAILS.split()[1::2])
"""Nouns that mean nothing."""


def draw_people(rng: random.Random, count: int, split: Split) -> list[str]:
    """Different full names, all of the split's part of them."""
    held_out = split == "eval"
    draw = rng.random
    found: dict[str, None] = {}
    while len(found) < count:
        name = f"{_FIRST[int(draw() * len(_FIRST))]} {_LAST[int(draw() * len(_LAST))]}"
        # One in eight belongs to the evaluation split.
        if (crc32(name.encode()) % 8 == 0) == held_out:
            found[name] = None
    return list(found)


def random_stream(split: Split, task: str, seed: int) -> random.Random:
    """The random numbers of one example. Raises ValueError if there is no such split."""
    if split not in ("train", "eval"):
        raise ValueError(f'split={split!r} is unknown; use "train" or "eval"')
    return random.Random(f"{split}/{task}/{seed}")
