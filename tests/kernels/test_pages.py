"""Formats: names, sizes and errors; packing; and what quantization promises of every element."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hfkvq.kernels import PageFormat, StoreFormat, dequantize_pages, quantize_pages
from hfkvq.kernels.quantize import pack_words, unpack_words

FORMATS = [
    PageFormat(2, "channel", 16, 16),
    PageFormat(2, "channel", 4, 16),
    PageFormat(4, "channel", 8, 16),
    PageFormat(2, "token", 32, 16),
    PageFormat(4, "token", 8, 16),
    PageFormat(2, "channel", 8, 16, ((4, 5),)),
    PageFormat(2, "channel", 16, 16, ((4, 9), (16, 3))),
    PageFormat(4, "channel", 16, 16, ((16, 8),)),
]
NORMED = [PageFormat(2, "channel", 8, 16, normed=True), PageFormat(4, "token", 32, 16, normed=True)]


def spec_id(fmt):
    return fmt.spec


@given(st.sampled_from([2, 4]), st.integers(1, 100), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=50)
def test_unpacking_undoes_packing(bits, head_dim, seed):
    codes = torch.randint(0, 2**bits, (3, head_dim), generator=torch.Generator().manual_seed(seed))
    words = pack_words(codes, bits)
    assert words.dtype == torch.int16
    assert words.shape == (3, PageFormat(bits, "token", 1, 8).words(head_dim))
    assert torch.equal(unpack_words(words, bits, head_dim).long(), codes)


def test_fields_hold_strided_channels():
    codes = torch.zeros(16, dtype=torch.int32)
    # Two words of eight fields: channel 2 * 7 + 1 is field 7 of word 1, whose top bit is the sign.
    codes[15] = 3
    assert pack_words(codes, 2).tolist() == [0, -16384]
    codes = torch.zeros(16, dtype=torch.int32)
    codes[4] = 9
    assert pack_words(codes, 4).tolist() == [9 << 4, 0, 0, 0]


def numbers(seed, kind):
    """(1, 2, 16, 32) tokens of one page: plain, far from zero, of every magnitude, constant, or huge."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, 2, 16, 32, generator=generator)
    if kind == "offset":
        x = x + 100.0
    elif kind == "magnitudes":
        x = x * 10.0 ** torch.randint(-6, 4, x.shape, generator=generator)
    elif kind == "constant":
        x = torch.full_like(x, float(x[0, 0, 0, 0]))
    elif kind == "huge":
        x = x.sign() * 60000.0 + x
    return x


@given(
    st.sampled_from(FORMATS),
    st.sampled_from(["plain", "offset", "magnitudes", "constant", "huge"]),
    st.integers(0, 2**32 - 1),
)
@settings(deadline=None, max_examples=80)
def test_error_is_half_a_step(fmt, kind, seed):
    x = numbers(seed, kind)
    widths = None
    if fmt.raised:
        chosen = torch.tensor([fmt.bits, *dict(fmt.raised)])
        widths = chosen[torch.randint(0, len(chosen), (1, 2, 32), generator=torch.Generator().manual_seed(seed))].byte()
    parts = quantize_pages(x, fmt, "keys", widths)
    named = dict(zip(fmt.names, parts, strict=True))
    got = dequantize_pages(parts, fmt, "keys", 32)
    scale, zero = named["scale"].float(), named["zero"].float()
    if fmt.axis == "channel":
        scale, zero = (t.repeat_interleave(fmt.group_size, 2) for t in (scale, zero))
    else:
        scale, zero = (t.transpose(-1, -2).repeat_interleave(fmt.group_size, -1) for t in (scale, zero))
    # Half a step, plus the f16 rounding of zero, plus what rounding the scale down takes off the highest code.
    limit = scale / 2 + zero.abs() * 2**-11 + 15 * scale * 2**-11 + 2.0**-19
    assert ((got - x).abs() <= limit * (1 + 1e-4)).all()


@pytest.mark.parametrize("fmt", FORMATS + NORMED, ids=spec_id)
def test_spec_is_reversible(fmt):
    assert PageFormat.parse(fmt.spec) == fmt
    store = StoreFormat(((fmt, PageFormat(2, "token", 32, 16)),), 4, 32, 0)
    assert StoreFormat.parse(store.spec) == store
    window = dataclasses.replace(store, sink=0, window=100)
    assert StoreFormat.parse(window.spec) == window


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 18, 19, 127, 1000])
@pytest.mark.parametrize("page", [8, 32])
def test_a_ring_holds_what_steps_see(window, page):
    """Of sixteen tokens, sixty-four of which were taken back, beside the page that is being filled."""
    store = StoreFormat(((PageFormat(16, "token", 1, page),) * 2,), window=window)
    for length in range(1, 3 * page + window):
        newest, oldest = (length - 1) // page, max(length - 80 - window + 1, 0) // page
        assert newest - oldest < store.ring
        assert newest - max(length - window, 0) // page < store.pages_seen(1000, 1)
    assert store.pages(5) == min(5, store.ring)


def test_windows_are_of_one_run():
    pair = (PageFormat(16, "token", 1, 16),) * 2
    with pytest.raises(ValueError, match="window: got 8 tokens, 2 runs"):
        StoreFormat((pair, pair), window=8)
    with pytest.raises(ValueError, match="window: got -1 tokens"):
        StoreFormat((pair,), window=-1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((3, "token", 32), "bits: got 3, allowed 2, 4, 8"),
        ((2, "row", 32), "axis: got 'row'"),
        ((2, "token", 32, 20), "page_size: got 20, allowed powers of two from 8"),
        ((2, "token", 0), "group_size: got 0"),
        ((8, "channel", 32), "axis='token'"),
        ((2, "channel", 24), "does not divide the page of 128 tokens"),
        ((2, "token", 32, 128, ((4, 8),)), "raised: only channels of"),
        ((4, "channel", 32, 128, ((4, 8),)), "raised: got 8 channels of width 4"),
        ((2, "channel", 32, 128, ((8, 8),)), "of width 8"),
        ((8, "token", 32, 128, (), True), "normed: got pages of 8 bits"),
        ((2, "channel", 32, 128, ((4, 8),), True), "normed: got pages of 2 bits, raised=((4, 8),)"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name(arguments, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        PageFormat(*arguments)


def test_head_dims_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="does not divide head_dim 80"):
        PageFormat(2, "token", 32).check_head_dim(80)
    with pytest.raises(ValueError, match="more channels than head_dim 16"):
        PageFormat(2, "channel", 32, 128, ((4, 17),)).check_head_dim(16)


def test_stores_refuse_what_values_cannot_be():
    keys = PageFormat(2, "channel", 16, 16)
    with pytest.raises(ValueError, match="only per-token formats"):
        StoreFormat(((keys, keys),))
    with pytest.raises(ValueError, match="keys have 16 and values 32"):
        StoreFormat(((keys, PageFormat(2, "token", 32, 32)),))
    with pytest.raises(ValueError, match="got none"):
        StoreFormat(())
    with pytest.raises(ValueError, match="expected something like"):
        PageFormat.parse("2x128")


def test_code_bits_counts_raised_channels():
    assert PageFormat(2, "channel", 128, 128, ((4, 16),)).code_bits(128) == 2.25
    assert PageFormat(2, "channel", 128, 128, ((4, 8), (16, 8))).code_bits(128) == 2 + (16 + 112) / 128
