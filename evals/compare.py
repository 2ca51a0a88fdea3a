"""Two runs of lm-eval on the same questions: what the second lost and gained, and whether that is more than chance.

    lm_eval run --model hf-kvq --model_args pretrained=M,scheme=none --tasks T --log_samples --output_path runs/none
    lm_eval run --model hf-kvq --model_args pretrained=M,scheme=kitty --tasks T --log_samples --output_path runs/kitty
    PYTHONPATH=. python evals/compare.py runs/none runs/kitty

A row is a task's main metric, or what ``--metric`` names. p is two-sided: McNemar's exact test for right and wrong,
random signs for other metrics; it is not corrected for the number of tasks.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import binomtest, permutation_test

from hfkvq.measure.divergence.intervals import mean_interval
from hfkvq.measure.tables import NOTHING, markdown_table, small_number

# Best first: math_verify reads answers that a task's own exact_match misses.
MAIN = ("math_verify", "exact_match", "acc", "acc_norm", "score", "pass@1", "f1", "qa_f1", "rouge", "code_sim")
FILTERS = ("flexible-extract", "strict-match", "none")
PERMUTATIONS = 9_999


def main_metrics(keys: Iterable[str]) -> list[str]:
    """Keys "metric,filter" of a task's best known metric, by filter; all keys if none is known."""

    def rank(key: str) -> int:
        name = key.split(",")[1]
        return FILTERS.index(name) if name in FILTERS else len(FILTERS)

    found = list(keys)
    best = next((name for name in MAIN for key in found if key.split(",")[0] == name), None)
    return sorted((key for key in found if key.split(",")[0] == best), key=rank) if best else found


def judge(first: Sequence[float], second: Sequence[float], seed: int = 0) -> dict[str, Any]:
    """Compares the values of the same questions in two runs.

    Args:
        first: a value of each question, more is better.
        second: the same questions in the other run.
        seed: of bootstrap and permutations.

    Returns:
        Means, their ``difference`` (second less first) with a 95 % bootstrap ``interval`` (None of one question), how
        many questions the second run ``lost`` and ``gained``, and the two-sided ``p`` that the runs do not differ.
    """
    differences = np.subtract(second, first).astype(np.float64)
    lost, gained = int((differences < 0).sum()), int((differences > 0).sum())
    if lost + gained == 0:
        p = 1.0
    elif {*first, *second} <= {0.0, 1.0}:
        # McNemar: of the questions that differ, as many are gained as are lost.
        p = float(binomtest(gained, lost + gained, 0.5).pvalue)
    else:
        options: dict[str, Any] = {"permutation_type": "samples", "vectorized": True, "n_resamples": PERMUTATIONS}
        options |= {"batch": max(1, 2**20 // len(differences)), "rng": np.random.default_rng(seed)}
        both = differences, np.zeros_like(differences)
        p = float(permutation_test(both, lambda a, b, axis: (a - b).mean(axis), **options).pvalue)
    return {
        "questions": len(differences),
        "first": float(np.mean(first)),
        "second": float(np.mean(second)),
        "difference": float(differences.mean()),
        "interval": mean_interval(differences.tolist(), seed),
        "lost": lost,
        "gained": gained,
        "p": p,
    }


def read_samples(path: Path) -> dict[str, dict[str, dict[Any, float]]]:
    """Values of the newest run in a folder, by task, "metric,filter" and question (hashes of document and prompt)."""
    results = sorted(path.rglob("results_*.json"), key=lambda file: file.name)
    date = results[-1].stem.rpartition("_")[2] if results else ""
    files = sorted(results[-1].parent.glob(f"samples_*_{date}.jsonl")) if results else []
    if not files:
        sys.exit(f"{path}: has no results with samples; run lm-eval with --log_samples --output_path {path}.")
    found: dict[str, dict[str, dict[Any, float]]] = {}
    for file in files:
        task = found.setdefault(file.name[len("samples_") : -len(f"_{date}.jsonl")], {})
        for line in file.read_text(encoding="utf-8").split("\n"):
            row = json.loads(line) if line.strip() else {"metrics": ()}
            for metric in row["metrics"]:
                # A tuple, such as F1's pairs, says nothing by question.
                if isinstance(row[metric], (int, float)):
                    question = row["doc_id"], row["doc_hash"], row["prompt_hash"]
                    task.setdefault(f"{metric},{row['filter']}", {})[question] = float(row[metric])
    return found


def compare(first: Path, second: Path, metric: str | None = None) -> list[dict[str, Any]]:
    """`judge`'s figures of each task that both runs have; and of all their main metrics together, if several.

    Raises:
        ValueError: a task's questions or prompts differ.
    """
    runs, rows, together = (read_samples(first), read_samples(second)), [], ([], [])
    for task in (task for task in runs[0] if task in runs[1]):
        one, other = runs[0][task], runs[1][task]
        keys = [key for key in one if key.split(",")[0] == metric] if metric else main_metrics(one)[:1]
        for key in keys:
            if key not in other or one[key].keys() != other[key].keys():
                raise ValueError(
                    f"{task}: the runs have other questions or prompts; run both with the same --limit, --num_fewshot, "
                    "--apply_chat_template and data."
                )
            pair = list(one[key].values()), [other[key][question] for question in one[key]]
            rows.append({"task": task, "metric": key, **judge(*pair)})
            together[0].extend(pair[0])
            together[1].extend(pair[1])
    if len(rows) > 1:
        rows.append({"task": "all", "metric": "", **judge(*together)})
    return rows


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=Path, help="folder of a run, with its samples")
    parser.add_argument("second", type=Path, help="folder of the other run")
    parser.add_argument("--metric", help="instead of each task's main one")
    parser.add_argument("--json", type=Path, help="file for the figures")
    given = parser.parse_args()
    try:
        rows = compare(given.first, given.second, given.metric)
    except ValueError as error:
        sys.exit(str(error))
    lines = []
    for row in rows:
        ends = NOTHING if row["interval"] is None else "{:+.4f} to {:+.4f}".format(*row["interval"])
        figures = f"{row['first']:.4f}", f"{row['second']:.4f}", f"{row['difference']:+.4f}", ends
        counts = str(row["questions"]), str(row["lost"]), str(row["gained"])
        lines.append((row["task"], row["metric"], *figures, *counts, small_number(max(row["p"], 1e-9))))
    head = ("task", "metric", "first", "second", "difference", "95 %", "questions", "lost", "gained", "p")
    print(markdown_table(head, lines))
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
