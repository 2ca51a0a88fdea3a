"""Weights of pages by the queries of their tokens: by hand, and the kernel against the reference."""

from __future__ import annotations

import pytest
import torch

from hfkvq.kernels import page_weights
from hfkvq.kernels.dispatch import reference
from tests.kernels.stores import numbers

# Columns of the ranges: a page's queries, its number, the request, queries of the page that is being filled
# afterwards, whether the sums belong to the first of the two, and tokens of the second.
RANGES = (
    (10, 42, 0, -1, 0, 0, 0, 0),
    # A page that is filled with what earlier queries have summed, and one that is begun.
    (2, 10, 1, 0, 42, 45, 1, 3),
    # A page that goes on, one that is begun without another, and nothing at all.
    (0, 0, -1, 1, 45, 50, 1, 21),
    (0, 0, -1, 2, 50, 52, 0, 2),
    (0, 0, -1, 3, 52, 52, 0, 0),
)


def weights_of(device, q, heads, function=page_weights):
    torch.manual_seed(1)
    sums = torch.randint(0, 999, (6, heads, q.shape[2])).double()
    counts = torch.arange(6 * heads, dtype=torch.int32).view(heads, 6)
    ranges = torch.tensor(RANGES, dtype=torch.int32).T.contiguous()
    given = [x.to(device) for x in (q, ranges, numbers(4, 0, 2, 5), sums, counts)]
    return function(*given, 2, 32).cpu(), *(x.cpu() for x in given[3:])


def test_weights_by_hand(backend):
    torch.manual_seed(0)
    q = torch.randn(60, 4, 32).to(torch.bfloat16)
    means = q.abs().double().unflatten(1, (2, 2)).mean(2)
    torch.manual_seed(1)
    before = torch.randint(0, 999, (6, 2, 32)).double()
    weight, sums, found = weights_of(backend, q, 2)
    assert torch.equal(weight[0], (means[10:42].sum(0) / 32).float())
    assert torch.equal(weight[1], ((means[2:10].sum(0) + before[4]) / 32).float())
    assert torch.equal(sums[4], means[42:45].sum(0))
    assert torch.equal(sums[0], means[45:50].sum(0) + before[0])
    assert torch.equal(sums[2], means[50:52].sum(0))
    assert not sums[5].any()
    assert torch.equal(sums[[1, 3]], before[[1, 3]])
    assert found.tolist() == [[21, 1, 2, 3, 3, 0], [21, 7, 2, 9, 3, 0]]


@pytest.mark.parametrize(("heads", "share", "dim"), [(2, 4, 64), (1, 3, 80)])
def test_weights_of_kernel_and_reference(triton_backend, heads, share, dim):
    torch.manual_seed(0)
    q = torch.randn(60, heads * share + 2, dim).to(torch.bfloat16)[:, 1:-1]
    found, expected = weights_of(triton_backend, q, heads), weights_of("cpu", q, heads, reference("page_weights"))
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y) or (share == 3 and torch.allclose(x, y, rtol=1e-6))
