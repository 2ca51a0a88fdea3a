"""Trellis codes against all walks, and their bits by hand."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from evals import trellis
from hfkvq.caches.store import kvstore
from hfkvq.measure.divergence import measure


def every_walk(widths, states, count, biting):
    """States of all walks, i64 (n, count)."""
    found = []
    for start in range(states):
        for bits in itertools.product(*[range(1 << widths[i % len(widths)]) for i in range(1, count)]):
            walk = [start]
            for i, new in enumerate(bits, 1):
                walk.append(((walk[-1] << widths[i % len(widths)]) | new) % states)
            if not biting or walk[-1] % (states >> widths[0]) == walk[0] >> widths[0]:
                found.append(walk)
    return torch.tensor(found)


@pytest.mark.parametrize("biting", [False, True])
@pytest.mark.parametrize(("widths", "count"), [((1,), 6), ((2,), 4), ((2, 1), 4)])
def test_walk_is_the_best_of_all(widths, count, biting) -> None:
    generator = torch.Generator().manual_seed(1)
    tables = torch.randn(len(widths), 8, generator=generator)
    x = torch.randn(16, count, generator=generator)
    found = trellis.walk(x, tables, widths, biting)
    walks = every_walk(widths, 8, count, biting)
    costs = (x[:, None] - trellis.looked_up(walks, tables)).square().sum(2)
    own = (x - trellis.looked_up(found, tables)).square().sum(1)
    known = {tuple(walk) for walk in walks.tolist()}
    assert all(tuple(walk) in known for walk in found.tolist())
    if biting:
        # Where the ends meet is taken from a free walk, which is right most of the time.
        assert (own <= costs.amin(1) + 1e-5).float().mean() > 0.5
        assert (own <= costs.median(1).values).all()
    else:
        assert own == pytest.approx(costs.amin(1), abs=1e-5)


def test_walks_lose_less_than_scalar_codes() -> None:
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    code = trellis.Code((2,), table="computed", centred=True)
    # The bound is 0.0625, and scalar codes with fitted scale and minimum lose 0.109.
    assert (x - code.rounded(x)).square().mean() < 0.09


def test_bits_by_hand() -> None:
    assert trellis.Code((2,)).bits(128) == 2 + (6 + 16) / 128
    assert trellis.Code((2, 1), biting=True, centred=True, scale_bits=8).bits(64) == 1.5 + 24 / 64
    keys, values = trellis.parse_cache("trellis:keys=4x32+2x96:biting=true").scheme.page_bits(128)
    assert (keys, values) == (2.5 + 32 / 128 + 8 / 128, 2 + 16 / 128)


def test_pages_hold_what_codes_decode_to(monkeypatch) -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    tokens = torch.randint(64, (1, 320), generator=torch.Generator().manual_seed(3))
    monkeypatch.setattr(kvstore, "write_pages", trellis.write_pages)
    schemes = {name: trellis.parse_cache(name) for name in ("best-2.5", "trellis:keys=scalar:values=scalar")}
    with pytest.warns(UserWarning, match="simulated"):
        real, same = measure(model, tokens, schemes, prefill=312, chunk=4).schemes
    assert real.mean > 0
    # 16 bits hold in the model's dtype what real pages decode to.
    assert same.mean == pytest.approx(real.mean, rel=0.05)
