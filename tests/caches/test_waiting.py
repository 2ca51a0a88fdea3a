"""Steps that wait for the compiler: fewer operations, and the same tokens in the same bits."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from hfkvq import MixedKVCache, get_scheme
from hfkvq.caches.layers import waiting
from hfkvq.caches.store.view import StoreView
from tests.caches.driver import small
from tests.caches.models import build, prompt

BEST = get_scheme("best-3.4", page_size=8, group_size=8, sink_length=4, local_length=6, key_local_length=5)
SCHEMES = {
    "best": BEST,
    "kitty-pro": get_scheme("kitty-pro", page_size=8, sink_length=4, local_length=6),
    "exact": get_scheme(
        "kitty-pro", page_size=8, sink_length=4, local_length=6, score="error", exact_keys=2, key_local_length=3
    ),
    "kivi": small("kivi-2"),
    "mixkvq": small("mixkvq"),
    "saw-int4": small("saw-int4-kv"),
}


class Kernels:
    """Kernels that are being compiled."""

    there = False

    def is_done(self):
        return self.there

    def is_ready(self):
        return self.there


def waits(model, scheme, kernels, **kwargs):
    cache = MixedKVCache(model.config, scheme, **kwargs)
    cache.layers[0].steps.sync.wait_for(kernels)
    return cache


def check(cache, want):
    """The same to the bit, once all that was gathered is stored; before, tokens lack a rotation there and back."""
    mine, theirs = cache.layers[0], want.layers[0]
    for side in ("keys", "values"):
        torch.testing.assert_close(mine.dense(side), theirs.dense(side), rtol=0, atol=1e-5)
    stored = copy.deepcopy(cache).layers[0]
    stored.settle()
    assert stored.staged is None
    assert stored.store.states == theirs.store.states
    assert torch.equal(stored.store.counters, theirs.store.counters)
    for side in ("keys", "values"):
        assert torch.equal(stored.dense(side), theirs.dense(side)), side


FEW = {"best": 34, "kitty-pro": 29, "exact": 26}
"""A prompt's tokens behind which some steps pass before anything is sealed."""


# One layer, so that keys and values are the same however attention rounds.
@pytest.fixture(scope="module")
def model():
    return build("llama", num_hidden_layers=1)


def mask_of(rows, columns, lead):
    mask = torch.ones(rows, columns, dtype=torch.long)
    mask[0, :lead] = 0
    return mask


# Capacities and padding go by turns: every scheme has both of each, in two of their four pairs.
TURNS = [
    pytest.param(
        *(name, length, lead),
        id=f"{name}-{length}-{'padded' if lead else 'alike'}",
        marks=[] if (length is None) ^ (lead > 0) ^ bool(i % 2) else [pytest.mark.slow],
    )
    for i, name in enumerate(SCHEMES)
    for length in (None, 100)
    for lead in (0, 3)
]


@pytest.mark.parametrize(("name", "length", "lead"), TURNS)
def test_what_is_gathered_is_sealed_when_it_would_have_been(model, name, length, lead):
    kernels = Kernels()
    cache = waits(model, SCHEMES[name], kernels, max_cache_len=length)
    want = MixedKVCache(model.config, SCHEMES[name], max_cache_len=length, graphs=False)
    sizes, columns, gathered = [30, *[1] * 23, 3, *[1] * 12, 20, *[1] * 5], 0, 0
    with torch.no_grad():
        for i, size in enumerate(sizes):
            columns += size
            kernels.there = i == len(sizes) - 2
            for each in (cache, want):
                model(prompt(2, size), past_key_values=each, attention_mask=mask_of(2, columns, lead))
            gathered = max(gathered, cache.layers[0].staged_length)
            check(cache, want)
    assert cache.layers[0].kept is None
    assert cache.layers[0].staged is None
    # Where each value is sealed as it leaves the window, nothing can be gathered.
    assert (gathered > 1) == (name not in ("kivi", "saw-int4"))


@pytest.mark.parametrize("name", ["best", "kitty-pro", "exact"])
def test_what_changes_the_rows_finds_all_tokens(model, name):
    """Within what is gathered."""

    def crop(cache):
        cache.crop(-2)

    def reorder(cache):
        cache.reorder_cache(torch.tensor([1, 0]))

    def repeat(cache):
        cache.batch_repeat_interleave(2)

    changes = (crop, reorder, repeat, copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache)))
    size = FEW[name]
    for change in changes:
        cache = waits(model, SCHEMES[name], Kernels())
        want = MixedKVCache(model.config, SCHEMES[name], graphs=False)
        with torch.no_grad():
            for each in (cache, want):
                for tokens in (size, 1, 1, 1):
                    model(prompt(2, tokens), past_key_values=each)
            assert cache.layers[0].staged_length == 3
            assert cache.layers[0].kept is not None
            assert cache.get_seq_length() == size + 3
            got, wanted = (change(each) or each for each in (cache, want))
            assert got.layers[0].kept is None
            for _ in range(12):
                for each in (got, wanted):
                    model(prompt(each.layers[0].batch_size, 1), past_key_values=each)
                check(got, wanted)
    # A copy's steps are not those of what it was copied from.
    assert cache.layers[0].staged_length == 3
    assert cache.get_seq_length() == size + 3


def test_a_compiled_step_finds_what_was_gathered(model):
    cache = waits(model, BEST, Kernels(), max_cache_len=100)
    want = MixedKVCache(model.config, BEST, max_cache_len=100, graphs=False)
    forward = torch.compile(model.forward, backend="eager")
    with torch.no_grad():
        for each in (cache, want):
            for tokens in (34, 1, 1):
                model(prompt(1, tokens), past_key_values=each)
        assert cache.layers[0].staged_length == 2
        for step in range(3):
            # As generate does, or whoever calls a compiled forward.
            cache.between_steps()
            assert cache.layers[0].staged is None
            got = forward(prompt(1, 1, seed=step), past_key_values=cache).logits
            expected = model(prompt(1, 1, seed=step), past_key_values=want).logits
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert int(cache.get_seq_length()) == 39
    torch._dynamo.reset()


def test_pages_are_dequantized_once(model, monkeypatch):
    asked, dense = [], StoreView.dense

    def counted(self, *given):
        asked.append(given)
        return dense(self, *given)

    monkeypatch.setattr(StoreView, "dense", counted)
    cache = waits(model, BEST, Kernels())
    with torch.no_grad():
        model(prompt(1, 34), past_key_values=cache)
        for _ in range(5):
            model(prompt(1, 1), past_key_values=cache)
        assert len(asked) == 2
        # What is reported is what is held from then on, so that is let go of.
        assert cache.layers[0].kept is not None
        cache.memory()
        assert cache.layers[0].kept is None
        model(prompt(1, 1), past_key_values=cache)
        assert len(asked) == 4
        # Much is not kept; two layers would have half each.
        size = sum(x.nbytes for x in cache.layers[0].kept.sides)
        monkeypatch.setattr(waiting, "MOST_KEPT", size - 1)
        cache.reset()
        model(prompt(1, 34), past_key_values=cache)
        for _ in range(3):
            model(prompt(1, 1), past_key_values=cache)
            assert cache.layers[0].kept is None
    assert len(asked) == 10
