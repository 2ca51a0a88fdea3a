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
from collections.abc import Sequence
from typing import Any

import datasets

from .boxed import after_thoughts
from .calls import matches, parse_calls, plain_name
from .chat import render, tokenizer_of
from .rows import ENVIRONMENT, Row, as_dataset, data_folder, find_file, read_jsonl

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
    return as_dataset({"test": rows})


def memory(data_dir: str | None = None, **metadata: Any) -> datasets.DatasetDict:
    """155 questions about what the user said before; prompts of 2,000 to 25,000 tokens."""
    tokenizer, folder = tokenizer_of(metadata, "bfcl_memory"), folder_of(data_dir)
    functions = read_jsonl(find_file(folder, "bfcl/multi_turn_func_doc/memory_kv.json"))
    tools = [as_tool(function) for function in functions]
    stored = {scenario: _said(scenario, data_dir) for scenario in SCENARIOS}
    rows: list[Row] = []
    for question, possible in _with_answers("BFCL_v4_memory.json", data_dir):
        call = {"type": "function", "function": {"name": "core_memory_retrieve_all", "arguments": {}}}
        messages = [
            {"role": "system", "content": _MEMORY_PROMPT},
            *question["question"][0],
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {
                "role": "tool",
                "name": "core_memory_retrieve_all",
                "content": json.dumps(stored[question["scenario"]], ensure_ascii=False),
            },
        ]
        text = render(tokenizer, messages, tools, metadata, "bfcl_memory")
        rows.append({"id": question["id"], "prompt": text, "answers": list(map(str, possible["ground_truth"]))})
    return as_dataset({"test": rows})


def folder_of(data_dir: str | None) -> Any:
    """The folder that has ``bfcl/``.

    Raises:
        FileNotFoundError: none is named, or it is not there.
    """
    folder = data_folder(data_dir)
    if folder is None:
        raise FileNotFoundError(
            "data_dir: BFCL's files are on GitHub and not on the hub; put them into DIR/bfcl (evals/tasks/README.md "
            f"says where they come from) and pass --metadata data_dir=DIR or set {ENVIRONMENT}."
        )
    return folder


def _with_answers(name: str, data_dir: str | None) -> list[tuple[Row, Row]]:
    folder = folder_of(data_dir)
    questions = read_jsonl(find_file(folder, f"bfcl/{name}"))
    path = find_file(folder, f"bfcl/possible_answer/{name}")
    answers = {row.get("id"): row for row in read_jsonl(path)}
    lost = [row["id"] for row in questions if row["id"] not in answers]
    if lost:
        raise ValueError(f"{path}: lacks answers for {len(lost)} questions, {lost[0]} first; take one version of both.")
    return [(row, answers[row["id"]]) for row in questions]


def conversations(scenario: str, data_dir: str | None) -> list[list[list[Row]]]:
    """What the user said before the questions of a scenario: messages by conversation and turn."""
    path = find_file(folder_of(data_dir), f"bfcl/memory_prereq_conversation/memory_{scenario}.json")
    return [conversation["question"] for conversation in read_jsonl(path)]


def questions(scenario: str, data_dir: str | None) -> list[Row]:
    """Questions of a scenario: ``id``, ``messages`` and ``answers``."""
    return [
        {"id": row["id"], "messages": row["question"][0], "answers": list(map(str, possible["ground_truth"]))}
        for row, possible in _with_answers("BFCL_v4_memory.json", data_dir)
        if row["scenario"] == scenario
    ]


def _said(scenario: str, data_dir: str | None) -> dict[str, str]:
    """All that the user said in the conversations before, by conversation and turn."""
    return {
        f"conversation_{number}_turn_{place}": " ".join(message["content"] for message in turn)
        for number, conversation in enumerate(conversations(scenario, data_dir), start=1)
        for place, turn in enumerate(conversation, start=1)
    }


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


def score_call(doc: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Whether the answer is exactly one call, and a possible one."""
    calls = parse_calls(results[0])
    if calls is None or len(calls) != 1:
        return {"acc": 0.0}
    return {"acc": float(matches(calls[0], json.loads(doc["expected"]), json.loads(doc["schema"])))}


def score_memory(doc: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Whether the answer has one of the right answers as whole words."""
    text = _standard(after_thoughts(results[0]))
    return {"acc": float(any(re.search(rf"\b{re.escape(_standard(gold))}\b", text) for gold in doc["answers"]))}


def _standard(text: str) -> str:
    return re.sub(r"[,./\-_*^()]", "", text).lower().replace("'", '"')
