"""`hfkvq leaderboard`: results as lm-eval saves them, and the report of them."""

import functools
import json
from functools import partial

import pytest
from lm_eval.tasks import TaskManager

from hfkvq.lm_eval import runs
from hfkvq.lm_eval.runs import folder_name
from tests.command import assert_refused, invoke

run = partial(invoke, "leaderboard")


def test_results_report_and_what_is_there_already(tmp_path, monkeypatch):
    # Without the thousands of files of lm-eval's own tasks.
    monkeypatch.setattr(runs, "TaskManager", functools.partial(TaskManager, include_defaults=False))
    options = ["--out", tmp_path / "board", "--tasks", "ref_recall_24", "--limit", "1", "--device", "cpu"]
    options += ["--windows", "1", "--context", "256", "--schemes", "full,kitty:sink_length=4"]
    done = run(*options)
    assert done.exit_code == 0, done.output
    names = {"none", "full", "kitty-sink_length-4"}
    found = {}
    for name in names:
        [file] = (tmp_path / "board" / name).rglob("results_*.json")
        found[name] = json.loads(file.read_text(encoding="utf-8"))
        assert len(list(file.parent.glob("samples_ref_recall_24_*.jsonl"))) == 1
    assert found["none"]["config"]["kvq"]["scheme"] is None
    assert found["kitty-sink_length-4"]["config"]["kvq"]["scheme"]["sink_length"] == 4
    assert found["full"]["config"]["model_args"] == {"pretrained": "reference model", "scheme": "full"}
    text = (tmp_path / "board" / "report.md").read_text(encoding="utf-8")
    assert "full" in text
    # Another run finds the results.
    again = run(*options)
    assert again.exit_code == 0, again.output
    assert again.output.count("already") == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--schemes", "kity"], "scheme: got 'kity', which is unknown"),
        (["--metadata", "{"], "which is no JSON"),
        (["--metadata", "[1]"], "allowed a JSON object"),
        (["--device", "tpu"], "device: got 'tpu'"),
    ],
)
def test_bad_input(tmp_path, arguments, message):
    assert_refused(run("--out", tmp_path / "board", *arguments), message)


def test_folders_of_typed_schemes():
    assert folder_name("kitty:boost_ratio=0.2") == "kitty-boost_ratio-0.2"
    assert folder_name("presets/tuned.json") == "tuned.json"
