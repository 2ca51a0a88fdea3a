"""Tests on pairs, by hand, and the samples they are made of."""

from __future__ import annotations

import json

import pytest

from hfkvq.measure.report.paired import judge, mcnemar, permutation, pool
from hfkvq.measure.report.samples import Pairs, pair, read_run

from .files import evaluation, run_files, write


def test_mcnemar_by_hand() -> None:
    # 1 and 5 of 6 that differ: 2 · (1 + 6) / 64.
    assert mcnemar(1, 5) == pytest.approx(14 / 64)
    assert mcnemar(5, 1) == pytest.approx(14 / 64)
    assert mcnemar(0, 8) == pytest.approx(2 / 256)
    assert mcnemar(3, 3) == 1.0
    assert mcnemar(0, 0) == 1.0


def test_permutation_by_hand() -> None:
    # Of 2^4 signs, the two where all agree are as far from zero.
    assert permutation([1.0, 2.0, 3.0, 4.0]) == pytest.approx(2 / 16)
    assert permutation([1.0, -1.0]) == 1.0
    assert permutation([0.0, 0.0]) == 1.0
    many = [0.1 * (number % 7) - 0.25 for number in range(200)]
    assert permutation(many) == permutation(many)


def test_verdicts() -> None:
    binary = judge(Pairs("a", "acc,none", [1, 1, 1, 0], [1, 0, 0, 1], True))
    assert (binary.test, binary.first, binary.second, binary.difference) == ("McNemar", 0.75, 0.5, -0.25)
    assert (binary.better, binary.worse, binary.p) == (1, 2, 1.0)
    assert binary.interval is not None
    assert binary.interval[0] <= -0.25 <= binary.interval[1]
    graded = judge(Pairs("b", "score,none", [0.5, 0.25], [0.75, 0.5], True))
    assert (graded.test, graded.p) == ("permutation", pytest.approx(0.5))


def test_pooled_takes_each_sample_once() -> None:
    a = Pairs("a", "exact_match,flexible-extract", [1, 1, 0], [0, 0, 0], True)
    again = Pairs("a", "exact_match,strict-match", [1, 1, 0], [1, 1, 0], True)
    b = Pairs("b", "acc,none", [1, 0], [0, 0], True)
    perplexity = Pairs("c", "ppl,none", [9.0], [10.0], False)
    assert pool([a]) is None
    assert pool([a, again, perplexity]) is None
    verdict = pool([a, again, b, perplexity])
    assert verdict is not None
    assert (verdict.samples, verdict.better, verdict.worse) == (5, 0, 3)
    assert verdict.p == pytest.approx(2 / 8)


def test_samples_are_paired(tmp_path) -> None:
    first = read_run(run_files(tmp_path / "a", "2026-01-01T00-00-00.1", {"x": [1.0, 0.0], "only": [1.0]}))
    second = read_run(run_files(tmp_path / "b", "2026-01-02T00-00-00.2", {"x": [0.0, 0.0]}))
    pairs, unpaired = pair(first, second)
    assert pairs == [Pairs("x", "acc,none", [1.0, 0.0], [0.0, 0.0], True)]
    assert unpaired == ["only"]


def test_folders_give_their_newest_results(tmp_path) -> None:
    run_files(tmp_path / "m", "2026-01-01T00-00-00.1", {"x": [1.0]})
    newest = run_files(tmp_path / "m", "2026-01-02T00-00-00.1", {"x": [0.0]})
    assert read_run(tmp_path).path == newest
    with pytest.raises(ValueError, match=r"has no results_\*.json"):
        read_run(write(tmp_path / "empty" / "x.txt", 1).parent)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"values": [1.0, 0.0, 1.0]}, "x: the samples do not match: the first file has 2, the second 3, in both are 2"),
        ({"doc_hash": "z"}, "x: 2 of 2 samples have different documents; run both on the same data"),
        ({"prompt_hash": "z"}, "x: 2 of 2 samples have different prompts; run both with the same --num_fewshot"),
        ({"task": "y"}, "no task in common: x in the first, y in the second"),
    ],
)
def test_samples_that_do_not_match_are_refused(tmp_path, other, message) -> None:
    values, task = other.pop("values", [1.0, 0.0]), other.pop("task", "x")
    first = read_run(run_files(tmp_path / "a", "2026-01-01", {"x": [1.0, 0.0]}))
    second = read_run(run_files(tmp_path / "b", "2026-01-01", {task: values}, **other))
    with pytest.raises(ValueError, match=message):
        pair(first, second)


def test_metrics_are_chosen(tmp_path) -> None:
    runs = [read_run(run_files(tmp_path / name, "1", {"x": [0.5, 0.25]}, "quality", acc=1.0)) for name in "ab"]
    assert [one.key for one in pair(*runs)[0]] == ["quality,none"]
    with pytest.raises(ValueError, match="metric: got f1, allowed quality"):
        pair(*runs, ["f1"])


def test_bad_samples(tmp_path) -> None:
    with pytest.raises(ValueError, match="was not written by lm-eval"):
        read_run(write(tmp_path / "x_1.json", {"kind": "other"}))
    path = write(tmp_path / "results_1.json", evaluation({"x": {"acc,none": 1.0}}))
    with pytest.raises(ValueError, match=r"no samples_\*_1.jsonl beside .*--log_samples"):
        read_run(path)
    samples = tmp_path / "samples_x_1.jsonl"
    samples.write_text('{"doc_id": 0}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"line 1 of .* is not a sample of lm-eval: KeyError 'metrics'"):
        read_run(path)
    line = {"doc_id": 0, "doc_hash": "d", "prompt_hash": "p", "filter": "none", "metrics": ["acc"], "acc": 1.0}
    samples.write_text(2 * (json.dumps(line) + "\n"), encoding="utf-8")
    with pytest.raises(ValueError, match="document 0 twice"):
        read_run(path)
