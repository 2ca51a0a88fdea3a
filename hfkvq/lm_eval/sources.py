"""Loaders of the public data sets: what task YAML names as ``custom_dataset: !function hfkvq.lm_eval.sources.<name>``.

lm-eval calls a loader with everything that ``--metadata`` and ``--model_args`` hold, so each takes what it knows and
ignores the rest.
"""

from __future__ import annotations

import random
from typing import Any

import datasets

from .rows import Row, Source, as_dataset, data_folder, find_file, read_csv, read_source

_SAME = {"problem": ("problem", "Problem"), "answer": ("answer", "Answer")}

GSM8K = Source(
    {"train": "gsm8k/train.jsonl", "test": "gsm8k/test.jsonl"},
    ("openai/gsm8k", "main"),
    {"question": ("question",), "answer": ("answer",)},
)
MATH500 = Source(
    {"test": "math/math500.jsonl"},
    ("HuggingFaceH4/MATH-500", None),
    {"problem": ("problem",), "solution": ("solution",), "answer": ("answer",)},
)
MATH = Source(
    {"test": "math/math_test.jsonl"},
    ("EleutherAI/hendrycks_math", "algebra"),
    {"problem": ("problem",), "solution": ("solution",), "type": ("type",)},
)
AIME24 = Source({"test": "aime/aime24.jsonl"}, ("Maxwell-Jia/AIME_2024", None), _SAME, {"test": "train"})
AIME25 = Source({"test": "aime/aime25.jsonl"}, ("math-ai/aime25", None), _SAME)
HUMANEVAL = Source(
    {"test": "humaneval/HumanEval.jsonl"},
    ("openai/openai_humaneval", None),
    {name: (name,) for name in ("task_id", "prompt", "entry_point", "canonical_solution", "test")},
)
GPQA = Source(
    {"train": "gpqa/gpqa_diamond.csv"},
    ("Idavidrein/gpqa", "gpqa_diamond"),
    {
        name: (name,)
        for name in ("Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
    },
    gated=True,
)
COMMONSENSE_QA = Source(
    {"train": "commonsense_qa/train_rand_split.jsonl", "validation": "commonsense_qa/dev_rand_split.jsonl"},
    ("tau/commonsense_qa", None),
    {"question": ("question",), "answerKey": ("answerKey",)},
)


def gsm8k(data_dir: str | None = None, **_: Any) -> datasets.DatasetDict:
    """GSM8K as upstream's tasks read it, with `problem` and `gold` for the chat variant."""
    rows = read_source(GSM8K, data_dir)
    for row in (row for part in rows.values() for row in part):
        number = row["answer"].rpartition("####")[2].strip().replace(",", "")
        row.update(problem=row["question"], gold=f"\\boxed{{{number}}}")
    return as_dataset(rows)


def math500(data_dir: str | None = None, **_: Any) -> datasets.DatasetDict:
    """The 500 problems of MATH that "Let's verify step by step" tests on."""
    return _with_gold(read_source(MATH500, data_dir), "solution")


def math_algebra(data_dir: str | None = None, **_: Any) -> datasets.DatasetDict:
    """The 1,187 algebra problems of MATH's test set."""
    return _with_gold(read_source(MATH, data_dir, keep=lambda row: row["type"] == "Algebra"), "solution")


def aime24(data_dir: str | None = None, **_: Any) -> datasets.DatasetDict:
    """The 30 problems of AIME 2024."""
    return _with_gold(read_source(AIME24, data_dir), "answer")


def aime25(data_dir: str | None = None, **_: Any) -> datasets.DatasetDict:
    """The 30 problems of AIME 2025."""
    return _with_gold(read_source(AIME25, data_dir), "answer")


def _with_gold(rows: dict[str, list[Row]], field: str) -> datasets.DatasetDict:
    """Adds what the scorer parses: a solution as it is, a bare answer in a box."""
    for row in (row for part in rows.values() for row in part):
        if "answer" in row:
            row["answer"] = str(row["answer"])
        row["gold"] = row[field] if field == "solution" else f"\\boxed{{{row[field]}}}"
    return as_dataset(rows)


def humaneval(data_dir: str | None = None, **_: Any) -> datasets.DatasetDict:
    """HumanEval's 164 functions."""
    return as_dataset(read_source(HUMANEVAL, data_dir))


def gpqa_diamond(data_dir: str | None = None, option_seed: int = 0, **_: Any) -> datasets.DatasetDict:
    """GPQA's 198 diamond questions, with options in an order that depends on the question and ``option_seed`` alone.

    Upstream shuffles with Python's global generator, so there the order depends on which other tasks run.
    """
    rows = read_source(GPQA, data_dir)
    for row in (row for part in rows.values() for row in part):
        texts = [row["Correct Answer"], *(row[f"Incorrect Answer {number}"] for number in (1, 2, 3))]
        texts = [" ".join((text or "").replace(" [title]", ". ").split()) for text in texts]
        order = [0, 1, 2, 3]
        random.Random(f"{option_seed}/{row['Question']}").shuffle(order)
        row["choices"] = [texts[at] for at in order]
        row.update({f"choice{place}": text for place, text in enumerate(row["choices"], start=1)})
        row["letter"] = "ABCD"[order.index(0)]
        row["answer"] = f"({row['letter']})"
    return as_dataset(rows)


def commonsense_qa(data_dir: str | None = None, **_: Any) -> datasets.DatasetDict:
    """CommonsenseQA, whose own files nest the question where the hub's do not."""
    folder = data_folder(data_dir)
    if folder is None:
        name = COMMONSENSE_QA.hub[0]
        source = Source(COMMONSENSE_QA.files, (name, None), {**COMMONSENSE_QA.fields, "choices": ("choices",)})
        return as_dataset(read_source(source, data_dir))
    rows = read_source(COMMONSENSE_QA, data_dir)
    for row in (row for part in rows.values() for row in part):
        nested = row["question"]
        if not isinstance(nested, dict) or not {"stem", "choices"} <= nested.keys():
            raise ValueError("commonsense_qa: 'question' must hold 'stem' and 'choices', as in the authors' files.")
        pairs = sorted((choice["label"], choice["text"]) for choice in nested["choices"])
        row["question"] = nested["stem"]
        row["choices"] = {"label": [label for label, _ in pairs], "text": [text for _, text in pairs]}
    return as_dataset(rows)


_MMLU_COLUMNS = ("question", "A", "B", "C", "D", "answer")


def mmlu(subject: str, data_dir: str | None = None, **_: Any) -> datasets.DatasetDict:
    """One subject of MMLU; the authors' files are CSV without a header."""
    folder = data_folder(data_dir)
    files = {"test": f"mmlu/test/{subject}_test.csv", "dev": f"mmlu/dev/{subject}_dev.csv"}
    if folder is None:
        fields = {name: (name,) for name in ("question", "choices", "answer")}
        return as_dataset(read_source(Source(files, ("cais/mmlu", subject), fields), None))
    rows: dict[str, list[Row]] = {}
    for split, name in files.items():
        path = find_file(folder, name)
        rows[split] = []
        for number, row in enumerate(read_csv(path, _MMLU_COLUMNS), start=1):
            if row["answer"] not in ("A", "B", "C", "D"):
                raise ValueError(f"{path}: row {number} has the answer {row['answer']!r}, allowed A, B, C, D.")
            choices = [row[letter] for letter in "ABCD"]
            rows[split].append({"question": row["question"], "choices": choices, "answer": "ABCD".index(row["answer"])})
    return as_dataset(rows)
