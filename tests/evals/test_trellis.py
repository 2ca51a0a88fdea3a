"""Trellis codes against all walks, their bits by hand, and the prototype's kernel against PyTorch."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from evals import trellis, trellis_kernel
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
    keys, values = trellis.parse_cache("trellis:keys=paired32:values=paired").scheme.page_bits(128)
    assert (keys, values) == (2.5 + 34 / 128, 2 + 16 / 128)


@pytest.mark.parametrize("raised", [0, 16])
def test_paired_codes_come_back_in_place(raised) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(1, 2, 1, 128, 64, generator=generator)
    # Each channel has a mean of its own, and each token a scale: other places would be far off.
    keys = x + 10 * torch.arange(64)
    lost = (trellis.paired_keys(keys, torch.ones(1, 2, 64), raised) - keys).square().mean()
    assert lost < (0.12 if raised == 0 else 0.1)
    values = x * torch.exp2(torch.arange(128) % 8)[:, None]
    share = (trellis.paired_values(values) - values).square().mean(-1) / values.square().mean(-1)
    assert share.mean() < 0.12


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


def test_kernel_is_right() -> None:
    trellis_kernel.check(torch.device("cpu"))


def test_kernel_finds_the_walks_of_least_error() -> None:
    generator = torch.Generator().manual_seed(4)
    x, weight = torch.randn(12, 16, 2, generator=generator), torch.rand(12, 16, 2, generator=generator) + 0.1
    table = trellis_kernel.code_table()
    states = trellis_kernel.walked(x, weight, table, 4).long()
    # A loop: states follow upon each other, the first one upon the last.
    assert torch.equal(states >> 4, states.roll(1, 1) & 15)
    lost = ((x - table[states]).square() * weight).sum((1, 2))
    emissions = ((x[:, :, None] - table).square() * weight[:, :, None]).sum(-1)
    free = trellis._paired(emissions.roll(-8, 1))[:, 8] >> 4
    exact = emissions.gather(2, trellis._paired(emissions, free)[..., None]).sum((1, 2))
    assert lost == pytest.approx(exact, rel=1e-3)
