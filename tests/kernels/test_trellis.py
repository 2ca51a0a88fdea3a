"""Trellis codes: bits by hand, walks against all that begin elsewhere, scales, and what is refused."""

from __future__ import annotations

import pytest
import torch

from hfkvq.kernels import PageFormat, StoreFormat, dequantize_pages, quantize_pages
from hfkvq.kernels.trellis import SPREAD, decode, encode, state_numbers, walk
from hfkvq.measure.presets import page_bits


def test_states_are_eight_bits_of_a_loop():
    generator = torch.Generator().manual_seed(0)
    lower = torch.randint(16, (2, 3, 16), generator=generator).tolist()
    # A page of 8 tokens: pairs 0 and 1 and three words a token.
    words = torch.zeros(1, 1, 3, 8, dtype=torch.int64)
    expected = torch.zeros(1, 1, 8, 24)
    for pair in range(2):
        for e in range(3):
            own = lower[pair][e]
            for half in range(2):
                word = int("".join(f"{x:04b}" for x in own[8 * half : 8 * half + 8]), 2)
                at = 4 * half + 2 * pair
                words[0, 0, e, at], words[0, 0, e, at + 1] = word & 0xFFFF, word >> 16
                for s in range(8):
                    i = 8 * half + s
                    numbers = state_numbers(words.device)[own[i - 1] << 4 | own[i]]
                    expected[0, 0, at : at + 2, 3 * s + e] = numbers
    codes = torch.where(words > 0x7FFF, words - 0x10000, words).to(torch.int16)
    assert torch.equal(decode(codes), expected)


def test_states_of_one_bit_are_of_four_lanes():
    generator = torch.Generator().manual_seed(0)
    lower = torch.randint(16, (16,), generator=generator).tolist()
    # A page of 8 tokens, of 8 channels: two words for each half's states, of two tokens of each quarter.
    words = [int("".join(f"{x:04b}" for x in lower[8 * half : 8 * half + 8]), 2) for half in range(2)]
    halves = torch.tensor([half for word in words for half in (word & 0xFFFF, word >> 16)])
    codes = torch.where(halves > 0x7FFF, halves - 0x10000, halves).to(torch.int16)[None, None, None]
    numbers = state_numbers(codes.device, 1)
    got = decode(codes, 1)
    for half in range(2):
        for s in range(8):
            i = 8 * half + s
            expected = numbers[lower[i - 1] << 4 | lower[i]]
            assert torch.equal(got[0, 0, 4 * half : 4 * half + 4, s], expected)


def test_numbers_of_states_are_those_of_the_product():
    y = ((5 * 0xC0E2D8A5 + 0xF2893F07) % 2**32 & 0x8FFF8FFF) ^ 0x38003800
    halves = torch.tensor([y & 0xFFFF, y >> 16]).to(torch.uint16).view(torch.float16).float()
    numbers = state_numbers(torch.device("cpu"))
    assert torch.equal(numbers[5], halves)
    assert numbers.abs().max() < 2
    assert float(numbers.square().mean().sqrt()) == pytest.approx(SPREAD, rel=1e-6)


def least(x, shared):
    """Least squared errors f64 (N,) of loops that begin with these 4 bits, by dynamic programming."""
    errors = (x.double()[:, :, None] - state_numbers(x.device).double()).square().sum(-1).unflatten(2, (16, 16))
    costs = errors[:, 0].clone()
    costs[:, torch.arange(16) != shared] = torch.inf
    for i in range(1, 16):
        costs = costs.amin(1)[:, :, None] + errors[:, i]
    return costs[:, :, shared].amin(1)


def test_walks_are_the_best_that_begin_where_they_do():
    x = (SPREAD * torch.randn(200, 16, 2, generator=torch.Generator().manual_seed(1))).half().float()
    lower = walk(x)
    numbers = state_numbers(x.device)[lower.roll(1, 1) << 4 | lower]
    lost = (x - numbers).double().square().sum((1, 2))
    best = torch.stack([least(x, shared) for shared in range(16)], 1)
    assert lost == pytest.approx(best.gather(1, lower[:, -1:])[:, 0], rel=1e-4)
    # Most loops begin where all are best.
    assert (lost <= best.amin(1) * (1 + 1e-4)).float().mean() > 0.6
    assert lost.sum() < 1.05 * best.amin(1).sum()


@pytest.mark.parametrize("head_dim", [16, 40, 128])
def test_tokens_keep_their_length(head_dim):
    x = torch.randn(2, 2, 16, head_dim, generator=torch.Generator().manual_seed(2))
    x *= 10.0 ** torch.arange(-4, 4).repeat(2)[:, None]
    fmt = PageFormat(2, "token", head_dim, 16, trellis=True)
    parts = quantize_pages(x, fmt, "values")
    got = dequantize_pages(parts, fmt, "values", head_dim)
    squares = x.square().sum(-1)
    # But for what f16 rounds in scales of tiny tokens.
    assert (got * x).sum(-1) / squares == pytest.approx(torch.ones_like(squares), abs=2e-2)
    # The bound is 0.0625, and scalar codes of the token's range lose about 0.25.
    assert ((got - x).square().sum(-1) / squares).mean() < 0.11


