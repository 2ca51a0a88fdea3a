"""evals/real.py without a model: the order of jobs, what is resumed, and what a cache lost and gained."""

import pytest

from evals import real
from evals.real import compare, pack, task_record, unpack


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


def test_missing_data_are_told_before_work_begins(tmp_path, monkeypatch):
    monkeypatch.delenv("HFKVQ_DATA", raising=False)
    real.check_data(["kld8k", "gsm8k", "longbench"], None)
    with pytest.raises(ValueError, match=r"no folder is named, which must have ruler/niah_multikey_3_4096.jsonl"):
        real.check_data(["ruler4k"], None)
    with pytest.raises(ValueError, match=r"must have gsm8k/train.jsonl \(gsm8k\), gsm8k/test.jsonl"):
        real.check_data(["kld8k", "gsm8k", "gsm8k"], str(tmp_path))
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "train.jsonl").touch()
    (tmp_path / "gsm8k" / "test.jsonl.gz").touch()
    real.check_data(["gsm8k"], str(tmp_path))
    monkeypatch.setenv("HFKVQ_DATA", str(tmp_path))
    with pytest.raises(ValueError, match=r"math/math500.jsonl"):
        real.check_data(["gsm8k", "math500"], None)
    monkeypatch.setattr("sys.argv", ["real.py", "--model", "reference", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match=r"data: .* humaneval/HumanEval.jsonl \(humaneval\)"):
        real.main()
    assert not (tmp_path / "out" / "logs").exists()


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
    assert {key: compare(base, other)[key] for key in ("lost", "gained")} == {"lost": 2, "gained": 1}
    with pytest.raises(ValueError, match="other questions"):
        compare(base, _job("gsm8k", "int4", "011000", asked="b"))
