"""Tags under the real chat templates, which a checkout may have beside it, and of real conversations."""

from __future__ import annotations

import base64
import functools
import json
import time
from bisect import bisect_left
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hfkvq.caches.tags import Tagger, find_format
from tests.caches.chat_samples import SAMPLES
from tests.caches.chats import (
    MERGES,
    TOKENS,
    bfcl_conversations,
    bfcl_tools,
    byte_tokenizer,
    encode,
    expected,
    names,
    swe_conversations,
    tau_conversations,
)


@pytest.mark.parametrize("name", [sample.name for sample in SAMPLES if sample.messages is not None])
def test_the_real_template_writes_the_sample(name, shared_data):
    sample = next(sample for sample in SAMPLES if sample.name == name)
    template = (shared_data / "chat_templates" / f"{sample.template}.jinja").read_text(encoding="utf-8")
    tokenizer = byte_tokenizer(sample.family, template)
    written = tokenizer.apply_chat_template(sample.messages, tokenize=False, **sample.arguments)
    wanted = "".join(text for text, _ in sample.pieces[sample.skip :])
    assert written.endswith(wanted) if sample.skip else written == wanted
    if sample.skip == 0:
        ids, tags = expected(sample, tokenizer)
        assert names(Tagger.from_tokenizer(tokenizer).tag(ids)[0]) == tags


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


@functools.cache
def _qwen_ranks(folder: Path) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of Qwen's tokenizer, from its ranks."""
    lines = (folder / "tokenizers" / "qwen.tiktoken").read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}
    letters = _letters()

    def spelled(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = []
    for token, rank in sorted(ranks.items(), key=lambda entry: entry[1]):
        # The last merge that made the token is that of the two parts which all lower ranks leave of it.
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            _, i = min((ranks.get(a + b, rank), i) for i, (a, b) in enumerate(pairwise(parts)))
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        if len(parts) == 2:
            merges.append((spelled(parts[0]), spelled(parts[1])))
    return {spelled(token): rank for token, rank in ranks.items()}, merges


def _qwen(folder: Path, template: str) -> PreTrainedTokenizerFast:
    """The real tokenizer of Qwen2.5 or Qwen3."""
    core = Tokenizer(models.BPE(*_qwen_ranks(folder)))
    core.normalizer = normalizers.NFC()
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    core.add_tokens([AddedToken(token, special=True, normalized=False) for token in TOKENS[_FAMILIES[template]]])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        chat_template=_template(folder, template),
        clean_up_tokenization_spaces=False,
    )


def _letters() -> dict[int, str]:
    """Byte-level letters by byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {**{byte: chr(byte) for byte in plain}, **{byte: chr(256 + i) for i, byte in enumerate(others)}}


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
    for messages in tau_conversations(shared_data, 12) + swe_conversations(shared_data):
        count, ids, tagger = check_conversation(tokenizer, messages, add_generation_prompt=True)
        checked += count
        half = len(ids) // 2
        first = tagger.extend(None, ids[:half])
        assert torch.equal(tagger.extend(first.state, ids[half:]).append_to(first.tags), tagger.tag(ids))
    assert checked > 100


@pytest.mark.parametrize("template", _FAMILIES)
def test_talk_under_real_templates(template, shared_data):
    tokenizer = byte_tokenizer(_FAMILIES[template], _template(shared_data, template), MERGES)
    conversations = bfcl_conversations(shared_data)
    assert len(conversations) > 20
    assert sum(check_conversation(tokenizer, messages)[0] for messages in conversations[::4]) > 100


@pytest.mark.parametrize("template", ["qwen2_5", "qwen3"])
def test_the_real_tokenizer_of_qwen(template, shared_data):
    tokenizer = _qwen(shared_data, template)
    assert encode(tokenizer, "<|im_start|>user\nHi")[1:] == [872, 198, 13048]
    tools = bfcl_tools(shared_data)
    for messages in tau_conversations(shared_data, 12):
        checked, _, _ = check_conversation(tokenizer, messages, tools=tools, add_generation_prompt=True)
        assert checked >= 3
    for sample in SAMPLES:
        if sample.template == template:
            ids, tags = expected(sample, tokenizer)
            assert names(Tagger.from_tokenizer(tokenizer).tag(ids)[0]) == tags


def test_a_long_prompt_is_tagged_in_no_time(shared_data):
    tokenizer = byte_tokenizer("qwen3", _template(shared_data, "qwen3"))
    tagger, ids = Tagger.from_tokenizer(tokenizer), []
    for messages in tau_conversations(shared_data, 8):
        ids += encode(tokenizer, tokenizer.apply_chat_template(messages, tokenize=False))
    ids = torch.tensor(ids[:32768])
    assert len(ids) == 32768
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        tagger.tag(ids)
        times.append(time.perf_counter() - begin)
    assert min(times) < 0.05
