"""Fixed capacity: compiled steps give what eager ones give, from one graph, and the host finds out what they did."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import CompileConfig, DynamicCache

from hfkvq import MixedKVCache
from tests.caches.driver import DIM, OwnChoice, small
from tests.caches.models import build, prompt
from tests.caches.test_generate import FULL, _generate

SCHEMES = {
    "full": FULL,
    "kitty": small("kitty"),
    "kvarn": small("kvarn"),
    "mixkvq": small("mixkvq"),
    "triaxial": small("triaxial", page_size=32),
    "arkv": small("arkv", budget_tokens=40),
    "snapkv+kitty": small("snapkv+kitty"),
    "tova+saw-int4": small("tova+saw-int4"),
    "streaming-llm+kivi-2": small("streaming-llm+kivi-2"),
}


@pytest.fixture(autouse=True)
def fresh_graphs():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def padded(rows, length):
    ids = prompt(rows, length)
    mask = torch.ones_like(ids)
    mask[1:, :7] = 0
    return ids, mask


def compiling(backend):
    config = CompileConfig(backend=backend, mode=None, fullgraph=True)
    config._compile_all_devices = True
    return config


def test_generate_compiles_by_itself():
    """Padding, then the same buffers again: a second request and one that goes on, all through one graph."""
    model, (_, mask) = build("llama", num_hidden_layers=1), padded(2, 30)
    cache = MixedKVCache(model, SCHEMES["kitty"], max_cache_len=160, graphs=False)
    grown, graphs = MixedKVCache(model, SCHEMES["kitty"]), []

    def counter(module, inputs):
        # A function, which generate's copy of the options does not copy.
        graphs.append(module)
        return module.forward

    addresses = set()
    for seed in (0, 1):
        ids, told = prompt(2, 30, seed=seed), mask
        for tokens in (10, 8):
            got, expected = (
                _generate(model, c, ids, attention_mask=told, max_new_tokens=tokens, **kwargs)
                for c, kwargs in ((cache, {"compile_config": compiling(counter)}), (grown, {}))
            )
            assert torch.equal(got, expected)
            ids, told = torch.cat([got, prompt(2, 9, seed=7)], 1), torch.ones(2, got.shape[1] + 9, dtype=mask.dtype)
            told[1, :7] = 0
        addresses.add(cache.layers[0].buffer.tensor.data_ptr())
        cache.reset()
        grown.reset()
        assert int(cache.get_seq_length()) == 0
    assert len(addresses) == 1
    assert len(graphs) == 1


# Room.


def test_steps_nobody_watches_lose_nothing_that_was_cached():
    """A compiled forward without generate: tokens beyond the capacity are not stored, and that is said later."""
    model, ids = build("llama", num_hidden_layers=1), prompt(1, 40)
    cache, other = (MixedKVCache(model, SCHEMES["kitty"], max_cache_len=n) for n in (45, 100))
    forward = torch.compile(model.forward, backend="eager", fullgraph=True)
    with torch.no_grad():
        for c, steps in ((cache, 9), (other, 5)):
            model(ids, past_key_values=c)
            for token in prompt(1, 9, seed=2)[0, :steps]:
                forward(token.view(1, 1), past_key_values=c)
        with pytest.raises(ValueError, match=r"max_cache_len: compiled steps went on beyond the capacity of 45 tokens"):
            cache.memory()
        assert cache.get_seq_length() == 45
        cache.crop(-3)
        other.crop(-3)
        a, b = (model(prompt(1, 2, seed=4), past_key_values=c).logits for c in (cache, other))
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", pytest.param("deepseek-v3", marks=pytest.mark.slow)])
def test_a_compiled_model_takes_prompts(family):
    """Between graphs, also behind a context and of a few tokens with a mask."""
    model, ids = build(family, num_hidden_layers=1), prompt(2, 60)
    compiled, graphs, logits = MixedKVCache(model, FULL, max_cache_len=100, graphs=False), [], []
    eager = MixedKVCache(model, FULL, max_cache_len=100, graphs=False)
    forward = torch.compile(model.forward, backend=lambda module, inputs: graphs.append(module) or module.forward)
    mask = torch.ones(2, 60, dtype=torch.long)
    mask[1, :3] = 0
    with torch.no_grad():
        for f, cache in ((forward, compiled), (model.forward, eager)):
            found = []
            for first, last in ((0, 2), (2, 30), (30, 31), (31, 32), (32, 58), (58, 59), (59, 60)):
                out = f(ids[:, first:last], attention_mask=mask[:, :last], past_key_values=cache)
                found.append(out.logits[:, -1])
            logits.append(torch.stack(found))
    assert graphs
    assert torch.equal(*logits)
    compiled.integrity_check()


# Caches that refuse to be compiled.


def test_what_the_host_has_to_know_is_not_compiled():
    """Tokens that may be taken back, which must not be sealed; options, latents, and attention of the model's own."""
    model = copy.deepcopy(build("llama"))

    def cache(model=model, **more):
        return MixedKVCache(model, FULL, max_cache_len=80, graphs=False, **more)

    assert not cache(attach=False).is_compileable
    assert not cache(debug=True).is_compileable
    assert not cache(build("deepseek-v3")).is_compileable
    recording, detached = cache(), cache()
    assert recording.is_compileable
    recording.activate_past_recording()
    assert not recording.is_compileable
    detached.detach()
    assert not detached.is_compileable


@pytest.mark.parametrize(
    ("scheme", "reason"),
    [
        (small(OwnChoice()), "no rule that the sealing kernel knows"),
        (small("h2o+int4", budget_tokens=40), "accumulate"),
        (small("tova+mixkvq"), "queries weigh channels"),
        (small("triaxial"), "several runs"),
    ],
)
def test_what_needs_the_host_works_without_graphs(scheme, reason):
    assert reason in scheme.limits(DIM, DIM).captured
    model, ids = build("llama", num_hidden_layers=1), prompt(2, 30)
    cache = MixedKVCache(model, scheme, max_cache_len=80)
    assert not cache.is_compileable
    assert not any(layer.buffer for layer in cache.layers)
    expected = _generate(model, MixedKVCache(model, scheme), ids, max_new_tokens=12)
    assert torch.equal(_generate(model, cache, ids, max_new_tokens=12), expected)


@pytest.mark.parametrize("family", ["gpt-oss", pytest.param("qwen3-next", marks=pytest.mark.slow)])
def test_families_compile(family):
    """Whatever is not refused must be traced whole, or `generate` would fail on a GPU."""
    model, ids = build(family), prompt(2, 30)
    cache, other = MixedKVCache(model, FULL, max_cache_len=100, graphs=False), DynamicCache(config=model.config)
    assert cache.is_compileable
    forward = torch.compile(model.forward, backend="eager", fullgraph=True)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        model(ids, past_key_values=other)
        for i in range(3):
            token = prompt(2, 1, seed=i)
            a, b = (f(token, past_key_values=c).logits for f, c in ((forward, cache), (model, other)))
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
