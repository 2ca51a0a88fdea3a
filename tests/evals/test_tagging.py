"""``python -m evals.triaxial tag``, as its user types it."""

from __future__ import annotations

import json
from functools import partial

import pytest

from evals.triaxial.__main__ import app
from tests.caches.chats import byte_tokenizer
from tests.command import assert_refused, invoke

run = partial(invoke, "tag", app=app)


# What it writes for a conversation is no matter here.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MESSAGES = [{"role": "system", "content": "Be [b]brief[/b]."}, {"role": "user", "content": "Hé"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer("qwen3", TEMPLATE).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def messages(tmp_path):
    path = tmp_path / "messages.jsonl"
    path.write_text(json.dumps(MESSAGES) + "\n", encoding="utf-8")
    return path


def test_runs_of_equal_tags_and_a_count(tokenizer, messages):
    done = run("--tokenizer", tokenizer, "--messages", messages)
    assert done.exit_code == 0, done.output
    lines = [line.split(maxsplit=1) for line in done.output.splitlines() if line.strip()]
    assert lines[:4] == [
        ["older|text|delim", '"<|im_start|>system\\n"'],
        ["older|text|inst", '"Be [b]brief[/b]."'],
        ["older|text|delim", '"<|im_end|>\\n"'],
        ["current|text|delim", '"<|im_start|>user\\n"'],
    ]
    # Two bytes, so two tokens, of one letter.
    assert ["current|text|user", '"Hé"'] in lines
    assert ["current|text|user", "3"] in [line.split()[:2] for line in done.output.splitlines()]


def test_json(tokenizer, messages):
    done = run("--tokenizer", tokenizer, "--messages", messages, "--json", "--no-generation-prompt")
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert found["format"] == "chatml"
    (one,) = found["conversations"]
    assert len(one["ids"]) == len(one["tags"]) == sum(one["counts"].values())
    assert one["counts"]["older|text|inst"] == len(MESSAGES[0]["content"])
    assert one["tags"][-1] == "current|text|delim"


def test_several_conversations(tokenizer, tmp_path, messages):
    path = tmp_path / "given.jsonl"
    path.write_text(json.dumps(MESSAGES) + "\n\n" + json.dumps({"messages": MESSAGES}), encoding="utf-8")
    (wanted,) = json.loads(run("--tokenizer", tokenizer, "--messages", messages, "--json").output)["conversations"]
    found = json.loads(run("--tokenizer", tokenizer, "--messages", path, "--json").output)["conversations"]
    assert found == [wanted] * 2


def test_tools_and_a_format_by_name(tokenizer, tmp_path):
    written = [{"type": "function", "function": {"name": name}} for name in ("sky", "sea")]
    path = tmp_path / "tools.jsonl"
    path.write_text(json.dumps({"messages": MESSAGES, "tools": written}) + "\n", encoding="utf-8")
    done = run("--tokenizer", tokenizer, "--messages", path, "--format", "chatml")
    assert done.exit_code == 0, done.output
    assert json.dumps(json.dumps(written)) in done.output


def test_a_tokenizer_that_cannot_write_conversations(tmp_path, messages):
    byte_tokenizer("qwen3", None).save_pretrained(tmp_path)
    assert_refused(run("--tokenizer", tmp_path, "--messages", messages), "no chat template")
