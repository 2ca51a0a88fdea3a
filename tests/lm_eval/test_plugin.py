"""`lm_eval --model hf-kvq` as typed, the plain road beside it, and the bill in lm-eval's results."""

import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from lm_eval.tasks import TaskManager
from lm_eval.utils import make_table

import hfkvq.lm_eval.model
from hfkvq.lm_eval import __main__ as plain_road
from hfkvq.lm_eval import task_folder
from hfkvq.measure.reference import reference_path

START = Path(hfkvq.lm_eval.__file__).parent / "start"


def load_start():
    spec = importlib.util.spec_from_file_location("start_of_hfkvq", START / "_hfkvq_lm_eval.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def installed():
    """The command that pip made."""
    command = Path(sys.executable).with_name("lm_eval")
    if importlib.util.find_spec("_hfkvq_lm_eval") is None or not command.is_file():
        pytest.skip("hfkvq is not installed here: pip install -e '.[eval]'")
    return command


def test_lm_eval_knows_the_name(installed):
    """By the installed files, which ran when this process began: nothing else imports the module by this name."""
    from lm_eval.api.registry import get_model

    assert "_hfkvq_lm_eval" in sys.modules
    importlib.import_module("lm_eval.models")
    assert get_model("hf-kvq") is hfkvq.lm_eval.model.HFKVQ


@pytest.mark.slow
def test_lm_eval_as_typed(installed, tmp_path):
    """In a process of its own; and the bill is in what it prints and saves."""
    options = f"pretrained={reference_path()},scheme=kitty,boost_ratio=0.2,dtype=float32"
    ran = subprocess.run(
        [
            *(installed, "--model", "hf-kvq", "--model_args", options, "--device", "cpu", "--batch_size", "2"),
            *("--include_path", task_folder(), "--tasks", "ref_recall", "--limit", "2"),
            *("--output_path", tmp_path, "--log_samples"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    # In the table that lm-eval prints, between its own metrics.
    assert "|total_bits" in ran.stdout
    [file] = tmp_path.rglob("results_*.json")
    found = json.loads(file.read_text(encoding="utf-8"))
    row, kvq = found["results"]["ref_recall"], found["config"]["kvq"]
    assert kvq["scheme"]["boost_ratio"] == 0.2
    assert 2 < row["code_bits,none"] < row["total_bits,none"] < 16
    assert row["total_bits,none"] == kvq["total_bits"] == kvq["tasks"]["ref_recall"]["total_bits"]
    assert row["peak_cache_bytes,none"] == kvq["peak_cache_bytes"] > 0
    assert kvq["requests"] == 2


def test_registered_once():
    """lm-eval's table has the name, and its own names as well."""
    from lm_eval.api.registry import get_model, model_registry

    start = load_start()
    start.register()
    start.register()
    assert get_model("hf-kvq") is hfkvq.lm_eval.model.HFKVQ
    assert "hf" in model_registry


def test_finder_waits_for_one_module_and_leaves(monkeypatch):
    start = load_start()
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.delitem(sys.modules, "lm_eval.models")
    start.install()
    start.install()
    assert sys.meta_path.count(start.Finder) == 1
    assert start.Finder.find_spec("json") is None
    assert start.Finder in sys.meta_path
    registered = []
    monkeypatch.setattr(start, "register", lambda: registered.append(True))
    spec = start.Finder.find_spec("lm_eval.models")
    assert start.Finder not in sys.meta_path
    assert not registered
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert registered


def test_start_files_name_the_module():
    """One line each: what interpreters before 3.15 read, and what later ones do."""
    assert (START / "hfkvq_lm_eval.pth").read_text() == "import _hfkvq_lm_eval; _hfkvq_lm_eval.install()\n"
    assert (START / "hfkvq_lm_eval.start").read_text() == "_hfkvq_lm_eval:install\n"


@pytest.mark.parametrize(
    ("given", "added"),
    [
        (["run", "--tasks", "ref_recall"], ["--include_path", str(task_folder())]),
        (["run", "--include_path", "mine"], []),
        (["run", "--include_path=mine"], []),
        ([], []),
        (["--help"], []),
    ],
)
def test_plain_road_knows_the_tasks(monkeypatch, given, added):
    seen = []
    monkeypatch.setattr(sys, "argv", ["lm_eval", *given])
    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", lambda: seen.extend(sys.argv[1:]))
    plain_road.main()
    assert seen == [*given, *added]


def test_bill_of_an_evaluation():
    """Two runs of one model: each has its own bill, in results, table and config."""
    lm = hfkvq.lm_eval.model.HFKVQ(pretrained=str(reference_path()), device="cpu", scheme="kivi-2", batch_size=2)
    manager = TaskManager(include_path=str(task_folder()), include_defaults=False)
    requests = []
    for limit in (2, 1):
        found = lm_eval_run(lm, manager, limit)
        requests.append(found["config"]["kvq"]["requests"])
    assert requests == [2, 1]
    row = found["results"]["ref_recall"]
    assert row["code_bits,none"] == 2
    assert found["higher_is_better"]["ref_recall"]["total_bits"] is False
    assert "total_bits" in make_table(found)


def lm_eval_run(lm, manager, limit):
    from lm_eval import simple_evaluate

    return simple_evaluate(lm, tasks=["ref_recall"], limit=limit, task_manager=manager, bootstrap_iters=0)
