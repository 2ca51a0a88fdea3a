"""Whatever fails, and wherever: a cache is what it was or is to become, in all layers, and knows what it holds."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hfkvq import MixedKVCache
from hfkvq.caches.steps.step_buffer import StepBuffer
from hfkvq.caches.store import kvstore
from hfkvq.kernels import append, hadamard, use_interpreter
from hfkvq.kernels.pages import StoreFormat
from tests.caches.driver import DIM, HEADS, forward, make, same_bits, small, stored
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


# Whole caches.


def test_a_refused_crop_changes_no_layer(model):
    cache = MixedKVCache(model, small("arkv", budget_tokens=48), layers={"0": "full"})
    with torch.no_grad():
        model(prompt(1, 150), past_key_values=cache)
    before = bits(cache)
    with pytest.raises(NotImplementedError, match="crop: cannot remove 60 tokens"):
        cache.crop(-60)
    assert [layer.seen for layer in cache.layers] == [150, 150]
    assert same_bits(bits(cache), before)


@pytest.mark.parametrize("name", ["arkv", "snapkv", "h2o", "kitty"])
@pytest.mark.parametrize("capacity", [None, 120])
def test_padding_throughout(model, name, capacity):
    """A batch without any token holds none, and the tokens after it are a prompt."""
    ids, mask = prompt(2, 90), torch.zeros(2, 90, dtype=torch.long)
    mask[:, 40:] = 1
    cache = MixedKVCache(model, small(name), max_cache_len=capacity)
    alone = MixedKVCache(model, small(name), max_cache_len=capacity)
    with torch.no_grad():
        model(ids[:, :40], attention_mask=mask[:, :40], past_key_values=cache)
        cache.integrity_check()
        got = model(ids[:, 40:], attention_mask=mask, past_key_values=cache).logits
        expected = model(ids[:, 40:], past_key_values=alone).logits
    cache.integrity_check()
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_numbers_beyond_float16():
    """A rotation of float16 has no infinity, and debug says what pages cannot hold."""
    torch.manual_seed(0)
    x = (torch.rand(1, HEADS, 40, DIM) * 2 - 1) * 6e4
    assert float(hadamard(x, DIM).abs().amax()) > 65504
    with use_interpreter():
        by_kernel = hadamard(x.half(), DIM)
    for rotated in (hadamard(x.half(), DIM), by_kernel):
        assert rotated.isfinite().all()
        torch.testing.assert_close(
            rotated.float(), hadamard(x.half().float(), DIM).clamp(-65504, 65504), rtol=1e-3, atol=1
        )
    layer = make(small("saw-int4-kv"))
    out = forward(layer, torch.randn(1, 2 * HEADS, 40, DIM).half() / 6e4, x.half(), x.half())
    assert out.isfinite().all()
    assert layer.dense("keys").isfinite().all()
    for name, given, refused in (
        ("saw-int4", x.half(), True),
        ("kitty", (2 * x).bfloat16(), True),
        ("kitty", x.half(), False),
        ("full", (2 * x), False),
    ):
        layer = make(small(name), debug=True)
        if not refused:
            layer.update(given, given)
            continue
        with pytest.raises(ValueError, match=r"update: keys are as large as .* stores numbers of up to 65504 only"):
            layer.update(given, given)
        assert layer.seen == 0


def _share_open_page(cache):
    table = cache.layers[1].store.runs[-1].table
    table[0, -1] = table[1, -1]


def _forget_a_state(cache):
    store = cache.layers[0].store
    store.state = store.state.replace(
        states=frozenset(state._replace(length=state.length + 1) for state in store.states)
    )


BREAKS = {
    "counters": (lambda cache: cache.layers[1].store.counters[1].add_(1), "rows end at columns"),
    "sealed": (lambda cache: cache.layers[1].store.counters[2].sub_(16), "stand nowhere, or twice|tail|host takes"),
    "host": (_forget_a_state, "the host takes them"),
    "table": (lambda cache: cache.layers[1].store.runs[0].table.fill_(999), "table names pages"),
    "shared": (_share_open_page, "share a page that is not full"),
    "rows": (lambda cache: setattr(cache.layers[1], "batch_size", 2), "rows"),
}


@pytest.mark.parametrize("kind", BREAKS)
def test_what_the_check_finds(model, kind):
    act, message = BREAKS[kind]
    cache = filled(model, "kitty-pro", None)
    cache.integrity_check()
    act(cache)
    with pytest.raises(RuntimeError, match=f"integrity_check: layer.*{message}"):
        cache.integrity_check()
    cache.reset()
    cache.integrity_check()


def test_debug_looks_before_each_forward(model):
    cache = MixedKVCache(model, small("kitty-pro"), debug=True)
    with torch.no_grad():
        for tokens in (40, 1, 1):
            model(prompt(2, tokens), past_key_values=cache)
        cache.layers[1].store.counters[1].add_(1)
        with pytest.raises(RuntimeError, match=r"integrity_check: layer 1: .* Call reset\(\)"):
            model(prompt(2, 1), past_key_values=cache)


def test_a_step_that_fails_anywhere_is_not_counted():
    """Counters say what they said, whatever operation fails while tokens join windows."""
    store = StoreFormat.parse("s4;k0;v0;16t1p16/16t1p16")
    for fails in range(1, 100):
        counters = torch.tensor([[0], [20], [16], [16]], dtype=torch.int32)
        windows = [torch.zeros(1, 2, slots, 16) for slots in (4, 4, 32, 32)]
        new, before = torch.ones(1, 2, 3, 16), counters.clone()
        try:
            with FailAt(fails):
                append(new, new, counters, windows, store)
        except Fault:
            assert torch.equal(counters, before)
        else:
            break
    assert counters[1].item() == 23
    assert fails > 5
