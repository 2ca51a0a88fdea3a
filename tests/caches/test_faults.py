"""Whatever fails, and wherever: a cache is what it was or what it was to become, or it says that it must be reset."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hfkvq import MixedKVCache
from hfkvq.caches.steps.step_buffer import StepBuffer
from hfkvq.caches.store import kvstore
from tests.caches.driver import small, stored
from tests.caches.models import build, prompt


class Fault(RuntimeError):
    """As if there had been no memory."""


class FailAt(TorchDispatchMode):
    """The n-th operation of PyTorch fails, before it has done anything; 0 counts them only."""

    def __init__(self, fails: int = 0) -> None:
        super().__init__()
        self.fails, self.count = fails, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        if self.count == self.fails:
            raise Fault
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def model():
    return build("llama")


def filled(model, name, capacity, rows=3):
    """A cache with left padding, pages that two rows share, and a tail."""
    cache = MixedKVCache(model, small(name), max_cache_len=capacity)
    ids, mask = prompt(rows, 42), torch.ones(rows, 42, dtype=torch.long)
    mask[0, :7] = 0
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
        for i in range(3):
            model(ids[:, i : i + 1], past_key_values=cache)
    cache.reorder_cache(torch.tensor([0, 1, 1]))
    return cache


def bits(cache):
    """What each layer holds once nothing is left to do, bit for bit."""
    cache = copy.deepcopy(cache)
    found = []
    for layer in cache.layers:
        layer.settle()
        rows = [stored(layer, i) for i in range(layer.batch_size)] if layer.seen else []
        found.append([{key: x.float() for key, x in row.items()} for row in rows])
    return found


def same(a, b):
    if len(a) != len(b):
        return False
    pairs = zip(a, b, strict=True)
    return all(x.keys() == y.keys() and all(torch.equal(x[key], y[key]) for key in x) for x, y in pairs)


@pytest.mark.parametrize("name", ["int4", "kvarn"])
def test_tokens_counted_as_sealed_before_an_operation_fails(model, monkeypatch, name):
    """Their pages are not written: they are counted as not sealed again, and are sealed with the step's repetition."""
    cache, ids = filled(model, name, None), prompt(3, 140, seed=3)
    own, failed = kvstore.kernels.due, []

    def fails(*args):
        found = own(*args)
        if not failed:
            failed.append(True)
            raise Fault
        return found

    monkeypatch.setattr(kvstore.kernels, "due", fails)
    monkeypatch.setattr(StepBuffer, "takes", lambda *_: False)
    for i in range(ids.shape[1]):
        twin = copy.deepcopy(cache)
        with torch.no_grad():
            try:
                model(ids[:, i : i + 1], past_key_values=cache)
            except Fault:
                break
    assert failed
    cache.level()
    cache.integrity_check()
    assert cache.get_seq_length() == twin.get_seq_length()
    for other in (cache, twin):
        with torch.no_grad():
            model(ids[:, i : i + 1], past_key_values=other)
    # They attend over other addresses, so sums may be rounded otherwise.
    torch.testing.assert_close(bits(cache), bits(twin), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("capacity", [None, 120])
@pytest.mark.parametrize("name", ["mixkvq", "snapkv+kitty-pro", "arkv"])
def test_a_cache_that_was_read_in_inference_mode_goes_on_in_any(model, name, capacity, tmp_path):
    whole = filled(model, name, capacity)
    whole.save(tmp_path / "cache")
    with torch.inference_mode():
        cache = MixedKVCache.load(tmp_path / "cache", model)
    for tokens in (1, 30, 1):
        ids = prompt(3, tokens, seed=5)
        with torch.no_grad():
            a, b = (model(ids, past_key_values=each).logits for each in (cache, whole))
        assert torch.equal(a, b)
