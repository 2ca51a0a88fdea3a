"""Modes of PyTorch that are set from outside: a cache gives what it gives without them, or as DynamicCache does."""

from __future__ import annotations

import contextlib

import pytest
import torch
from transformers import DynamicCache

from hfkvq import MixedKVCache
from tests.caches.driver import small
from tests.caches.models import build, prompt

PRESETS = ("best-3.4", "saw-int4", "mixkvq", "arkv")


@contextlib.contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES = {
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
    "meta": lambda: torch.device("meta"),
    "deterministic": deterministic,
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "inference": torch.inference_mode,
    "gradients": torch.enable_grad,
}


def run(model, cache, mode):
    """Logits of a padded prompt, of steps that fill pages, and of tokens after every operation on rows."""
    ids, mask = prompt(2, 60), torch.ones(2, 60, dtype=torch.long)
    mask[0, :7] = 0
    with torch.no_grad(), mode():
        out = [model(ids[:, :40], attention_mask=mask[:, :40], past_key_values=cache).logits]
        for i in range(40, 50):
            out.append(model(ids[:, i : i + 1], attention_mask=mask[:, : i + 1], past_key_values=cache).logits)
        cache.reorder_cache(torch.tensor([1, 0], device="cpu"))
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices([0, 2])
        out.append(model(ids[:, 50:54], past_key_values=cache).logits)
        return torch.cat(out, 1)


@pytest.mark.parametrize(("name", "capacity"), [(name, (None, 160)[i % 2]) for i, name in enumerate(PRESETS)])
def test_modes_change_nothing(name, capacity):
    model, logits = build("llama"), {}
    for mode in ("none", *MODES):
        cache = MixedKVCache(model, small(name), max_cache_len=capacity)
        logits[mode] = run(model, cache, MODES.get(mode, contextlib.nullcontext))
    assert {mode for mode, x in logits.items() if not torch.equal(x, logits["none"])} == set()


@pytest.mark.parametrize(
    ("family", "capacity", "attach"),
    [("llama", None, True), ("llama", None, False), ("gemma3", 160, True), ("deepseek-v3", None, True)],
)
def test_autocast_is_that_of_a_dynamic_cache(family, capacity, attach):
    """Keys come in float32 after RoPE, and values as autocast has them."""
    model = build(family)
    found = []
    for cache in (
        MixedKVCache(model, "full", max_cache_len=capacity, attach=attach),
        DynamicCache(config=model.config),
    ):
        found.append(run(model, cache, lambda: torch.autocast("cpu", dtype=torch.float16)).float())
    # Without a mask, later tokens of a DynamicCache see padding.
    real = slice(8, 50)
    torch.testing.assert_close(found[0][:, real], found[1][:, real], rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, (torch.float32, torch.float16)[i % 2]) for i, name in enumerate(PRESETS)],
)
def test_presets_under_autocast(name, dtype):
    """Pages hold what comes; what a preset itself computes is not autocast, so steps are those of plain bfloat16."""
    model = build("llama", num_hidden_layers=1).to(dtype)
    cache = MixedKVCache(model, small(name))
    logits = run(model, cache, lambda: torch.autocast("cpu", dtype=torch.bfloat16))
    assert torch.isfinite(logits[:, 8:]).all()
    assert cache.layers[0].dtype == torch.bfloat16
    cache.integrity_check()


def test_autocast_of_some_forwards():
    """The layer's dtype stays that of its first tokens."""
    model = build("llama")
    for first, dtype in ((False, torch.float32), (True, torch.bfloat16)):
        cache = MixedKVCache(model, "full")
        with torch.no_grad():
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=first):
                model(prompt(1, 30), past_key_values=cache)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                model(prompt(1, 1), past_key_values=cache)
        assert {layer.dtype for layer in cache.layers} == {dtype}
    # Outside of autocast, another dtype is a mistake.
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match=r"got torch.float32 on cpu, but this cache was first used with"),
    ):
        model(prompt(1, 1), past_key_values=cache)


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [None, 60])
def test_a_forward_compiled_for_all_shapes(capacity):
    """With ``dynamic=True`` the index of a layer is a number that the compiler does not know."""
    model, ids = build("llama", num_hidden_layers=1), prompt(1, 40)
    forward = torch.compile(model.forward, backend="eager", dynamic=True)
    logits = []
    for call, cache in (
        (forward, MixedKVCache(model, "full", max_cache_len=capacity)),
        (model, DynamicCache(config=model.config)),
    ):
        with torch.no_grad():
            out = [call(ids[:, :30], past_key_values=cache, use_cache=True).logits]
            out += [call(ids[:, i : i + 1], past_key_values=cache, use_cache=True).logits for i in range(30, 32)]
        logits.append(torch.cat(out, 1))
    torch._dynamo.reset()
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def test_an_update_compiled_for_all_shapes():
    cache = MixedKVCache(build("llama", num_hidden_layers=4), "full")
    update = torch.compile(lambda x, i: cache.update(x, x + 1, i)[1] * 2, backend="eager", dynamic=True)
    x = torch.randn(1, 2, 30, 32)
    with torch.no_grad():
        found = [update(x, i) for i in range(4)]
    torch._dynamo.reset()
    assert all(torch.equal(each, (x + 1) * 2) for each in found)
    assert cache.get_seq_length() == 30


@pytest.mark.parametrize("name", ["full", "kitty-pro"])
def test_transforms_of_functions_are_refused(name):
    """The cache writes into pages of its own, which vmap and grad cannot follow; a call by its parameters is plain."""
    model, ids = build("llama"), prompt(3, 40)

    def logits(given, cache):
        return model(inputs_embeds=given, past_key_values=cache, use_cache=True).logits

    given = model.get_input_embeddings()(ids).detach()
    for transform in (torch.vmap, lambda f: torch.func.grad(lambda x: f(x).sum())):
        with pytest.raises(ValueError, match=r"within torch\.func"):
            transform(lambda x: logits(x.reshape(-1, *given.shape[1:]), MixedKVCache(model, name)))(given)
    with torch.no_grad():
        plain = logits(given, MixedKVCache(model, name))
        found = torch.func.functional_call(
            model, dict(model.named_parameters()), (ids,), {"past_key_values": MixedKVCache(model, name)}
        )
    assert torch.equal(found.logits, plain)
