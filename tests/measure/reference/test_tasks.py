"""The tasks of the reference model: determinism, splits, scoring and the chat template."""

from __future__ import annotations

import json
import re
from itertools import pairwise

import pytest
from transformers import PreTrainedTokenizerBase

from hfkvq.measure.reference import EVALUATION_TASKS, Example, arithmetic, evaluation_set, recall, tools
from hfkvq.measure.reference.chat import IM_END, parse_tool_call


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
