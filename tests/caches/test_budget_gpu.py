"""A cache with a budget on a GPU: captured steps go down the ladder, and the allocator's peak stays within."""

from __future__ import annotations

import gc

import pytest
import torch

from hfkvq import MixedKVCache
from tests.caches.models import build, prompt

pytestmark = pytest.mark.gpu


def peak_above(run):
    """Most bytes that PyTorch's allocator has given within a call, beyond those before."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize(("mebibytes", "evict"), [(24, None), (10, "snapkv")])
def test_the_allocators_peak_is_within_the_budget(mebibytes, evict):
    """Beside what the same steps take with a cache that has room; 10 MiB are for some 2,000 tokens on the last rung."""
    model = build("llama", num_hidden_layers=8, max_position_embeddings=16384, head_dim=128, hidden_size=256)
    model = model.to("cuda", torch.bfloat16)
    ids, found = prompt(1, 200).cuda(), {}

    def run(memory, steps):
        cache = MixedKVCache(model, memory=memory, evict=evict)
        with torch.no_grad():
            model(ids, past_key_values=cache)
            for _ in range(steps):
                model(ids[:, :1], past_key_values=cache)
        cache.integrity_check()
        found[memory] = cache.memory().total, cache.budget.rungs, int(cache.get_seq_length()), cache.evicted

    run(2**40, 40)
    beside = peak_above(lambda: run(2**40, 300)) - found[2**40][0]
    limit = mebibytes * 2**20
    above = peak_above(lambda: run(limit, 4000)) - beside
    held, rungs, seen, evicted = found[limit]
    assert seen == 4200
    assert (evicted > 1500) == (evict is not None)
    assert held <= limit
    assert above <= limit
    assert max(max(own) for own in rungs) >= 1
