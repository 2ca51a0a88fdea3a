"""Simulated methods against direct formulas in f64, and their bits by hand."""

from __future__ import annotations

import math

import pytest
import torch

from evals import simulated
from evals.simulated import LayerFormat, SimulatedCache
from hfkvq.measure.capture import Capture
from hfkvq.measure.divergence.naming import find_other
from hfkvq.measure.texts import KINDS, read_text
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


def affine_with_whole_zero(group: list[float]) -> list[float]:
    low, scale = min(group), (max(group) - min(group)) / 3
    zero = round(-low / scale)
    codes = [min(3, max(0, round(x / scale) + zero)) for x in group]
    return [q * half(scale) - half(zero * scale) for q in codes]


def test_omni_scaled_by_hand() -> None:
    torch.manual_seed(1)
    # Tokens of unequal norms, channels of unequal size.
    x = torch.randn(1, 2, 8, 16) * torch.rand(8, 1).mul(4).exp() * torch.rand(16).exp()
    y = torch.einsum("bhnd,de->bhne", x.double(), hadamard(16))
    norm = (y**2).sum((1, 3)).sqrt()[0]
    expected = torch.empty_like(y)
    for h in range(2):
        for c in range(16):
            for first in (0, 4):
                group = [float(y[0, h, t, c] / norm[t]) for t in range(first, first + 4)]
                expected[0, h, first : first + 4, c] = torch.tensor(affine_with_whole_zero(group))
    expected = torch.einsum("bhnd,de->bhne", expected * norm[:, None], hadamard(16))
    torch.testing.assert_close(simulated.omni_keys(x, 4).double(), expected, rtol=1e-4, atol=1e-4)
    values = torch.empty_like(y)
    for h in range(2):
        for t in range(8):
            for first in range(0, 16, 4):
                values[0, h, t, first : first + 4] = torch.tensor(
                    affine_with_whole_zero(y[0, h, t, first : first + 4].tolist())
                )
    expected = torch.einsum("bhnd,de->bhne", values, hadamard(16))
    torch.testing.assert_close(simulated.omni_values(x, 4).double(), expected, rtol=1e-4, atol=1e-4)


def captured(rows: int = 2) -> list[Capture]:
    torch.manual_seed(2)
    size = torch.linspace(0.2, 3, 8)
    draws = [
        (torch.randn(4, 20, 8) * size, torch.randn(2, 20, 8) * size.flip(0), torch.randn(2, 20, 8)) for _ in range(rows)
    ]
    return [Capture(*draw, 1.0) for draw in draws]


def test_oscars_rotations_by_hand() -> None:
    given = captured()
    key_moment, value_moment = torch.zeros(8, 8, dtype=torch.float64), torch.zeros(8, 8, dtype=torch.float64)
    for h in range(2):
        # Query heads 2h and 2h + 1 read KV head h.
        queries = [q for one in given for head in (2 * h, 2 * h + 1) for q in one.query[head].double()]
        keys, values = ([x for one in given for x in getattr(one, name)[h].double()] for name in ("keys", "values"))
        moment = sum(torch.outer(q, q) for q in queries) / len(queries)
        weights = [float(k @ moment @ k) for k in keys]
        key_moment += moment / 2
        for weight, value in zip(weights, values, strict=True):
            value_moment += weight / sum(weights) * torch.outer(value, value) / 2
    for got, moment in zip(simulated.oscar_rotations(given), (key_moment, value_moment), strict=True):
        torch.testing.assert_close(got @ got.T, torch.eye(8, dtype=torch.float64))
        # With the columns in order and the Hadamard matrix undone, the moment is diagonal, and largest last.
        eigenvalues = torch.linalg.eigvalsh(moment)
        reverse = [0, 4, 2, 6, 1, 5, 3, 7]
        back = torch.empty_like(got)
        for i in range(8):
            # The i-th largest eigenvalue's column is the one of index 7 - i of an ascending order.
            back[:, 7 - i] = got[:, reverse[i]]
        basis = back @ hadamard(8)
        torch.testing.assert_close(basis.T @ moment @ basis, torch.diag(eigenvalues), rtol=1e-6, atol=1e-6)


