"""Pages in the host's memory: the same tokens and the same bytes, whatever is done with the cache.

On the CPU they lie in memory of their own as well; all but the pinning is what runs on a GPU.
"""

from __future__ import annotations

import gc

import pytest
import torch
from transformers import LlamaConfig

from hfkvq import KittyCache, MixedKVCache
from hfkvq.caches.layers.memory import held_bytes
from hfkvq.caches.steps import step_buffer
from hfkvq.caches.store import host
from tests.caches.driver import assert_same_bits, small, stored
from tests.caches.graph_recorder import TapeGraph, captured  # noqa: F401
from tests.caches.models import build, prompt
from tests.caches.test_generate import _generate
from tests.caches.test_graphs_gpu import model as large_model  # noqa: F401
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
        TapeGraph.made = 0
        found.append(_generate(model, cache, ids, attention_mask=mask, max_new_tokens=40))
        assert TapeGraph.made == (1 if length else 3)
        longer = torch.cat([mask, mask.new_ones(2, 53)], 1)
        more = torch.cat([found[-1], prompt(2, 13, seed=7)], 1)
        found[-1] = _generate(model, cache, more, attention_mask=longer, max_new_tokens=9, prefill_chunk_size=5)
    assert torch.equal(*found)
    assert_alike(*caches, rows=2)
    # Of a cache that grows, steps are captured with copies a layer ahead.
    assert (caches[1].layers[0].buffer.memory()[1:] != []) == (length is None)


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


# Pinned memory, which kernels and PyTorch's operations read and write.


PROMPT, MORE = 4000, 300
OPTIONS = {"captured": {}, "fixed": {"max_cache_len": PROMPT + MORE}, "eager": {"graphs": False}}


def generated(model, cache):
    options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": MORE, "min_new_tokens": MORE}
    return model.generate(prompt(2, PROMPT).cuda(), past_key_values=cache, prefill_chunk_size=1000, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("how", OPTIONS)
@pytest.mark.parametrize("name", ["kitty-pro", "saw-int4", "mixkvq", "full"])
def test_tokens_are_the_same_and_pages_are_not_on_the_gpu(large_model, name, how):  # noqa: F811
    found, held = [], []
    # The first one also allocates what its process keeps.
    for on in (False, False, True):
        gc.collect()
        before = torch.cuda.memory_allocated()
        cache = MixedKVCache(large_model, name, offloading=on, **OPTIONS[how])
        found.append(generated(large_model, cache))
        sync = None if cache.graphs is None else cache.graphs.sync
        memory = cache.memory()
        held.append(torch.cuda.memory_allocated() - before)
        replays = sync is not None and sync.buffers is not None and bool(sync.buffers.recordings)
        assert replays == (how != "eager")
        cache.integrity_check()
        # Its buffers go with it.
        del cache, sync
    assert torch.equal(*found[1:])
    assert memory.offloaded >= memory.compressed.codes
    # Captured steps of a cache that grows copy pages to two layers' room, and the model has no more layers.
    assert held[2] < held[1] + 2**16 - (0 if how == "captured" else 0.9 * memory.offloaded)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.bfloat16])
def test_operations_over_pinned_memory(dtype):
    size = 64 * 1000
    there = host.empty(size * dtype.itemsize, torch.device("cuda", 0)).view(dtype).view(64, 1000)
    here = torch.randint(0, 100, (64, 1000), device="cuda").to(dtype)
    assert there.device == here.device
    block = there.untyped_storage().hfkvq_block.bytes
    assert block.is_pinned()
    assert torch.equal(there.copy_(here), here)
    torch.cuda.synchronize()
    assert torch.equal(block.view(dtype).view(64, 1000), here.cpu())
    rows = torch.randperm(64, device="cuda")
    assert torch.equal(there[rows], here[rows])
    assert torch.equal(torch.cat([there, there]), torch.cat([here, here]))
    assert torch.equal(there.clone(), here)
    assert torch.equal(there.cpu(), here.cpu())
    there[rows[:9]] = here[rows[9:18]]
    here[rows[:9]] = here[rows[9:18]].clone()
    assert torch.equal(there, here)
    assert not there.zero_().any()


@pytest.mark.gpu
def test_memory_is_not_reused_while_the_gpu_is_at_work():
    """Freed memory is not given out before the kernels launched on it are done."""
    size = 64 * 2**20
    for _ in range(3):
        there = host.empty(size, torch.device("cuda", 0)).fill_(1)
        torch.cuda.synchronize()
        for _ in range(20):
            last = there.sum(dtype=torch.int64)
        del there
        gc.collect()
        torch.full((size,), 7, dtype=torch.uint8, pin_memory=True)
        assert int(last) == size


@pytest.mark.gpu
def test_a_second_gpu():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    there = host.empty(1000, torch.device("cuda", 1)).fill_(3)
    assert there.device.index == 1
    assert int(there.sum()) == 3000
