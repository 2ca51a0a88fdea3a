"""Fields of OpenAI's requests: `hfkvq serve` obeys each one, or refuses it by its name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from hfkvq.bounded import parse_json

ENDPOINTS: tuple[str, ...] = ("chat completions", "completions", "responses")
PROMPTS: dict[str, str] = dict(zip(ENDPOINTS, ("messages", "prompt", "input"), strict=True))
"""The field of each endpoint that holds the prompt."""


class RefusedRequest(ValueError):
    """A request that is answered with status 400.

    Attributes:
        field: the field's name, with an index or a key where it has parts.
    """

    def __init__(self, field: str, words: str) -> None:
        super().__init__(f"{field}: {words}")
        self.field = field


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def got(value: Any, allowed: str) -> str:
    """The words "got ..., allowed ..."; of long values the beginning."""
    return f"got {_short(value)}, allowed {allowed}."


class Rule(NamedTuple):
    """Values that a field may have.

    Attributes:
        allowed: in words, for the error and for the table.
        check: raises `RefusedRequest` for any other value, which is given with the field's name.
    """

    allowed: str
    check: Callable[[str, Any], None]


def _rule(allowed: str, holds: Callable[[Any], bool]) -> Rule:
    def check(name: str, value: Any) -> None:
        if not holds(value):
            raise RefusedRequest(name, got(value, allowed))

    return Rule(allowed, check)


def _only(*values: Any) -> Rule:
    """Rule of a field that has no effect with these values, and is not obeyed with others."""
    words = " or ".join(map(json.dumps, values))
    return _rule(f"only {words}", lambda value: any(type(value) is type(one) and value == one for one in values))


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _is_number(value: Any) -> bool:
    return _is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _refuse(name: str, value: Any) -> NoReturn:
    raise RefusedRequest(name, f"got {_short(value)}, which hfkvq serve does not obey; leave it out.")


_TEXT = _rule("a string", lambda value: isinstance(value, str))
_OBJECT = _rule("an object", lambda value: isinstance(value, dict))
_SWITCH = _rule("true or false", _is_bool)
_COUNT = _rule("a whole number from 1 on", lambda value: _is_whole(value) and value >= 1)
_ROLES = ("system", "developer", "user", "assistant", "tool")
_ROLE = _rule(f"one of {', '.join(_ROLES)}", lambda value: isinstance(value, str) and value in _ROLES)
TEXT_PARTS = ("text", "input_text", "output_text")
_PART = _rule(f"one of {', '.join(TEXT_PARTS)}", lambda value: isinstance(value, str) and value in TEXT_PARTS)
_MESSAGE_KEYS = {"role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content", "type", "id", "status"}


def _items(name: str, value: Any, what: str) -> list[tuple[str, dict[str, Any]]]:
    """Objects of a list by their names."""
    if not isinstance(value, list) or not value:
        raise RefusedRequest(name, got(value, f"a list of {what}, one or more"))
    for i, item in enumerate(value):
        _OBJECT.check(f"{name}[{i}]", item)
    return [(f"{name}[{i}]", item) for i, item in enumerate(value)]


def _content(name: str, value: Any) -> None:
    if isinstance(value, str):
        return
    for part, item in _items(name, value, "texts"):
        _PART.check(f"{part}.type", item.get("type"))
        _TEXT.check(f"{part}.text", item.get("text"))


def _arguments(name: str, value: Any) -> None:
    try:
        found = parse_json(value) if isinstance(value, str) else value
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise RefusedRequest(name, got(value, "an object in JSON"))


def _tool_call(name: str, call: dict[str, Any]) -> None:
    function = call.get("function", call)
    _OBJECT.check(f"{name}.function", function)
    _TEXT.check(f"{name}.function.name", function.get("name"))
    _arguments(f"{name}.function.arguments", function.get("arguments"))


def _message(name: str, message: dict[str, Any]) -> None:
    _ROLE.check(f"{name}.role", message.get("role"))
    calls = message.get("tool_calls")
    if calls is None:
        # Transformers takes a list or nothing.
        message.pop("tool_calls", None)
    else:
        for part, call in _items(f"{name}.tool_calls", calls, "calls"):
            _tool_call(part, call)
    if message.get("content") is not None:
        _content(f"{name}.content", message["content"])
    elif calls is None:
        raise RefusedRequest(f"{name}.content", got(None, "a string or a list of texts"))
    for key in ("tool_call_id", "name", "reasoning_content"):
        if message.get(key) is not None:
            _TEXT.check(f"{name}.{key}", message[key])
    for key in message.keys() - _MESSAGE_KEYS:
        # Answers that are sent back have empty ones.
        if message[key] not in (None, "", [], {}):
            _refuse(f"{name}.{key}", message[key])


def _messages(name: str, value: Any) -> None:
    for part, message in _items(name, value, "messages"):
        _message(part, message)


def _input(name: str, value: Any) -> None:
    if isinstance(value, str):
        if not value:
            raise RefusedRequest(name, got(value, "a text, or a list of items, one or more"))
        return
    items = _items(name, value, "items")
    if "role" not in items[0][1] and items[0][1].get("type") in TEXT_PARTS:
        return _content(name, value)
    for part, item in items:
        kind = item.get("type", "message")
        if kind == "function_call":
            _TEXT.check(f"{part}.call_id", item.get("call_id"))
            _tool_call(part, item)
        elif kind == "function_call_output":
            _TEXT.check(f"{part}.call_id", item.get("call_id"))
            _TEXT.check(f"{part}.output", item.get("output"))
        elif kind == "reasoning":
            for text, each in _items(f"{part}.content", item["content"], "texts") if item.get("content") else ():
                _TEXT.check(f"{text}.text", each.get("text"))
        elif kind == "message":
            _message(part, item)
        else:
            raise RefusedRequest(f"{part}.type", got(kind, "message, function_call, function_call_output or reasoning"))


def _tools(name: str, value: Any) -> None:
    if value == []:
        return
    for part, tool in _items(name, value, "tools"):
        _only("function").check(f"{part}.type", tool.get("type"))
        function = tool.get("function", tool)
        _OBJECT.check(f"{part}.function", function)
        _TEXT.check(f"{part}.function.name", function.get("name"))
        if function.get("parameters") is not None:
            _OBJECT.check(f"{part}.function.parameters", function["parameters"])


def _stop(name: str, value: Any) -> None:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or len(texts) > 4 or not all(isinstance(one, str) and one for one in texts):
        raise RefusedRequest(name, got(value, "a text, or up to 4, none of them empty"))


def _generation_config(name: str, value: Any) -> None:
    try:
        given = parse_json(value) if isinstance(value, str) else None
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise RefusedRequest(name, got(value, "an object in JSON, as a string"))
    for key, each in given.items():
        if key == "max_new_tokens":
            _COUNT.check(f"{name}.{key}", each)
        elif key != "eos_token_id":
            _refuse(f"{name}.{key}", each)
        elif not all(map(_is_whole, each if isinstance(each, list) else [each])):
            raise RefusedRequest(f"{name}.{key}", got(each, "a token or a list of tokens"))


def _template(name: str, value: Any) -> None:
    _OBJECT.check(name, value)
    for key in value:
        # Arguments that the server itself gives, or that change what the template returns.
        if key in _TEMPLATE_ARGUMENTS:
            _refuse(f"{name}.{key}", value[key])


_TEMPLATE_ARGUMENTS = set(
    """conversation messages tools documents chat_template add_generation_prompt continue_final_message tokenize padding
    truncation max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs
    load_audio_from_video""".split()
)

_SAMPLING = _rule("a number from 0 to 2", lambda value: _is_number(value) and 0 <= value <= 2)
_SHARE = _rule("a number from 0 to 1", lambda value: _is_number(value) and 0 <= value <= 1)
_SEED = _rule("a whole number", _is_whole)._replace(allowed="a whole number, with temperature 0")
_PENALTY = _rule("only 0", lambda value: _is_number(value) and value == 0)
_NONE = _only({})
_STREAM_OPTIONS = _rule(
    "include_usage, which comes in the last chunk",
    lambda value: isinstance(value, dict) and set(value) <= {"include_usage"} and all(map(_is_bool, value.values())),
)

_LABEL = _rule("a string, which changes nothing", lambda value: isinstance(value, str))
_TIER = _only("auto", "default")

_ = None
FIELDS: dict[str, tuple[Rule | None, ...]] = {
    "model": (_rule("the served model's name", lambda _: True),) * 3,
    "messages": (Rule("messages of text and tool calls", _messages), _, _),
    "prompt": (_, _rule("a text", lambda value: isinstance(value, str) and value != ""), _),
    "input": (_, _, Rule("a text, or items of text and function calls", _input)),
    "instructions": (_, _, _TEXT),
    "max_completion_tokens": (_COUNT, _, _),
    "max_tokens": (_COUNT, _COUNT, _),
    "max_output_tokens": (_, _, _COUNT),
    "temperature": (_SAMPLING,) * 3,
    "top_p": (_SHARE,) * 3,
    "seed": (_SEED,) * 3,
    "stop": (Rule("a text, or up to 4", _stop), Rule("a text, or up to 4", _stop), _),
    "stream": (_SWITCH,) * 3,
    "stream_options": (_STREAM_OPTIONS, _STREAM_OPTIONS, _NONE),
    "tools": (Rule("functions, if the chat template takes them", _tools), _, Rule("functions", _tools)),
    "tool_choice": (_only("auto"), _, _only("auto")),
    "parallel_tool_calls": (_only(True), _, _only(True)),
    "chat_template_kwargs": (Rule("an object, for the chat template", _template), _, _),
    "generation_config": (Rule("JSON with max_new_tokens, eos_token_id", _generation_config),) * 3,
    "user": (_LABEL,) * 3,
    "safety_identifier": (_LABEL, _, _LABEL),
    "prompt_cache_key": (_LABEL, _, _LABEL),
    "n": (_only(1), _only(1), _),
    "best_of": (_, _only(1), _),
    "echo": (_, _only(False), _),
    "frequency_penalty": (_PENALTY, _PENALTY, _),
    "presence_penalty": (_PENALTY, _PENALTY, _),
    "logit_bias": (_NONE, _NONE, _),
    "logprobs": (_only(False), _, _),
    "top_logprobs": (_, _, _only(0)),
    "response_format": (_only({"type": "text"}), _, _),
    "text": (_, _, _only({"format": {"type": "text"}}, {})),
    "modalities": (_only(["text"]), _, _),
    "metadata": (_NONE, _, _NONE),
    "store": (_only(False), _, _only(False)),
    "service_tier": (_TIER, _, _TIER),
    "truncation": (_, _, _only("disabled")),
    "background": (_, _, _only(False)),
    "include": (_, _, _only([])),
    "prompt_cache_retention": (_only("in_memory"), _, _only("in_memory")),
}
"""Rules of fields for `ENDPOINTS`; None where an endpoint has no such field, or it is not obeyed."""


def check(endpoint: str, body: dict[str, Any], model: str) -> None:
    """Refuses a request with any value that would not be obeyed; null is as if a field were left out.

    Args:
        endpoint: one of `ENDPOINTS`.
        body: of the request; fields that are null are taken out.
        model: name of the served model.

    Raises:
        RefusedRequest: with the field's name.
    """
    at, prompt = ENDPOINTS.index(endpoint), PROMPTS[endpoint]
    for name, value in list(body.items()):
        if value is None:
            del body[name]
            continue
        rule = FIELDS.get(name, (None,) * 3)[at]
        if rule is None:
            _refuse(name, value)
        try:
            # No tokenizer takes halves of surrogate pairs.
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except (UnicodeEncodeError, RecursionError):
            raise RefusedRequest(name, "holds text that is not valid Unicode, or is nested too deeply.") from None
        rule.check(name, value)
    if prompt not in body:
        raise RefusedRequest(prompt, f"is missing, allowed {FIELDS[prompt][at].allowed}.")  # type: ignore[union-attr]
    if body.get("model", model) != model:
        raise RefusedRequest("model", got(body["model"], f"the served model {model!r}"))
    if "max_tokens" in body and body.get("max_completion_tokens", body["max_tokens"]) != body["max_tokens"]:
        raise RefusedRequest("max_tokens", got(body["max_tokens"], "the same as max_completion_tokens; leave one out"))
