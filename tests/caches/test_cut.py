"""First prompts beyond a budget: cut without asking the device, and then what the general way would have left."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hfkvq import ARKVCache
from hfkvq.caches.eviction.tier_evictor import TierEvictor
from hfkvq.caches.layers.build import group_layers
from hfkvq.caches.schemes import Arkv
from hfkvq.kernels.arguments import AttentionArguments
from hfkvq.kernels.decode import LENGTH
from tests.caches.driver import DIM, HEADS, SHARE, assert_close, make
from tests.caches.models import build, prompt

TIGHT = {"budget_tokens": 40, "window": 8, "page_size": 8}
WHOLE = 2 * DIM * 2 + 4
KNOBS = {
    "mixed": {},
    "origin": {"tiers": "origin"},
    "quant": {"tiers": "quant"},
    "four bits": {"low_bits": 4},
    "recency": {"tiers": "origin", "score": "recency"},
    "the paper's statistics": {"stats": "paper"},
    "bytes": {"budget_tokens": None, "budget_bytes": 40 * WHOLE},
    "bytes, few": {"budget_tokens": None, "budget_bytes": 40 * WHOLE, "tiers": "quant"},
    "pages of other size": {"page_size": 32, "window": 5},
}


class Questions(TorchDispatchMode):
    """Operations by which the host asks the device: for a number, or for how many a mask has chosen."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        if any(part in name for part in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "::equal")):
            self.asked.append(name)
        index = args[1] if name.startswith("aten::index") and isinstance(args[1], (list, tuple)) else ()
        if any(x is not None and x.dtype == torch.bool for x in index):
            self.asked.append(name)
        # What `tolist` and numbers need: copies to the host.
        if name == "aten::_to_copy" and (kwargs or {}).get("device") == torch.device("cpu"):
            self.asked.append(name)
        return func(*args, **(kwargs or {}))


def layers_of(knobs, count=3, **more):
    layers = [make(Arkv(**TIGHT | knobs), **more) for _ in range(count)]
    group_layers(layers)
    return layers


def tensors(layer, rows, tokens, seed, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(rows, heads, tokens, DIM, generator=generator) for heads in (HEADS * SHARE, HEADS, HEADS)]
    # Layers differ in how concentrated their attention is.
    made[0] = made[0] * (0.3 + layer)
    return [x.to(dtype) for x in made]


def forward(layer, queries, keys, values, mask=None, softcap=0.0, sinks=None):
    """What the "hfkvq" attention does; a prompt's own result is of no interest."""
    layer.update(keys, values)
    out = queries
    if layer.begin(mask, queries.shape[2]):
        out = layer.attend(queries, AttentionArguments(DIM**-0.5, mask, softcap, sinks))
    layer.finish(queries, AttentionArguments(DIM**-0.5, mask, softcap, sinks))
    return out


def run(layers, rows, chunks, mask=None, dtype=torch.bfloat16, **more):
    outs = []
    for i, tokens in enumerate(chunks):
        for at, layer in enumerate(layers):
            queries, keys, values = tensors(at, rows, tokens, 10 * i + at, dtype)
            outs.append(forward(layer, queries, keys, values, mask if i == 0 else None, **more))
    return outs


def general(monkeypatch):
    monkeypatch.setattr(TierEvictor, "_room_of_prompt", lambda self: 0)


@pytest.mark.parametrize(("name", "rows"), [(name, 2) for name in KNOBS if name not in ("quant", "bytes, few")])
def test_it_leaves_what_the_general_way_leaves(name, rows, monkeypatch):
    """The same tokens in the same tiers, and the same from then on, trims and another prompt included."""
    first, second = layers_of(KNOBS[name], 2), layers_of(KNOBS[name], 2)
    for chunks in ([90], [1, 1, *[1] * 20, 30, 1]):
        got = run(first, rows, chunks)
        with monkeypatch.context() as patch:
            general(patch)
            expected = run(second, rows, chunks)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)
        for a, b in zip(first, second, strict=True):
            assert torch.equal(a.store.counters, b.store.counters)
            assert torch.equal(a.store.state.dropped, b.store.state.dropped)
            assert (a.eviction.trim_at, a.eviction.full_at) == (b.eviction.trim_at, b.eviction.full_at)
            for side in ("keys", "values"):
                assert torch.equal(a.dense(side), b.dense(side))
            if chunks == [90]:
                assert a.evicted
                assert a.store.state.settled == 90 - a.scheme.window
                if KNOBS[name].get("score") != "recency":
                    assert_close(a.eviction.strength, b.eviction.strength)
                assert a.store.nbytes().total <= b.store.nbytes().total
            else:
                assert a.store.states == b.store.states


