"""Moments of attention over queries, by hand and where queries or tokens do not count."""

from __future__ import annotations

import math

import pytest
import torch

from hfkvq.caches.schemes.score_inputs import Attention


def moments(logits, sinks, real):
    """Mean, squares, fourth powers and entropy: (4, N, r, n)."""
    found = Attention.of(logits, sinks, real)
    return torch.stack([found.mean, found.squares, found.fourths, found.entropy])


def test_by_hand():
    """Two queries pay 1/2 1/2 0 and 0 1/2 1/2: means 1/4 1/2 1/4, deviations of 1/4 but for the one that both pay."""
    probs = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5]])
    real = torch.ones(1, 2, dtype=torch.bool)
    mean, squares, fourths, entropy = moments(probs.log()[None, None], None, real)
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


def test_what_does_not_count_changes_nothing():
    """Padded queries, and keys that nobody sees."""
    x, sink, real = logits_of(2, 2, 9, 40)
    real[0, :4] = False
    real[1] = real[0]
    expected = moments(x, sink, real)
    x[:, :, :4] = torch.randn(4, 40)
    more = torch.full((2, 2, 9, 30), -torch.inf)
    got = moments(torch.cat([x, more], -1), sink, real)
    torch.testing.assert_close(got[..., :40], expected)
    assert (got[..., 40:] == 0).all()


def test_no_query_counts():
    x, _, real = logits_of(2, 1, 4, 20)
    assert (moments(x, None, torch.zeros_like(real)) == 0).all()
