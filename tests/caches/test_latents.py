"""Models with latent attention: 16-bit latents are `DynamicCache`, compressed ones come close, and nothing is left."""

from __future__ import annotations

import gc

import pytest
import torch
from transformers import DynamicCache

from hfkvq import MixedKVCache, get_scheme
from hfkvq.caches import base
from hfkvq.caches.attention import mla
from tests.caches.graph_recorder import TapeGraph, captured  # noqa: F401
from tests.caches.models import build, prompt
from tests.caches.test_generate import MODES, forwards

FAMILIES = ("deepseek-v2", "deepseek-v3", "glm4-moe-lite", "minicpm3", "youtu")
FULL = get_scheme("full", page_size=8)
BARE = {"page_size": 8, "sink_length": 0, "local_length": 0}
FOUR, EIGHT = (get_scheme(name, **BARE) for name in ("latent-4", "latent-8"))
WINDOWS = get_scheme(FOUR, sink_length=3, local_length=5)

# Whose drafts a llama makes is a matter of other tests.
RUNS = {name: run for name, run in MODES.items() if name != "assisted"}


def expected(family, run):
    model = build(family)
    return run(model, lambda: DynamicCache(config=model.config))


@pytest.fixture
def attended(monkeypatch):
    """Counts steps that attend to latents as they are."""
    calls, absorb = [], mla.absorb_queries

    def counted(module, query):
        calls.append(query.shape)
        return absorb(module, query)

    monkeypatch.setattr("hfkvq.caches.attention.interface.absorb_queries", counted)
    return calls


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("family", FAMILIES)
def test_families_give_stock_tokens(family, attended):
    """From captured steps, with padding."""
    model, run = build(family), MODES["padding"]
    found = run(model, lambda: MixedKVCache(model, FULL))
    assert torch.equal(found, expected(family, run))
    assert attended
    assert TapeGraph.made == 1


@pytest.mark.parametrize("mode", ["greedy", "padding", "chunked", "turns"])
def test_fixed_capacity_gives_stock_tokens(mode, attended):
    model = build("deepseek-v3")
    found = RUNS[mode](model, lambda: MixedKVCache(model, FULL, max_cache_len=120, graphs=False))
    assert torch.equal(found, expected("deepseek-v3", RUNS[mode]))
    assert attended


def test_assisted_steps_are_taken_back(attended):
    """A model that drafts for itself: every draft is right, but for those behind the last token."""
    model, ids = build("deepseek-v3"), prompt(1, 40)
    stock, found = (
        model.generate(ids, past_key_values=cache, max_new_tokens=20, do_sample=False, **more)
        for cache, more in (
            (DynamicCache(config=model.config), {}),
            (MixedKVCache(model, FULL), {"assistant_model": build("deepseek-v3", seed=1)}),
        )
    )
    assert torch.equal(stock, found)
    # Several tokens of a step at once.
    assert any(shape[2] > 1 for shape in attended)


@pytest.mark.rounding
@pytest.mark.parametrize("scheme", [FOUR, EIGHT, WINDOWS, get_scheme("saw-int4", page_size=8)])
@pytest.mark.parametrize("family", ["deepseek-v3", "minicpm3"])
def test_logits_are_those_of_dequantized_latents(scheme, family):
    """Attention to latents as they are gives what the model's own expansion of the same bytes gives.

    They are the same bytes in a first layer alone: a second one is given what attention made of them.
    """
    model = build(family, num_hidden_layers=1)
    found, dense = (forwards(model, lambda on=on: MixedKVCache(model, scheme, attach=on), mask=False) for on in (1, 0))
    torch.testing.assert_close(found, dense, rtol=2e-4, atol=2e-4)


def test_bytes_are_the_schemes():
    """Of latents of 512 channels and 64 of rotary parts: 4 bits and a scale and a minimum a token, and 8."""
    model = build("deepseek-v3", kv_lora_rank=512, qk_rope_head_dim=64)
    cache = MixedKVCache(model, "latent-4")
    with torch.no_grad():
        model(prompt(1, 257 + 160), past_key_values=cache)
    memory = cache.memory()
    bits = (512 * 4 + 32 + 64 * 8 + 16) / 576
    assert memory.code_bits == pytest.approx((512 * 4 + 64 * 8) / 576, rel=1e-6)
    held = memory.compressed
    # Of three pages in each of two layers, and 160 tokens of 32-bit numbers, the tail's room for a step included.
    assert 8 * (held.codes + held.metadata) == pytest.approx(bits * 576 * 3 * 128 * 2, rel=1e-6)
    assert 160 <= held.windows / (2 * 576 * 4) <= 160 + 16


@pytest.mark.parametrize("given", ["model", "config"])
def test_modules_are_as_they_were(given):
    """Detached, or once the last cache is gone; another cache needs no other model."""
    model = build("deepseek-v3")

    def passing():
        return [name for name, module in model.named_modules() if "expand_kv" in vars(module)]

    def used():
        cache = MixedKVCache(model if given == "model" else model.config, FULL)
        if given == "config":
            cache.attach(model)
        with torch.no_grad():
            model(prompt(1, 20), past_key_values=cache)
        return cache

    cache, other = used(), used()
    assert len(passing()) == 2
    del other
    gc.collect()
    assert len(passing()) == 2
    cache.detach()
    assert not passing()
    cache.attach()
    with torch.no_grad():
        model(prompt(1, 1), past_key_values=cache)
    assert len(passing()) == 2
    del cache
    gc.collect()
    assert not passing()


def test_other_schemes_are_dequantized_and_say_so(caplog, attended):
    base.warn_once.cache_clear()
    model, ids = build("deepseek-v3"), prompt(1, 40)
    cache = MixedKVCache(model, get_scheme("kitty", page_size=16, sink_length=4, local_length=16))
    assert (
        "DeepseekV3Config: latents are dequantized in each step: kitty cannot be attended to as latents" in caplog.text
    )
    model.generate(ids, past_key_values=cache, max_new_tokens=5, do_sample=False)
    assert not attended


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scheme", ["full", "latent-8", "latent-4"])
def test_steps_on_a_gpu(family, scheme):
    """Captured steps of kernels against dequantized latents in the model's own way."""
    changes = {"kv_lora_rank": 128, "qk_rope_head_dim": 32, "hidden_size": 128}
    model = build(family, **changes).to("cuda", torch.bfloat16)
    ids = prompt(2, 300).cuda()
    logits = []
    for attach in (True, False):
        cache, own = MixedKVCache(model, scheme, attach=attach), []
        with torch.no_grad():
            model(ids, past_key_values=cache)
            for i in range(20):
                own.append(model(prompt(2, 1, i).cuda(), past_key_values=cache).logits.float().log_softmax(-1))
        logits.append(torch.cat(own, 1))
    divergence = (logits[1].exp() * (logits[1] - logits[0])).sum(-1)
    # Not the mean: with random weights, rounding to bf16 alone makes DeepSeek-V3's router choose other experts for one
    # token in 200, which is worth up to 3 nats.
    assert divergence.median() < 2e-3
    assert divergence.flatten().quantile(0.9) < 2e-2
