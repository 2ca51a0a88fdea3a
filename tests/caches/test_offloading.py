"""Pages in the host's memory: the same tokens and the same bytes, whatever is done with the cache.

On the CPU they lie in memory of their own as well; all but the pinning is what runs on a GPU.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from transformers import LlamaConfig

from hfkvq import KittyCache, MixedKVCache
from hfkvq.caches.layers.memory import held_bytes
from hfkvq.caches.steps import step_buffer
from tests.caches.driver import assert_same_bits, small, stored
from tests.caches.graph_recorder import PythonGraph, captured  # noqa: F401
from tests.caches.models import build, prompt
from tests.caches.test_generate import _generate
from tests.caches.test_static import padded


def both(model, scheme, **options):
    """A cache, and the same with its pages in the host's memory."""
    return [MixedKVCache(model, small(scheme), offloading=on, **options) for on in (False, True)]


def assert_alike(plain, offloaded, rows):
    """The same bits and bytes, of which the pages, and nothing else, lie in the host's memory."""
    for cache in (plain, offloaded):
        cache.integrity_check()
    for a, b in zip(plain.compressed_layers, offloaded.compressed_layers, strict=True):
        for row in range(rows):
            assert_same_bits(stored(a, row), stored(b, row))
    memory, expected = offloaded.memory(), plain.memory()
    assert expected.offloaded == 0
    copies = [x for layer in offloaded.compressed_layers if layer.buffer for x in layer.buffer.memory()[1:]]
    assert memory.total == expected.total + held_bytes(copies)
    pages = memory.compressed.codes + memory.compressed.metadata
    assert pages <= memory.offloaded < pages + memory.compressed.tables
    assert ("offloaded" in str(memory), "offloaded" in str(expected)) == (True, False)


@pytest.mark.parametrize(("name", "length"), [("best-3.4", None), ("mixkvq", 120)])
def test_tokens_and_bytes_are_the_same(name, length, monkeypatch, captured):  # noqa: F811
    """Captured steps that outgrow their buffers, with padding; then another turn, in chunks."""
    monkeypatch.setattr(step_buffer, "LEAST_HEADROOM", 16)
    model, (ids, mask) = build("llama"), padded(2, 30)
    caches, found = both(model, name, max_cache_len=length, headroom=0.01), []
    for cache in caches:
        PythonGraph.made = 0
        found.append(_generate(model, cache, ids, attention_mask=mask, max_new_tokens=40))
        assert PythonGraph.made == (1 if length else 3)
        longer = torch.cat([mask, mask.new_ones(2, 53)], 1)
        more = torch.cat([found[-1], prompt(2, 13, seed=7)], 1)
        found[-1] = _generate(model, cache, more, attention_mask=longer, max_new_tokens=9, prefill_chunk_size=5)
    assert torch.equal(*found)
    assert_alike(*caches, rows=2)
    # Of a cache that grows, steps are captured with copies a layer ahead.
    assert (caches[1].layers[0].buffer.memory()[1:] != []) == (length is None)


def _reset(cache):
    cache.reset()
    with torch.no_grad():
        build("llama")(prompt(3, 33, seed=4), past_key_values=cache)


CHANGES = {
    "crop": lambda cache: cache.crop(-19),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([2, 1])),
    "reset": _reset,
    "away and back": lambda cache: [(layer.offload(), layer.prefetch()) for layer in cache.layers],
}


@pytest.mark.parametrize(
    ("change", "length"), [(change, (None, 120)[at % 4 == 0]) for at, change in enumerate(CHANGES)]
)
def test_rows_and_lengths_change(length, change, captured):  # noqa: F811
    """After captured steps, and before others."""
    model, caches, found = build("llama"), both(build("llama"), "kitty-pro", max_cache_len=length), []
    for cache in caches:
        _generate(model, cache, prompt(3, 60), max_new_tokens=4)
        CHANGES[change](cache)
        rows = cache.compressed_layers[0].batch_size
        with torch.no_grad():
            tokens = prompt(rows, 17, seed=5).split([9, *[1] * 8], 1)
            found.append(torch.cat([model(each, past_key_values=cache).logits for each in tokens], 1))
    assert torch.equal(*found)
    assert_alike(*caches, rows=rows)


def test_copies_have_pages_of_their_own():
    model, caches = build("llama"), both(build("llama"), "kitty-pro")
    with torch.no_grad():
        for cache in caches:
            model(prompt(2, 70), past_key_values=cache)
        copies = [copy.deepcopy(caches[0]), pickle.loads(pickle.dumps(caches[1]))]
        for cache in copies:
            model(prompt(2, 30, seed=3), past_key_values=cache)
    assert_alike(*caches, rows=2)
    assert_alike(*copies, rows=2)
    places = [cache.layers[0].store.runs[0].keys[0].data_ptr() for cache in (caches[1], copies[1])]
    assert places[0] != places[1]


def test_saved_caches_may_be_loaded_either_way(tmp_path):
    model, (plain, offloaded) = build("llama"), both(build("llama"), "best-3.4")
    with torch.no_grad():
        for cache in (plain, offloaded):
            model(prompt(2, 70), past_key_values=cache)
    offloaded.save(tmp_path / "cache")
    loaded = [MixedKVCache.load(tmp_path / "cache", model, offloading=on) for on in (False, True)]
    assert_alike(*loaded, rows=2)
    assert_alike(plain, loaded[1], rows=2)


def test_some_layers():
    """The last ones, of those that are held in pages."""
    model = build("llama", num_hidden_layers=3)
    caches = [KittyCache(model, page_size=16, local_length=0, offloading=on) for on in (2, True, False)]
    with torch.no_grad():
        logits = [model(prompt(2, 60), past_key_values=cache).logits for cache in caches]
    assert [layer.offloaded for layer in caches[0].layers] == [False, True, True]
    held = [cache.memory().offloaded for cache in caches]
    assert held[0] * 3 == held[1] * 2
    assert held[2] == 0
    assert torch.equal(logits[0], logits[2])


def test_bad_arguments():
    model = build("llama")
    for value in (0, 3, -1, 1.0, "yes", None):
        with pytest.raises(ValueError, match=r"offloading: got .*, allowed True, False, or how many .* from 1 to 2"):
            MixedKVCache(model, "kitty-pro", offloading=value)
    for name in ("snapkv", "arkv"):
        with pytest.raises(ValueError, match=r"offloading: got True with .*make the cache without offloading"):
            MixedKVCache(model, name, offloading=True)
    # Layers that stay may evict.
    mixed = MixedKVCache(model, "kitty-pro", layers={"0": "snapkv"}, offloading=1)
    assert [layer.offloaded for layer in mixed.layers] == [False, True]
    sliding = LlamaConfig(num_hidden_layers=2, layer_types=["sliding_attention"] * 2, sliding_window=8)
    with pytest.raises(ValueError, match="offloading: got True, but LlamaConfig has no layer that holds all tokens"):
        MixedKVCache(sliding, "kitty-pro", offloading=True)


def test_devices_that_do_not_reach_the_host():
    """Refused at the first tokens, which no layer has then."""
    cache = MixedKVCache(build("llama").config, "kitty-pro", offloading=True)
    tokens = torch.empty(1, 2, 600, 32, device="meta")
    with pytest.raises(ValueError, match="offloading: got tensors on meta, allowed CUDA GPUs and the CPU"):
        cache.update(tokens, tokens, 0)
    assert cache.get_seq_length() == 0
