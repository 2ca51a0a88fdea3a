"""Function calls in generated text: found, parsed, and compared with BFCL's possible answers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hfkvq.bounded import parse_json

from .boxed import after_thoughts

Call = tuple[str, dict[str, Any]]

_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def parse_calls(text: str) -> list[Call] | None:
    """All calls of an answer, in order; None if one of them is no proper call.

    Three ways of writing are known: ``<tool_call>{"name", "arguments"}</tool_call>`` (ChatML, Qwen, the reference
    model), JSON objects ``{"name", "parameters"}`` with or without a tag in front (Llama), and a JSON list of calls.
    Text around calls does not count.
    """
    text = after_thoughts(text)
    tagged = _TAGGED.findall(text)
    found = [_decode(part) for part in tagged] if tagged else _bare(text)
    calls: list[Call] = []
    for item in found:
        for each in item if isinstance(item, list) else [item]:
            call = _as_call(each)
            if call is None:
                return None
            calls.append(call)
    return calls


def _decode(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError:
        return None


def _bare(text: str) -> list[Any]:
    """JSON objects in a text that name a function, and lists of them; other braces are prose."""
    decoder, found, at = json.JSONDecoder(), [], 0
    while (start := next((i for i in range(at, len(text)) if text[i] in "[{"), None)) is not None:
        try:
            value, at = decoder.raw_decode(text, start)
        except json.JSONDecodeError:
            at = start + 1
            continue
        first = value[0] if isinstance(value, list) and value else value
        if isinstance(first, dict) and ("name" in first or "function" in first):
            found.append(value)
    return found


def _as_call(value: Any) -> Call | None:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _decode(arguments)
    return (value["name"], arguments) if isinstance(arguments, dict) else None


def matches(call: Call, expected: Mapping[str, Mapping[str, Sequence[Any]]], schema: Mapping[str, Any]) -> bool:
    """Whether a call is one that BFCL allows.

    Args:
        call: name and arguments.
        expected: ``{name: {parameter: possible values}}``; "" among the values says it may be left out.
        schema: JSON schema of the function's parameters, in BFCL's dialect.
    """
    ((name, possible),) = expected.items()
    got, arguments = call
    if plain_name(got) != plain_name(name):
        return False
    properties = schema.get("properties", {})
    if any(needed not in arguments for needed in schema.get("required", ())):
        return False
    if any(parameter not in possible or parameter not in properties for parameter in arguments):
        return False
    if any(parameter not in arguments and "" not in values for parameter, values in possible.items()):
        return False
    return all(
        _has_type(value, properties[parameter].get("type")) and _among(value, possible[parameter])
        for parameter, value in arguments.items()
    )


def plain_name(name: str) -> str:
    """A function's name as templates and models write it; most allow no dots."""
    return name.replace(".", "_")


def _has_type(value: Any, kind: str | None) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    allowed = {
        "integer": isinstance(value, int) and not isinstance(value, bool),
        "float": number,
        "number": number,
        "string": isinstance(value, str),
        "boolean": isinstance(value, bool),
        "array": isinstance(value, list),
        "tuple": isinstance(value, list),
        "dict": isinstance(value, dict),
        "object": isinstance(value, dict),
    }
    return allowed.get(kind or "any", True)


def _among(value: Any, options: Sequence[Any]) -> bool:
    return any(_equal(value, option) for option in options)


def _equal(value: Any, option: Any) -> bool:
    """Equality as BFCL's checker has it: strings loosely, and a mapping's fields each against its possible values."""
    if isinstance(value, str) and isinstance(option, str):
        return _standard(value) == _standard(option)
    if isinstance(value, bool) or isinstance(option, bool):
        return value is option
    if isinstance(value, (int, float)) and isinstance(option, (int, float)):
        return value == option
    if isinstance(value, list) and isinstance(option, list):
        return len(value) == len(option) and all(_equal(a, b) for a, b in zip(value, option, strict=True))
    if isinstance(value, dict) and isinstance(option, dict):
        left_out = [key for key in option if key not in value]
        return all(key in option and _among(part, _options(option[key])) for key, part in value.items()) and all(
            "" in _options(option[key]) for key in left_out
        )
    return value is None and option is None


def _options(values: Any) -> Sequence[Any]:
    return values if isinstance(values, list) else [values]


def _standard(text: str) -> str:
    return re.sub(r"[ ,./\-_*^]", "", text).lower().replace("'", '"')