def test_oscars_codes_by_hand() -> None:
    torch.manual_seed(3)
    x, rotation = torch.randn(1, 1, 6, 16) * 2, torch.linalg.qr(torch.randn(16, 16, dtype=torch.float64))[0]
    got = simulated.oscar(x, rotation, 0.8)
    for row, found in zip(x[0, 0].double(), got[0, 0], strict=True):
        y = (row @ rotation).tolist()
        limit = sorted(map(abs, y))[math.floor(0.8 * 16)]
        y = [min(limit, max(-limit, each)) for each in y]
        scale = half((max(y) - min(y)) / 3)
        zero = half(-min(y) / scale)
        codes = [min(3, max(0, math.floor(each / scale + zero + 0.5))) for each in y]
        expected = torch.tensor([(q - zero) * scale for q in codes], dtype=torch.float64) @ rotation.T
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


def int4_by_hand(row: torch.Tensor) -> torch.Tensor:
    low, scale = float(row.min()), half(float(row.max() - row.min()) / 15)
    codes = [min(15, max(0, math.floor((float(x) - half(low)) / scale + 0.5))) for x in row]
    return torch.tensor([q * scale + half(low) for q in codes], dtype=torch.float64)


def test_saws_hessian_by_hand() -> None:
    """Eqs. 7 to 11: INT4 in the basis of the queries' eigenvectors, behind blocks of Hadamard matrices."""
    given = captured()
    queries = [q for one in given for head in one.query.double() for q in head]
    moment = sum(torch.outer(q, q) for q in queries) / len(queries)
    moment = moment + 0.01 * moment.diagonal().mean() * torch.eye(8)
    turn = simulated.hessian_rotation(given, 0.01)
    torch.testing.assert_close(turn.T @ moment @ turn, torch.diag(torch.linalg.eigvalsh(moment).flip(0)))
    assert (turn.gather(0, turn.abs().argmax(0, keepdim=True)) > 0).all()
    form = simulated.SawHessian(block=4).form(given)
    whole = torch.block_diag(hadamard(4), hadamard(4)) @ turn
    x = given[0].keys[None]
    for row, found in zip(x.flatten(0, 2).double(), form.keys(x).flatten(0, 2).double(), strict=True):
        torch.testing.assert_close(found, int4_by_hand((row @ whole).float()) @ whole.T, rtol=1e-4, atol=1e-4)
    assert torch.equal(form.keys(x), form.values(x))


def test_saws_kmeans_by_hand() -> None:
    """Eqs. 5 and 6: the nearest centroid, and INT4 of what is left."""
    torch.manual_seed(1)
    middle = torch.tensor([[20.0] * 8, [-20.0] * 8, [20.0, -20.0] * 4])
    x = middle[torch.arange(60) % 3] + torch.randn(60, 8) * 0.1
    centres = simulated.kmeans(x, 3)
    order = torch.cdist(middle, centres).argmin(1)
    torch.testing.assert_close(centres[order], torch.stack([x[i::3].mean(0) for i in range(3)]))
    got = simulated.residual(x[None, None], centres[None], None)[0, 0]
    for i, row in enumerate(x):
        near = centres[order[i % 3]]
        torch.testing.assert_close(got[i].double(), near + int4_by_hand(row - near), rtol=1e-4, atol=1e-5)
    # A codebook of one is the mean.
    torch.testing.assert_close(simulated.kmeans(x, 1)[0], x.mean(0))
    plain = simulated.int4(x, None)
    assert (got - x).abs().mean() < (plain - x).abs().mean() / 3


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


def test_calibration_text_is_of_no_window(tokenizer) -> None:
    rows = simulated.calibration_rows(tokenizer, torch.zeros(1, 64, dtype=torch.long), 8192, 4096)
    assert [len(row) for row in rows] == [1024] * 8
    # A window that holds the end of the first row, from somewhere in it on.
    window = torch.tensor([[5] * 8 + rows[0][500:]])
    others = simulated.calibration_rows(tokenizer, window, 8192, 4096)
    assert rows[0] not in others
    assert len(others) == 8
    with pytest.raises(ValueError, match="nothing is left to calibrate"):
        simulated.calibration_rows(tokenizer, everything(tokenizer), 8192, 4096)


def everything(tokenizer) -> torch.Tensor:
    ids = [tokenizer(read_text(kind), add_special_tokens=False).input_ids for kind in KINDS]
    size = max(map(len, ids))
    return torch.tensor([[0] * (size - len(each)) + each for each in ids])


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
