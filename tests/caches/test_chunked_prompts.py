"""Prompts behind a context: attention without a mask where flash attention takes it."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right
from transformers.models.gemma2 import modeling_gemma2

from hfkvq.caches.attention import interface
from hfkvq.caches.attention.interface import hfkvq_attention
from hfkvq.caches.layers import KVLayer, PaddingReader
from hfkvq.kernels.arguments import AttentionArguments
from tests.caches.driver import DIM, HEADS, SHARE, Module, attention, small

SCALING = 0.2


def given(device="cpu", dtype=torch.float32, queries=40, columns=140, batch=2, dim=64):
    """Queries, keys and values."""
    sizes = ((8, queries), (2, columns), (2, columns))
    return (torch.randn(batch, heads, tokens, dim, device=device, dtype=dtype) for heads, tokens in sizes)


@pytest.fixture
def plain(monkeypatch):
    """Calls without a mask as on a GPU; gives the queries and columns of each."""
    asked = []

    def noted(queries, columns):
        asked.append((queries, columns))
        return causal_lower_right(queries, columns)

    monkeypatch.setattr(interface, "causal_lower_right", noted)
    monkeypatch.setattr(interface, "flash_takes", lambda *rest: True)
    return asked


def test_it_is_causal_attention(plain):
    query, keys, values = given()
    got, _ = interface.dense_attention(None, query, keys, values, AttentionArguments(SCALING))
    assert torch.allclose(got.transpose(1, 2), attention(query, keys, values, None, SCALING), atol=1e-5)
    assert plain == [(40, 140)]


@pytest.mark.parametrize("preset", ["int4", "saw-int4", "saw-int4-kv", "kvarn", "triaxial", "full"])
def test_a_layers_prompt_behind_its_pages(plain, monkeypatch, preset):
    """The same as with a mask, though nothing is rotated back."""
    outs = []
    for masked in (True, False):
        torch.manual_seed(0)
        layer = KVLayer(small(preset), PaddingReader())
        for tokens in (90, 1, 1, 33):
            query, keys, values = (torch.randn(2, heads, tokens, DIM) for heads in (HEADS * SHARE, HEADS, HEADS))
            handles = layer.update(keys, values)
            mask = torch.ones(tokens, layer.seen, dtype=torch.bool).tril(layer.seen - tokens)[None, None]
            with monkeypatch.context() as patch:
                if masked:
                    patch.setattr(interface, "is_plain", lambda *rest: False)
                out, _ = hfkvq_attention(
                    Module(), query, *handles, mask if masked or tokens < 33 else None, scaling=SCALING
                )
        outs.append((out, layer.dense("keys"), layer.dense("values")))
    assert plain == [(33, 125)]
    torch.testing.assert_close(outs[1][0], outs[0][0], rtol=1e-4, atol=1e-4)
    # What is stored then is the same to the bit.
    assert all(torch.equal(a, b) for a, b in zip(*(x[1:] for x in outs), strict=True))


class Gemma2(Module):
    """An attention module with a softcap, whose eager attention is Gemma 2's."""

    num_key_value_groups, __module__ = 4, modeling_gemma2.__name__


@pytest.mark.parametrize(
    ("mask", "more", "expected"),
    [
        (None, {}, True),
        (None, {"sliding_window": 500}, True),
        (None, {"sliding_window": 30}, False),
        (None, {"softcap": 30.0}, False),
        (None, {"dropout": 0.1}, False),
        (None, {"position_bias": torch.zeros(1, 8, 40, 140)}, False),
        (torch.ones(1, 1, 40, 140, dtype=torch.bool), {}, False),
    ],
)
def test_what_goes_without_a_mask(plain, mask, more, expected):
    query, keys, values = given()
    arguments = AttentionArguments(SCALING, mask, more.get("softcap", 0.0), bias=more.get("position_bias"))
    out, _ = interface.dense_attention(Gemma2(), query, keys, values, arguments, **more)
    assert out.shape == (2, 40, 8, 64)
    assert bool(plain) == expected


def test_a_bias_is_not_all_that_hides():
    """Of several queries without a mask, where it becomes one."""
    made = AttentionArguments(1.0, bias=torch.zeros(1, 2, 3, 5)).biased().mask
    assert made is not None
    assert (made[0, 0] > -1).tolist() == torch.ones(3, 5, dtype=torch.bool).tril(2).tolist()
    made = AttentionArguments(1.0, bias=torch.zeros(1, 2, 3, 5), causal=False).biased().mask
    assert made is not None
    assert (made == 0).all()


def test_a_served_prompt_without_a_gpu_is_capped():
    pages = pytest.importorskip("hfkvq.serving.pages", reason="Transformers before 5.19", exc_type=ImportError)
    query, keys, values = given(batch=1)
    assert not interface.flash_takes(query, keys, values)
    caps = (AttentionArguments(SCALING, softcap=cap) for cap in (0.0, 1e6, 0.1))
    none, wide, narrow = (pages.prompt_attention(Gemma2(), query, keys, values, cap) for cap in caps)
    torch.testing.assert_close(wide, none)
    assert (narrow - none).abs().max() > 0.01


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu(dtype):
    """Its error is at most twice that of PyTorch's attention with a mask, and no mask is made."""
    query, keys, values = given("cuda", dtype, 2000, 8100, dim=128)
    # As models make queries.
    query = query.transpose(1, 2).contiguous().transpose(1, 2)
    assert interface.flash_takes(query, keys, values)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    got = interface.lower_right(query, keys, values, SCALING)
    assert torch.cuda.max_memory_allocated() - before < 2 * got.nbytes
    exact = attention(query.float(), keys.float(), values.float(), None, SCALING)
    triangle = torch.ones(2000, 8100, dtype=torch.bool, device="cuda").tril(6100)
    many = (x.repeat_interleave(4, 1) for x in (keys, values))
    usual = torch.nn.functional.scaled_dot_product_attention(query, *many, triangle, scale=SCALING).float()
    assert (got.float() - exact).square().mean() <= 4 * (usual - exact).square().mean()
