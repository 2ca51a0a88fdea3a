"""Moments of attention over queries, by hand."""

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
