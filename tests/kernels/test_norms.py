"""Factors of normed pages: by hand, and kernels against the reference bit for bit."""

from __future__ import annotations

import pytest
import torch

from hfkvq.kernels import PageFormat, dequantize_pages, page_norms, quantize_pages
from hfkvq.kernels.dispatch import reference

# NumPy remarks on infinity in what is then left out.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


def norms_of(x, axis, rounds=1):
    """Factors of the one page (G, D)."""
    index = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)[None]
    return page_norms(x[None, None], index, axis, x.shape[0], rounds)[0, 0, 0].float()


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


def test_rank_one_by_hand(backend):
    """x = u v but for signs: tokens are to channels as u is, and more rounds find nothing better."""
    u, v = torch.tensor([4.0, 4, 4, 5, 5, 5, 4, 5]), torch.tensor([1.0, -1.25, 1, -1])
    x = (u[:, None] * v[None, :]).to(backend)
    x[::2] *= -1
    expected = u / u.mean()
    for rounds in (1, 2, 7):
        assert norms_of(x, "channel", rounds).tolist() == pytest.approx(expected.tolist(), rel=1e-3)


@pytest.mark.parametrize("axis", ["channel", "token"])
def test_nothing_to_gain_is_factors_of_one(backend, axis):
    """A page that is even already, one of zeros, and one whose rows are constant, hence exact."""
    index = torch.arange(16)
    constant = (index[None, :] + 1.0).expand(16, 16) if axis == "channel" else (index[:, None] + 1.0).expand(16, 16)
    for x in (torch.zeros(16, 16), torch.where((index[:, None] + index) % 2 == 0, 1.0, -1.0), constant):
        assert (norms_of(x.contiguous().to(backend), axis, 3) == 1).all()
    assert (norms_of(torch.randn(16, 16, device=backend), axis, 0) == 1).all()


SHAPES = [("channel", 32, 64), ("token", 32, 64), ("channel", 24, 80), ("token", 8, 72)]


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
    for rounds in (1, 3):
        expected = reference("page_norms")(source, index, axis, page, rounds)
        got = page_norms(source.to(triton_backend), index.to(triton_backend), axis, page, rounds)
        assert torch.equal(got.cpu(), expected)
        assert torch.isfinite(expected).all()
        assert (expected > 0).all()


@pytest.mark.parametrize(("axis", "side"), [("channel", "keys"), ("token", "values")])
def test_outliers_along_the_other_axis_cost_less(axis, side):
    """What it is for: large tokens among keys, large channels among values."""
    torch.manual_seed(0)
    x = torch.randn(1, 1, 128, 128)
    size = torch.randn(128).mul(0.6).exp()
    x = x * (size[:, None] if axis == "channel" else size)
    fmt = PageFormat(2, axis, 128, 128, normed=True)
    norm = page_norms(x, torch.arange(128, dtype=torch.int32)[None], axis, 128)[:, :, 0]
    error = [
        (dequantize_pages(quantize_pages(x, fmt, side, None, own), fmt, side, 128) - x).square().mean()
        for own in (None, norm)
    ]
    assert error[1] < 0.5 * error[0]


def test_opcheck(backend):
    index = torch.arange(32, dtype=torch.int32, device=backend).expand(2, -1)
    args = (torch.randn(2, 2, 40, 16, device=backend), index, "token", 16, 2)
    torch.library.opcheck(torch.ops.hfkvq.page_norms.default, args)
