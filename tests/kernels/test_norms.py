"""Factors of normed pages: by hand, and kernels against the reference bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hfkvq.kernels import PageFormat, dequantize_pages, page_norms, quantize_pages
from hfkvq.kernels.dispatch import reference
from hfkvq.kernels.norms import Balance

# NumPy remarks on infinity in what is then left out.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


def norms_of(x, axis, rounds=1, rule="error"):
    """Factors of the one page (G, D)."""
    index = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)[None]
    return page_norms(x[None, None], index, axis, x.shape[0], Balance(rounds, rule))[0, 0, 0].float()


@pytest.mark.parametrize("axis", ["channel", "token"])
def test_by_hand(backend, axis):
    """Tokens of size 1 but for one of size 3, eight channels: mean square 2, so squared factors 1/2 and 9/2 over rows.

    All channels have mean square (7 + 9) / 8 = 2, relative 1; tokens (1 or 9) / 2, of which the small one is held at
    0.5488. Roots 0.7408 and 2.1213, of mean 0.9134.
    """
    x = torch.ones(8, 8)
    x[3] = 3
    # Signs, so that no channel is constant.
    x[:, ::2] *= -1
    x[::2] *= -1
    x = (x if axis == "channel" else x.T).contiguous().to(backend)
    got = norms_of(x, axis).cpu()
    small, large = 0.5488**0.5, (9 / 2) ** 0.5
    mean = (7 * small + large) / 8
    assert got.tolist() == pytest.approx([(large if i == 3 else small) / mean for i in range(8)], rel=1e-3)


SHAPES = [("channel", 32, 64), ("token", 32, 64), ("channel", 32, 80), ("token", 8, 72)]


@pytest.mark.interpreted(turns=2, over=("axis", "kind"))
@pytest.mark.parametrize(("axis", "page", "dim"), SHAPES)
@pytest.mark.parametrize("kind", ["plain", "tokens", "channels", "bad", "tiny"])
def test_kernel_is_reference(triton_backend, axis, page, dim, kind):
    torch.manual_seed(1)
    source = torch.randn(2, 3 * page, 2, dim).transpose(1, 2)
    source = source * torch.randn(dim).exp() + torch.randn(dim)
    if kind == "tokens":
        source = source * torch.randn(3 * page, 1).exp()
    elif kind == "channels":
        source[..., 3] *= 300
    elif kind == "bad":
        source[0, 0, 5], source[0, 1, :, 7], source[1, 0, 2, 2] = torch.nan, torch.inf, 1e9
    elif kind == "tiny":
        source *= 1e-30
    source = source.to(torch.float32 if kind in ("bad", "tiny") else torch.bfloat16)
    index = torch.stack([torch.randperm(3 * page)[: 2 * page] for _ in range(2)]).int()
    index[1, page:] = 1 << 30
    for rounds, rule in ((1, "error"), (3, "error"), (0, "deviation"), (3, "deviation")):
        expected = reference("page_norms")(source, index, axis, page, Balance(rounds, rule))
        got = page_norms(source.to(triton_backend), index.to(triton_backend), axis, page, Balance(rounds, rule))
        assert torch.equal(got.cpu(), expected)
        assert torch.isfinite(expected).all()
        assert (expected > 0).all()


def released_balance(tile: np.ndarray, rounds: int) -> np.ndarray:
    """Factors of the columns of a tile (rows share a scale), as KVarN's authors take them, in f64 and logarithms."""

    def divided(log_column, log_row):
        return tile / np.exp(log_column)[None, :] / np.exp(log_row)[:, None]

    def imbalance(x):
        return sum(s.max() / max(s.min(), 1e-8) for s in (x.std(0, ddof=1), x.std(1, ddof=1)))

    log_column, log_row = np.zeros(tile.shape[1]), np.zeros(tile.shape[0])
    best, least = log_column, imbalance(tile)
    for _ in range(rounds):
        deviation = divided(log_column, log_row).std(0, ddof=1).clip(1e-3, 1e3)
        log_column = (log_column + np.log(deviation)).clip(-0.3, 10)
        deviation = divided(log_column, log_row).std(1, ddof=1).clip(1e-3, 1e3)
        log_row = (log_row + np.log(deviation)).clip(-0.3, 10)
        found = imbalance(divided(log_column, log_row))
        if found <= least:
            best, least = log_column, found
    return np.exp(best)


def released_codes(tile: np.ndarray, factor: np.ndarray, bits: int) -> np.ndarray:
    """Codes of the balanced tile; what a row was divided by cancels out, since scale and minimum are its own."""
    balanced = tile / factor[None, :]
    low, high = balanced.min(1, keepdims=True), balanced.max(1, keepdims=True)
    return np.round((balanced - low) / np.maximum((high - low) / (2**bits - 1), 1e-10)).clip(0, 2**bits - 1)


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize(("axis", "side"), [("channel", "keys"), ("token", "values")])
@pytest.mark.parametrize("kind", ["plain", "tokens", "biased"])
def test_balanced_as_the_authors_do(backend, kind, axis, side, bits):
    """Factors are the authors' but for their mean, and codes are theirs but where f16 scales round otherwise."""
    torch.manual_seed(4)
    x = torch.randn(128, 64) * 2
    if kind == "tokens":
        x = x * torch.randn(128, 1).mul(0.6).exp()
    elif kind == "biased":
        x = x + 6 * torch.randn(64)
    tile = x.T.double().numpy() if axis == "channel" else x.double().numpy()
    expected = released_balance(tile, 16)
    norm = norms_of(x.to(backend), axis, 16, "deviation").cpu()
    np.testing.assert_allclose(norm.numpy(), expected / expected.mean(), rtol=2e-3)
    fmt = PageFormat(bits, axis, 128 if axis == "channel" else 64, 128, normed=True)
    parts = quantize_pages(x[None, None], fmt, side, None, norm.half()[None, None])
    packed = dequantize_pages(parts, fmt, side, 64)[0, 0].double().numpy()
    balanced = (packed.T if axis == "channel" else packed) / norm.double().numpy()[None, :]
    low, high = balanced.min(1, keepdims=True), balanced.max(1, keepdims=True)
    codes = np.round((balanced - low) / (high - low) * (2**bits - 1))
    apart = np.abs(codes - released_codes(tile, expected, bits))
    assert apart.max() <= 1
    assert (apart > 0).mean() < 0.01
