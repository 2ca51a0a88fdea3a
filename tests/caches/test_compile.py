"""Kernels of a cache, or of several presets, are compiled together, once, and nowhere but on a GPU."""

from __future__ import annotations

import logging
import types

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from hfkvq import MixedKVCache
from hfkvq.caches import compile
from hfkvq.caches.schemes.preset import get_preset

SMALL = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3}
CONFIG = LlamaConfig(**SMALL, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
KINDS = [(get_preset("saw-int4").scheme, 0)]


def model_on(device):
    """What is asked of a model, which need not be there."""
    return types.SimpleNamespace(device=torch.device(device), dtype=torch.bfloat16, config=CONFIG)


@pytest.fixture
def given(monkeypatch):
    """What is to be compiled: layers, device and tokens of steps of each call."""
    found = []
    monkeypatch.setattr(compile, "compile_layers", lambda *given, **_: found.append(given))
    compile._compile.cache_clear()
    yield found
    compile._compile.cache_clear()


def test_all_presets_go_together(given):
    told = []
    presets = [get_preset(each) for each in ("saw-int4", "kitty-pro", "kitty-pro")]
    presets.append(get_preset("saw-int4", layers={"0": "full"}))
    compile.compile_ahead(model_on("cuda:0"), presets, (16, 5), told.append)
    [(layers, device, steps)] = given
    assert device == torch.device("cuda", 0)
    # Steps of one token come in any case.
    assert steps == [1, 5, 16]
    assert [heads for _, heads, *_ in layers] == [4, 4, 4]
    assert [plan.format.runs[0][0].bits for plan, *_ in layers] == [4, 2, 16]
    assert [rule for _, _, rule, _ in layers] == [
        get_preset(x).scheme.channel_rule for x in ("saw-int4", "kitty-pro", "full")
    ]
    assert {(plan.heads, plan.key_dim, plan.dtype) for plan, *_ in layers} == {(2, 64, "torch.bfloat16")}
    assert told == ["compiling kernels"]


def test_nothing_is_compiled_on_a_cpu(given):
    compile.compile_ahead(model_on("cpu"), [get_preset("saw-int4")], tell=pytest.fail)
    assert not given


def test_what_fails_is_left_to_launches(monkeypatch, caplog):
    def compile_layers(*_, **__):
        raise raised

    monkeypatch.setattr(compile, "compile_layers", compile_layers)
    for act in (
        lambda: compile.compile_ahead(model_on("cuda"), [get_preset("saw-int4")]),
        lambda: compile.compile_kernels(CONFIG, KINDS, torch.zeros(1, 4, 3, 64)),
    ):
        caplog.clear()
        compile._compile.cache_clear()
        raised = RuntimeError("no thread to be had")
        with caplog.at_level(logging.WARNING):
            act()
        assert "not compiled ahead (no thread to be had)" in caplog.text
        compile._compile.cache_clear()
        raised = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            act()


def test_a_cache_compiles_for_all_kinds_of_its_layers(given):
    """Each scheme and window is compiled for, by the heads of this process; caches alike are compiled for once."""
    config = Gemma3TextConfig(
        **SMALL,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        sliding_window=2048,
        sliding_window_pattern=3,
    )
    for _ in range(2):
        cache = MixedKVCache(config, "kitty-pro", layers={"0": "saw-int4"})
        kinds = [(layer.scheme, layer.window) for layer in cache.compressed_layers]
        compile.compile_kernels(cache.config, kinds, torch.zeros(1, 2, 5, 64, dtype=torch.bfloat16))
    [(layers, device, steps)] = given
    assert (device, steps) == (torch.device("cpu"), (1,))
    found = {(plan.format.runs[0][0].bits, plan.format.window, plan.heads, heads) for plan, heads, *_ in layers}
    assert found == {(4, 2048, 2, 4), (2, 2048, 2, 4), (2, 0, 2, 4)}


def test_kernels_of_several_tokens_are_compiled_once_they_may_be_taken_back(given):
    for several in (False, True):
        compile.compile_kernels(CONFIG, KINDS, torch.zeros(1, 2, 5, 64), several)
    assert [steps for *_, steps in given] == [(1,), tuple(range(1, 17))]


def test_kernels_are_compiled_before_the_first_layer(monkeypatch):
    """The cache asks again where its device is another, or steps may have several tokens, and not at each step."""
    asked = []
    monkeypatch.setattr(
        "hfkvq.caches.cache.compile_kernels", lambda config, layers, keys, *_: asked.append(keys.device)
    )
    cache = MixedKVCache(CONFIG, "saw-int4", graphs=False)
    keys = [
        types.SimpleNamespace(is_cuda=device.type == "cuda", device=device, dtype=torch.float16, shape=(1, 2, 5, 64))
        for device in map(torch.device, ("cpu", "cuda:0", "cuda:1"))
    ]
    for each in (keys[0], keys[1], keys[1]):
        cache._before_first_layer(each)
    assert asked == [keys[1].device]
    cache.activate_past_recording()
    cache._before_first_layer(keys[1])
    cache._before_first_layer(keys[2])
    assert asked == [keys[1].device, keys[1].device, keys[2].device]


def test_kernels_are_compiled_before_a_prompt_begins(monkeypatch):
    """The model tells what its layers will give the cache, so modules before the first attention find their kernels."""
    monkeypatch.setattr("hfkvq.caches.step_graphs.DEVICES", {"cpu"})
    seen = []

    def note(self, keys):
        seen.append((keys.shape[:2], keys.shape[3], keys.dtype, keys.device))

    monkeypatch.setattr(MixedKVCache, "_compile", note)
    model = LlamaForCausalLM(CONFIG).to(torch.bfloat16).eval()
    model.model.layers[0].register_forward_pre_hook(lambda *_: seen.append("first layer"))
    with torch.no_grad():
        model(torch.arange(34).view(2, 17), past_key_values=MixedKVCache(model, "saw-int4"))
    kernels = (torch.Size((2, 2)), 64, torch.bfloat16, torch.device("cpu"))
    assert seen == [kernels, "first layer", kernels]
    with torch.autocast("cpu", torch.bfloat16):
        MixedKVCache(model, "saw-int4").compile_for(model, 2)
    assert len(seen) == 3
