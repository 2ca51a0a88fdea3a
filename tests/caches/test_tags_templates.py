"""Tags under the real chat templates, which a checkout may have beside it, and of real conversations."""

from __future__ import annotations

import json
from bisect import bisect_left
from pathlib import Path

import pytest

from hfkvq.caches.tags import Tagger, find_format
from tests.caches.chats import (
    MERGES,
    byte_tokenizer,
    names,
    tau_conversations,
)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("qwen2_5", "chatml"),
        ("qwen3_vl", "chatml"),
        ("llama3_2", "llama3"),
        ("gemma3", "gemma"),
        ("gptoss", "gpt-oss"),
        ("glm4moe", "glm4"),
        ("phi3_5", "phi3"),
        ("deepseekv3", "deepseek"),
    ],
)
def test_formats_of_real_templates(template, name, shared_data):
    assert find_format(_template(shared_data, template)).name == name


def _contents(message) -> list[str]:
    """How templates may write the content."""
    return [message["content"].strip(), json.dumps(message["content"], ensure_ascii=False)]


def check_conversation(tokenizer, messages, **arguments):
    """Each message's content stands in the prompt, in order, with the semantic of its role and its turn."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, **arguments)
    made = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    begins = [begin for begin, _ in made["offset_mapping"]]
    tagger = Tagger.from_tokenizer(tokenizer)
    got = names(tagger.tag(made["input_ids"])[0])
    turns = sum(message["role"] == "user" for message in messages)
    semantics = {"system": "inst", "user": "user", "assistant": "assistant", "tool": "obs"}
    # gpt-oss puts what comes before a call into the channel of thoughts.
    before_call = "reasoning" if tagger.grammar.format.name == "gpt-oss" else "assistant"
    place, turn, checked = 0, 0, 0
    for message in messages:
        turn += message["role"] == "user"
        role = before_call if "tool_calls" in message else semantics[message["role"]]
        wanted = [(role, _contents(message))] if message["content"].strip() else []
        for one in message.get("tool_calls", ()):
            wanted.append(("tool_call", [json.dumps(one["function"]["arguments"], ensure_ascii=False)]))
        for semantic, ways in wanted:
            places = [(at, way) for way in ways if (at := text.find(way, place)) >= 0]
            # Templates leave out what they please: thoughts before a call, arguments in a form of their own.
            if not places:
                assert semantic in ("assistant", "reasoning", "tool_call")
                continue
            at, way = min(places)
            place = at + len(way)
            age = {0: "current", 1: "turn_m1", 2: "turn_m2"}.get(turns - turn, "older") if turn else "older"
            if semantic == "inst" and tagger.grammar.format.name == "gemma":
                semantic, age = "user", {1: "current", 2: "turn_m1", 3: "turn_m2"}.get(turns, "older")
            first, last = bisect_left(begins, at), bisect_left(begins, place)
            # A token may begin before so short a thing as {} and end after it.
            inside = set(got[min(first, last - 1) : last])
            assert inside == {f"{age}|text|{semantic}"}, message
            checked += 1
    assert "pad" not in got
    return checked, made["input_ids"], tagger


def _template(folder: Path, name: str) -> str:
    return (folder / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


_FAMILIES = {
    "qwen2_5": "qwen2_5",
    "qwen2_5_vl": "qwen3",
    "qwen3": "qwen3",
    "qwen3_instruct_2507": "qwen3",
    "qwen3_vl": "qwen3",
    "qwen3_5_think": "qwen3",
    "llama3": "llama3",
    "llama3_1": "llama3",
    "llama3_2": "llama3",
    "gemma3": "gemma3",
    "gptoss": "gptoss",
    "glm4moe": "glm4moe",
    "phi3_5": "phi3_5",
}
# These write neither calls nor results.
_NO_TOOLS = ("qwen2_5_vl", "llama3", "gemma3", "phi3_5")


@pytest.mark.parametrize("template", [name for name in _FAMILIES if name not in _NO_TOOLS])
def test_agents_conversations_under_real_templates(template, shared_data):
    tokenizer = byte_tokenizer(_FAMILIES[template], _template(shared_data, template), MERGES)
    checked = 0
    for messages in tau_conversations(shared_data, 12):
        checked += check_conversation(tokenizer, messages, add_generation_prompt=True)[0]
    assert checked > 100
