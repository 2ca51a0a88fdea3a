"""Whatever fails, and wherever: a cache is what it was or what it was to become, or it says that it must be reset."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hfkvq import MixedKVCache
from hfkvq.caches.steps.step_buffer import StepBuffer
from hfkvq.caches.store import kvstore
from hfkvq.kernels.step import ops
from tests.caches.driver import for_all_models, small, stored
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


def samples(total, most):
    """Operations to fail: all of them, or as many as there is time for."""
    if most is None or total <= most:
        return range(1, total + 1)
    return sorted({1 + i * (total - 1) // (most - 1) for i in range(most)})


OPERATIONS = {
    "crop": lambda cache: cache.crop(-2),
    "crop pages": lambda cache: cache.crop(-30),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0, 0])),
    "grow": lambda cache: cache.reorder_cache(torch.tensor([2, 1, 0, 0])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([2, 0])),
    "reset": lambda cache: cache.reset(),
}

KINDS = ("kitty-pro", "saw-int4", "triaxial", "arkv", "snapkv")


def check_operation(model, name, capacity, operation, most):
    """Fails operations of PyTorch, one at a time, and looks at what is left."""
    whole, act = filled(model, name, capacity), OPERATIONS[operation]
    before, done = bits(whole), copy.deepcopy(whole)
    try:
        with FailAt() as counted:
            act(done)
    except NotImplementedError:
        # What has been evicted cannot be taken back.
        assert all(same(*pair) for pair in zip(bits(done), before, strict=True))
        return
    after = bits(done)
    for n in samples(counted.count, most):
        cache = copy.deepcopy(whole)
        with pytest.raises(Fault), FailAt(n):
            act(cache)
        left = bits(cache)
        kept, made = (all(same(*pair) for pair in zip(left, other, strict=True)) for other in (before, after))
        assert kept or made, f"operation {n} of {counted.count}"
        cache.integrity_check()
        # And it goes on.
        rows = cache.layers[0].batch_size
        with torch.no_grad():
            model(prompt(rows, 1), past_key_values=cache)
        cache.integrity_check()


@pytest.mark.parametrize(
    ("name", "operation", "capacity"),
    # Operations are met by every third kind, in turn.
    [
        (name, each, (None, 120)[(i + j) // 3 % 2])
        for i, name in enumerate(KINDS)
        for j, each in enumerate(OPERATIONS)
        if (i + j) % 3 == 0
    ],
)
def test_operations_happen_in_all_layers_or_in_none(model, name, operation, capacity):
    check_operation(model, name, capacity, operation, 3)


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [None, 120])
@pytest.mark.parametrize("name", for_all_models())
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_that_may_fail(model, name, operation, capacity):
    check_operation(model, name, capacity, operation, None)


def check_forward(model, name, capacity, tokens, most):
    """Fails a forward anywhere: layers are whole, and the cache is even, or says that it is not and can be mended."""
    whole = filled(model, name, capacity)
    seen, ids = whole.get_seq_length(), prompt(3, tokens, seed=3)
    before, done = bits(whole), copy.deepcopy(whole)
    with torch.no_grad(), FailAt() as counted:
        model(ids, past_key_values=done)
    after = bits(done)
    # What weighs by queries, or evicts by them, depends on whether they were shown.
    exact = not whole.scheme.needs and not whole.scheme.evicts
    for n in samples(counted.count, most):
        cache = copy.deepcopy(whole)
        with pytest.raises(Fault), torch.no_grad(), FailAt(n):
            model(ids, past_key_values=cache)
        # Of a step over buffers, the device may know more.
        cache._catch_up()
        lengths = [layer.seen for layer in cache.layers]
        assert set(lengths) <= {seen, seen + tokens}
        for layer, left, was, will in zip(cache.layers, bits(cache), before, after, strict=True):
            assert not exact or same(left, was if layer.seen == seen else will), f"operation {n} of {counted.count}"
        if len(set(lengths)) > 1:
            with pytest.raises(RuntimeError, match=r"has seen .* Call reset\(\)"), torch.no_grad():
                model(ids, past_key_values=cache)
            try:
                cache.level()
                assert cache.get_seq_length() == seen
            except NotImplementedError:
                # What has been evicted cannot be taken back.
                cache.reset()
        cache.integrity_check()
        with torch.no_grad():
            model(ids, past_key_values=cache)
        cache.integrity_check()


@pytest.mark.parametrize(
    ("name", "tokens", "capacity"),
    [
        pytest.param(name, tokens, (None, 120)[(i + tokens) % 2], marks=[pytest.mark.slow] * ((i + at) % 2))
        for i, name in enumerate(KINDS)
        for at, tokens in enumerate((1, 30))
    ],
)
def test_an_interrupted_forward(model, name, tokens, capacity):
    check_forward(model, name, capacity, tokens, 5)


def test_a_step_that_fails_before_it_seals(model, monkeypatch):
    """What was due with it is sealed later, and is not taken to be sealed."""
    whole = filled(model, "kivi", 120)
    seen, ids, done = whole.get_seq_length(), prompt(3, 1, seed=3), copy.deepcopy(whole)
    with torch.no_grad():
        model(ids, past_key_values=done)

    def fails(*args):
        raise Fault

    with monkeypatch.context() as patch:
        patch.setattr(ops, "seal_due", fails)
        with pytest.raises(Fault), torch.no_grad():
            model(ids, past_key_values=whole)
    whole._catch_up()
    assert whole.layers[0].seen == seen + 1
    assert same(bits(whole)[0], bits(done)[0])


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
def test_a_cache_that_was_read_in_inference_mode_goes_on_in_any(model, name, capacity):
    whole = filled(model, name, capacity)
    with torch.inference_mode():
        cache = pickle.loads(pickle.dumps(whole))
    for tokens in (1, 30, 1):
        ids = prompt(3, tokens, seed=5)
        with torch.no_grad():
            a, b = (model(ids, past_key_values=each).logits for each in (cache, whole))
        assert torch.equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [None, 120])
@pytest.mark.parametrize("name", for_all_models())
@pytest.mark.parametrize("tokens", [1, 5, 30])
def test_a_forward_interrupted_anywhere(model, name, tokens, capacity):
    check_forward(model, name, capacity, tokens, None)
