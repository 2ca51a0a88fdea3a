"""GSM8K, MATH, AIME and RULER's ready-made questions: loaders that YAML names, and their scores.

lm-eval calls a loader with everything that ``--metadata`` and ``--model_args`` hold, so each takes what it knows and
ignores the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import datasets

from evals.tasks.common import Row, after_thoughts, as_dataset, read_jsonl, read_rows


def gsm8k(data_dir: str | None = None, **_: Any) -> datasets.DatasetDict:
    """GSM8K as upstream's tasks read it, with `problem` and `gold` for the chat variant."""
    splits = {}
    for split in ("train", "test"):
        hub = ("openai/gsm8k", "main", split)
        splits[split] = read_rows(f"gsm8k/{split}.jsonl", hub, ("question", "answer"), data_dir)
        for row in splits[split]:
            number = row["answer"].rpartition("####")[2].strip().replace(",", "")
            row.update(problem=row["question"], gold=f"\\boxed{{{number}}}")
    return as_dataset(**splits)


def math500(data_dir: str | None = None, **_: Any) -> datasets.DatasetDict:
    """The 500 problems of MATH that "Let's verify step by step" tests on."""
    hub = ("HuggingFaceH4/MATH-500", None, "test")
    rows = read_rows("math/math500.jsonl", hub, ("problem", "solution", "answer"), data_dir)
    return as_dataset(test=[{**row, "gold": row["solution"]} for row in rows])


def math_algebra(data_dir: str | None = None, **_: Any) -> datasets.DatasetDict:
    """The 1,187 algebra problems of MATH's test set."""
    hub = ("EleutherAI/hendrycks_math", "algebra", "test")
    rows = read_rows("math/math_test.jsonl", hub, ("problem", "solution", "type"), data_dir)
    return as_dataset(test=[{**row, "gold": row["solution"]} for row in rows if row["type"] == "Algebra"])


def aime24(data_dir: str | None = None, **_: Any) -> datasets.DatasetDict:
    """The 30 problems of AIME 2024."""
    return _aime("aime/aime24.jsonl", ("Maxwell-Jia/AIME_2024", None, "train"), data_dir)


def aime25(data_dir: str | None = None, **_: Any) -> datasets.DatasetDict:
    """The 30 problems of AIME 2025."""
    return _aime("aime/aime25.jsonl", ("math-ai/aime25", None, "test"), data_dir)


def _aime(name: str, hub: Sequence[str | None], data_dir: str | None) -> datasets.DatasetDict:
    rows = read_rows(name, hub, ("problem|Problem", "answer|Answer"), data_dir)
    return as_dataset(
        test=[{**row, "answer": str(row["answer"]), "gold": f"\\boxed{{{row['answer']}}}"} for row in rows]
    )


def score_math(doc: Row, results: Sequence[str]) -> dict[str, float]:
    r"""True if the answer equals ``doc["gold"]``: a ``\boxed`` one first, else what else can be parsed."""
    from math_verify import parse, verify

    return {"math_verify": float(verify(gold=parse(doc["gold"]), target=parse(after_thoughts(results[0]))))}


def ruler(data_dir: str | None = None, tokens: int = 4096, **_: Any) -> datasets.DatasetDict:
    """RULER's multikey-3 questions of so many tokens, from a local file; their prompts already begin the answer."""
    rows = read_jsonl(data_dir, f"ruler/niah_multikey_3_{tokens}.jsonl")
    return as_dataset(test=[{"input": row["input"], "outputs": row["outputs"]} for row in rows])


def score_ruler(doc: Row, results: Sequence[str]) -> dict[str, float]:
    """Share of the right values that the answer has, times 100 as published."""
    from lm_eval.tasks.ruler.common_utils import postprocess_pred, string_match_all

    return {"score": 100 * string_match_all(postprocess_pred([results[0]]), [doc["outputs"]])}
