"""evals/compare.py: lost and gained questions, and p values computed by hand."""

from __future__ import annotations

import json
import sys

import pytest

from evals import compare


def test_mcnemar_by_hand():
    found = compare.judge([1, 1, 1, 1, 1, 0, 1], [0, 0, 0, 0, 0, 1, 1])
    # 1 and 5 of the 6 that differ: 2 · (1 + 6) / 64.
    assert (found["lost"], found["gained"], found["questions"], found["p"]) == (5, 1, 7, pytest.approx(14 / 64))
    assert found["difference"] == pytest.approx(-4 / 7)
    assert found["interval"][0] < found["difference"] < found["interval"][1]
    same = compare.judge([1.0, 0.0], [1.0, 0.0])
    assert (same["p"], same["difference"], same["interval"]) == (1.0, 0.0, (0.0, 0.0))


def test_permutation_by_hand():
    # Of 2^4 signs, the two where all agree are as far from zero.
    assert compare.judge([0.0] * 4, [0.1, 0.2, 0.3, 0.4])["p"] == pytest.approx(2 / 16)
    assert compare.judge([0.5, 0.5], [0.6, 0.4])["p"] == 1.0


def test_main_metrics():
    keys = ["exact_match,strict-match", "exact_match,flexible-extract", "math_verify,none"]
    assert compare.main_metrics(keys) == ["math_verify,none"]
    assert compare.main_metrics(keys[:2]) == keys[1::-1]
    assert compare.main_metrics(["quality,none", "other,none"]) == ["quality,none", "other,none"]


def run(folder, values, prompt="p", date="2026-01-01"):
    """A folder as lm-eval leaves it."""
    folder.mkdir(exist_ok=True)
    (folder / f"results_{date}.json").write_text("{}")
    for task, of_task in values.items():
        rows = [
            {"doc_id": i, "doc_hash": str(i), "prompt_hash": prompt, "filter": "none", "metrics": ["acc"], "acc": value}
            for i, value in enumerate(of_task)
        ]
        (folder / f"samples_{task}_{date}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_two_runs(tmp_path, monkeypatch, capsys):
    run(tmp_path / "a", {"x": [0.0, 0.0]}, date="2025-01-01")
    first = run(tmp_path / "a", {"x": [1.0, 0.0], "y": [1.0], "only": [1.0]})
    second = run(tmp_path / "b", {"x": [0.0, 0.0], "y": [0.0]})
    rows = compare.compare(first, second)
    assert [(row["task"], row["lost"], row["gained"]) for row in rows] == [("x", 1, 0), ("y", 1, 0), ("all", 2, 0)]
    monkeypatch.setattr(sys, "argv", ["compare.py", str(first), str(second), "--json", str(tmp_path / "out.json")])
    compare.main()
    assert "| all |  | 0.6667 | 0.0000 | -0.6667 |" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "out.json").read_text())) == 3


@pytest.mark.parametrize("other", [{"values": {"x": [1.0]}}, {"values": {"x": [1.0, 0.0]}, "prompt": "q"}])
def test_other_questions_are_refused(tmp_path, other):
    first = run(tmp_path / "a", {"x": [1.0, 0.0]})
    with pytest.raises(ValueError, match="x: the runs have other questions or prompts"):
        compare.compare(first, run(tmp_path / "b", **other))


def test_a_run_without_samples(tmp_path):
    with pytest.raises(SystemExit, match="run lm-eval with --log_samples"):
        compare.read_samples(tmp_path)
