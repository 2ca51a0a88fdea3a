"""The reference model, the copy of it with outlier channels, and its tasks: determinism, splits, scoring, template."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedTokenizerBase, Qwen3ForCausalLM

from evals.reference.outliers import with_outliers
from hfkvq.measure.demo.prompts import Subject, is_right, make_batches
from hfkvq.measure.reference import (
    EVALUATION_TASKS,
    PLAIN_TASKS,
    Example,
    arithmetic,
    evaluation_set,
    load_reference,
    recall,
    reference_path,
    tools,
)
from hfkvq.measure.reference import model as model_module
from hfkvq.measure.reference.chat import IM_END, parse_tool_call


@torch.inference_mode()
def run(model: Qwen3ForCausalLM, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits, and the range of each key channel, (layers, head_dim)."""
    cache = DynamicCache(config=model.config)
    logits = model(ids, past_key_values=cache).logits
    keys = [layer.keys for layer in cache.layers]
    return logits, torch.stack([key.abs().amax(dim=(0, 1, 2)) for key in keys])


def test_missing_weights_name_both_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "hfkvq" / "measure" / "reference" / "model.py"
    monkeypatch.setattr(model_module, "__file__", str(file))
    with pytest.raises(FileNotFoundError) as caught:
        reference_path()
    assert str(file.parent / "checkpoint") in str(caught.value)
    checkout = tmp_path / "evals" / "reference" / "checkpoint"
    assert str(checkout) in str(caught.value)
    checkout.mkdir(parents=True)
    (checkout / "model.safetensors").touch()
    assert reference_path() == checkout


def test_reference_answers_also_with_outliers() -> None:
    torch.set_num_threads(1)
    model, tokenizer = load_reference(torch.float32)
    examples = evaluation_set("recall-24", 4)
    inputs = tokenizer([example.prompt for example in examples], return_tensors="pt", padding=True)
    width = inputs.input_ids.shape[1]
    logits, ranges = run(model, inputs.input_ids)
    changed = with_outliers(model)
    new_logits, new_ranges = run(changed, inputs.input_ids)
    torch.testing.assert_close(new_logits, logits, atol=1e-4, rtol=0)
    assert ((new_ranges / ranges).round() == 8).sum(dim=-1).tolist() == [4] * len(ranges)
    out = changed.generate(**inputs, max_new_tokens=8, do_sample=False)
    texts = tokenizer.batch_decode(out[:, width:], skip_special_tokens=True)
    assert sum(example.score(text) for example, text in zip(examples, texts, strict=True)) >= 3


@pytest.mark.parametrize("task", EVALUATION_TASKS)
def test_evaluation_set_is_fixed(task: str) -> None:
    assert evaluation_set(task, 5) == evaluation_set(task, 9)[:5]
    assert evaluation_set(task, 5) != evaluation_set(task, 5, seed=1)


def test_prompts_do_not_change_between_releases() -> None:
    (example,) = evaluation_set("recall-24", 1)
    assert example.answer == "60300"


@pytest.mark.parametrize("task", EVALUATION_TASKS)
def test_no_evaluation_prompt_is_a_training_prompt(task: str) -> None:
    def make(seed: int) -> Example:
        if task == "tools":
            return tools(seed=seed)
        kind, size = task.split("-")
        return {"recall": recall, "arithmetic": arithmetic}[kind](int(size), seed=seed)

    evaluated = {example.prompt for example in evaluation_set(task, 60)}
    assert len(evaluated) == 60
    assert not evaluated & {make(seed).prompt for seed in range(60)}


@pytest.mark.parametrize("task", EVALUATION_TASKS)
def test_score_takes_the_answer_and_nothing_else(task: str) -> None:
    examples = evaluation_set(task, 20)
    for example, other in pairwise(examples):
        assert example.score(example.answer)
        assert example.score(f"{example.answer}{IM_END}\nmore")
        assert not example.score("")
        assert not example.score(example.answer[:-1])
        assert example.score(other.answer) == (
            other.answer.split("</think>")[-1] == example.answer.split("</think>")[-1]
        )


def test_arithmetic_is_right_and_scored_by_its_last_number() -> None:
    for seed in range(50):
        example = arithmetic(12, seed=seed)
        thoughts, final = example.answer.split("</think>\n")
        steps = re.findall(r"(\d+) ([-+*]) (\d+) = (\d+)", thoughts)
        assert len(steps) == 12
        for (left, sign, right, result), following in zip(steps, [*steps[1:], (final,)], strict=True):
            value = {"+": int(left) + int(right), "-": int(left) - int(right), "*": int(left) * int(right)}[sign]
            assert value == int(result) == int(following[0])
            assert 0 <= value <= 999
        assert example.score(f"<think>\nwrong\n</think>\n{final}")
        assert not example.score(f"<think>\n{final}")


def test_tools_are_scored_as_json() -> None:
    example = tools(seed=3, split="eval")
    call = parse_tool_call(example.answer)
    assert call is not None
    arguments = dict(reversed(call["arguments"].items()))
    assert example.score(f"<tool_call>{json.dumps({'arguments': arguments, 'name': call['name']})}</tool_call>")
    assert not example.score(example.answer * 2)
    assert not example.score(example.answer.replace(call["name"], "other"))
    assert not example.score("<tool_call>[1]</tool_call>")


@pytest.mark.parametrize("task", EVALUATION_TASKS)
def test_chat_template_gives_the_prompt(task: str, tokenizer: PreTrainedTokenizerBase) -> None:
    for example in evaluation_set(task, 10):
        options = {"tools": list(example.tools) or None, "add_generation_prompt": True}
        assert tokenizer.apply_chat_template(list(example.messages), tokenize=False, **options) == example.prompt
        ids = tokenizer.apply_chat_template(list(example.messages), return_dict=False, **options)
        assert ids == tokenizer(example.prompt).input_ids


def test_errors_name_the_remedy() -> None:
    with pytest.raises(ValueError, match="known are recall-24"):
        evaluation_set("recal-24", 1)
    with pytest.raises(ValueError, match="split='test' is unknown"):
        recall(4, seed=0, split="test")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="questions=5 must be between 1 and n_entries=4"):
        recall(4, seed=0, questions=5)


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
