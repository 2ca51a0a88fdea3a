"""Tasks as plain text: the same every time, of the size that was asked for, and with the answer in the text."""

from __future__ import annotations

from pathlib import Path

import pytest

from hfkvq.measure.demo.prompts import Subject, is_right, make_batches
from hfkvq.measure.reference import PLAIN_TASKS, evaluation_set
from tests.command import invoke


@pytest.mark.parametrize("kind", PLAIN_TASKS)
def test_answers_stand_in_the_text(kind: str, tokenizer) -> None:
    examples = evaluation_set(f"{kind}-256", 6)
    assert examples == evaluation_set(f"{kind}-256", 6)
    assert not {each.prompt for each in examples} & {each.prompt for each in evaluation_set(f"{kind}-256", 6, seed=1)}
    for each in examples:
        end = each.prompt[-12:]
        assert f"{end.splitlines()[-1][-6:]}{each.answer}" in each.prompt
        assert is_right(None, each, f"{each.answer} and so on")  # type: ignore[arg-type]
        assert not is_right(None, each, each.answer[:-1])  # type: ignore[arg-type]
    short, long = (len(evaluation_set(f"{kind}-{size}", 1)[0].prompt) for size in (128, 1024))
    assert 4 * short < long < 16 * short


def test_prompts_go_without_a_chat_template(tokenizer) -> None:
    # A model is asked for its positions alone.
    config = type("Config", (), {"get_text_config": lambda self, decoder: self})()
    subject = Subject("x", type("Model", (), {"config": config, "device": "cpu"})(), tokenizer, False)
    (batch,) = make_batches(subject, "copy-64", 2, 2, 0, None)
    row, there = batch.ids[0], batch.mask[0].bool()
    assert tokenizer.decode(row[there]) == batch.examples[0].prompt
    longest = max(len(tokenizer(each.answer).input_ids) for each in batch.examples)
    assert longest < batch.limit < 2 * longest


def test_the_demo_asks_them(stand_in: Path) -> None:
    arguments = ["--tasks", "copy-32,passkey-24", "--samples", "1", "--schemes", "full", "--device", "cpu"]
    done = invoke("demo", "--model", stand_in, *arguments)
    assert done.exit_code == 0, done.output
    assert "100.0" in next(line for line in done.output.splitlines() if line.startswith("full "))
