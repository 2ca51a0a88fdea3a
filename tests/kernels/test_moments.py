"""Moments of attention: by hand, and kernels against the reference."""

from __future__ import annotations

import math

import pytest
import torch

from hfkvq.kernels import attention_moments
from hfkvq.kernels.dispatch import reference

# NumPy remarks on the logarithm of nothing.
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning")


def test_by_hand(backend):
    """Two queries pay 1/2 1/2 0 and 0 1/2 1/2: means 1/4 1/2 1/4, deviations of 1/4 but for the one that both pay."""
    probs = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5]], device=backend)
    real = torch.ones(1, 2, dtype=torch.bool, device=backend)
    mean, squares, fourths, entropy = attention_moments(probs.log()[None, None], None, real)
    assert mean.flatten().tolist() == pytest.approx([0.25, 0.5, 0.25])
    assert squares.flatten().tolist() == pytest.approx([2 / 16, 0.0, 2 / 16], abs=1e-7)
    assert fourths.flatten().tolist() == pytest.approx([2 / 256, 0.0, 2 / 256], abs=1e-7)
    assert entropy.flatten().tolist() == pytest.approx([math.log(2) / 2, math.log(2), math.log(2) / 2])


def logits_of(rows, share, queries, columns, hidden=0.2):
    """Random ones, some hidden, and some queries that see nothing; sinks, and queries that count."""
    generator = torch.Generator().manual_seed(rows + queries + columns)
    x = torch.randn(rows, share, queries, columns, generator=generator) * 3
    x = x.masked_fill(torch.rand(x.shape, generator=generator) < hidden, -torch.inf)
    x[0, 0, 0] = -torch.inf
    real = torch.rand(rows, queries, generator=generator) < 0.8
    real[-1] = False
    return x, torch.randn(rows, share, generator=generator), real


@pytest.mark.interpreted(turns=2, over=("columns", "sinks"))
@pytest.mark.parametrize(
    ("rows", "share", "queries", "columns"),
    [(3, 2, 8, 65), (2, 1, 1, 7), (2, 4, 33, 130), (2, 3, 5, 2500), (1, 1, 3, 1)],
)
@pytest.mark.parametrize("sinks", [False, True])
def test_kernel_follows_the_reference(triton_backend, rows, share, queries, columns, sinks):
    """At most twice the error of PyTorch in f32, and what rounding leaves of numbers near 0."""
    x, sink, real = logits_of(rows, share, queries, columns)
    sink = sink if sinks else None
    exact = reference("attention_moments")(x.double(), None if sink is None else sink.double(), real)
    plain = reference("attention_moments")(x, sink, real)
    given = (x.to(triton_backend), None if sink is None else sink.to(triton_backend), real.to(triton_backend))
    got = attention_moments(*given).cpu()
    assert got.shape == (4, rows, share, columns)
    for own, other, want in zip(got, plain, exact, strict=True):
        worst = (other - want).abs().max()
        assert (own - want).abs().max() <= 2 * worst + 1e-7 * want.abs().max() + 1e-12


@pytest.mark.interpreted
def test_opcheck(backend):
    x, sink, real = (y.to(backend) for y in logits_of(2, 2, 4, 20))
    for given in (None, sink):
        torch.library.opcheck(torch.ops.hfkvq.attention_moments.default, (x, given, real), test_utils="test_schema")
