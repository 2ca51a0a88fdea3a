"""`hfkvq tune` on the reference model's text, its objectives, and what it says of wrong arguments."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
import torch

from hfkvq import MixedKVCache, get_scheme
from hfkvq.caches import Preset, get_preset
from hfkvq.measure.divergence import measure
from hfkvq.measure.models import load_model
from hfkvq.measure.reference import load_reference
from hfkvq.tuning.objectives import LmEvalTasks, TextKLD
from hfkvq.tuning.study import load_study
from tests.caches.models import first_layers
from tests.command import assert_refused, flat, invoke

run = partial(invoke, "tune")

SMALL = ["--samples", "2", "--held-out", "2", "--context", "192", "--prefill", "128", "--chunk", "64"]


@pytest.fixture(scope="module")
def subject():
    model, tokenizer = load_reference(torch.float32)
    return first_layers(model, 2), tokenizer


@pytest.fixture
def small_model(monkeypatch):
    """The command takes two layers of a model."""
    monkeypatch.setattr("hfkvq.tuning.search.load_model", lambda *given: first_layers(load_model(*given), 2))


def test_from_search_to_preset(tmp_path, small_model):
    storage, out = f"sqlite:///{tmp_path}/tuning.db", tmp_path / "tuned.json"
    options = ["kitty:page_size=32:sink_length=4", "--space", "boost_ratio=0,0.125,0.5", "--trials", 3, *SMALL]
    options += ["--storage", storage, "--name", "mine", "--device", "cpu", "--dtype", "float32"]
    # As on a second machine: trials, and nothing else.
    done = run(*options, "--search-only")
    assert (done.exit_code, done.stdout) == (0, ""), done.output
    assert not load_study(storage, "mine").references()
    done = run(*options, "--out", out)
    assert done.exit_code == 0, done.output
    assert "3 trials measured on 2 samples each" in flat(done.output)
    preset = Preset.load(out)
    assert preset.scheme.page_size == 32
    assert preset.origin["searched"] == {"boost_ratio": preset.scheme.boost_ratio}
    assert preset.origin["held_out_score"]["samples"] == 2
    study = load_study(storage, "mine")
    assert {"kitty", "kitty-pro"} <= set(study.references())
    assert MixedKVCache(load_reference()[0], str(out)).scheme == preset.scheme
    # It goes on where it stopped: nothing is left to do, but a limit may choose another point.
    cheapest = min(point.score.total_bits for point in study.points())
    done = run(*options, "--max-total-bits", cheapest + 1e-6)
    assert done.exit_code == 0, done.output
    starred = re.search(r"(\d+) \*", done.output)
    assert starred is not None
    assert study.points()[int(starred[1])].score.total_bits == cheapest
    # Other text, or another model, under the same name: trials that could not be compared.
    assert_refused(run(*options, "--seed", 1), "is one of another measured_on")
    done = run(*options, "--max-total-bits", 0.5)
    assert_refused(done, "none of 3 trials is within total_bits <= 0.5; the closest is trial")


def windows(tokenizer, rows=4, length=160):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, len(tokenizer) - 64, (rows, length), generator=generator)


def test_kld_of_text_is_that_of_measure(subject):
    """The score is what `measure` says, and its samples are windows."""
    model, tokenizer = subject
    tokens = windows(tokenizer)
    preset = get_preset("kitty", page_size=16, sink_length=4, local_length=16)
    expected = measure(model, tokens, {"": preset}, prefill=96, chunk=32).schemes[0]
    score = TextKLD(model, tokens, prefill=96, chunk=32, batch_size=2)(preset)
    assert score.value == pytest.approx(expected.mean, rel=1e-4)
    assert score.total_bits == pytest.approx(expected.bill.total_bits)
    assert score.samples == 4
    assert score.low <= score.value <= score.high


def test_lm_eval_tasks(subject, monkeypatch):
    from lm_eval.tasks import TaskManager

    from hfkvq.lm_eval.model import HFKVQ

    # It asks pip for all that is installed, for a second.
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
    model, tokenizer = subject
    lm = HFKVQ(pretrained=model, tokenizer=tokenizer, batch_size=2, max_length=2048)
    folder = str(Path(__file__).resolve().parents[2] / "evals" / "tasks")
    manager = TaskManager(include_path=folder, include_defaults=False, metadata={"ref_size": 24})
    objective = LmEvalTasks(lm, ["ref_recall"], [0, 1, 2], task_manager=manager)
    score = objective(get_preset("kivi-2"))
    assert score.samples == 3
    assert score.code_bits == 2
    assert lm.cache_arguments.preset == get_preset("kivi-2")
    with pytest.raises(ValueError, match="has no metric 'speed'; it has exact_match,none"):
        LmEvalTasks(lm, ["ref_recall:speed"], [0], task_manager=manager)(get_preset("full"))
    with pytest.raises(ValueError, match="tasks, samples: got 0 and 1"):
        LmEvalTasks(lm, [], [0])


@pytest.mark.parametrize("name", ["kitty", "kivi-2", "mixkvq", "saw-int4", "arkv", "triaxial", "kvarn"])
def test_default_spaces_are_legal(name):
    """Every value is, and so are the presets' own."""
    from hfkvq.tuning.study import published, space_of

    scheme = get_scheme(name)
    space = space_of(scheme)
    assert space
    assert {knob: getattr(scheme, knob) for knob in space} in published(scheme, space) or name in ("arkv",)
