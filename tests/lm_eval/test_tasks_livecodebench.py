"""LiveCodeBench from local files: as the authors pack them, and programs against their tests."""

from __future__ import annotations

import base64
import json
import pickle
import zlib

import pytest

pytest.importorskip("lm_eval")

from hfkvq.lm_eval.livecodebench import is_right, livecodebench, score

SUM = {"input": "2\n3 4\n", "output": "7\n", "testtype": "stdin"}
HALF = {"input": "2\n1 2\n", "output": "3.0", "testtype": "stdin"}
TWICE = {"input": "[1, 2]\n3", "output": "[3, 6]", "testtype": "functional"}

READS = "n = int(input())\nprint(sum(map(int, input().split())))"
METHOD = "class Solution:\n    def scale(self, xs: List[int], by: int):\n        return tuple(by * x for x in xs)"


def packed(tests):
    """As the authors have private tests."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


def problem(number, day, public, private, **more):
    row = {"question_id": number, "question_content": f"Problem {number}.", "contest_date": f"{day}T00:00:00"}
    row |= {"difficulty": "easy", "starter_code": "", "public_test_cases": json.dumps(public), "metadata": "{}"}
    return row | {"private_test_cases": packed(private)} | more


STARTER = {"starter_code": "class Solution:", "metadata": json.dumps({"func_name": "scale"})}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "livecodebench").mkdir()
    rows = [
        problem("a", "2024-12-31", [SUM], [HALF]),
        problem("b", "2025-01-01", [TWICE], [], **STARTER),
        problem("c", "2025-04-06", [SUM], [], private_test_cases="[]"),
    ]
    for name, part in (("test.jsonl", rows[:2]), ("test2.jsonl", rows[2:])):
        (tmp_path / "livecodebench" / name).write_text("".join(json.dumps(row) + "\n" for row in part))
    return tmp_path


def test_rows(folder):
    rows = livecodebench(data_dir=str(folder))["test"]
    assert [row["id"] for row in rows] == ["a", "b", "c"]
    assert json.loads(rows[0]["tests"]) == [SUM, HALF]
    assert "Question: Problem a.\n\nRead the inputs from stdin" in rows[0]["prompt"]
    assert rows[1]["prompt"].endswith("```python\nclass Solution:\n```\n")
    # The days of MixKVQ's subset.
    rows = livecodebench(data_dir=str(folder), start_date="2025-01-01", end_date="2025-04-06")["test"]
    assert [row["id"] for row in rows] == ["b", "c"]


def test_programs(folder):
    stdin, method, _ = livecodebench(data_dir=str(folder))["test"]
    assert is_right(stdin, READS)
    assert is_right(stdin, "import sys\nxs = sys.stdin.buffer.read().split()\nprint(sum(map(int, xs[1:])))\nexit(0)")
    for wrong in ("print(7)", "", "1/0", READS + "\nprint()\nprint(1)", "import os\nos._exit(0)", "exit(0)"):
        assert not is_right(stdin, wrong)
    assert is_right(method, METHOD)
    assert not is_right(method, METHOD.replace("by * x", "x"))
    text = f"Some thoughts.\n```python\n{READS}\n```\nDone."
    assert score(stdin, [[text, "```python\nprint(1)\n```"]]) == {"pass@1": 0.5}


def test_a_slow_program_fails(folder, monkeypatch):
    monkeypatch.setattr("hfkvq.lm_eval.livecodebench.SECONDS", 0.5)
    assert not is_right(livecodebench(data_dir=str(folder))["test"][2], "while True: pass")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"private_test_cases": base64.b64encode(zlib.compress(pickle.dumps(pytest.fail))).decode()}, "is no text"),
        ({"private_test_cases": "@@"}, "row 1 is not a problem of LiveCodeBench"),
        ({"contest_date": "soon"}, "row 1 is not a problem of LiveCodeBench"),
        ({"metadata": '{"func_name": "f"}'}, "need metadata with 'func_name', others none"),
        ({"public_test_cases": '[{"input": ""}]'}, "row 1 is not a problem"),
    ],
)
def test_damaged_rows(tmp_path, change, message):
    (tmp_path / "livecodebench").mkdir()
    row = problem("a", "2025-01-01", [SUM], []) | change
    (tmp_path / "livecodebench" / "test.jsonl").write_text(json.dumps(row))
    with pytest.raises(ValueError, match=message):
        livecodebench(data_dir=str(tmp_path))


def test_missing_files_and_days(folder, tmp_path, monkeypatch):
    monkeypatch.delenv("HFKVQ_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match=r"data_dir: no folder is named, .* put test.jsonl to test6.jsonl"):
        livecodebench()
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"empty/livecodebench has no \*\.jsonl"):
        livecodebench(data_dir=str(tmp_path / "empty"))
    with pytest.raises(ValueError, match="start_date: got 'May', allowed a day"):
        livecodebench(data_dir=str(folder), start_date="May")
    with pytest.raises(ValueError, match="has none from that time"):
        livecodebench(data_dir=str(folder), start_date="2026-01-01")
