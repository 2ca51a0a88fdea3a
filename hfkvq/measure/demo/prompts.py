"""The questions of the demo: examples of the reference tasks, as batches of tokens for any chat model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from hfkvq.measure.reference import Example, evaluation_set, load_reference, with_outliers

SIZES = {"recall": "recall-80", "arithmetic": "arithmetic-12", "tools": "tools"}
"""Tasks by their short names, with the sizes that the demo takes for them."""

# Beyond this the reference model was not trained, and other models need another --max-new-tokens by far.
_LARGEST = {"recall": 280, "arithmetic": 100}


def full_name(task: str) -> str:
    """Name of a task with its size: "recall" is "recall-80".

    Raises:
        ValueError: unknown task, or a size out of range.
    """
    name = SIZES.get(task, task)
    match = re.fullmatch(r"(recall|arithmetic)-([0-9]+)", name)
    if match and 1 <= int(match[2]) <= _LARGEST[match[1]]:
        return f"{match[1]}-{int(match[2])}"
    if match:
        raise ValueError(f"tasks: got {task!r}, allowed sizes 1 to {_LARGEST[match[1]]}, e.g. {match[1]}-12.")
    if name != "tools":
        raise ValueError(
            f"tasks: got {task!r}, allowed {', '.join(SIZES)}; recall and arithmetic also with a size, e.g. recall-40."
        )
    return name


@dataclass(frozen=True)
class Subject:
    """A model under test, with what is particular to it.

    Attributes:
        name: for the report.
        model: ready for ``generate``.
        tokenizer: pads on the left.
        reference: whether it is the reference model, which knows the exact form of each answer.
    """

    name: str
    model: Any
    tokenizer: Any
    reference: bool


def load(
    name: str | None, *, device: torch.device, dtype: torch.dtype | None = None, outliers: float | None = None
) -> Subject:
    """Loads the model to be tested.

    Args:
        name: a folder or a name on the Hugging Face Hub; None loads the reference model.
        device: where to.
        dtype: None takes bf16 for the reference model, and what the checkpoint says for any other.
        outliers: factor by which some key channels of the reference model are enlarged.

    Raises:
        ValueError: the model has no chat template.
        OSError: it cannot be found.
    """
    if name is None:
        model, tokenizer = load_reference(dtype or torch.bfloat16, device)
        if outliers is not None:
            model = with_outliers(model, outliers)
        title = "reference model" if outliers is None else f"reference model, outliers x{outliers:g}"
        return Subject(title, model, tokenizer, True)
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    if not tokenizer.chat_template:
        raise ValueError(f"model: {name} has no chat template, so it cannot be asked; choose a chat model.")
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype or "auto", trust_remote_code=False)
    # The wrapper around PreTrainedModel.to confuses type checkers.
    nn.Module.to(model, device)
    return Subject(Path(name).name if Path(name).is_dir() else name, model.eval(), tokenizer, False)


@dataclass(frozen=True)
class Batch:
    """Prompts of one task that are run together.

    Attributes:
        task: full name.
        examples: what was asked.
        ids: i64 (B, T), padded on the left.
        mask: i64 (B, T), 0 at padding.
        limit: most tokens of an answer.
    """

    task: str
    examples: Sequence[Example]
    ids: Tensor
    mask: Tensor
    limit: int


def make_batches(
    subject: Subject, task: str, samples: int, batch_size: int, seed: int, max_new_tokens: int | None
) -> list[Batch]:
    """The first ``samples`` evaluation examples of a task, in batches.

    Without ``max_new_tokens`` the reference model may write a quarter more than the longest right answer, and other
    models, which are wordier, 256 tokens.

    Raises:
        ValueError: the chat template does not take the task's messages, or the model is too short for them.
    """
    tokenizer, batches = subject.tokenizer, []
    examples = evaluation_set(task, samples, seed=seed)
    for first in range(0, samples, batch_size):
        part = examples[first : first + batch_size]
        texts = [prompt_text(subject, example) for example in part]
        encoded = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
        limit = max_new_tokens
        if limit is None:
            longest = max(len(tokenizer(x.answer, add_special_tokens=False).input_ids) for x in part)
            limit = longest + max(8, longest // 4) if subject.reference else 256
        ids, mask = encoded.input_ids, encoded.attention_mask
        room = getattr(subject.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if room and ids.shape[1] + limit > room:
            raise ValueError(
                f"tasks: {task} takes {ids.shape[1]} tokens and {limit} for the answer, {subject.name} has {room} "
                "positions; choose a smaller size or fewer --max-new-tokens."
            )
        device = subject.model.device
        batches.append(Batch(task, part, ids.to(device), mask.to(device), limit))
    return batches


def prompt_text(subject: Subject, example: Example) -> str:
    """Text of the conversation up to the answer, by the model's own chat template."""
    if subject.reference:
        return example.prompt
    try:
        # Answers are short, so models that can think are asked not to; other templates ignore the argument.
        return subject.tokenizer.apply_chat_template(
            list(example.messages),
            tools=list(example.tools) or None,
            add_generation_prompt=True,
            tokenize=False,
            enable_thinking=False,
        )
    except Exception as error:
        # Templates raise what they like (jinja2's errors, TypeError).
        raise ValueError(
            f"tasks: the chat template of {subject.name} does not take the messages of {example.task} ({error}); "
            "leave this task out with --tasks."
        ) from error


def is_right(subject: Subject, example: Example, text: str) -> bool:
    """Whether generated text answers the question.

    The reference model must give the exact answer. Others may wrap a number in a sentence: the last number counts.
    """
    if subject.reference or example.task == "tools":
        return example.score(text)
    numbers = re.findall(r"-?\d+", re.sub(r"(?<=\d),(?=\d{3})", "", text.rsplit("</think>", maxsplit=1)[-1]))
    return bool(numbers) and numbers[-1] == re.findall(r"-?\d+", example.answer)[-1]
