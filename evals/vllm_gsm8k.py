"""GSM8K through vLLM's offline engine, with its own caches or hfkvq's: lm-eval's prompt and its strict-match, greedy.

    PYTHONPATH=. python -m evals.vllm_gsm8k FOLDER test.jsonl --answers bf16.jsonl --json bf16.json
    PYTHONPATH=. python -m evals.vllm_gsm8k FOLDER test.jsonl --scheme best-2.5 --base bf16.jsonl --json best-2.5.json

FOLDER holds weights and tokenizer, test.jsonl GSM8K's questions as evals/tasks/README.md says. Prompt and score are
read from lm-eval's gsm8k-cot.yaml: the installed one's, or --task. Questions share the eight shots, so prefix caching
is on. --answers writes a line for each question, --base reads one of another run: "lost" were right there alone,
"gained" here alone. Where keys are to be smoothed, write HFKVQ_SMOOTHING first (docs/vllm.md).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Template

from evals.vllm_peer import Row, engine, header, keep, leave

SHOTS, DELIMITER, MARK = "\n\n", " ", "strict-match"
"""Lm-eval's text between shots, and between a question and its answer; and the name of the filter."""


def task_file() -> Path:
    """The task of the lm-eval that is installed, which is not imported.

    Raises:
        FileNotFoundError: none is.
    """
    found = importlib.util.find_spec("lm_eval")
    if found is None or not found.submodule_search_locations:
        raise FileNotFoundError("--task: got none, and lm-eval is not installed; name its tasks/gsm8k/gsm8k-cot.yaml.")
    return Path(found.submodule_search_locations[0]) / "tasks" / "gsm8k" / "gsm8k-cot.yaml"


class Task:
    """Prompts and scores that a YAML of lm-eval says.

    Args:
        path: of the YAML.
    """

    def __init__(self, path: Path) -> None:
        self._said = yaml.safe_load(path.read_text(encoding="utf-8"))
        self._question, self._target = (Template(self._said[f"doc_to_{name}"]) for name in ("text", "target"))
        self.until: list[str] = self._said["generation_kwargs"]["until"]
        filters = next(each["filter"] for each in self._said["filter_list"] if each["name"] == MARK)
        self._found = re.compile(filters[0]["regex_pattern"])
        self._metric = self._said["metric_list"][0]
        shots = self._said["fewshot_config"]["samples"][: self._said["num_fewshot"]]
        self._shots = "".join(self._question.render(shot) + DELIMITER + self.target(shot) + SHOTS for shot in shots)

    def prompt(self, row: Row) -> str:
        """The shots and a question."""
        return self._shots + self._question.render(row)

    def target(self, row: Row) -> str:
        """The right number of a question."""
        return self._target.render(row)

    def is_right(self, row: Row, answer: str) -> bool:
        """An answer is right if the number that it ends with is."""
        found = self._found.findall(answer)
        return bool(found) and self._plain(found[0].strip()) == self._plain(self.target(row))

    def _plain(self, text: str) -> str:
        for ignored in self._metric["regexes_to_ignore"]:
            text = re.sub(ignored, "", text)
        return text.lower() if self._metric["ignore_case"] else text


def read_lines(path: Path) -> list[Row]:
    """Rows of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]


def against(right: Sequence[bool], base: Sequence[bool]) -> Row:
    """Questions that were right in the other run alone, and here alone.

    Raises:
        ValueError: the runs have other numbers of questions.
    """
    if len(base) < len(right):
        raise ValueError(f"--base: got {len(base)} answers, allowed {len(right)} or more; use the same questions.")
    pairs = list(zip(right, base, strict=False))
    return {"lost": sum(b and not own for own, b in pairs), "gained": sum(own and not b for own, b in pairs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder with weights and tokenizer")
    parser.add_argument("questions", type=Path, help="JSON lines with question and answer")
    parser.add_argument("--task", type=Path, help="lm-eval's gsm8k-cot.yaml, where lm-eval is not installed")
    parser.add_argument("--limit", type=int, help="only the first questions")
    parser.add_argument("--scheme", help="of hfkvq")
    parser.add_argument("--kv", default="auto", help="vLLM's --kv-cache-dtype, without --scheme")
    parser.add_argument("--tokens", type=int, default=256, help="of an answer, at most, as in lm-eval")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--tp", type=int, default=1, help="GPUs, by tensor parallelism")
    parser.add_argument("--answers", type=Path, help="JSON lines to write")
    parser.add_argument("--base", type=Path, help="JSON lines of another run")
    parser.add_argument("--json", type=Path, help="the record to write")
    asked = parser.parse_args()
    task, rows = Task(asked.task or task_file()), read_lines(asked.questions)[: asked.limit]
    base = [row["right"] for row in read_lines(asked.base)] if asked.base else None
    if base is not None:
        against([False] * len(rows), base)

    from vllm import SamplingParams

    llm: Any = engine(
        asked.model, asked.scheme, kv_cache_dtype=asked.kv, max_model_len=4096, enable_prefix_caching=True,
        max_num_seqs=asked.max_num_seqs, tensor_parallel_size=asked.tp,
    )  # fmt: skip
    given = SamplingParams(temperature=0.0, max_tokens=asked.tokens, stop=task.until)
    llm.generate(["1 + 1 ="], given, use_tqdm=False)
    start = time.perf_counter()
    out = llm.generate([task.prompt(row) for row in rows], given, use_tqdm=False)
    seconds = time.perf_counter() - start
    answers = [each.outputs[0].text for each in out]
    right = [task.is_right(row, answer) for row, answer in zip(rows, answers, strict=True)]
    found: Row = {"scheme": asked.scheme, "kv": asked.kv, "accuracy": 100 * sum(right) / len(right)}
    found |= {"right": sum(right), "of": len(right), "seconds": round(seconds, 2)}
    found |= {"new_tokens": sum(len(each.outputs[0].token_ids) for each in out)}
    found |= {"cached_tokens": sum(each.num_cached_tokens or 0 for each in out)}
    found |= against(right, base) if base is not None else {}
    if asked.answers:
        lines = [json.dumps({"right": ok, "answer": answer}) for ok, answer in zip(right, answers, strict=True)]
        asked.answers.write_text("\n".join(lines) + "\n", encoding="utf-8")
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(asked).items()}
    keep(header("gsm8k through vllm", settings=settings), found, asked.json)
    leave(llm)


if __name__ == "__main__":
    main()
