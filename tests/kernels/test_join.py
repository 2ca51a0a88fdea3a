"""Attention over two sets of keys joined is attention over both."""

from __future__ import annotations

import pytest
import torch

from hfkvq.kernels import join


def parts(queries, keys, values, mask):
    """Attention in f64 over some keys, and its log-sum-exp."""
    logits = (queries.double() @ keys.double().mT).masked_fill(~mask, -torch.inf)
    lse = torch.logsumexp(logits, -1)
    probs = torch.exp(logits - lse[..., None]).nan_to_num(0.0)
    return probs @ values.double(), lse


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("transposed", [False, True])
def test_two_parts_are_the_whole(backend, dtype, transposed):
    queries, keys, values = (torch.randn(2, 3, n, 24) for n in (37, 50, 50))
    mask = torch.ones(37, 50, dtype=torch.bool).tril(13)
    # Queries that see the one side only, or nothing at all.
    mask[4, :20], mask[5, 20:], mask[6] = False, False, False
    whole, both = parts(queries, keys, values, mask)
    given = []
    for own in (slice(0, 20), slice(20, 50)):
        out, lse = parts(queries, keys[:, :, own], values[:, :, own], mask[:, own])
        # What nobody sees may be anything.
        out = out.masked_fill((lse == -torch.inf)[..., None], torch.nan).to(backend, dtype)
        out = out.transpose(1, 2).contiguous().transpose(1, 2) if transposed else out
        given += [out, lse.float().to(backend)]
    join(*given)
    out, lse = given[0].cpu().double(), given[1].cpu().double()
    assert torch.equal(out[:, :, 6], torch.zeros(2, 3, 24, dtype=torch.float64))
    # Both parts were rounded, and so is their sum.
    assert torch.allclose(out, whole, rtol=0, atol=2 * torch.finfo(dtype).eps * float(values.abs().max()))
    assert torch.allclose(lse, both, rtol=1e-5, atol=1e-5)
