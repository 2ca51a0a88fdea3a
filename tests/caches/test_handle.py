"""Handles that the layers of a cache use one after the other, and never while anybody holds them."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import weakref

import pytest
import torch

from hfkvq import MixedKVCache, get_scheme
from hfkvq.caches import handle
from hfkvq.caches.attention import hfkvq_attention
from hfkvq.caches.handle import LazyKV, Spare, layer_of
from hfkvq.caches.layer import KVLayer, PaddingReader
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


def ids(pair):
    return [id(x) for x in pair]


def same(x, expected):
    """What a handle shows, without a copy that a method of it would leave behind."""
    return torch.equal(x.materialize(), expected)


def test_layers_of_a_step_use_the_same_handles():
    cache = cache_of()
    fill(cache)
    for step in range(3):
        found = [ids(cache.update(*tokens(10 * step + i), i)) for i in range(LAYERS)]
        assert found == [found[0]] * LAYERS
    for i in range(LAYERS):
        # A layer that has changed more often than others.
        cache.layers[i].reorder_cache(torch.zeros(1, dtype=torch.long))
        cache.layers[1].reorder_cache(torch.zeros(1, dtype=torch.long))
        keys, values = cache.update(*tokens(40 + i), i)
        assert ((keys.side, values.side), keys.shape) == (("keys", "values"), (1, HEADS, 9, DIM))
        assert keys.hfkvq_layer is values.hfkvq_layer is cache.layers[i]
        assert same(keys, cache.layers[i].dense("keys"))
        assert same(values, cache.layers[i].dense("values"))
        del keys, values


class Kept(torch.autograd.Function):
    """Lets PyTorch hold a tensor where Python does not see it."""

    @staticmethod
    def forward(ctx, x, kept):
        ctx.save_for_backward(kept)
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def saved(x):
    with torch._C.DisableTorchFunctionSubclass():
        return Kept.apply(torch.ones(1, requires_grad=True), x)


def in_a_frame(x):
    def waits(own):
        yield own

    frame = waits(x)
    next(frame)
    return frame


def noted(x):
    x.mine = "here"


HOLDS = {
    "name": lambda x: x,
    "list": lambda x: [x],
    "frame": in_a_frame,
    "weak reference": weakref.ref,
    "attribute": noted,
    "autograd": saved,
    "layers that share": lambda x: {"full_attention": (x, None)},
}


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("how", HOLDS)
def test_handles_that_anybody_holds_stay_as_they_are(how, side):
    cache = cache_of()
    fill(cache)
    pair = cache.update(*tokens(7), 0)
    which, expected = ids(pair), cache.layers[0].dense(("keys", "values")[side])
    held = HOLDS[how](pair[side])
    del pair
    other = cache.update(*tokens(8), 1)
    assert id(other[side]) != which[side]
    assert other[0].hfkvq_layer is other[1].hfkvq_layer is cache.layers[1]
    assert not vars(other[side])
    # A new pair has taken the place of the old one.
    other = ids(other)
    assert ids(cache.update(*tokens(9), 2)) == other
    if how in ("name", "list"):
        mine = held if how == "name" else held[0]
        assert mine.hfkvq_layer is cache.layers[0]
        assert same(mine, expected)
        cache.update(*tokens(9), 0)
        with pytest.raises(RuntimeError, match="earlier update"):
            mine + 0


def test_who_traces_holds_nothing_for_others(monkeypatch):
    """A debugger keeps the names of every frame that it looks at: that counts for all alike."""
    cache, looked = cache_of(), []
    fill(cache)

    def trace(frame, event, arg):
        looked.append(len(frame.f_locals))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        held = cache.update(*tokens(7), 0)
        other = cache.update(*tokens(8), 1)
        distinct = not {*ids(held)} & {*ids(other)}
    finally:
        sys.settrace(before)
    assert looked
    assert distinct
    assert held[0].hfkvq_layer is cache.layers[0]


def test_a_handle_of_the_past_stays_of_the_past():
    """Its layer's next update makes another, of the same shape too."""
    cache = cache_of(1)
    cache.update(*tokens(0, 5), 0)
    cache.layers[0].finish(torch.zeros(1, 4, 1, DIM))
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


def test_handles_keep_their_layer():
    cache = cache_of()
    keys, _ = cache.update(*tokens(0, 5), 0)
    expected = cache.layers[0].dense("keys")
    del cache
    assert torch.equal(keys + 0, expected)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_have_handles_of_their_own(copied):
    cache = cache_of()
    fill(cache)
    new = copied(cache)
    assert new._spare is not cache._spare
    first = ids(cache.update(*tokens(7), 0))
    assert {*ids(new.update(*tokens(7), 0))}.isdisjoint(first)
    # Both go on sharing theirs.
    for own in (cache, new):
        mine = ids(own.update(*tokens(8), 1))
        keys, values = own.update(*tokens(9), 2)
        assert ids((keys, values)) == mine
        assert keys.hfkvq_layer is own.layers[2]
        del keys, values


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


def test_a_layer_without_a_cache_makes_its_own():
    layer = KVLayer(get_scheme("saw-int4"), PaddingReader())
    layer.update(*tokens(0, 5))
    for seed in range(3):
        keys, values = layer.update(*tokens(seed))
        assert keys.hfkvq_layer is values.hfkvq_layer is layer


def test_counts_that_are_not_exact_are_not_asked(monkeypatch):
    monkeypatch.setattr(handle, "_COUNTS", False)
    cache = cache_of()
    fill(cache)
    assert cache._spare.keys is None


def test_a_spare_pair_is_taken_by_nobody_else():
    """Two that ask at a time, of whom each has a name for it, both make their own."""
    cache = cache_of()
    fill(cache)
    spare = cache._spare
    assert spare.take(spare.kind) is not None
    first = spare.take(spare.kind)
    assert spare.take(spare.kind) is None
    del first
    assert spare.take(spare.kind) is not None
    assert spare.take((*spare.kind[:-1], None)) is None
    assert copy.deepcopy(spare).keys is None


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
    cache.update(*tokens(5), 0)
    for pair in ((one, own), (one, other), (other, own)):
        with pytest.raises(RuntimeError, match="earlier update"):
            hfkvq_attention(torch.nn.Identity(), query, *pair, None)


def test_handles_have_nothing_in_their_dict():
    """What is there is somebody else's."""
    layer = KVLayer(get_scheme("saw-int4"), PaddingReader())
    keys, _ = layer.update(*tokens(0, 5))
    assert not vars(keys)
    assert isinstance(keys, LazyKV)
    assert (keys.repeats, keys.form) == (1, "bhsd")
    assert type(Spare().alone) is object