def test_what_is_no_number_stays_in_its_token():
    x = torch.randn(1, 1, 8, 16, generator=torch.Generator().manual_seed(3))
    x[0, 0, 0], x[0, 0, 1, 3], x[0, 0, 2] = torch.nan, torch.inf, 0.0
    codes, scale = encode(x)
    got = decode(codes) * scale.transpose(2, 3).float()
    assert torch.isfinite(got).all()
    assert not got[0, 0, [0, 2]].any()
    # Infinity counts as the largest finite magnitude.
    assert got[0, 0, 1].abs().max() < 3 * x[0, 0, 1, :3].abs().max()
    assert ((got - x)[0, 0, 3:].square().sum(-1) < 0.3 * x[0, 0, 3:].square().sum(-1)).all()


def test_format_by_hand():
    fmt = PageFormat(2, "token", 128, 128, trellis=True)
    assert fmt.spec == "2t128p128t"
    assert PageFormat.parse(fmt.spec) == fmt
    assert fmt.names == ("codes", "scale")
    assert fmt.whole
    assert page_bits(fmt, "values", 128) == 2 + 16 / 128
    parts = quantize_pages(torch.randn(3, 2, 128, 128), fmt, "values")
    assert [(part.shape, part.dtype) for part in parts] == [
        ((3, 2, 16, 128), torch.int16), ((3, 2, 1, 128), torch.float16)
    ]  # fmt: skip


def test_one_bit_values_keep_their_length():
    x = torch.randn(1, 2, 16, 128, generator=torch.Generator().manual_seed(2))
    fmt = PageFormat(1, "token", 128, 16, trellis=True)
    got = dequantize_pages(quantize_pages(x, fmt, "values"), fmt, "values", 128)
    squares = x.square().sum(-1)
    assert (got * x).sum(-1) / squares == pytest.approx(torch.ones_like(squares), abs=2e-2)
    assert ((got - x).square().sum(-1) / squares).mean() < 0.5


def test_key_channels_have_the_bits_they_are_given():
    """Means are kept, whatever they are; errors are those of 1 and of 3 bits."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(1, 2, 128, 48, generator=generator) * (10.0 ** torch.arange(-3, 3).repeat(8))
    x = x + 20 * x.std(2, keepdim=True) * torch.randn(1, 2, 1, 48, generator=generator)
    fmt = PageFormat(1, "channel", 128, 128, ((3, 24),), trellis=True)
    widths = torch.tensor([1, 3, 1, 3, 1, 3]).repeat(8).to(torch.uint8).expand(1, 2, -1)
    made = quantize_pages(x, fmt, "keys", widths)
    index = dict(zip(fmt.names, made, strict=True))["high_index"]
    assert index[0, 0].tolist() == [*range(1, 48, 2)]
    got = dequantize_pages(made, fmt, "keys", 48)
    lost = (got - x).var(2, correction=0) / x.var(2, correction=0)
    for width, least, most in ((1, 0.2, 0.35), (3, 0.015, 0.035)):
        own = lost[:, :, widths[0, 0] == width]
        assert least < own.mean() < most, width
    assert ((got - x).mean(2).abs() < 0.2 * x.std(2)).all()


def test_key_format_by_hand():
    fmt = PageFormat(1, "channel", 128, 128, ((3, 32),), trellis=True)
    assert fmt.spec == "1c128p128t+3x32"
    assert PageFormat.parse(fmt.spec) == fmt
    assert fmt.names == ("codes", "scale", "zero", "high", "high_index")
    assert fmt.code_bits(128) == 1 + 2 * 32 / 128
    # A mean and a scale of each channel, and a byte of each that is raised.
    assert page_bits(fmt, "keys", 128) == fmt.code_bits(128) + 32 / 128 + 32 * 8 / (128 * 128)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"bits": 2}, "trellis: got keys of 2 bits, allowed 1"),
        ({"group_size": 64}, "trellis: got a scale for 64 of a page's 128 tokens"),
        ({"raised": ((4, 8),)}, "raised: got 8 channels of width 4 over trellis codes"),
        ({"raised": ((3, 12),)}, "raised: got 12 channels of width 3 .* multiples of 8 of width 3"),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_keys_in_trellis_codes_are_of_one_kind(given, words):
    with pytest.raises(ValueError, match=words):
        PageFormat(**{"bits": 1, "axis": "channel", "group_size": 128, "page_size": 128, "trellis": True, **given})


def test_keys_and_odd_heads_are_refused():
    fmt = PageFormat(2, "token", 20, 128, trellis=True)
    with pytest.raises(ValueError, match="keys: trellis codes of keys have a scale per channel"):
        StoreFormat(((fmt, fmt),))
    for head_dim in (20, 40):
        with pytest.raises(ValueError, match=f"trellis: got head_dim {head_dim} and a scale for 20 channels"):
            fmt.check_head_dim(head_dim)
