"""Sums of queries over ranges of tokens: by hand, and the kernel against the reference."""

from __future__ import annotations

import pytest
import torch

from hfkvq.kernels import query_sums
from hfkvq.kernels.dispatch import reference


def numbers(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_by_hand(backend):
    """Two query heads of a KV head, three tokens of which the first is in no range."""
    q = torch.tensor([[[[9.0]], [[1.0]], [[-2.0]]], [[[9.0]], [[3.0]], [[4.0]]]], device=backend)
    q = q[..., 0].permute(2, 0, 1)[..., None]
    given = (q, *(numbers(x).to(backend) for x in (0, 1, 3)), 2, 1)
    assert query_sums(*given).flatten().tolist() == [(1 + 2 + 3 + 4) / 2]


@pytest.mark.parametrize(("heads", "share", "dim"), [(2, 4, 64), (1, 3, 80)])
def test_kernel_is_reference(triton_backend, heads, share, dim):
    """Ranges within, over and beside each other, an empty one, and one longer than a program takes."""
    torch.manual_seed(0)
    q = torch.randn(2, 600, heads * share, dim).to(torch.bfloat16).transpose(1, 2)
    ranges = numbers(0, 1, 0, 1, 1), numbers(0, 3, 590, 40, 7), numbers(600, 300, 600, 40, 8)
    expected = reference("query_sums")(q, *ranges, 600, heads)
    got = query_sums(q.to(triton_backend), *(x.to(triton_backend) for x in ranges), 600, heads)
    assert torch.allclose(got.cpu(), expected, rtol=1e-15, atol=0.0)
    assert torch.equal(got.cpu(), expected) or share == 3


def test_others_numbers_reach_nobody(backend):
    q = torch.ones(1, 2, 40, 32, device=backend)
    q[:, :, 20:] = torch.nan
    found = query_sums(q, *(x.to(backend) for x in (numbers(0, 0), numbers(0, 20), numbers(20, 40))), 20, 1)
    assert torch.equal(found[0], torch.full_like(found[0], 20.0))
    assert found[1].isnan().all()
