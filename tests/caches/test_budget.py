"""A cache with a budget: never a byte more, exactly 16 bits while there is room, then what the presets hold."""

from __future__ import annotations

import copy
import pickle
import random
import weakref
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache

from hfkvq import MixedKVCache, get_scheme
from hfkvq.caches import budget
from hfkvq.caches.layers.layer import KVLayer
from hfkvq.caches.layers.memory import held_bytes
from tests.caches.driver import small
from tests.caches.graph_recorder import captured  # noqa: F401
from tests.caches.models import build, prompt

LAYERS = 4


class Live(TorchDispatchMode):
    """Counts the bytes of tensors that operations make within, while their memory lives."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self.known = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            storage = x.untyped_storage() if isinstance(x, torch.Tensor) else None
            if storage is not None and storage._cdata not in given and storage._cdata not in self.known:
                self.known[storage._cdata] = storage.nbytes()
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self.free, storage._cdata)
        return out

    def free(self, key):
        self.live -= self.known.pop(key, 0)


@pytest.fixture(autouse=True)
def small_ladder(monkeypatch):
    """Pages so small that a few hundred tokens go down the whole ladder."""
    monkeypatch.setattr(budget, "LADDER", tuple(small(name) for name in ("full", "best-4.3", "best-2.5")))


@pytest.fixture
def model():
    return build("llama", num_hidden_layers=LAYERS, max_position_embeddings=4096)


def held(cache):
    """All bytes that a cache holds, counted from its tensors; asks for nothing that changes it."""
    tensors = []
    for layer in cache.compressed_layers:
        tensors += [] if layer.store is None else layer.store.tensors()
        tensors += layer.tensors() + (list(layer._staged) if layer._staged is not None else [])
        tensors += layer.buffer.memory()
    return held_bytes(tensors)


@contextmanager
def watched(cache, monkeypatch):
    """Within, checks the bytes held at each attention call, and at each operation of a layer that moves."""
    move, begin, peaks = budget.Budget._move, KVLayer.forward, []

    def moving(self, cache, *args):
        before = held(cache)
        with Live() as live:
            move(self, cache, *args)
        peaks.append(before + live.peak)
        assert peaks[-1] <= self.limit, "while a layer moves"

    def attending(layer, *args, **kwargs):
        peaks.append(held(cache))
        assert peaks[-1] <= cache.budget.limit, "while tokens are staged"
        return begin(layer, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(budget.Budget, "_move", moving)
        patch.setattr(KVLayer, "forward", attending)
        yield peaks


def forward(model, cache, ids, **kwargs):
    with torch.no_grad():
        return model(ids, past_key_values=cache, **kwargs).logits


def test_16_bits_while_there_is_room(model):
    """The tokens and logits of the model's own cache."""
    cache, own = MixedKVCache(model, memory="64MiB"), DynamicCache(config=model.config)
    for ids in (prompt(2, 90), prompt(2, 1), prompt(2, 40)):
        torch.testing.assert_close(forward(model, cache, ids), forward(model, own, ids), rtol=1e-4, atol=1e-4)
    assert cache.budget.rungs == ((0, 0),) * LAYERS
    for layer, theirs in zip(cache.compressed_layers, own.layers, strict=True):
        torch.testing.assert_close(layer.keys, theirs.keys, rtol=1e-5, atol=1e-5)


def test_goes_down_the_ladder_within_the_budget(model, monkeypatch):
    cache = MixedKVCache(model, memory=900_000, graphs=False)
    stood = []
    with watched(cache, monkeypatch) as peaks:
        for n in range(12):
            forward(model, cache, prompt(1, 90 if n % 3 else 1))
            stood.append(cache.budget.rungs)
            assert held(cache) == cache.memory().total <= 900_000
            cache.integrity_check()
    assert stood[0] == ((0, 0),) * LAYERS
    assert stood[-1] > stood[0]
    assert cache.get_seq_length() == 724
    assert max(peaks) > 600_000
