"""Deep copies of a cache share its full pages, and are independent all the same."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import threading

import pytest
import torch

from hfkvq import MixedKVCache
from tests.caches.driver import small, stored
from tests.caches.graph_recorder import captured  # noqa: F401
from tests.caches.models import build, prompt
from tests.caches.test_faults import FailAt, Fault, alone

# Pages sealed by tokens and whole, rotated and fitted, runs of several widths, budgets.
NAMES = ("saw-int4", "kitty-pro", "kivi-2", "mixkvq", "kvarn", "triaxial", "arkv", "snapkv+kitty-pro", "tova+saw-int4")


@pytest.fixture(scope="module")
def model():
    return build("llama", num_hidden_layers=1)


def filled(model, name, tokens=90, rows=1, **kwargs):
    cache = MixedKVCache(model.config, small(name), **kwargs)
    forward(model, cache, prompt(rows, tokens))
    return cache


def forward(model, cache, ids):
    with torch.no_grad():
        return model(ids, past_key_values=cache).logits


def decode(model, cache, tokens, seed=0, rows=1):
    """Steps with given tokens: logits of all."""
    ids = prompt(rows, tokens, seed)
    return torch.cat([forward(model, cache, ids[:, i : i + 1]) for i in range(tokens)], 1)


def bits(cache):
    layers = pickle.loads(pickle.dumps(cache)).compressed_layers
    return [[stored(layer, i) for i in range(layer.batch_size)] for layer in layers if layer.seen]


def storages(*caches):
    """Bytes of all memory that caches keep."""
    layers = [layer for cache in caches for layer in cache.compressed_layers]
    tensors = [x for layer in layers for x in (*layer.store.tensors(), *layer.tensors())]
    return sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}.values())


def leases(cache):
    return [view.lease for layer in cache.compressed_layers for view in layer.store.runs if view.lease is not None]


def assert_same(got, want):
    for a, b in zip(bits(got), bits(want), strict=True):
        for one, other in zip(a, b, strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[key].float(), other[key].float()) for key in one)


def operation(kind, number):
    """The same thing, whatever cache it is done to: what comes out, or why it cannot be done."""

    def act(model, cache):
        rows = max(cache.compressed_layers[0].batch_size, 1) if cache.get_seq_length() else 2
        try:
            if kind == "steps":
                return decode(model, cache, 1 + number % 20, number, rows)
            if kind == "prompt":
                return forward(model, cache, prompt(rows, 17 + number % 30, number))
            if kind == "crop":
                cache.crop(-min(number % 50, cache.get_seq_length()))
            elif kind == "reset":
                cache.reset()
            elif cache.get_seq_length() and kind == "reorder":
                cache.reorder_cache(torch.arange(rows).flip(0)[[0] * (rows - 1) + [rows - 1]])
            elif cache.get_seq_length() and kind == "repeat" and rows < 4:
                cache.batch_repeat_interleave(2)
            elif cache.get_seq_length() and kind == "select":
                cache.batch_select_indices(torch.tensor([0, rows - 1] if rows > 1 else [0]))
        except NotImplementedError as error:
            return str(error)
        return None

    return act


KINDS = ["steps"] * 5 + ["prompt", "crop", "crop", "reset", "reorder", "repeat", "select", "copy", "copy", "delete"]


@pytest.mark.parametrize("name", NAMES)
def test_whatever_is_done_to_copies(model, name):
    """Copies, copies of copies and their originals give what caches give that share nothing, bit for bit."""
    choose = random.Random(name)
    first = filled(model, name, rows=2)
    family = [(first, alone(model, first))]
    for number in range(16):
        kind = "copy" if number < 2 else choose.choice(KINDS)
        at = choose.randrange(len(family))
        cache, want = family[at]
        if kind == "copy":
            if len(family) < 4:
                family.append((copy.deepcopy(cache), alone(model, want)))
        elif kind == "delete":
            if len(family) > 1:
                del family[at]
        else:
            act = operation(kind, choose.randrange(1000))
            got, expected = (act(model, each) for each in (cache, want))
            assert got is expected or got == expected if not torch.is_tensor(got) else torch.equal(got, expected)
        for each, _ in family:
            each.integrity_check()
        del cache, want
    for got, want in family:
        assert got.get_seq_length() == want.get_seq_length()
        assert_same(got, want)


@pytest.mark.parametrize("name", ["saw-int4", "kitty-pro", "mixkvq", "arkv"])
def test_copies_grow_beyond_the_room_there_is(model, name):
    first = filled(model, name, 60)
    want = alone(model, first)
    copies = [copy.deepcopy(first) for _ in range(3)]
    for seed, each in enumerate(copies):
        own = alone(model, want)
        assert torch.equal(decode(model, each, 40, seed), decode(model, own, 40, seed))
        assert_same(each, own)
    assert_same(first, want)
    assert len({id(lease.generation) for each in (first, *copies) for lease in leases(each)}) > 1
    assert torch.equal(decode(model, first, 40), decode(model, want, 40))
    for each in (first, *copies):
        each.integrity_check()


@pytest.mark.parametrize("name", ["saw-int4", "kitty-pro"])
def test_a_document_and_eight_questions(model, name):
    """Full pages are held once; each copy has windows of its own, and pages for what it was asked and has answered."""
    cache = MixedKVCache(model.config, small(name))
    forward(model, cache, prompt(1, 1000))
    alone_bytes = storages(cache)
    windows = cache.memory().compressed.windows
    copies = [copy.deepcopy(cache) for _ in range(8)]
    for seed, each in enumerate(copies):
        forward(model, each, prompt(1, 20, seed))
        decode(model, each, 20, seed)
    # The answers take 320 tokens, a third of the document.
    assert storages(cache, *copies) < 1.6 * alone_bytes + 8 * windows
    report = copies[0].memory()
    assert report.compressed.shared > 0.9 * (alone_bytes - windows)
    assert "shared with copies" in str(report)


def test_bytes_are_counted_once_each(model):
    cache = filled(model, "saw-int4", 400)
    assert cache.memory().compressed.shared == 0
    other = copy.deepcopy(cache)
    decode(model, other, 20)
    mine, theirs = cache.memory(), other.memory()
    assert mine.compressed.shared == theirs.compressed.shared > 0
    assert mine.total + theirs.total - mine.compressed.shared == storages(cache, other)
    del cache
    # What only the original had is counted by who keeps it.
    assert other.memory().compressed.shared == 0
    assert other.memory().total == storages(other)


def test_pages_of_copies_that_are_gone_are_used_again(model):
    cache = filled(model, "saw-int4", 300)
    held = []
    gc.disable()
    try:
        for seed in range(6):
            other = copy.deepcopy(cache)
            decode(model, other, 40, seed)
            held.append(storages(cache, other))
            del other
    finally:
        gc.enable()
    assert held[1:] == held[:1] * 5
    assert all((lease.generation.held[lease.pages] == 1).all() for lease in leases(cache))


def test_a_copy_keeps_what_its_original_had(model):
    cache = filled(model, "kitty-pro", 200)
    want = alone(model, cache)
    other = copy.deepcopy(cache)
    cache.reset()
    forward(model, cache, prompt(1, 150, 9))
    del cache
    assert torch.equal(decode(model, other, 50), decode(model, want, 50))
    assert_same(other, want)


def test_what_copies_share_is_in_no_pickle_twice(model):
    cache = filled(model, "saw-int4", 300)
    size = len(pickle.dumps(cache))
    copies = [copy.deepcopy(cache) for _ in range(3)]
    for each in copies:
        decode(model, each, 40)
    assert len(pickle.dumps(cache)) < 1.05 * size
    assert_same(alone(model, copies[1]), copies[1])


def test_fixed_capacities_share_nothing(model):
    cache = filled(model, "kitty-pro", 90, max_cache_len=200)
    other = copy.deepcopy(cache)
    assert not leases(cache)
    assert not leases(other)
    assert other.memory().compressed.shared == 0


def test_copies_of_short_caches_share_nothing(model):
    cache = filled(model, "kitty-pro", 5)
    assert not leases(copy.deepcopy(cache))


@pytest.mark.parametrize("name", ["saw-int4", "triaxial"])
def test_a_copy_that_fails_changes_nothing(model, name):
    cache, n = filled(model, name, 120), 0
    want = alone(model, cache)
    while True:
        n += 1
        try:
            with FailAt(n):
                copy.deepcopy(cache)
            break
        except Fault:
            cache.integrity_check()
    assert n > 20
    assert_same(cache, want)
    assert torch.equal(decode(model, copy.deepcopy(cache), 30), decode(model, want, 30))


def test_a_step_that_fails_keeps_the_others_pages(model):
    cache = filled(model, "saw-int4", 120)
    want, broken = alone(model, cache), copy.deepcopy(cache)
    for n in range(1, 200, 14):
        with FailAt(n), pytest.raises(Fault):
            decode(model, broken, 20, n)
        broken.level()
        broken.integrity_check()
    cache.integrity_check()
    assert torch.equal(decode(model, cache, 30), decode(model, want, 30))


def test_copies_in_threads(model):
    """Each decodes its own, also while pages move because there is no room left."""
    cache = filled(model, "saw-int4", 120)
    wanted = [decode(model, alone(model, cache), 60, seed) for seed in range(4)]
    found = {}

    def ask(seed):
        found[seed] = decode(model, copy.deepcopy(cache), 60, seed)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[seed], want) for seed, want in enumerate(wanted))


@pytest.mark.parametrize("name", ["kitty-pro", "saw-int4", "mixkvq", "arkv"])
def test_copies_whose_steps_are_captured(model, captured, name):  # noqa: F811
    """Each lies in the buffer while it decodes, and goes back to the shared pages when another takes its place."""
    cache, plain = (filled(model, name, 120, graphs=on) for on in (True, False))
    copies = [copy.deepcopy(cache) for _ in range(3)]
    wanted = [alone(model, plain) for _ in copies]
    for turn in range(2):
        for seed, (each, want) in enumerate(zip(copies, wanted, strict=True)):
            expected = decode(model, want, 20, seed + turn)
            torch.testing.assert_close(decode(model, each, 20, seed + turn), expected, rtol=1e-4, atol=1e-4)
            for one in (cache, *copies):
                one.integrity_check()
    assert captured.made
    assert_same(cache, plain)


def test_buffers_are_left_for_shared_pages(model, captured):  # noqa: F811
    cache = filled(model, "saw-int4", 400)
    copies = [copy.deepcopy(cache) for _ in range(3)]
    for seed, each in enumerate(copies):
        decode(model, each, 30, seed)
    # The last one still lies in the buffer.
    assert [bool(leases(each)) for each in copies] == [True, True, False]
    assert copies[2].layers[0].store.state.home is not None
    generations = {lease.generation for each in (cache, *copies) for lease in leases(each)}
    assert len(generations) == 1
    report = copies[2].memory().compressed
    assert report.shared > 0.5 * report.codes / 2
    # So does a copy of what lies in a buffer.
    held, twin = alone(model, copies[2]), copy.deepcopy(copies[2])
    assert leases(twin)[0].generation in generations
    assert_same(twin, held)
    # What has lost a page in the middle has no way back.
    copies[2].crop(-25)
    held.crop(-25)
    assert copies[2].layers[0].store.state.home is None
    decode(model, twin, 20, 9)
    for each in (cache, twin, *copies):
        each.integrity_check()
    assert_same(copies[2], held)
