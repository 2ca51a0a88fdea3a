"""Function calling with the model's own chat template and tools, on questions of BFCL v4.

Two parts of BFCL need no simulated world, and are here: `simple_python` (one call, compared with the possible answers),
and the reading half of `memory`: instead of what the model itself would have stored over many conversations, the memory
holds what the user said in them, and the model answers from one retrieval. Scores of the second are not BFCL's own; it
has the same contexts, roles and questions, and one generation each. ``evals/bfcl_memory.py`` is the whole of it, with
the model's own notes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import datasets

from evals.tasks.common import Row, after_thoughts, as_dataset, read_jsonl, render, tokenizer_of

SCENARIOS = ("customer", "finance", "healthcare", "notetaker", "student")

_TYPES = {"dict": "object", "float": "number", "tuple": "array"}
"""BFCL's names of types, where JSON schema has others."""

_MEMORY_PROMPT = (
    "You are a helpful assistant with a memory of earlier conversations with the user. Look things up in the memory "
    "with the tools, and then answer the question in one short sentence."
)


def simple(data_dir: str | None = None, **metadata: Any) -> datasets.DatasetDict:
    """400 questions, each with one function to be called."""
    tokenizer = tokenizer_of(metadata, "bfcl_simple")
    rows: list[Row] = []
    for question, possible in _with_answers("BFCL_v4_simple_python.json", data_dir):
        (function,) = question["function"]
        text = render(tokenizer, question["question"][0], [as_tool(function)], metadata, "bfcl_simple")
        (expected,) = possible["ground_truth"]
        row = {"id": question["id"], "prompt": text, "expected": json.dumps(expected)}
        rows.append({**row, "schema": json.dumps(function["parameters"])})
    return as_dataset(test=rows)


def memory(data_dir: str | None = None, **metadata: Any) -> datasets.DatasetDict:
    """155 questions about what the user said before; prompts of 2,000 to 25,000 tokens."""
    tokenizer, tools = tokenizer_of(metadata, "bfcl_memory"), memory_tools("kv", data_dir)
    name, stored, rows = "core_memory_retrieve_all", {}, []
    for scenario in SCENARIOS:
        stored[scenario] = {
            f"conversation_{number}_turn_{place}": " ".join(message["content"] for message in turn)
            for number, conversation in enumerate(conversations(scenario, data_dir), start=1)
            for place, turn in enumerate(conversation, start=1)
        }
    for question, possible in _with_answers("BFCL_v4_memory.json", data_dir):
        call = {"name": name, "arguments": {}}
        content = json.dumps(stored[question["scenario"]], ensure_ascii=False)
        messages = [
            {"role": "system", "content": _MEMORY_PROMPT},
            *question["question"][0],
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
            {"role": "tool", "name": name, "content": content},
        ]
        text = render(tokenizer, messages, tools, metadata, "bfcl_memory")
        rows.append({"id": question["id"], "prompt": text, "answers": list(map(str, possible["ground_truth"]))})
    return as_dataset(test=rows)


def memory_tools(kind: str, data_dir: str | None) -> list[dict[str, Any]]:
    """The functions of a memory, "kv" or "rec_sum", as chat templates take them."""
    return [as_tool(row) for row in read_jsonl(data_dir, f"bfcl/multi_turn_func_doc/memory_{kind}.json")]


def _with_answers(name: str, data_dir: str | None) -> list[tuple[Row, Row]]:
    answers = {row["id"]: row for row in read_jsonl(data_dir, f"bfcl/possible_answer/{name}")}
    return [(row, answers[row["id"]]) for row in read_jsonl(data_dir, f"bfcl/{name}")]


def conversations(scenario: str, data_dir: str | None) -> list[list[list[Row]]]:
    """Messages of the user before the questions of a scenario: messages by conversation and turn."""
    rows = read_jsonl(data_dir, f"bfcl/memory_prereq_conversation/memory_{scenario}.json")
    return [conversation["question"] for conversation in rows]


def questions(scenario: str, data_dir: str | None) -> list[Row]:
    """Questions of a scenario: ``id``, ``messages`` and ``answers``."""
    return [
        {"id": row["id"], "messages": row["question"][0], "answers": list(map(str, possible["ground_truth"]))}
        for row, possible in _with_answers("BFCL_v4_memory.json", data_dir)
        if row["scenario"] == scenario
    ]


def as_tool(function: dict[str, Any]) -> dict[str, Any]:
    """BFCL's description of a function as the JSON schema that chat templates take."""
    return {
        "type": "function",
        "function": {
            "name": plain_name(function["name"]),
            "description": function["description"],
            "parameters": _schema(function["parameters"]),
        },
    }


def _schema(schema: dict[str, Any]) -> dict[str, Any]:
    made = {key: value for key, value in schema.items() if key not in ("type", "properties", "items")}
    if schema.get("type") not in (None, "any"):
        made["type"] = _TYPES.get(schema["type"], schema["type"])
    if "properties" in schema:
        made["properties"] = {name: _schema(part) for name, part in schema["properties"].items()}
    if isinstance(schema.get("items"), dict):
        made["items"] = _schema(schema["items"])
    return made


def score_call(doc: Row, results: Sequence[str]) -> dict[str, float]:
    """True if the answer is exactly one call, and a possible one."""
    calls = parse_calls(results[0])
    if calls is None or len(calls) != 1:
        return {"acc": 0.0}
    return {"acc": float(matches(calls[0], json.loads(doc["expected"]), json.loads(doc["schema"])))}


def score_memory(doc: Row, results: Sequence[str]) -> dict[str, float]:
    """True if the answer has one of the right answers as whole words."""

    def plain(text: str) -> str:
        return re.sub(r"[,./\-_*^()]", "", text).lower().replace("'", '"')

    text = plain(after_thoughts(results[0]))
    return {"acc": float(any(re.search(rf"\b{re.escape(plain(gold))}\b", text) for gold in doc["answers"]))}


Call = tuple[str, dict[str, Any]]

_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def parse_calls(text: str) -> list[Call] | None:
    """Calls of an answer, in order; None if one of them is no proper call.

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
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _bare(text: str) -> list[Any]:
    """JSON objects in a text that name a function, and lists of them; other braces are prose."""
    decoder, found, at = json.JSONDecoder(), [], 0
    while (start := next((i for i in range(at, len(text)) if text[i] in "[{"), None)) is not None:
        try:
            value, at = decoder.raw_decode(text, start)
        except (json.JSONDecodeError, RecursionError):
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
    """True if a call is one that BFCL allows.

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
