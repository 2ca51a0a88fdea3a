"""Kernels of several presets are compiled together, once, and nowhere but on a GPU."""

from __future__ import annotations

import importlib.util
import logging
import types

import pytest
import torch
from transformers import LlamaConfig

from hfkvq.caches import warm
from hfkvq.caches.preset import get_preset
from hfkvq.kernels import warm as kernels
from hfkvq.measure.demo import Settings, run_demo
from hfkvq.measure.demo import run as demo
from hfkvq.measure.demo.prompts import load
from hfkvq.measure.divergence import measure, measurement
from tests.caches.models import build, prompt

SMALL = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3}


def model_on(device):
    """What is asked of a model, which need not be there."""
    config = LlamaConfig(**SMALL, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    return types.SimpleNamespace(device=torch.device(device), dtype=torch.bfloat16, config=config)


@pytest.fixture
def given(monkeypatch):
    """What is to be compiled, as if something were missing."""
    found = []

    def compile_missing(layers, device, steps, begin):
        begin()
        found.append((layers, device, steps))

    monkeypatch.setattr(warm, "compile_missing", compile_missing)
    return found


def test_all_presets_go_together(given):
    told = []
    presets = [get_preset(each) for each in ("saw-int4", "kitty-pro", "kitty-pro")]
    presets.append(get_preset("saw-int4", layers={"0": "full"}))
    warm.compile_ahead(model_on("cuda:0"), presets, (16, 5), told.append)
    [(layers, device, steps)] = given
    assert device == torch.device("cuda", 0)
    # Caches wait for steps of one token, whatever comes.
    assert steps == [1, 5, 16]
    assert [heads for _, heads, _ in layers] == [4, 4, 4]
    assert [plan.format.runs[0][0].bits for plan, *_ in layers] == [4, 2, 16]
    assert [rule for *_, rule in layers] == [
        get_preset(x).scheme.channel_rule for x in ("saw-int4", "kitty-pro", "full")
    ]
    assert {(plan.heads, plan.key_dim, plan.dtype) for plan, *_ in layers} == {(2, 64, "torch.bfloat16")}
    assert told == ["compiling kernels"]


def test_nothing_is_compiled_on_a_cpu(given):
    warm.compile_ahead(model_on("cpu"), [get_preset("saw-int4")], tell=pytest.fail)
    assert not given
    kernels.compile_missing([], torch.device("cpu"), (1,), pytest.fail)


def test_what_fails_is_left_to_launches(monkeypatch, caplog):
    def compile_missing(*_):
        raise raised

    monkeypatch.setattr(warm, "compile_missing", compile_missing)
    raised = RuntimeError("the process that compiles has failed")
    with caplog.at_level(logging.WARNING):
        warm.compile_ahead(model_on("cuda"), [get_preset("saw-int4")])
    assert "not compiled ahead (the process that compiles has failed)" in caplog.text
    raised = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        warm.compile_ahead(model_on("cuda"), [get_preset("saw-int4")])


@pytest.fixture
def own(monkeypatch):
    """The module of Triton's kernels, as where they are not interpreted."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    from hfkvq.kernels.triton import warm as own

    monkeypatch.setattr(own, "INTERPRETED", types.SimpleNamespace(value=False))
    monkeypatch.setattr(own, "_gpu", lambda device: own.GPUS[90])
    monkeypatch.setattr(own, "wanted", lambda plan, *_: [plan.format.runs[0][0].bits])
    return own


@pytest.mark.parametrize(("there", "missing"), [((), [4, 2]), ((4,), [2]), ((4, 2), [])])
def test_one_process_compiles_what_is_missing(own, monkeypatch, there, missing):
    happened = []

    def compile_elsewhere(orders, gpu):
        happened.extend(order.plan.format.runs[0][0].bits for order in orders())
        assert gpu == own.GPUS[90]
        return [own.Compiled("kernel", 1.0, "it does not compile")]

    monkeypatch.setattr(own, "are_there", lambda wanted, device: wanted[0] in there)
    monkeypatch.setattr(own, "compile_elsewhere", compile_elsewhere)
    presets = [get_preset("saw-int4"), get_preset("kitty-pro"), get_preset("saw-int4")]
    warm.compile_ahead(model_on("cuda"), presets, tell=happened.append)
    # Where all are found, no process is started, and nothing is told.
    assert happened == (["compiling kernels", *missing] if missing else [])


def test_interpreted_kernels_are_not_compiled(own, monkeypatch):
    monkeypatch.setattr(own, "INTERPRETED", types.SimpleNamespace(value=True))
    monkeypatch.setattr(own, "_gpu", pytest.fail)
    warm.compile_ahead(model_on("cuda"), [get_preset("saw-int4")], tell=pytest.fail)


def test_what_is_looked_for_is_all_or_nothing(monkeypatch):
    ahead = pytest.importorskip("hfkvq.kernels.triton.ahead")
    looked, there, cpu = [], {"a", "b"}, torch.device("cpu")
    monkeypatch.setattr(ahead, "_is_new", lambda each: each == "new")
    monkeypatch.setattr(ahead, "find", lambda each: looked.append(each) or each in there)
    assert ahead.are_there(["a", "b"], cpu)
    assert ahead.are_there([], cpu)
    assert not ahead.are_there(["a", "c", "b"], cpu)
    assert looked == ["a", "b", "a", "c"]
    looked.clear()
    assert not ahead.are_there(["new", "a"], cpu)
    assert looked == []


@pytest.fixture
def asked(monkeypatch):
    """Presets and steps of each call, before which nothing was measured; it tells that something is compiled."""
    found = []

    def compile_ahead(model, presets, steps=(1,), tell=lambda _: None):
        found.append(([preset.scheme.name for preset in presets], sorted(steps)))
        tell("compiling kernels")

    for module in (measurement, demo):
        monkeypatch.setattr(module, "compile_ahead", compile_ahead)
    return found


@pytest.mark.parametrize(
    ("tokens", "chunk", "steps"), [(44, 16, [12, 16]), (48, 16, [16]), (48, 32, []), (20, 16, [4])]
)
def test_a_divergence_compiles_for_its_chunks(asked, tokens, chunk, steps):
    told = []
    model = build("qwen3")
    measure(
        model,
        prompt(1, tokens),
        ["full", "saw-int4"],
        prefill=16,
        chunk=chunk,
        on_progress=lambda name, share: told.append((name, share)),
    )
    assert asked == [(["full", "saw-int4"], steps)]
    assert told[0] == ("compiling kernels", 0.0)
    assert [name for name, _ in told[1:]] == ["DynamicCache", "full", "saw-int4"]


def test_a_demo_compiles_for_all_its_rows(asked):
    told = []
    settings = Settings(tasks=("recall",), schemes=("full", "saw-int4"), samples=1, max_new_tokens=2, kl_tokens=1)
    run_demo(
        load(None, device=torch.device("cpu")), settings, lambda cache, task, share: told.append((cache, task, share))
    )
    assert asked == [(["full", "saw-int4"], [1])]
    assert told[0] == ("compiling kernels", "", 0.0)
    assert [name for name, *_ in told[1:]] == ["DynamicCache", "full", "saw-int4"]
