"""Scripts that run real models and vLLM, as far as they need none: jobs, lost and gained questions, GSM8K's prompts."""

from __future__ import annotations

import json
import sys

import pytest

pytest.importorskip("lm_eval")

from evals import compare, real
from evals.real import pack, task_record, unpack
from evals.tasks.common import Task as LmEvalTask
from evals.vllm_gsm8k import Task, against, task_file
from evals.vllm_plugin import RUNS, TOKENS, agreement, failures


def _job(part, preset, right, asked="a"):
    tasks = {"task": {"asked_sha256": asked, "values": {"exact_match,none": right}}}
    return {"part": part, "preset": preset, "settings": {"part": part}, "about": {"model": "m"}, "tasks": tasks}


def test_what_is_there_is_not_run_again(tmp_path):
    job = ("gsm8k", "kitty:boost_ratio=0.2")
    settings = {"part": "gsm8k", "limit": None}
    assert not real.is_done(tmp_path, job, settings)
    real.write(real.job_file(tmp_path, job), {**_job(*job, "01"), "settings": settings})
    assert real.is_done(tmp_path, job, settings)
    with pytest.raises(ValueError, match="choose another --out"):
        real.is_done(tmp_path, job, {**settings, "limit": 3})
    assert not list(tmp_path.glob("*.part"))


def test_values_of_questions():
    for values, packed in (([1.0, 0.0, 1.0], "101"), ([1.0, 0.25], [1.0, 0.25])):
        assert pack(values) == packed
        assert unpack(packed) == values
    rows = [
        {"doc_id": at, "doc_hash": str(at), "prompt_hash": "p", "filter": name, "metrics": ["score"], "score": 100 * at}
        for name in ("none",)
        for at in (1, 0)
    ]
    assert task_record(rows)["values"] == {"score,none": "01"}
    assert task_record(rows) == task_record(rows[::-1])


def test_lost_and_gained():
    base, other = _job("gsm8k", "none", "110100"), _job("gsm8k", "int4", "011000")
    assert {key: real.compare(base, other)[key] for key in ("lost", "gained")} == {"lost": 2, "gained": 1}
    with pytest.raises(ValueError, match="other questions"):
        real.compare(base, _job("gsm8k", "int4", "011000", asked="b"))


def test_mcnemar_by_hand():
    found = compare.judge([1, 1, 1, 1, 1, 0, 1], [0, 0, 0, 0, 0, 1, 1])
    # 1 and 5 of the 6 that differ: 2 · (1 + 6) / 64.
    assert (found["lost"], found["gained"], found["questions"], found["p"]) == (5, 1, 7, pytest.approx(14 / 64))
    assert found["difference"] == pytest.approx(-4 / 7)
    assert found["interval"][0] < found["difference"] < found["interval"][1]
    same = compare.judge([1.0, 0.0], [1.0, 0.0])
    assert (same["p"], same["difference"], same["interval"]) == (1.0, 0.0, (0.0, 0.0))


def test_permutation_by_hand():
    # Two of the 2^4 signs, those where all agree, are as far from zero.
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


ROWS = [
    {"question": "Two and two?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"},
    {"question": "A house?\nIn dollars?", "answer": "It is dear.\n#### 1,250"},
]


@pytest.fixture
def upstream(tmp_path, monkeypatch):
    """Lm-eval's own task over the rows."""
    for split in ("train", "test"):
        (tmp_path / "gsm8k").mkdir(exist_ok=True)
        text = "\n".join(map(json.dumps, ROWS))
        (tmp_path / "gsm8k" / f"{split}.jsonl").write_text(text, encoding="utf-8")
    monkeypatch.setenv("HFKVQ_DATA", str(tmp_path))
    from evals.tasks.public import gsm8k

    return LmEvalTask({"upstream": "gsm8k/gsm8k-cot.yaml", "task": "kvq_gsm8k_cot", "custom_dataset": gsm8k})


def test_gsm8k_is_asked_and_scored_as_by_lm_eval(upstream):
    task, docs = Task(task_file()), list(upstream.test_docs())
    answers = [
        "So it is 4. The answer is 4.",
        "The answer is $1250.",
        "The answer is 1,250. Q",
        "4",
        "The answer is 5.",
    ]
    for doc in docs:
        assert task.prompt(doc) == upstream.fewshot_context(doc, num_fewshot=8)
        for answer in answers:
            found = upstream.config.filter_list[0]["filter"][0]["regex_pattern"]
            assert found == task._found.pattern
            picked = pick(upstream, doc, answer)
            assert task.is_right(doc, answer) == bool(upstream.process_results(doc, [picked])["exact_match"])
    assert [task.is_right(docs[0], answer) for answer in answers] == [True, False, False, False, False]
    assert task.is_right(docs[1], answers[2])
    assert task.until == upstream.config.generation_kwargs["until"]


def pick(upstream, doc, answer):
    """Answer behind lm-eval's filter."""
    ensemble = upstream._filters[0]
    assert ensemble.name == "strict-match"
    found = [[answer]]
    for make in ensemble.filters:
        found = make().apply(found, [doc])
    return next(iter(found))


def test_answers_are_compared_with_those_of_another_run():
    assert against([True, False, True], [True, True, False, True]) == {"lost": 1, "gained": 1}
    with pytest.raises(ValueError, match="got 1 answers, allowed 2"):
        against([True, False], [True])


def test_agreement_counts_until_the_first_other_token():
    assert agreement([[1, 2, 3, 4], [5, 6, 7, 8], [9]], [[1, 2, 3, 4], [5, 0, 7, 8], [8]]) == {
        "equal": 1, "of": 3, "until": 0.417, "first": 2,
    }  # fmt: skip


def test_each_failure_of_a_run_is_named():
    whole = [[[0] * TOKENS] * 12]
    row = {"run": "main", "free": 9, "blocks": 10, "cached": [0], "preemptions": 0, "to_generate": {"first": 12}}
    assert failures(row, whole) == []
    assert failures({"run": "main", "error": "exit 1"}, None) == ["exit 1"]
    assert failures(row, [[[0]]]) == ["an answer is not whole"]
    assert failures(row | {"free": 8}, whole) == ["blocks are not free"]
    assert failures(row | {"run": "prefix"}, whole) == ["nothing was cached"]
    assert failures(row | {"run": "preempted"}, whole) == ["nothing was preempted"]
    assert failures(row | {"to_generate": {"first": 8}}, whole) == ["first tokens are not those of generate"]
    assert {"prefix", "preempted"} <= set(RUNS)
