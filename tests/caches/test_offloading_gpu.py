"""Pages in pinned memory, which kernels and PyTorch's operations read and write there: tokens, and the GPU's memory."""

from __future__ import annotations

import gc

import pytest
import torch

from hfkvq import MixedKVCache
from hfkvq.caches.store import host
from tests.caches.test_graphs_gpu import model, prompt  # noqa: F401

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

PROMPT, MORE = 4000, 300
OPTIONS = {"captured": {}, "fixed": {"max_cache_len": PROMPT + MORE}, "eager": {"graphs": False}}


def generate(model, cache):  # noqa: F811
    options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": MORE, "min_new_tokens": MORE}
    return model.generate(prompt(length=PROMPT), past_key_values=cache, prefill_chunk_size=1000, **options)


@pytest.mark.parametrize("how", OPTIONS)
@pytest.mark.parametrize("name", ["kitty-pro", "saw-int4", "mixkvq", "full"])
def test_tokens_are_the_same_and_pages_are_not_on_the_gpu(model, name, how):  # noqa: F811
    found, held = [], []
    # The first one also allocates what its process keeps.
    for on in (False, False, True):
        gc.collect()
        before = torch.cuda.memory_allocated()
        cache = MixedKVCache(model, name, offloading=on, **OPTIONS[how])
        found.append(generate(model, cache))
        sync = None if cache.graphs is None else cache.graphs.sync
        memory = cache.memory()
        held.append(torch.cuda.memory_allocated() - before)
        captured = sync is not None and sync.buffers is not None and bool(sync.buffers.recordings)
        assert captured == (how != "eager")
        cache.integrity_check()
        # Its buffers go with it.
        del cache, sync
    assert torch.equal(*found[1:])
    assert memory.offloaded >= memory.compressed.codes
    # Captured steps of a cache that grows copy pages to two layers' room, and the model has no more layers.
    assert held[2] < held[1] + 2**16 - (0 if how == "captured" else 0.9 * memory.offloaded)


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


def test_memory_is_not_reused_while_the_gpu_is_at_work():
    """What is freed goes to nobody before the kernels are done that were launched on it."""
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


def test_a_second_gpu():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    there = host.empty(1000, torch.device("cuda", 1)).fill_(3)
    assert there.device.index == 1
    assert int(there.sum()) == 3000
