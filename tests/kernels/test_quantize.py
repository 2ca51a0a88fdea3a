"""Quantize and dequantize: the affine rule, raised channels, and bytes that mean what the format says."""

from __future__ import annotations

import pytest
import torch

from hfkvq.kernels import PageFormat, dequantize_pages, quantize_pages
from hfkvq.kernels.quantize import unpack_words


def by_hand(x, bits):
    """Codes, scale and zero of one group, in plain Python over f16 metadata."""
    zero = x.min().half()
    scale = ((x.max() - x.min()) / (2**bits - 1)).half()
    codes = [min(max(int(float(v - zero.float()) / float(scale) + 0.5), 0), 2**bits - 1) for v in x]
    return codes, scale, zero


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("side", ["keys", "values"])
def test_tokens_by_hand(bits, side):
    torch.manual_seed(42)
    x = torch.randn(1, 1, 8, 32)
    fmt = PageFormat(bits, "token", 16, 8)
    codes, scale, zero = quantize_pages(x, fmt, side)
    words = codes if side == "keys" else codes.transpose(-1, -2)
    fields = unpack_words(words, bits, 32)
    for token in range(8):
        for group in range(2):
            expected = by_hand(x[0, 0, token, group * 16 : group * 16 + 16], bits)
            assert fields[0, 0, token, group * 16 : group * 16 + 16].tolist() == expected[0]
            assert (scale[0, 0, group, token], zero[0, 0, group, token]) == expected[1:]


@pytest.mark.parametrize("bits", [2, 4])
def test_channels_by_hand(bits):
    torch.manual_seed(42)
    x = torch.randn(1, 1, 16, 16)
    codes, scale, zero = quantize_pages(x, PageFormat(bits, "channel", 8, 16), "keys")
    fields = unpack_words(codes, bits, 16)
    for channel in range(16):
        for group in range(2):
            expected = by_hand(x[0, 0, group * 8 : group * 8 + 8, channel], bits)
            assert fields[0, 0, group * 8 : group * 8 + 8, channel].tolist() == expected[0]
            assert (scale[0, 0, group, channel], zero[0, 0, group, channel]) == expected[1:]


def test_raised_channels_have_their_width():
    torch.manual_seed(42)
    fmt = PageFormat(2, "channel", 16, 16, ((4, 3), (16, 2)))
    x = torch.randn(1, 1, 16, 32)
    widths = torch.full((1, 1, 32), 2, dtype=torch.uint8)
    # One more of each width than there is room for: the last ones stay at two bits.
    widths[0, 0, [30, 1, 7, 12]] = 4
    widths[0, 0, [0, 5, 31]] = 16
    parts = dict(zip(fmt.names, quantize_pages(x, fmt, "keys", widths), strict=True))
    assert parts["high_index"][0, 0].tolist() == [1, 7, 12, 0, 0, 0, 0, 0]
    assert parts["full_index"][0, 0].tolist() == [0, 5, 0, 0, 0, 0, 0, 0]
    got = dequantize_pages(list(parts.values()), fmt, "keys", 32)
    for bits, channels in ((4, [1, 7, 12]), (2, [2, 30, 31])):
        plain = PageFormat(bits, "channel", 16, 16)
        alone = dequantize_pages(quantize_pages(x, plain, "keys"), plain, "keys", 32)
        assert torch.equal(got[..., channels], alone[..., channels])
    assert torch.equal(got[..., [0, 5]], x[..., [0, 5]])
    assert not parts["scale"][..., [0, 5]].any()
    assert not parts["zero"][..., [0, 5]].any()


@pytest.mark.parametrize(("axis", "side"), [("channel", "keys"), ("token", "values")])
def test_factors_by_hand(axis, side):
    """x̂ = (code * scale + zero) * norm: 0, 1, 2, 3 times 2 in tokens (or channels) of factor 2, exactly."""
    ramp = torch.arange(8.0) % 4
    norm = torch.tensor([1.0, 2, 1, 2, 1, 2, 1, 0.5])
    x = ramp[:, None] * torch.ones(8) * norm[:, None]
    # Row t holds one number; along the other axis it runs 0 to 3.
    x = (x if axis == "channel" else x.T)[None, None].contiguous()
    fmt = PageFormat(2, axis, 8, 8, normed=True)
    parts = quantize_pages(x, fmt, side, None, norm.half()[None, None])
    named = dict(zip(fmt.names, parts, strict=True))
    assert (named["scale"] == 1).all()
    assert (named["zero"] == 0).all()
    assert torch.equal(named["norm"][0, 0].float(), norm)
    assert torch.equal(dequantize_pages(parts, fmt, side, 8), x)


def test_eight_bits_are_within_an_eighth():
    """e4m3 keeps three bits of mantissa, so an element is within 2^-4 of itself or a step of the subnormals."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 32)
    fmt = PageFormat(8, "token", 16, 8)
    parts = quantize_pages(x, fmt, "keys")
    scale = parts[1].float().transpose(-1, -2).repeat_interleave(16, -1)
    error = (dequantize_pages(parts, fmt, "keys", 32) - x).abs()
    assert (error <= x.abs() / 16 * 1.01 + scale * 2**-9).all()
