"""Fitted scales: what is kept of the candidates, and what does not count."""

from __future__ import annotations

import pytest
import torch

from hfkvq.kernels import PageFormat, channel_widths, dequantize_pages, quantize_pages
from hfkvq.kernels.groups import MOST, Groups


def group(values, levels=3.0):
    return Groups(torch.tensor(values)[None], levels, -1)


def errors(x, fmt, power):
    """Sum of |error|^power of each group of values quantized per token."""
    made = dequantize_pages(quantize_pages(x, fmt, "values"), fmt, "values", x.shape[-1])
    return (made - x).abs().double().pow(power).unflatten(-1, (-1, fmt.group_size)).sum(-1)


@pytest.mark.parametrize("power", [2, 3, 4])
@pytest.mark.parametrize("bits", [2, 4])
def test_a_fit_loses_less_by_its_measure(bits, power):
    """In no group more than the range does, and on average much less: heavy tails make the range wide."""
    torch.manual_seed(42)
    x = torch.randn(4, 2, 16, 128)
    x *= 1 + 2 * torch.rand_like(x).square()
    plain, fitted = (errors(x, PageFormat(bits, "token", 64, 16, fit=fit), power) for fit in (0, power))
    # Sums are told apart to a share of this size.
    assert (fitted <= plain * (1 + 2e-3)).all()
    assert fitted.mean() < plain.mean() * (0.65 if bits == 2 else 0.9)


def test_what_lies_on_the_grid_keeps_its_range():
    """Nothing is lost, so nothing is gained."""
    groups = group([float(x) for x in range(4)] * 8)
    assert [float(x) for x in groups.scales(3)] == [1.0, 0.0]


def test_least_squares_by_hand():
    """Codes 0, 0, 0, 1, 2, 3 of these have the regression slope and base that are expected."""
    x = [0.0, 0.2, 0.4, 1.0, 2.0, 3.0]
    slope, base = torch.linalg.lstsq(
        torch.tensor([[code, 1.0] for code in (0, 0, 0, 1, 2, 3)]), torch.tensor(x)[:, None]
    ).solution.flatten()
    scale, zero = group(x).scales(2)
    assert scale.item() == pytest.approx(slope.item(), abs=1e-3)
    assert zero.item() == pytest.approx(base.item(), abs=1e-3)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 1e30])
def test_what_is_not_finite_in_f16_does_not_count(bad):
    """Scales are those of the rest."""
    torch.manual_seed(42)
    rest = torch.randn(1, 63) * 100
    scales = Groups(torch.cat([rest, torch.tensor([[bad]])], 1), 3.0, -1).scales(2)
    assert torch.equal(torch.stack(scales), torch.stack(Groups(rest, 3.0, -1).scales(2)))
    assert [float(x) for x in group([bad] * 4).scales(2)] == [0.0, 0.0]


@pytest.mark.parametrize(("bits", "size", "fit"), [(8, 32, 2), (16, 32, 3), (2, 32, 1), (4, 2 * MOST, 4)])
def test_formats_that_are_not_fitted(bits, size, fit):
    with pytest.raises(ValueError, match=f"fit: got {fit} for {bits} bits and groups of {size}, allowed 0, 2, 3, 4"):
        PageFormat(bits, "token", size, 128, fit=fit)


def test_what_is_stored_of_a_fitted_page_is_what_is_stored_of_others():
    plain = PageFormat(2, "channel", 32, 64, ((4, 8),))
    fitted = PageFormat(2, "channel", 32, 64, ((4, 8),), fit=3)
    assert PageFormat.parse(fitted.spec) == fitted != plain
    assert fitted.shapes("keys", 2, 64) == plain.shapes("keys", 2, 64)


@pytest.mark.parametrize("fit", [0, 4])
def test_error_raises_the_channels_that_lose_most(fit):
    """Of a page of groups: as dequantizing shows it; times the square of what queries weigh."""
    torch.manual_seed(42)
    keys = torch.randn(1, 2, 1, 32, 64) * torch.rand(64).exp()
    plain = PageFormat(2, "channel", 16, 32, fit=fit)
    made = dequantize_pages(quantize_pages(keys[:, :, 0], plain, "keys"), plain, "keys", 64)
    lost = (made - keys[:, :, 0]).square().sum(2)
    fmt = PageFormat(2, "channel", 16, 32, ((4, 8),), fit=fit)
    q_abs = torch.rand(1, 2, 64)
    for weight, score in ((None, lost), (q_abs, lost * q_abs.square())):
        raised = channel_widths(keys, fmt, "error", weight)[:, :, 0] == 4
        expected = torch.zeros_like(raised).scatter_(-1, score.topk(8).indices, True)
        assert torch.equal(raised, expected)
