"""`lm_eval --model hf-kvq` as typed, and the costs in lm-eval's results."""

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

import hfkvq.lm_eval.model
from hfkvq.measure.reference import load_reference, reference_path
from tests.caches.models import first_layers

ROOT = Path(__file__).resolve().parents[2]
TASKS = ROOT / "evals" / "tasks"
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
    """In a process of its own; costs are in what it logs and saves."""
    options = f"pretrained={reference_path()},scheme=kitty,boost_ratio=0.2,dtype=float32"
    ran = subprocess.run(
        [
            installed,
            *("--model", "hf-kvq", "--model_args", options, "--device", "cpu", "--batch_size", "2"),
            *("--include_path", TASKS, "--tasks", "ref_recall", "--limit", "2"),
            *("--output_path", tmp_path, "--log_samples"),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert re.search(r"ref_recall: [0-9.]+ total bits, [0-9.]+ bits of codes, largest cache [0-9,]+ bytes", ran.stderr)
    [file] = tmp_path.rglob("results_*.json")
    found = json.loads(file.read_text(encoding="utf-8"))
    kvq = found["config"]["kvq"]
    assert kvq["scheme"]["boost_ratio"] == 0.2
    assert 2 < kvq["code_bits"] < kvq["total_bits"] < 16
    assert kvq["total_bits"] == kvq["tasks"]["ref_recall"]["total_bits"]
    assert kvq["peak_cache_bytes"] > 0
    assert kvq["requests"] == 2


def test_registered_once():
    """lm-eval's table has the name, and its own names as well."""
    from lm_eval.api.registry import get_model, model_registry

    start = load_start()
    start.register()
    start.register()
    assert get_model("hf-kvq") is hfkvq.lm_eval.model.HFKVQ
    assert "hf" in model_registry


def test_start_files_name_the_module():
    """One line each: what interpreters before 3.15 read, and what later ones do."""
    assert (START / "hfkvq_lm_eval.pth").read_text() == "import _hfkvq_lm_eval; _hfkvq_lm_eval.install()\n"
    assert (START / "hfkvq_lm_eval.start").read_text() == "_hfkvq_lm_eval:install\n"


def test_costs_of_evaluations(monkeypatch):
    """Of all evaluations since a scheme was chosen."""
    # It asks pip for all that is installed, for a second.
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
    model, tokenizer = load_reference(torch.float32)
    lm = hfkvq.lm_eval.model.HFKVQ(pretrained=first_layers(model, 1), tokenizer=tokenizer, scheme="kivi-2")
    manager = TaskManager(include_path=str(TASKS), include_defaults=False, metadata={"ref_size": 24})
    requests = []
    for limit, scheme in ((1, None), (1, None), (1, "kivi-4")):
        if scheme is not None:
            lm.use(scheme)
        found = simple_evaluate(lm, tasks=["ref_recall"], limit=limit, task_manager=manager, bootstrap_iters=0)
        requests.append(found["config"]["kvq"]["requests"])
    assert requests == [1, 2, 1]
    assert found["config"]["kvq"]["code_bits"] == 4
