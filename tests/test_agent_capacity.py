"""evals/agent_capacity.py: pieces of a conversation, and what the results on file say."""

from __future__ import annotations

import gzip
import json

import pytest
import torch

from evals.agent_capacity import RESULTS, TRACES, measure, messages_of, turns
from hfkvq.measure.reference import load_reference


def trace(rounds):
    call = {"id": "1", "type": "function", "function": {"name": "find", "arguments": '{"id": "a_1"}'}}
    said = [{"role": "system", "content": "Be kind. " * 20}]
    for number in range(rounds):
        said += [{"role": "user", "content": f"Question {number}? " * 5}]
        said += [{"role": "assistant", "content": None, "tool_calls": [call]}]
        said += [{"role": "tool", "name": "find", "content": "found 12 " * 40}]
        said += [{"role": "assistant", "content": f"Answer {number}."}]
    return {"traj": said}


@pytest.fixture(scope="module")
def tokenizer():
    return load_reference(torch.float32)[1]


def test_pieces_are_the_conversation(tokenizer):
    messages = messages_of(trace(2))
    pieces = list(turns(tokenizer, messages))
    assert [generated for _, generated in pieces] == [False, True] * 4
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokenizer.decode(torch.cat([ids for ids, _ in pieces], 1)[0]) == whole


def test_a_template_that_changes_its_mind_is_refused(tokenizer, monkeypatch):
    template = "{% for m in messages %}{{ loop.length }}{{ m.content }}{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises(ValueError, match="tokenizer: its template changes what it has written, at message 3"):
        list(turns(tokenizer, messages_of(trace(1))))


def check(found):
    rows = {row["name"]: row for row in found["rows"]}
    bits = [row["total_bits"] for row in rows.values()]
    int4 = rows["uniform INT4 (TriAxialKV's pages)"]
    best = rows["TriAxialKV, 2 bits for results and answers, requantized"]
    assert bits[0] == max(bits) == 16
    assert best["total_bits"] == min(bits)
    assert int4["narrow"] == 0 < best["narrow"] < 1
    assert rows["bf16"]["fit"] < int4["fit"] < best["fit"]


def test_more_conversations_fit(tokenizer, tmp_path):
    path = tmp_path / TRACES
    path.parent.mkdir()
    path.write_bytes(gzip.compress(json.dumps([trace(4), trace(4)]).encode()))
    found = measure(tmp_path, tokenizer, 2)
    assert found["conversations"] == 2
    check(found)


def test_real_conversations(tokenizer, shared_data):
    check(measure(shared_data, tokenizer, 1))


def test_results_on_file():
    check(json.loads((RESULTS / "agent-capacity.json").read_text(encoding="utf-8")))
