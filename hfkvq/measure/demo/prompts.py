"""The questions of the demo: examples of the reference tasks, as batches of tokens for any chat model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hfkvq.measure.models import Source, find_model, load_model, load_tokenizer
from hfkvq.measure.reference import Example, evaluation_set, is_plain

SIZES = {"recall": "recall-80", "arithmetic": "arithmetic-3", "tools": "tools"}
SIZES |= {"passkey": "passkey-512", "needle": "needle-512", "copy": "copy-256"}
"""Tasks by their short names, with the sizes that the demo takes for them."""

CHAT_TASKS = ("recall", "arithmetic", "tools")

# Beyond this the reference model was not trained, and other models need another --max-new-tokens by far; names run out.
_LARGEST = {"recall": 280, "arithmetic": 100, "passkey": 131_072, "needle": 32_768, "copy": 32_768}


def full_name(task: str) -> str:
    """Name of a task with its size: "recall" is "recall-80".

    Raises:
        ValueError: unknown task, or a size out of range.
    """
    name = SIZES.get(task, task)
    match = re.fullmatch(r"([a-z]+)-([0-9]+)", name)
    if match and match[1] in _LARGEST:
        if 1 <= int(match[2]) <= _LARGEST[match[1]]:
            return f"{match[1]}-{int(match[2])}"
        raise ValueError(f"tasks: got {task!r}, allowed sizes 1 to {_LARGEST[match[1]]}, e.g. {match[1]}-12.")
    if name != "tools":
        raise ValueError(
            f"tasks: got {task!r}, allowed {', '.join(SIZES)}; all but tools also with a size, e.g. recall-40."
        )
    return name


@dataclass(frozen=True)
class Subject:
    """A model under test, with what is particular to it.

    Attributes:
        model: ready for ``generate``.
        tokenizer: pads on the left.
        reference: whether it is the reference model, which knows the exact form of each answer.
    """

    name: str
    model: Any
    tokenizer: Any
    reference: bool


def load(model: str | Source | None, *, device: torch.device, dtype: torch.dtype | None = None) -> Subject:
    """Loads the model to be tested, by its name as `find_model` takes it, or what that found.

    Raises:
        ValueError: it cannot be loaded, or has no chat template.
    """
    source = model if isinstance(model, Source) else find_model(model)
    tokenizer = load_tokenizer(source)
    if not tokenizer.chat_template:
        raise ValueError(f"model: {source.name} has no chat template, so it cannot be asked; choose a chat model.")
    return Subject(source.name, load_model(source, device, dtype), tokenizer, source.reference)


@dataclass(frozen=True)
class Batch:
    """Prompts of one task that are run together.

    Attributes:
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
            limit = longest + max(8, longest // 4) if subject.reference or is_plain(task) else 256
        ids, mask = encoded.input_ids, encoded.attention_mask
        room = getattr(subject.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if room and ids.shape[1] + limit > room:
            raise ValueError(
                f"tasks: {task} needs {ids.shape[1]} tokens and {limit} for the answer, but {subject.name} has {room} "
                "positions; choose a smaller size or fewer --max-new-tokens."
            )
        device = subject.model.device
        batches.append(Batch(task, part, ids.to(device), mask.to(device), limit))
    return batches


def prompt_text(subject: Subject, example: Example) -> str:
    """Text of the conversation up to the answer, by the model's own chat template."""
    if subject.reference or is_plain(example.task):
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
    """True if generated text answers the question.

    The reference model must give the exact answer. Others may wrap a number in a sentence: the last number counts. A
    plain text need only go on with the answer.
    """
    if is_plain(example.task):
        return text.startswith(example.answer)
    if subject.reference or example.task == "tools":
        return example.score(text)
    numbers = re.findall(r"-?\d+", re.sub(r"(?<=\d),(?=\d{3})", "", text.rsplit("</think>", maxsplit=1)[-1]))
    return bool(numbers) and numbers[-1] == re.findall(r"-?\d+", example.answer)[-1]
