"""The tasks of the reference model: determinism, splits, scoring and the chat template."""

from __future__ import annotations

import json
import re
from itertools import pairwise

import pytest
from transformers import PreTrainedTokenizerBase

from hfkvq.measure.reference import EVALUATION_TASKS, Example, arithmetic, evaluation_set, recall, tools
from hfkvq.measure.reference.chat import IM_END, parse_tool_call


def names(text: str) -> set[str]:
    """Return what looks like a full name."""
    return set(re.findall(r"\b[A-Z][a-z]+ [A-Z][a-z]+\b", text))


@pytest.mark.parametrize("task", EVALUATION_TASKS)
def test_evaluation_set_is_fixed(task: str) -> None:
    assert evaluation_set(task, 5) == evaluation_set(task, 9)[:5]
    assert evaluation_set(task, 5) != evaluation_set(task, 5, seed=1)


def test_prompts_do_not_change_between_releases() -> None:
    (example,) = evaluation_set("recall-24", 1)
    assert example.answer == "60300"


def test_splits_share_no_name() -> None:
    train = set().union(*(names(recall(80, seed=seed).text) for seed in range(100)))
    held_out = set().union(*(names(example.text) for example in evaluation_set("recall-80", 100)))
    assert len(train) > 7_000
    assert len(held_out) > 7_000
    assert not train & held_out


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


def test_recall_answer_is_the_value_of_the_name() -> None:
    for seed in range(20):
        example = recall(12, seed=seed, questions=3)
        listing, *_ = example.messages[-5]["content"].split("\n\n")[1:]
        (line,) = (line for line in listing.split("\n") if names(line) & names(example.messages[-1]["content"]))
        assert re.search(r"\d{5}", line)[0] == example.answer
        assert len(listing.split("\n")) == 12


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


def test_last_tool_call_uses_what_was_said_before() -> None:
    for example in evaluation_set("tools", 50):
        call = parse_tool_call(example.answer)
        assert call is not None
        (schema,) = (tool["function"] for tool in example.tools if tool["function"]["name"] == call["name"])
        assert list(call["arguments"]) == schema["parameters"]["required"]
        before, request = example.prompt.rsplit("<|im_start|>user\n", maxsplit=1)
        unsaid = [json.dumps(value) for value in call["arguments"].values() if json.dumps(value) not in request]
        assert unsaid
        assert all(value.strip('"') in before for value in unsaid)


@pytest.mark.parametrize("task", EVALUATION_TASKS)
def test_chat_template_gives_the_prompt(task: str, tokenizer: PreTrainedTokenizerBase) -> None:
    for example in evaluation_set(task, 10):
        options = {"tools": list(example.tools) or None, "add_generation_prompt": True}
        assert tokenizer.apply_chat_template(list(example.messages), tokenize=False, **options) == example.prompt
        ids = tokenizer.apply_chat_template(list(example.messages), return_dict=False, **options)
        assert ids == tokenizer(example.prompt).input_ids


@pytest.mark.parametrize("task", EVALUATION_TASKS)
def test_tokens_of_prompt_and_answer_are_those_of_the_text(task: str, tokenizer: PreTrainedTokenizerBase) -> None:
    for example in evaluation_set(task, 10):
        answer = tokenizer(example.answer).input_ids
        whole = tokenizer(example.text).input_ids
        assert whole[: -len(tokenizer(f"{IM_END}\n").input_ids)] == tokenizer(example.prompt).input_ids + answer
        assert example.score(tokenizer.decode([*answer, tokenizer.eos_token_id], skip_special_tokens=True))


def test_tokenizer_keeps_digits_apart(tokenizer: PreTrainedTokenizerBase) -> None:
    assert len(tokenizer) == 1_024
    assert tokenizer.tokenize("48213") == list("48213")
    assert tokenizer.decode(tokenizer("A näive\n\n  text 1 + 2").input_ids) == "A näive\n\n  text 1 + 2"
    assert tokenizer.convert_ids_to_tokens(tokenizer("<think></tool_call>").input_ids) == ["<think>", "</tool_call>"]


def test_recall_80_is_about_1100_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    lengths = [len(tokenizer(example.prompt).input_ids) for example in evaluation_set("recall-80", 20)]
    assert 1_000 < sum(lengths) / len(lengths) < 1_250


def test_errors_name_the_remedy() -> None:
    with pytest.raises(ValueError, match="known are recall-24"):
        evaluation_set("recal-24", 1)
    with pytest.raises(ValueError, match="split='test' is unknown"):
        recall(4, seed=0, split="test")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="questions=5 must be between 1 and n_entries=4"):
        recall(4, seed=0, questions=5)
