"""Models with attention of their own, and other code that meets handles: they get dequantized tensors."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from transformers import BloomConfig, FalconConfig, GPTNeoConfig, MptConfig, T5Config

from evals.families import build
from evals.matrix import small
from hfkvq import MixedKVCache
from hfkvq.caches.layers import KVLayer
from tests.caches.graph_recorder import TapeGraph, captured  # noqa: F401
from tests.caches.models import prompt

BATCH, HEADS, DIM, SEEN = 2, 4, 16, 60


@pytest.fixture
def dense_calls(monkeypatch):
    """Sides of layers that are dequantized."""
    calls, dense = [], KVLayer.dense

    def counted(layer, side):
        calls.append(side)
        return dense(layer, side)

    monkeypatch.setattr(KVLayer, "dense", counted)
    return calls


@torch.no_grad()
def logits(model, cache, ids, mask=None, cuts=(0, 60, 61, 62, 66)):
    found = []
    for a, b in itertools.pairwise(cuts):
        shown = None if mask is None else mask[:, :b]
        found.append(model(input_ids=ids[:, a:b], attention_mask=shown, past_key_values=cache).logits)
    return torch.cat(found, 1)


@pytest.mark.parametrize(
    "config",
    [BloomConfig(), MptConfig(), GPTNeoConfig(), FalconConfig(alibi=True), T5Config()],
    ids=lambda config: config.model_type,
)
def test_eviction_is_refused_where_distances_count(config):
    for name in ("arkv", "snapkv"):
        with pytest.raises(ValueError, match=r"all of them stand, so none can be evicted; choose .*'kitty-pro'"):
            MixedKVCache(config, name)
    MixedKVCache(config, "kitty-pro")


def test_global_layers_and_plain_falcon_may_evict():
    MixedKVCache(GPTNeoConfig(attention_types=[[["global"], 24]]), "arkv")
    MixedKVCache(FalconConfig(), "arkv")


@pytest.mark.parametrize("name", ["arkv", "snapkv"])
def test_attention_that_shows_no_queries_keeps_no_budget_and_says_so(name):
    """Before the second forward, of which nothing is cached then."""
    model, ids = build("gptj"), prompt(1, 66)
    cache = MixedKVCache(model, small(name))
    logits(model, cache, ids, cuts=(0, 60))
    with pytest.raises(ValueError, match=r"this model's own attention \(gptj\) shows none.*'kitty-pro'"):
        logits(model, cache, ids, cuts=(60, 61))
    assert [layer.seen for layer in cache.layers] == [60, 60]


def test_each_side_is_dequantized_once_a_step(dense_calls):
    """DiffLlama attends twice to the same keys."""
    model, ids = build("diffllama"), prompt(1, 66)
    cache = MixedKVCache(model, "kitty-pro")
    logits(model, cache, ids, cuts=(0, 60))
    dense_calls.clear()
    logits(model, cache, ids, cuts=(60, 61))
    assert sorted(dense_calls) == 2 * ["keys"] + 2 * ["values"]


@pytest.mark.usefixtures("captured")
def test_steps_with_repeated_heads():
    """JetMoe repeats keys for its experts: they are dequantized, and no step is captured."""
    model, ids = build("jetmoe"), prompt(BATCH, 40)
    more = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    for capacity in (None, 96):
        cache = MixedKVCache(model, "full", max_cache_len=capacity)
        assert torch.equal(model.generate(ids, past_key_values=cache, **more), model.generate(ids, **more))
        assert not TapeGraph.made


# What a model's attention may do, beside attention over plain tensors.


def written_to(q, k, v, mask):
    logits = torch.matmul(q, k.transpose(-1, -2))
    logits += mask
    logits.masked_fill_(mask < 0, -1e9).mul_(0.5)
    return torch.matmul(F.softmax(logits, -1), v)


def given_by_name(q, k, v, mask):
    logits = torch.matmul(input=q, other=k.transpose(dim0=2, dim1=3))
    logits = torch.where(condition=mask >= 0, input=torch.reshape(logits, shape=logits.shape), other=torch.tensor(-1e9))
    return torch.matmul(torch.softmax(logits.to("cpu", torch.float32), -1, torch.float32), v)


def functional(q, k, v, mask):
    """PyTorch's attention takes masks without axes for rows and heads."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[1, 0])


def dropping(q, k, v, mask):
    torch.manual_seed(3)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.5)


OWN = (written_to, given_by_name, functional, dropping)


@pytest.mark.parametrize("queries", [1, 3, 30])
@pytest.mark.parametrize("own", OWN, ids=lambda f: f.__name__)
def test_arithmetic(own, queries, dense_calls):
    """Handles give whatever a model's own attention computes; PyTorch's attention to them dequantizes no step."""
    cache = MixedKVCache(build("gptj").config, "full")
    generator = torch.Generator().manual_seed(2)
    keys, values = (torch.randn(BATCH, HEADS, SEEN + queries, DIM, generator=generator) for _ in range(2))
    q = torch.randn(BATCH, HEADS, queries, DIM, generator=generator)
    layer = cache.layers[0]
    layer.update(keys[:, :, :SEEN], values[:, :, :SEEN])
    layer.settle()
    dense_calls.clear()
    k, v = layer.update(keys[:, :, SEEN:], values[:, :, SEEN:])
    mask = torch.zeros(BATCH, 1, queries, SEEN + queries)
    mask[0, :, :, :7] = torch.finfo(torch.float32).min
    mask = mask.masked_fill(torch.ones(queries, SEEN + queries).triu(SEEN + 1) > 0, torch.finfo(torch.float32).min)
    found = own(q, k, v, mask)
    assert type(found) is torch.Tensor
    torch.testing.assert_close(found, own(q, keys, values, mask), rtol=1e-4, atol=1e-5)
    assert bool(dense_calls) == (own is not functional or queries > 16)
