"""Channels of a cache that are raised."""

from __future__ import annotations

import pytest
import torch

from evals.channels import raised_channels
from hfkvq import MixedKVCache, get_scheme
from tests.caches.models import build


@pytest.fixture(scope="module")
def filled():
    """Two rows of 150 tokens through two layers of two heads, pages of 32 tokens."""
    model = build("qwen3")
    caches = {}
    for name, scheme in {
        "kitty": get_scheme("kitty", page_size=32, sink_length=0, local_length=16, boost_ratio=0.25),
        "mixkvq": get_scheme("mixkvq", select="thresholds", tau_bf16=0.9, tau_int4=0.4),
        "kivi-2": get_scheme("kivi-2"),
    }.items():
        cache = caches[name] = MixedKVCache(model, scheme)
        ids = torch.randint(3, 120, (2, 300), generator=torch.Generator().manual_seed(1))
        with torch.inference_mode():
            model(input_ids=ids, past_key_values=cache, use_cache=True)
    return caches


def test_what_the_pages_hold(filled):
    """Counted from the dense keys: of 32 tokens, a channel in 2 bits has four values at the most."""
    cache = filled["kitty"]
    shares = raised_channels(cache)
    assert list(shares) == [0, 1]
    for layer, widths in shares.items():
        assert list(widths) == [4]
        assert widths[4].sum(1).tolist() == pytest.approx([8.0, 8.0])
        # 9 pages of 32 tokens in each of two rows.
        pages = cache.layers[layer].dense("keys")[:, :, :288].unflatten(2, (9, 32)).sort(3).values
        values = 1 + (pages.diff(dim=3) != 0).sum(3)
        torch.testing.assert_close(widths[4], (values > 4).float().mean((0, 2)))
