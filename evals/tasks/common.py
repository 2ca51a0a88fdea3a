"""Shared parts of tasks: rows of local files or of the Hub, lm-eval's own YAML with another loader, chat templates."""

from __future__ import annotations

import gzip
import json
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import lm_eval.tasks
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks._yaml_loader import load_yaml
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hfkvq.measure.models import find_model

Row = dict[str, Any]

# Data


def data_folder(data_dir: str | None) -> Path | None:
    """Folder of local data: ``--metadata data_dir=DIR``, else the environment's HFKVQ_DATA, else None for the Hub."""
    named = data_dir or os.environ.get("HFKVQ_DATA")
    return Path(named).expanduser() if named else None


def read_jsonl(data_dir: str | None, name: str) -> list[Row]:
    """Rows of a local file of JSON lines, which may be compressed.

    Raises:
        FileNotFoundError: no folder is named, or the file is not in it.
    """
    folder = data_folder(data_dir)
    found = [path for end in ("", ".gz") if folder and (path := folder / f"{name}{end}").is_file()]
    if not found:
        raise FileNotFoundError(
            f"data_dir: {folder or 'no folder is named, which'} must have {name} or {name}.gz; evals/tasks/README.md "
            "says where it comes from. Pass --metadata data_dir=DIR or set HFKVQ_DATA."
        )
    raw = found[0].read_bytes()
    text = (gzip.decompress(raw) if found[0].suffix == ".gz" else raw).decode("utf-8")
    # Lines end at "\n" alone, not as by splitlines(): JSON strings may hold U+2028 as it is.
    return [json.loads(line) for line in text.split("\n") if line.strip()]


def read_rows(name: str, hub: Sequence[str | None], fields: Iterable[str], data_dir: str | None) -> list[Row]:
    """Rows of a data set, from the local file if a folder is named, else from the Hub.

    Args:
        name: path of the file in the data folder.
        hub: name, configuration and split on the Hub.
        fields: what a row keeps; "question|input" is called by either name.
        data_dir: see `data_folder`.
    """
    rows: Any = datasets.load_dataset(hub[0], hub[1], split=hub[2]) if not data_folder(data_dir) else None
    made = []
    for row in rows if rows is not None else read_jsonl(data_dir, name):
        names = {field.split("|")[0]: next((n for n in field.split("|") if n in row), None) for field in fields}
        if None in names.values():
            raise ValueError(f"{name}: a row has {', '.join(row)}, not all of {', '.join(fields)}.")
        made.append({field: row[own] for field, own in names.items()})
    return made


def as_dataset(**splits: list[Row]) -> datasets.DatasetDict:
    """Rows by split, as lm-eval takes them."""
    return datasets.DatasetDict({split: datasets.Dataset.from_list(rows) for split, rows in splits.items()})


def after_thoughts(text: str) -> str:
    """Text behind the thoughts; the whole text if there are none. The tag that begins them may be in the prompt."""
    return text.rpartition("</think>")[2]


# Tasks


class Task(ConfigurableTask):
    """The class that each YAML here names; it knows two more keys than lm-eval's.

    * ``upstream``: path of the YAML to begin with, in lm-eval's folder of tasks. Own keys win. lm-eval itself includes
      by path alone, and the path to its tasks differs from machine to machine.
    * ``rendered``: true if prompts are complete as they are, so that ``--apply_chat_template`` leaves them alone.
    """

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        config = dict(config or {})
        config.pop("class", None)
        self._rendered = bool(config.pop("rendered", False))
        upstream = config.pop("upstream", None)
        if upstream is not None:
            with warnings.catch_warnings():
                # fuzzywuzzy recommends python-Levenshtein, which would change LongBench's scores.
                warnings.filterwarnings("ignore", "Using slow pure-python SequenceMatcher")
                base = load_yaml(Path(lm_eval.tasks.__file__).parent / upstream)
            for key in ("tag", "group", "task_list", "dataset_kwargs"):
                base.pop(key, None)
            config = {**base, **config, "metadata": {**(base.get("metadata") or {}), **(config.get("metadata") or {})}}
        super().__init__(config=config)

    def fewshot_context(self, doc: Row, **options: Any) -> str | list[str]:
        if self._rendered:
            options.update(apply_chat_template=False, chat_template=None, system_instruction=None)
        return super().fewshot_context(doc, **options)


# Chat templates. lm-eval passes no tools to them, but gives a loader the model's arguments, so that it can render whole
# prompts. Tasks with such prompts are `rendered`.


def tokenizer_name(metadata: Mapping[str, Any]) -> str | None:
    """Name of the tokenizer in what lm-eval passes to a loader; None if no model is named there."""
    return next((value for key in ("tokenizer", "pretrained") if (value := metadata.get(key))), None)


@cache
def _load(name: str, revision: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(find_model(name).path, revision=revision, trust_remote_code=trust_remote_code)


def tokenizer_of(metadata: Mapping[str, Any], task: str) -> PreTrainedTokenizerBase:
    """The tokenizer of the model that lm-eval is to run.

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
    if not tokenizer.chat_template:
        raise ValueError(f"{task}: {name} has no chat template, which must render the prompts; choose a chat model.")
    return tokenizer


def render(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], metadata: Mapping[str, Any], task: str
) -> str:
    """The prompt for the assistant's turn. ``enable_thinking`` and ``chat_template_args`` of the model count.

    Raises:
        ValueError: the template ignores the tools. It raises what it likes where it does not take the messages.
    """
    options = dict(metadata.get("chat_template_args") or {})
    if metadata.get("enable_thinking") is not None:
        options["enable_thinking"] = metadata["enable_thinking"]
    text = tokenizer.apply_chat_template(
        list(messages), tools=list(tools) or None, add_generation_prompt=True, tokenize=False, **options
    )
    lost = [tool["function"]["name"] for tool in tools if tool["function"]["name"] not in text]
    if lost:
        raise ValueError(
            f"{task}: the chat template ignores tools ({lost[0]} is not in the prompt); choose another model."
        )
    return str(text)
