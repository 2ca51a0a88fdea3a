"""``python -m evals.triaxial tag``, as its user types it."""

from __future__ import annotations

import json
from functools import partial

import pytest

from evals.triaxial.__main__ import app
from tests.caches.chats import byte_tokenizer
from tests.command import invoke

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
