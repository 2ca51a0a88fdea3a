"""`hfkvq tune` on the reference model's text, its objectives, and room that follows MixKVQ's thresholds."""

from __future__ import annotations

import itertools
import json
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
from hfkvq.tuning.room import fit_room, measure_room
from hfkvq.tuning.study import load_study, tune
from tests.caches.models import build, first_layers, prompt
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


PAGES = {"page_size": 16, "group_size": 8, "sink_length": 4}


@pytest.fixture(scope="module")
def model():
    return build("llama", head_dim=64)


@pytest.fixture(scope="module")
def tokens():
    return prompt(3, 128)


def scheme(tau, **knobs):
    return get_scheme("mixkvq", select="thresholds", tau_bf16=tau, tau_int4=tau / 2, **PAGES | knobs)


def test_bytes_follow_thresholds(model, tokens):
    """AUDIT: whatever tau_BF16, the cache held as many bytes. Growing and fixed, and the higher the fewer."""
    found = []
    for tau in (0.1, 0.5, 2.0):
        preset, bits = fit_room(model, scheme(tau), tokens), []
        for room in ({}, {"max_cache_len": 160}):
            cache = MixedKVCache(model, preset, **room)
            with torch.no_grad():
                model(tokens, past_key_values=cache)
                for step in range(20):
                    model(tokens[:, step : step + 1], past_key_values=cache)
            memory = cache.memory()
            bits += [memory.total_bits, memory.code_bits]
            assert 2 <= memory.used_bits <= memory.code_bits
            assert 2 <= memory.key_bits <= 16
        found.append((*bits, memory.key_bits))
    for more, less in itertools.pairwise(found):
        assert all(a > b for a, b in zip(more, less, strict=True))


def test_room_is_what_pages_need(model, tokens):
    """With room for all pages, each channel has the width that the thresholds say: eq. 17 comes out as measured."""
    rooms = measure_room(model, scheme(0.3), tokens, coverage=1.0)
    preset = fit_room(model, scheme(0.3), tokens, coverage=1.0)
    assert [room.layer for room in rooms] == [0, 1]
    for layer, room in enumerate(rooms):
        own = preset.by_layer(2)[layer]
        assert own.room(64) == (room.bf16, room.int4)
        assert room.fits == 1
    assert preset.scheme.room(64) == (max(room.bf16 for room in rooms), max(room.int4 for room in rooms))
    cache = MixedKVCache(model, preset)
    with torch.no_grad():
        for part in (tokens[:, :96], tokens[:, 96:112], tokens[:, 112:]):
            model(part, past_key_values=cache)
    assert cache.memory().key_bits == pytest.approx(sum(room.key_bits for room in rooms) / 2, abs=0.03)
    less = measure_room(model, scheme(0.3), tokens, coverage=0.5)
    assert sum(room.bf16 + room.int4 for room in less) < sum(room.bf16 + room.int4 for room in rooms)
    assert all(0.4 < room.fits < 0.9 for room in less)


@pytest.mark.parametrize(
    ("what", "length", "coverage", "message"),
    [
        ("kitty", 128, 1.0, r"preset: got Kitty.*allowed mixkvq with select='thresholds'"),
        ("mixkvq", 128, 1.0, r"allowed mixkvq with select='thresholds'"),
        (scheme(0.5), 128, 0.0, r"coverage: got 0\.0, allowed more than 0, up to 1"),
        (scheme(0.5), 16, 1.0, r"tokens: got windows of 16 tokens, in which no page is sealed; allowed 20 or more"),
    ],
)
def test_bad_arguments(model, tokens, what, length, coverage, message):
    with pytest.raises(ValueError, match=message):
        measure_room(model, what, tokens[:, :length], coverage=coverage)


def test_a_search_over_thresholds_has_a_trade_off(model, tokens, tmp_path):
    """Appendix C: the more is raised, the less is lost and the more it costs; what was measured is what is kept."""
    storage = f"sqlite:///{tmp_path}/tuning.db"
    objective = TextKLD(model, tokens, prefill=96, chunk=16)

    def search(**options):
        space = {"tau_bf16": [0.05, 0.3, 2.0], "tau_int4": [0.02, 0.1, 2.0]}
        return tune(
            scheme(0.5), objective, trials=8, space=space, cost="key_bits", storage=storage, name="taus",
            fit=lambda preset: fit_room(model, preset, tokens), **options,
        )  # fmt: skip

    study = search()
    front = study.pareto()
    assert len(front) >= 3
    assert front[0].score.value > 1.5 * front[-1].score.value
    assert front[0].score.total_bits < front[-1].score.total_bits
    assert len({point.score.total_bits for point in front}) >= 3
    again = load_study(storage, "taus")
    assert [point.preset for point in again.points()] == [point.preset for point in study.points()]
    assert all(len(point.preset.layers) == 2 for point in again.points())
    limit = front[1].score.key_bits
    assert study.pick({"key_bits": limit}).score.key_bits <= limit
    # A trial with knobs that were measured before takes what was measured.
    assert search().points()[0].preset == study.points()[0].preset


def test_the_command(tmp_path, monkeypatch, small_model):
    # A room for each of the paper's pairs takes its time.
    monkeypatch.setattr("hfkvq.tuning.search.beside", lambda plan: {})
    out = tmp_path / "mine.json"
    done = invoke(
        "tune", "mixkvq:select=thresholds:page_size=32:sink_length=4", "--space", "tau_bf16=0.3", "--trials", 1,
        "--samples", 2, "--held-out", 2, "--context", 192, "--prefill", 128, "--chunk", 64, "--coverage", 0.9,
        "--storage", f"sqlite:///{tmp_path}/tuning.db", "--cost", "key_bits", "--device", "cpu", "--dtype", "float32",
        "--out", out,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "key_bits" in flat(done.output)
    preset = Preset.load(out)
    assert len(preset.layers) == 2
    assert preset.origin["coverage"] == 0.9
    assert json.loads(out.read_text())["origin"]["score"]["key_bits"] >= 2
