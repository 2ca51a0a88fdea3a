"""Key channels a hundred times as wide as others: every preset bears them, or says that it does not."""

from __future__ import annotations

import logging

import pytest
import torch

from hfkvq import MixedKVCache, list_schemes
from hfkvq.caches.eviction import TokenEviction
from hfkvq.caches.once import say_once
from tests.caches.outliers import divergence, expected, grafted, reference, scored, text, with_factors

# Most divergence with biases, and with factors, about three times what was measured; None where it has to warn.
BOUNDS = {}


def bits(model, scheme, caplog, **options):
    """Divergence of a scheme's cache, and what it has warned of."""
