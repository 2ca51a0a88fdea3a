"""Tasks in evals/tasks: every YAML names what exists, local and remote rows, and right answers that score 1.0."""

import json
import logging
from pathlib import Path

import pytest

pytest.importorskip("lm_eval")

import lm_eval.tasks
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from evals.tasks.common import Task, read_jsonl
from evals.tasks.long_context import METRICS
from hfkvq.measure.reference import reference_path

FOLDER = Path(__file__).resolve().parents[2] / "evals" / "tasks"
FILES = sorted(FOLDER.rglob("*.yaml"))


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    monkeypatch.delenv("HFKVQ_DATA", raising=False)


@pytest.fixture(scope="module")
def manager():
    logging.disable(logging.WARNING)
    metadata = {"pretrained": str(reference_path()), "ref_samples": 3}
    yield TaskManager(include_path=[str(FOLDER)], include_defaults=False, metadata=metadata)
    logging.disable(logging.NOTSET)


def name_of(path):
    config = load_yaml(path, resolve_func=False)
    return config["group"] if "group" in config else config["task"]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_each_file(manager, path):
    """Functions exist, members of groups and lm-eval's own YAML too."""
    config = load_yaml(path)
    assert name_of(path).startswith(("kvq_", "plain_", "ref_"))
    assert name_of(path) in manager.all_tasks
    if "group" in config:
        assert set(config["task"]) <= set(manager.all_tasks)
        return
    assert issubclass(config["class"], Task)
    assert (Path(lm_eval.tasks.__file__).parent / config.get("upstream", "gsm8k/gsm8k.yaml")).is_file()


def test_names_are_unique():
    names = [name_of(path) for path in FILES]
    assert len(set(names)) == len(names)
    assert {f"kvq_longbench_{name}" for name in METRICS} <= set(names)


def test_line_separators_inside_of_strings(tmp_path):
    (tmp_path / "x.jsonl").write_text(json.dumps({"a": "b\u2028c"}, ensure_ascii=False) + "\r\n", encoding="utf-8")
    assert read_jsonl(str(tmp_path), "x.jsonl") == [{"a": "b\u2028c"}]


def test_reference_model_through_lm_eval(monkeypatch):
    """The whole way, with lm-eval's stock model: generation and log-likelihoods."""
    # It asks pip for all that is installed, for a second.
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
    metadata = {"pretrained": str(reference_path()), "ref_samples": 3, "ref_size": 24}
    found = simple_evaluate(
        model="hf",
        model_args={"pretrained": str(reference_path()), "dtype": "float32"},
        tasks=["ref_recall", "ref_recall_ll"],
        task_manager=TaskManager(include_path=[str(FOLDER)], include_defaults=False, metadata=metadata),
        limit=1,
        device="cpu",
        batch_size=1,
        bootstrap_iters=0,
    )
    results = found["results"]
    assert results["ref_recall"]["exact_match,none"] == 1.0
    assert results["ref_recall_ll"]["acc,none"] == 1.0
    assert 0.0 <= results["ref_recall_ll"]["nll,none"] < 0.5
    assert json.dumps(found["configs"]["ref_recall"]["generation_kwargs"])
