"""Simulated methods against direct formulas, trellis codes against all walks, and their bits by hand."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from evals import simulated, trellis
from evals.simulated import LayerFormat, SimulatedCache
from hfkvq.caches.store import kvstore
from hfkvq.measure.divergence import measure
from hfkvq.measure.divergence.naming import find_other
from tests.caches.models import build, prompt

LEVELS = {
    1: [0.7979],
    2: [0.4528, 1.5104],
    3: [0.2451, 0.7560, 1.3439, 2.1520],
    4: [0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326],
}
"""Of Max (1960), table I."""


def hadamard(size: int) -> torch.Tensor:
    signs = [[(-1) ** (i & j).bit_count() for j in range(size)] for i in range(size)]
    return torch.tensor(signs, dtype=torch.float64) / math.sqrt(size)


def half(x: float) -> float:
    return float(torch.tensor(x).half())


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_levels_are_those_of_lloyd_and_max(bits) -> None:
    assert simulated.levels(bits)[2 ** (bits - 1) :] == pytest.approx(LEVELS[bits], abs=2e-4)
    assert simulated.levels(bits) == pytest.approx([-x for x in reversed(simulated.levels(bits))], abs=1e-9)


@pytest.mark.parametrize("bits", [3, 4])
def test_turboquant_by_hand(bits) -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(1, 2, 5, 32) * 3, torch.randn(1, 2, 5, 32) + 1
    got, table = simulated.turboquant_keys(keys, bits), simulated.levels(bits)
    for row, found in zip(keys.flatten(0, 2).double(), got.flatten(0, 2), strict=True):
        norm = math.sqrt(sum(float(x) ** 2 for x in row))
        y = (hadamard(32) @ row / norm).tolist()
        c = torch.tensor([min(table, key=lambda t, x=x: abs(t / math.sqrt(32) - x)) for x in y], dtype=torch.float64)
        torch.testing.assert_close(found.double(), half(norm) * hadamard(32) @ (c / c.norm()), rtol=1e-5, atol=1e-5)
    for row, found in zip(
        values.flatten(0, 2).tolist(), simulated.turboquant_values(values, bits).flatten(0, 2), strict=True
    ):
        low, scale = min(row), (max(row) - min(row)) / (2**bits - 1)
        expected = [math.floor((x - low) / scale + 0.5) * half(scale) + half(low) for x in row]
        assert found.tolist() == pytest.approx(expected, abs=1e-5)


def step(cache: SimulatedCache, count: int, value: float = 9.0) -> tuple[list[float], list[float]]:
    keys, values = cache.update(torch.full((1, 1, count, 4), value), torch.full((1, 1, count, 4), value), 0)
    return keys[0, 0, :, 0].tolist(), values[0, 0, :, 0].tolist()


def test_what_leaves_the_window_is_rounded_once() -> None:
    config = build("qwen3").config
    calls: list[int] = []

    def rounds(x: torch.Tensor) -> torch.Tensor:
        calls.append(x.shape[-2])
        return x.float() - 1

    cache = SimulatedCache(config, [LayerFormat(rounds, rounds, 3.0, 2.0, sink=2, recent=3, unit=2)] + [None] * 9)
    # A prompt reads itself as it came; 8 - 2 - 3 = 3 tokens are out of the window, of which one unit leaves.
    assert step(cache, 8)[0] == [9.0] * 8
    assert step(cache, 1)[0] == [9, 9, 8, 8, 9, 9, 9, 9, 9]
    assert step(cache, 1)[0] == [9, 9, 8, 8, 8, 8, 9, 9, 9, 9]
    assert step(cache, 4)[1] == [9, 9, 8, 8, 8, 8, *[9] * 8]
    assert calls == [2, 2, 2, 2, 4, 4]
    assert cache.layers[0].rounded == 8
    assert cache.get_seq_length() == 14
    with pytest.raises(NotImplementedError, match="cannot be cropped"):
        cache.crop(4)


@pytest.mark.parametrize(
    ("name", "bits", "tokens", "rounded"),
    [
        # D = 32, 2 KV heads; 300 tokens, f32.
        ("FP4", 4 + 8 / 16, 300, 300),
        ("LlamaCpp", 4 + 16 / 32, 300, 300),
        ("Oscar", (2 + 32 / 32), 300, 0),
        ("Oscar:recent=100", (2 + 32 / 32), 300, 300 - 164),
        ("SawHessian", (4 + 32 / 32), 300, 300),
        ("SawKMeans:centroids=4", (4 + 40 / 32), 300, 300),
        ("OmniScaled", (2 + 32 / 32) + 32 / 64 / 2, 300, 256),
        ("TurboQuant:boundary=0", (4 + 16 / 32 + 4 + 32 / 32) / 2, 300, 300),
        ("TurboQuant:key_bits=3:value_bits=3:boundary=0", (3 + 16 / 32 + 3 + 32 / 32) / 2, 300, 300),
    ],
)
def test_bits_by_hand(monkeypatch, name, bits, tokens, rounded) -> None:
    model = build("qwen3")
    monkeypatch.setattr(simulated, "calibration_rows", lambda *args: [prompt(1, 40)[0].tolist()])
    other = find_other(f"evals.simulated:{name}")
    cache = other.prepare(model, object(), prompt(1, 8))()
    with torch.inference_mode():
        model(prompt(1, tokens), past_key_values=cache)
    code_bits, total = other.bits(cache)
    assert total == pytest.approx((rounded * bits + (tokens - rounded) * 32) / tokens)
    assert math.isnan(code_bits) if not rounded else code_bits == (3 if "bits=3" in name else 2 if "O" in name else 4)
    assert math.isnan(other.held_bytes(cache))


def test_the_first_and_last_layers_stay_whole() -> None:
    model = build("qwen3", num_hidden_layers=5)
    forms = simulated.TurboQuant().forms(model, None, prompt(1, 8))
    assert [form is not None for form in forms] == [False, False, True, False, False]


@pytest.mark.parametrize("bits", [4, 8])
def test_llama_cpps_blocks_by_hand(bits) -> None:
    """The number farthest from 0 is -8 d in q4_0, so that the other end has 7; q8_0 has 127 on both sides."""
    torch.manual_seed(0)
    x = torch.randn(1, 2, 3, 64)
    x[0, 0, 0, :32] = 0
    got = simulated.llama_cpp(x, bits, rotate=False).reshape(-1, 32)
    for block, found in zip(x.reshape(-1, 32).tolist(), got.tolist(), strict=True):
        far = max(block, key=abs)
        scale = (far / -8 if bits == 4 else abs(far) / 127) or 1.0
        codes = [min(15, math.floor(a / scale + 8.5)) - 8 if bits == 4 else round(a / scale) for a in block]
        assert found == pytest.approx([code * half(scale) for code in codes], abs=1e-6)
    turned = simulated.llama_cpp(x, bits, rotate=True)
    assert (turned - x).abs().max() < (0.6 if bits == 4 else 0.05)
    torch.testing.assert_close(turned[0, 0, 0, 32:].norm(), x[0, 0, 0, 32:].norm(), rtol=0.1, atol=0)


def test_fp8_ends_at_its_largest_number() -> None:
    assert simulated.fp8(torch.tensor([1000.0, -1000.0, 1.06, 0.0])).tolist() == [448, -448, 1.0, 0]


def test_fp4_by_hand() -> None:
    """The block's scale is 2: 9 is within 6 of it, but not of 1. Ties go up; each block has a scale of its own."""
    x = torch.zeros(1, 1, 2, 32)
    x[0, 0, 0, :8] = torch.tensor([9.0, -0.5, 0.49, -1.5, 5.1, 10, -7, 2.4])
    x[0, 0, 0, 16:19] = torch.tensor([0.375, -0.1, 0.0])
    found = simulated.fp4(x)
    assert found[0, 0, 0, :8].tolist() == [8, -1, 0, -2, 6, 12, -8, 2]
    # 0.375 / 6 is a sixteenth.
    assert found[0, 0, 0, 16:19].tolist() == [0.375, -0.09375, 0.0]
    assert not found[0, 0, 1].any()
    assert torch.equal(simulated.fp4(found), found)


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


def test_bits_of_walks_by_hand() -> None:
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
