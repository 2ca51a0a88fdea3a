"""Handles of a cache: of one layer and one update each."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from hfkvq import MixedKVCache, get_scheme
from hfkvq.caches.attention.interface import hfkvq_attention
from hfkvq.caches.layers.handle import layer_of
from hfkvq.kernels.arguments import AttentionArguments
from tests.caches.models import build

LAYERS, HEADS, DIM = 3, 2, 32


def cache_of(layers=LAYERS):
    return MixedKVCache(build("llama", num_hidden_layers=layers).config, get_scheme("saw-int4"))


def tokens(seed, count=1, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, HEADS, count, DIM, generator=generator).to(dtype) for _ in range(2)]


def fill(cache, count=5):
    for i in range(LAYERS):
        cache.update(*tokens(i, count), i)


def same(x, expected):
    """What a handle shows, without a copy that a method of it would leave behind."""
    return torch.equal(x.materialize(), expected)


def test_handles_are_of_their_layer():
    cache = cache_of()
    fill(cache)
    # A layer that has changed more often than others.
    cache.layers[1].reorder_cache(torch.zeros(1, dtype=torch.long))
    pairs = [cache.update(*tokens(40 + i), i) for i in range(LAYERS)]
    for layer, (keys, values) in zip(cache.layers, pairs, strict=True):
        assert ((keys.side, values.side), keys.shape) == (("keys", "values"), (1, HEADS, 6, DIM))
        assert keys.hfkvq_layer is values.hfkvq_layer is layer
        assert same(keys, layer.dense("keys"))
        assert same(values, layer.dense("values"))


def test_a_handle_of_the_past_stays_of_the_past():
    """Its layer's next update makes another, of the same shape too."""
    cache = cache_of(1)
    cache.update(*tokens(0, 5), 0)
    cache.layers[0].finish(torch.zeros(1, 4, 1, DIM), AttentionArguments(1.0))
    held = cache.update(*tokens(1), 0)
    cache.crop(-1)
    again = cache.update(*tokens(2), 0)
    assert again[0] is not held[0]
    assert again[0].shape == held[0].shape
    for x in held:
        with pytest.raises(RuntimeError, match="earlier update"):
            x.hfkvq_layer  # noqa: B018
    assert same(again[0], cache.layers[0].dense("keys"))


def test_a_cache_is_freed_with_its_last_name():
    """Handles keep their layer, and what keeps handles must not be kept by it."""
    cache = cache_of()
    fill(cache)
    layers = [weakref.ref(layer) for layer in cache.layers]
    stores = [weakref.ref(layer.store) for layer in cache.layers]
    gc.collect()
    gc.disable()
    try:
        del cache
        assert [x() for x in (*layers, *stores)] == [None] * 6
    finally:
        gc.enable()


def test_modes_and_kinds_do_not_mix():
    cache = cache_of()
    fill(cache)
    inference = torch._C.TensorBase.is_inference
    for mode in (False, True, False):
        with torch.inference_mode(mode):
            keys = cache.update(*tokens(7), 0)[0]
            with torch._C.DisableTorchFunctionSubclass():
                assert inference(keys) == mode
            del keys
        cache.layers[0].crop(-1)
    other = cache_of()
    assert other.update(*tokens(0, 5, torch.bfloat16), 0)[0].dtype == torch.bfloat16
    assert other.update(*tokens(0, 5), 1)[0].dtype == torch.float32


def test_attention_is_told_of_one_layer_only():
    cache = cache_of()
    fill(cache)
    pairs = [cache.update(*tokens(i), i) for i in range(2)]
    (one, own), (other, _) = pairs
    assert layer_of(one, own) is cache.layers[0]
    assert layer_of(other, own) is None
    assert layer_of(one, torch.ones(1)) is None
    assert layer_of(torch.ones(1), own) is None
    assert layer_of(one[:, :, None, :, :], own) is None
    query = torch.zeros(1, 4, 1, DIM)
    cache.layers[0].update(*tokens(5))
    for pair in ((one, own), (one, other), (other, own)):
        with pytest.raises(RuntimeError, match="earlier update"):
            hfkvq_attention(torch.nn.Identity(), query, *pair, None)