@pytest.mark.parametrize("name", ["mixed", "bytes, few"])
def test_nothing_is_asked_but_once_for_all_layers(name):
    layers = layers_of(KNOBS[name], 4)
    for at, layer in enumerate(layers):
        queries, keys, values = tensors(at, 2, 90, at)
        with Questions() as watch:
            forward(layer, queries, keys, values)
        # Numbers of tokens that stay go to the host, of all layers in one tensor.
        assert len(watch.asked) <= (2 if at == 3 else 1), (at, watch.asked)
        if at < 3:
            assert layer.eviction.provisional is not None


HIDING = torch.ones(90, 90, dtype=torch.bool).tril()[None, None].clone()
HIDING[..., 20:30] = False
HIDING |= torch.eye(90, dtype=torch.bool)


@pytest.mark.parametrize("more", [{"mask": HIDING}, {"softcap": 5.0, "sinks": torch.tensor([3.0, -1.0, 0.5, 2.0])}])
def test_what_else_attention_is_given(more, monkeypatch):
    """A mask of the user's own, softcap and sinks have the say that they have in the general way."""
    first, second, plain = (layers_of({}) for _ in range(3))
    run(first, 2, [90], dtype=torch.float32, **more)
    run(plain, 2, [90], dtype=torch.float32)
    general(monkeypatch)
    run(second, 2, [90], dtype=torch.float32, **more)
    for a, b, other in zip(first, second, plain, strict=True):
        assert_close(a.eviction.strength, b.eviction.strength)
        assert torch.equal(a.dense("keys"), b.dense("keys"))
        assert not torch.allclose(a.eviction.strength, other.eviction.strength)
        # Scores are averaged over five neighbours.
        assert "mask" not in more or (a.dense("keys")[:, :, 22:28] == 0).all()


def test_what_moves_before_tiers_are_final():
    """A layer that has not seen the prompt yet: the others' rows move, a copy is made, a step comes."""
    for change in ("reorder", "copy", "step"):
        layers = layers_of({}, 2)
        first, last = layers
        forward(first, *tensors(0, 2, 90, 1))
        assert first.eviction.provisional is not None
        if change == "reorder":
            first.reorder_cache(torch.tensor([1, 0]))
        elif change == "copy":
            first, last = copy.deepcopy(layers)
        else:
            forward(first, *tensors(0, 2, 1, 2))
        forward(last, *tensors(1, 2, 90, 3))
        for layer in (first, last):
            assert layer.eviction.provisional is None
            assert int(layer.store.counters[LENGTH].max()) <= 41
        held = first.dense("keys")
        keys = tensors(0, 2, 90, 1)[1]
        keys = keys[[1, 0]] if change == "reorder" else keys
        # A step moves the window of 8 on.
        newest = keys[:, :, -7:]
        assert torch.equal(held[:, :, 83:90].to(newest.dtype), newest)


def test_prompts_of_models_are_not_trimmed(monkeypatch):
    """They go this way, and not the general one; also where layers have copied what they hold into buffers by then."""

    def never(self, *args):
        raise AssertionError("a prompt was trimmed")

    monkeypatch.setattr(TierEvictor, "_trim", never)
    model = build("llama")
    cache = ARKVCache(model, **TIGHT, max_cache_len=160)
    model(prompt(2, 90), past_key_values=cache, use_cache=True)
    for layer in cache.layers:
        assert layer.evicted
        assert layer.eviction.provisional is None
        assert layer.eviction.trim_at
