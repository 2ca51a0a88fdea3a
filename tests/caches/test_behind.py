"""Prompts behind a context, without a mask: what PyTorch's kernels are asked, and what is made of their answers."""

from __future__ import annotations

import pytest
import torch

from hfkvq.caches import behind, dense
from hfkvq.kernels.arguments import AttentionArguments
from tests.caches.driver import attention

SCALING = 0.2


def given(device="cpu", dtype=torch.float32, queries=40, columns=140, batch=2, dim=64):
    """Queries, keys and values."""
    return (
        torch.randn(batch, h, n, dim, device=device, dtype=dtype) for h, n in ((8, queries), (2, columns), (2, columns))
    )


def plain(query, keys, values, scaling, causal):
    """Attention and log-sum-exps, as cuDNN gives them: its triangle is of as many queries as keys."""
    keys, values = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (keys, values))
    logits = query @ keys.mT * scaling
    if causal:
        assert logits.shape[2] == logits.shape[3]
        logits = logits.masked_fill(~torch.ones_like(logits, dtype=torch.bool).tril(), -torch.inf)
    return torch.softmax(logits, -1) @ values, torch.logsumexp(logits, -1)


def test_two_parts_are_causal_attention(monkeypatch):
    monkeypatch.setattr(behind, "_cudnn", plain)
    query, keys, values = given()
    got = behind._in_two_parts(query, keys, values, SCALING)
    assert torch.allclose(got, attention(query, keys, values, None, SCALING), atol=1e-5)


def test_who_is_asked(monkeypatch):
    """cuDNN for much, flash attention for little, and a mask where neither may be asked."""
    query, keys, values = given()
    whole = query.shape[:3].numel() * keys.shape[2]
    asked = []
    monkeypatch.setattr(behind, "_in_two_parts", lambda *rest: asked.append("parts") or query)
    monkeypatch.setattr(behind, "can_use_cudnn_attention", lambda params: True)
    monkeypatch.setattr(behind.F, "scaled_dot_product_attention", lambda *rest, **more: asked.append(rest[3]) or query)
    for pays in (whole, whole + 1):
        monkeypatch.setattr(behind, "PAYS", pays)
        behind.attend_behind(query, keys, values, SCALING)
    assert asked[0] == "parts"
    assert (asked[1].seq_len_q, asked[1].seq_len_kv, asked[1].variant.name) == (40, 140, "LOWER_RIGHT")
    # There is no GPU, so there is a mask, whatever else is asked for.
    assert not behind.takes(query, keys, values)


@pytest.mark.parametrize(
    ("mask", "more", "expected"),
    [
        (None, {}, True),
        (None, {"sliding_window": 500}, True),
        (None, {"sliding_window": 30}, False),
        (None, {"softcap": 30.0}, False),
        (None, {"dropout": 0.1}, False),
        (torch.ones(1, 1, 40, 140, dtype=torch.bool), {}, False),
    ],
)
def test_what_goes_without_a_mask(monkeypatch, mask, more, expected):
    query, keys, values = given()
    done = []
    monkeypatch.setattr(dense, "takes", lambda *rest: True)
    monkeypatch.setattr(dense, "attend_behind", lambda *rest: done.append(rest[3]) or query)
    arguments = AttentionArguments(SCALING, mask, more.get("softcap", 0.0))
    out, _ = dense.dense_attention(None, query, keys, values, arguments, **more)
    assert out.shape == (2, 40, 8, 64)
    assert done == [SCALING] * expected


@pytest.mark.gpu
@pytest.mark.parametrize("pays", [0, 1 << 60])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu(monkeypatch, pays, dtype):
    """Either way: its error is at most twice that of plain attention in the same dtype."""
    monkeypatch.setattr(behind, "PAYS", pays)
    query, keys, values = given("cuda", dtype, 200, 1100, dim=128)
    # As models make queries.
    query = query.transpose(1, 2).contiguous().transpose(1, 2)
    assert behind.takes(query, keys, values)
    got = behind.attend_behind(query, keys, values, SCALING)
    exact = attention(query.float(), keys.float(), values.float(), None, SCALING)
    triangle = torch.ones(200, 1100, dtype=torch.bool, device="cuda").tril(900)
    many = (x.repeat_interleave(4, 1) for x in (keys, values))
    usual = torch.nn.functional.scaled_dot_product_attention(query, *many, triangle, scale=SCALING).float()
    assert (got.float() - exact).square().mean() <= 4 * (usual - exact).square().mean()
