"""Prompts that a model's own chat template renders before lm-eval sees them.

lm-eval passes no tools to a template. A loader is given the model's arguments, though, so it can load the tokenizer and
render whole prompts; tasks with such prompts are marked ``rendered``, and ``--apply_chat_template`` leaves them alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hfkvq.measure.models import find_model


def tokenizer_name(metadata: Mapping[str, Any]) -> str | None:
    """Name of the tokenizer in what lm-eval passes to a loader; None if no model is named there."""
    for key in ("tokenizer", "pretrained"):
        value = metadata.get(key)
        if isinstance(value, str) and value:
            return value
    return None


@cache
def _load(name: str, revision: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(find_model(name).path, revision=revision, trust_remote_code=trust_remote_code)


def tokenizer_of(metadata: Mapping[str, Any], task: str, *, chat: bool = True) -> PreTrainedTokenizerBase:
    """The tokenizer of the model that lm-eval is to run.

    Args:
        metadata: what lm-eval passes to a loader.
        task: for errors.
        chat: whether it must have a chat template.

    Raises:
        ValueError: no model is named, or there is no chat template.
    """
    name = tokenizer_name(metadata)
    if name is None:
        raise ValueError(
            f"{task}: prompts are made with the model's tokenizer, and no model is named; pass --model_args "
            "pretrained=NAME, or metadata={'pretrained': NAME} when a model object is given."
        )
    tokenizer = _load(name, str(metadata.get("revision") or "main"), metadata.get("trust_remote_code") is True)
    if chat and not tokenizer.chat_template:
        raise ValueError(f"{task}: {name} has no chat template, which must render the prompts; choose a chat model.")
    return tokenizer


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    metadata: Mapping[str, Any],
    task: str,
) -> str:
    """The prompt for the assistant's turn. ``enable_thinking`` and ``chat_template_args`` of the model count.

    Raises:
        ValueError: the template does not take the messages, or ignores the tools.
    """
    options = dict(metadata.get("chat_template_args") or {})
    if metadata.get("enable_thinking") is not None:
        options["enable_thinking"] = metadata["enable_thinking"]
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=[dict(tool) for tool in tools] or None,
            add_generation_prompt=True,
            tokenize=False,
            **options,
        )
    except Exception as error:
        # Templates raise what they like (jinja2's errors, TypeError).
        raise ValueError(
            f"{task}: the chat template does not take the messages ({error}); leave the task out."
        ) from error
    lost = [tool["function"]["name"] for tool in tools if tool["function"]["name"] not in text]
    if lost:
        raise ValueError(
            f"{task}: the chat template ignores tools ({lost[0]} is not in the prompt); choose another model."
        )
    return str(text)
