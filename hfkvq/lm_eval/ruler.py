"""RULER's needles, generated for the model's tokenizer as upstream does, with a choice of length, number and text."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence
from typing import Any

import datasets

from .chat import tokenizer_of
from .rows import as_dataset, data_folder, find_file, read_jsonl, read_text
from .upstream import missing


def _needle(hay: str, key: str, value: str, **counts: int) -> dict[str, Any]:
    return {"type_haystack": hay, "type_needle_k": key, "type_needle_v": value, **counts}


NEEDLES: dict[str, dict[str, Any]] = {
    "niah_single_1": _needle("repeat", "words", "numbers"),
    "niah_single_2": _needle("essay", "words", "numbers"),
    "niah_single_3": _needle("essay", "words", "uuids"),
    "niah_multikey_1": _needle("essay", "words", "numbers", num_needle_k=4),
    "niah_multikey_2": _needle("needle", "words", "numbers"),
    "niah_multikey_3": _needle("needle", "uuids", "uuids"),
    "niah_multivalue": _needle("essay", "words", "numbers", num_needle_v=4),
    "niah_multiquery": _needle("essay", "words", "numbers", num_needle_q=4),
}
"""The eight tasks, in upstream's words."""


def needles(
    needle: str,
    data_dir: str | None = None,
    max_seq_lengths: Sequence[int] = (4096,),
    ruler_samples: int = 500,
    **metadata: Any,
) -> datasets.DatasetDict:
    """Documents of one task.

    Args:
        needle: key of `NEEDLES`; YAML gives it.
        data_dir: folder whose `long_texts/*.txt` hold the hay of the essay tasks; None takes them from the hub.
        max_seq_lengths: tokens of prompt and answer.
        ruler_samples: documents of each length.
        **metadata: what lm-eval knows of the model, for the tokenizer.

    Raises:
        ValueError: no model is named.
    """
    # Not upstream's loader of tokenizers, which trusts code of any repository.
    tokenizer = tokenizer_of(metadata, needle, chat=False)
    try:
        from lm_eval.tasks.ruler.niah_utils import TEMPLATE
        from lm_eval.tasks.ruler.prepare_niah import generate_samples
    except ImportError as error:
        raise missing("ruler", error) from error
    options = NEEDLES[needle]
    hay = _hay(options["type_haystack"], data_dir)
    # Upstream draws from Python's global generator, so its documents depend on the tasks that ran before.
    state = random.getstate()
    random.seed(42)
    try:
        made = [
            generate_samples(
                hay, TOKENIZER=tokenizer, max_seq_length=length, template=TEMPLATE, num_samples=ruler_samples, **options
            )
            for length in max_seq_lengths
        ]
    except LookupError as error:
        raise LookupError(
            f"{needle}: nltk lacks its sentence splitter; fetch it once with `python -m nltk.downloader punkt_tab`, or "
            "take a task without essays: niah_single_1, niah_multikey_2, niah_multikey_3."
        ) from error
    finally:
        random.setstate(state)
    return as_dataset({"test": list(itertools.chain.from_iterable(made))})


def _hay(kind: str, data_dir: str | None) -> list[str] | str:
    from lm_eval.tasks.ruler.prepare_niah import get_haystack

    folder = data_folder(data_dir)
    if kind != "essay" or folder is None:
        return get_haystack(type_haystack=kind)  # pyright: ignore[reportArgumentType]
    paths = sorted((folder / "long_texts").glob("*.txt*"))
    if not paths:
        raise FileNotFoundError(
            f"data_dir: {folder} has no long_texts/*.txt to hide needles in; put a long text there."
        )
    return re.sub(r"\s+", " ", " ".join(read_text(path) for path in paths)).split(" ")


def from_file(data_dir: str | None = None, tokens: int = 4096, **_: Any) -> datasets.DatasetDict:
    """Ready-made documents of so many tokens; their prompts already begin the answer.

    Args:
        data_dir: folder with the file.
        tokens: of prompt and answer; YAML gives it.

    Raises:
        FileNotFoundError: no folder is named, or the file is not in it.
    """
    folder, name = data_folder(data_dir), f"ruler/niah_multikey_3_{tokens}.jsonl"
    if folder is None:
        raise FileNotFoundError(
            f"data_dir: {name} is read from a local folder only; pass --metadata data_dir=DIR or take "
            "kvq_ruler_niah_multikey_3, which needs no file."
        )
    rows = read_jsonl(find_file(folder, name))
    return as_dataset({"test": [{"input": row["input"], "outputs": row["outputs"]} for row in rows]})


def score(doc: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Share of the right values that the answer has, times 100 as published."""
    from lm_eval.tasks.ruler.common_utils import postprocess_pred, string_match_all

    return {"score": 100 * string_match_all(postprocess_pred([results[0]]), [doc["outputs"]])}
