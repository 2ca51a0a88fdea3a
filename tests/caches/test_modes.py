"""Modes of PyTorch that are set from outside: a cache gives what it gives without them, or as DynamicCache does."""

from __future__ import annotations

import contextlib
import functools
import itertools

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

from hfkvq import MixedKVCache
from hfkvq.caches.attention.interface import hfkvq_attention
from hfkvq.caches.base.model_calls import with_cache
from tests.caches.driver import OF_EACH_SCHEME, assert_same_bits, row, small, stored
from tests.caches.graph_recorder import TapeGraph, captured  # noqa: F401
from tests.caches.models import build, prompt
from tests.caches.test_generate import forwards

PRESETS = ("best-3.4", "saw-int4", "mixkvq", "arkv")
MODEL = functools.cache(functools.partial(build, "llama", num_hidden_layers=1))


@contextlib.contextmanager
def setting(change, value, before):
    """A global of PyTorch with another value."""
    change(value)
    try:
        yield
    finally:
        change(before)


class Watching(TorchFunctionMode):
    """A mode that sees every call."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


MODES = {
    "none": contextlib.nullcontext,
    "bfloat16": lambda: setting(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "meta": lambda: torch.device("meta"),
    "inference": torch.inference_mode,
    "deterministic": lambda: setting(torch.use_deterministic_algorithms, True, False),
    "normal": lambda: torch.inference_mode(False),
    "float64": lambda: setting(torch.set_default_dtype, torch.float64, torch.float32),
    "gradients": torch.enable_grad,
    "float16": lambda: setting(torch.set_default_dtype, torch.float16, torch.float32),
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "cpu": lambda: setting(torch.set_default_device, "cpu", None),
    "watching": Watching,
    "operations": lambda: FlopCounterMode(display=False),
    "no autocast": lambda: torch.autocast("cpu", enabled=False),
    "hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
}
# Capacity, and whether steps are captured.
DRIVERS = {"growing": (None, False), "fixed": (160, False), "captured": (160, True), "captured growing": (None, True)}


def live(model, make, modes):
    """Logits and bits of a padded prompt, steps that seal pages and every operation on rows, each in the next mode."""
    ids, mask = prompt(2, 57), torch.ones(2, 57, dtype=torch.long)
    mask[0, :7] = 0
    places, modes, out = (mask.cumsum(1) - 1).clamp(min=0), iter(modes), []

    def forward(cache, first, last, **kwargs):
        with next(modes)():
            kwargs["position_ids"] = places[:, first:last]
            out.append(model(ids[:, first:last], **with_cache(model, cache), **kwargs).logits.detach())

    with torch.no_grad():
        with next(modes)():
            cache = make()
        for first, last in ((0, 46), *((i, i + 1) for i in range(46, 54))):
            forward(cache, first, last, attention_mask=mask[:, :last])
        # The host counts what captured steps have done.
        cache.integrity_check()
        held = [stored(layer, i) for layer in cache.compressed_layers for i in range(2)]
        for act in (
            lambda: cache.reorder_cache(torch.tensor([1, 0], device="cpu")),
            lambda: cache.batch_repeat_interleave(2),
            lambda: cache.batch_select_indices([0, 2]),
        ):
            with next(modes)():
                act()
        forward(cache, 54, 57)
        with next(modes)():
            cache.crop(-2)
        forward(cache, 55, 56)
        with next(modes)():
            cache.reset()
        forward(cache, 0, 20)
    cache.integrity_check()
    return torch.cat(out, 1), held


def assert_same(found, expected):
    assert torch.equal(found[0], expected[0])
    for one, other in zip(found[1], expected[1], strict=True):
        assert_same_bits(one, other)


def maker(name, driver, request):
    """A function that makes caches of a preset."""
    capacity, captures = DRIVERS[driver]
    if captures:
        request.getfixturevalue("captured")
    return lambda: MixedKVCache(MODEL(), small(name), max_cache_len=capacity)


@pytest.mark.parametrize(
    ("turn", "name", "driver"),
    [(i, name, "captured") for i, name in enumerate(OF_EACH_SCHEME)]
    + [(i, name, "growing") for i, name in enumerate(OF_EACH_SCHEME) if i % 3 == 0],
)
def test_modes_that_change_in_a_life(turn, name, driver, request):
    """Each begins with another mode; its 17 calls go through all. In some modes no step is captured."""
    make, modes = maker(name, driver, request), list(MODES.values())
    expected = live(MODEL(), make, itertools.repeat(contextlib.nullcontext))
    assert driver != "captured" or TapeGraph.made or make().graphs is None
    turn %= len(modes)
    assert_same(live(MODEL(), make, itertools.cycle(modes[turn:] + modes[:turn])), expected)


@pytest.mark.parametrize(("turn", "name"), list(enumerate(OF_EACH_SCHEME)))
def test_autocast_of_what_attention_is_given(turn, name):
    """Keys in float32 after RoPE, values as autocast has them: bits and outputs are those of both in its dtype."""
    capacity, dtype = (None, 160)[turn % 2], (torch.bfloat16, torch.float16)[turn // 2 % 2]
    model, own, found = MODEL(), row(1, 60), []
    attention, given = model.model.layers[0].self_attn, [x[None] for x in (own.queries, own.keys, own.values)]
    for enabled in (True, False):
        cache, out = MixedKVCache(model, small(name), max_cache_len=capacity), []
        for first, last in ((0, 46), *((i, i + 1) for i in range(46, 54)), (54, 57)):
            queries, keys, values = (x[:, :, first:last] for x in given)
            values = values.to(dtype)
            if not enabled:
                queries, keys = queries.to(dtype), keys.to(dtype)
            with torch.no_grad(), torch.autocast("cpu", dtype, enabled):
                held = cache.update(keys, values, 0)
                out.append(hfkvq_attention(attention, queries, *held, None, scaling=0.2)[0])
        assert {x.dtype for x in out} == {dtype}
        found.append((torch.cat(out, 1), [stored(cache.layers[0], 0)]))
    assert_same(*found)


@pytest.mark.parametrize(
    ("family", "capacity", "attach"),
    [("llama", None, True), ("llama", None, False), ("gemma3", 160, True), ("deepseek-v3", None, True)],
)
def test_autocast_is_that_of_a_dynamic_cache(family, capacity, attach):
    """Keys come in float32 after RoPE, and values as autocast has them."""
    model = build(family)
    ours = MixedKVCache(model, "full", max_cache_len=capacity, attach=attach)
    with torch.autocast("cpu", dtype=torch.float16):
        found = [forwards(model, lambda c=cache: c).float() for cache in (ours, DynamicCache(config=model.config))]
    torch.testing.assert_close(*found, rtol=0.05, atol=0.05)


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize(("name", "capacity"), [(name, (None, 160)[i % 2]) for i, name in enumerate(PRESETS)])
def test_captured_steps_under_autocast(name, capacity):
    """Pages hold what comes, as without captured steps."""
    found = []
    for graphs in (True, False):
        make = functools.partial(MixedKVCache, MODEL(), small(name), max_cache_len=capacity, graphs=graphs)
        found.append(live(MODEL(), make, itertools.repeat(lambda: torch.autocast("cpu", dtype=torch.bfloat16))))
    assert TapeGraph.made
    assert torch.isfinite(found[0][0][:, 8:]).all()
    for one, other in zip(found[0][1], found[1][1], strict=True):
        assert_same_bits(one, other)


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


def test_what_is_computed_of_a_model_outlives_inference_mode():
    """Vectors of smoothing: steps with gradients use them."""
    model, ids = build("llama"), prompt(1, 60)
    cache = MixedKVCache(model, "saw-int4")
    with torch.inference_mode():
        model(ids[:, :50], past_key_values=cache)
    assert model(ids[:, 50:51], past_key_values=cache).logits.isfinite().all()


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
