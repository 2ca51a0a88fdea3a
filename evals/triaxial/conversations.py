"""Conversations to calibrate on: read from a file, and turned into the requests that a model would be sent."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from hfkvq.bounded import DAMAGE, json_lines, load_json, parse_json, read_bounded
from hfkvq.caches.tags import FORMATS, ChatFormat, Opening, Span, placeholders


@dataclass(frozen=True)
class Conversation:
    """Messages and tools of a conversation.

    Attributes:
        messages: as chat templates take them, each with at least "role".
        tools: JSON schemas of functions, or None.
    """

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] | None = None

    @property
    def images(self) -> int:
        """Number of images and videos in the messages."""
        contents = [message.get("content") for message in self.messages]
        parts = [part for content in contents if isinstance(content, list) for part in content]
        return sum(isinstance(part, Mapping) and part.get("type") in ("image", "video") for part in parts)


@dataclass(frozen=True)
class Request:
    """Prompt that a model is sent before an answer.

    Attributes:
        first_new: tokens that came in earlier requests of the same conversation, and would be in the cache.
        inputs: other inputs of the model by name: pixels of images, and their positions.
    """

    ids: tuple[int, ...]
    first_new: int
    inputs: Mapping[str, Any] = field(default_factory=dict, compare=False)


def load_format(path: str | Path) -> ChatFormat:
    """A chat format by name, or from a JSON file, where lists are tuples, and mappings spans and openings."""
    if not Path(path).suffix:
        if str(path) not in FORMATS:
            raise ValueError(f"chat format: got {str(path)!r}, allowed {', '.join(FORMATS)} or a .json file.")
        return FORMATS[str(path)]
    given = load_json(path)
    if not isinstance(given, dict):
        raise ValueError(f"chat format: {Path(path).name} holds a {type(given).__name__}, allowed an object.")
    known = {part.name for part in fields(ChatFormat)}
    if unknown := sorted(set(given) - known):
        raise ValueError(f"chat format: got {', '.join(unknown)}, allowed {', '.join(sorted(known))}.")
    values = _tuples(given)
    try:
        for name, part in (("spans", Span), ("openings", Opening)):
            values[name] = tuple(part(**_tuples(item)) for item in values.get(name, ()))
        return ChatFormat(**values)
    except DAMAGE as error:
        raise ValueError(f"chat format: {error}") from error


def _tuples(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


def load_conversations(path: str | Path, name: str = "data") -> list[Conversation]:
    """Reads JSON Lines: ``{"messages": [...], "tools": [...]}``, or a bare list of messages.

    Arguments of tool calls that are JSON in a string are parsed, as templates want it.
    Images stand in a message's content, as ``{"type": "image", "path": ...}`` (or "url", or "base64") or as OpenAI's
    ``{"type": "image_url", "image_url": {"url": ...}}``.

    Args:
        name: of the option, for errors.

    Raises:
        ValueError: there is no such file, a line is no conversation (its number is told), or there are none.
    """
    try:
        text = read_bounded(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{name}: {path} cannot be read ({error}).") from None
    try:
        found = [_conversation(number, line) for number, line in json_lines(text)]
    except ValueError as error:
        raise ValueError(f"{name}: {path}: {error}.") from None
    if not found:
        raise ValueError(f"{name}: {path} holds no conversation; write one JSON object with its messages per line.")
    return found


def _conversation(number: int, given: Any) -> Conversation:
    try:
        return parse_conversation(given)
    except ValueError as error:
        raise ValueError(f"line {number}: {error}") from None


def parse_conversation(given: Any) -> Conversation:
    """A conversation from plain data; see `load_conversations`.

    Raises:
        ValueError: it has no messages, or one without a role, or tools that are no objects.
    """
    tools = None
    messages = given
    if isinstance(given, Mapping):
        messages, tools = given.get("messages"), given.get("tools")
    if not isinstance(messages, list) or not messages:
        raise ValueError(f'expected {{"messages": [...]}} or a list of messages, got {_short(given)}')
    if tools is not None and not (isinstance(tools, list) and all(isinstance(x, Mapping) for x in tools)):
        raise ValueError(f"expected tools that are a list of objects, got {_short(tools)}")
    return Conversation(tuple(_message(x) for x in messages), tuple(tools) if tools else None)


def _message(given: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise ValueError(f"expected a message with a role, got {_short(given)}")
    message = dict(given)
    if not isinstance(message.get("role"), str):
        raise ValueError(f"expected a message with a role, got {_short(given)}")
    if message.get("content") is None:
        message["content"] = ""
    if isinstance(message["content"], list):
        message["content"] = [_part(part) for part in message["content"]]
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        message["tool_calls"] = [_call(call) for call in calls]
    return message


def _part(given: Any) -> Any:
    """A part of a message's content; images as Transformers' processors take them."""
    if not isinstance(given, Mapping) or given.get("type") != "image_url":
        return given
    image = given.get("image_url")
    return {"type": "image", "url": image.get("url") if isinstance(image, Mapping) else image}


def _call(given: Any) -> Any:
    if not isinstance(given, Mapping):
        return given
    call = dict(given)
    function = dict(call["function"]) if isinstance(call.get("function"), Mapping) else None
    for part in (call, function):
        if part is not None and isinstance(part.get("arguments"), str):
            try:
                part["arguments"] = parse_json(part["arguments"])
            except ValueError:
                # Arguments of some agents are no JSON; templates take strings too.
                continue
    return call if function is None else {**call, "function": function}


def _short(thing: Any) -> str:
    text = json.dumps(thing, default=str)
    return text if len(text) < 80 else f"{text[:77]}..."


def data_hash(conversations: Iterable[Conversation]) -> str:
    """Sixteen hex digits of the conversations' content."""

    def plain(thing: Any) -> str:
        # Images in memory are hashed by their pixels: their names in Python change from run to run.
        return hashlib.sha256(thing.tobytes()).hexdigest() if hasattr(thing, "tobytes") else str(thing)

    text = json.dumps([[x.messages, x.tools] for x in conversations], sort_keys=True, default=plain)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def encode(conversation: Conversation, tokenizer: Any, prompt: bool = True) -> tuple[list[int], dict[str, Any]]:
    """Token ids of a conversation, and other inputs of the model: pixels of images, and their positions.

    Args:
        tokenizer: with a chat template; for images the model's processor, which loads them, and knows how many tokens
            each takes.
        prompt: end with the header of the next answer.

    Raises:
        ValueError: the chat template does not take the messages, or they show images and this is no processor, or
            one that makes no pixels of them.
    """
    shown = conversation.images
    if shown and getattr(tokenizer, "image_processor", None) is None:
        raise ValueError(
            f"tokenizer: got a {type(tokenizer).__name__}, which makes no tokens from a conversation's images; "
            "pass the model's processor, AutoProcessor.from_pretrained(...)."
        )
    # Messages are copied, since processors write into them.
    messages = copy.deepcopy(list(conversation.messages))
    options = {
        "tools": list(conversation.tools) if conversation.tools else None,
        "add_generation_prompt": prompt,
        "tokenize": bool(shown),
    }
    try:
        if not shown:
            text = tokenizer.apply_chat_template(messages, **options)
            return getattr(tokenizer, "tokenizer", tokenizer)(text, add_special_tokens=False).input_ids, {}
        inputs = dict(tokenizer.apply_chat_template(messages, **options, return_dict=True, return_tensors="pt"))
    except Exception as error:
        # Errors of Jinja, files and addresses have many types.
        raise ValueError(f"data: the chat template does not take these messages: {error}") from error
    inputs.pop("attention_mask", None)
    ids = inputs.pop("input_ids")[0]
    if not any(isinstance(x, Tensor) and x.is_floating_point() for x in inputs.values()):
        found = sum(int((ids == token).sum()) for token in placeholders(tokenizer))
        raise ValueError(
            f"data: the conversation shows {shown} images or videos, of which the {type(tokenizer).__name__} made "
            f"{found} placeholders and no pixels; give the processor that belongs to the model, with its chat template."
        )
    return ids.tolist(), inputs


def make_request(conversation: Conversation, tokenizer: Any) -> Request | None:
    """Request before the conversation's last answer; None if there is no answer.

    ``first_new`` is the first token behind the previous answer: a cache kept from turn to turn would not hold it yet.

    Raises:
        ValueError: see `encode`.
    """
    answers = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant" and i]
    if not answers:
        return None
    whole, inputs = encode(replace(conversation, messages=conversation.messages[: answers[-1]]), tokenizer)
    before: list[int] = []
    if len(answers) > 1:
        before, _ = encode(replace(conversation, messages=conversation.messages[: answers[-2] + 1]), tokenizer, False)
    same = next(
        (i for i, (a, b) in enumerate(zip(whole, before, strict=False)) if a != b), min(len(whole), len(before))
    )
    # One token must be new, if only the last.
    return Request(tuple(whole), min(same, len(whole) - 1), inputs)
