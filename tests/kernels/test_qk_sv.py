"""Logits and weighted sums over pages, against dense float64."""

from __future__ import annotations

import pytest
import torch

from hfkvq.kernels import PageFormat, dequantize_pages, qk_pages, quantize_pages, sv_pages
from tests.kernels.stores import assert_as_good_as_torch, poison

ROWS, HEADS, PAGES = 2, 2, 3


def pages(spec, side, head_dim, counts, dtype=torch.float32):
    """Pages of a permuted pool that hold ``counts`` tokens a row, NaN elsewhere; and the dense tokens."""
    torch.manual_seed(42)
    fmt = PageFormat.parse(spec)
    pool = ROWS * PAGES + 1
    parts = [poison(x) for x in fmt.allocate(side, pool, HEADS, head_dim, dtype, torch.device("cpu"))]
    table = torch.randperm(pool)[: ROWS * PAGES].view(ROWS, PAGES).int()
    dense = torch.zeros(ROWS, HEADS, PAGES * fmt.page_size, head_dim)
    for row, count in enumerate(counts):
        for block in range(-(-count // fmt.page_size)):
            x = torch.randn(1, HEADS, fmt.page_size, head_dim, dtype=dtype)
            widths = torch.tensor([fmt.bits, *dict(fmt.raised)])
            widths = widths[torch.randint(0, len(widths), (1, HEADS, head_dim))].byte()
            made = quantize_pages(x, fmt, side, widths if fmt.raised else None)
            for part, new in zip(parts, made, strict=True):
                part.view(torch.uint8)[table[row, block].long()] = new.contiguous().view(torch.uint8)[0]
            known = dequantize_pages(made, fmt, side, head_dim)[0]
            dense[row, :, block * fmt.page_size : (block + 1) * fmt.page_size] = known
        dense[row, :, count:] = 0
    return parts, table, torch.tensor(counts, dtype=torch.int32), dense, fmt


@pytest.mark.parametrize("rows", [1, 4, 7])
@pytest.mark.parametrize("spec", ["2c32p32", "2c8p32+4x8+16x3", "4c12p24", "2t20p32", "4t80p16", "8t80p32", "16t80p32"])
def test_qk(backend, spec, rows):
    page = PageFormat.parse(spec).page_size
    counts = [3 * page, page] if "c" in spec else [2 * page + 5, 0]
    parts, table, count, dense, fmt = pages(spec, "keys", 80, counts)
    q = torch.randn(ROWS, HEADS, rows, 80)
    got = qk_pages(q.to(backend), table.to(backend), count.to(backend), [p.to(backend) for p in parts], fmt).cpu()
    outside = torch.arange(got.shape[-1]) >= count[:, None, None, None]
    assert (got.masked_select(outside) == -torch.inf).all()
    exact = (q.double() @ dense.double().transpose(-1, -2)).masked_fill(outside, 0.0)
    plain = (q @ dense.transpose(-1, -2)).masked_fill(outside, 0.0)
    assert_as_good_as_torch(got.masked_fill(outside, 0.0), exact, plain)


@pytest.mark.parametrize("rows", [1, 4, 7])
@pytest.mark.parametrize("spec", ["2t20p32", "4t80p16", "2t80p24", "8t80p32", "16t80p32"])
def test_sv(backend, spec, rows):
    page = PageFormat.parse(spec).page_size
    parts, table, count, dense, fmt = pages(spec, "values", 80, [2 * page + 5, 0])
    probs = torch.randn(ROWS, HEADS, rows, PAGES * page).softmax(-1)
    probs = probs.masked_fill(torch.arange(PAGES * page) >= count[:, None, None, None], 0.0)
    parts = [p.to(backend) for p in parts]
    got = sv_pages(probs.to(backend), table.to(backend), count.to(backend), parts, fmt, 80)
    assert_as_good_as_torch(got, probs.double() @ dense.double(), probs @ dense)


@pytest.mark.parametrize("spec", ["2c8p32+4x8+16x3", "4t80p32"])
def test_opcheck(spec):
    parts, table, count, _, _ = pages(spec, "keys", 80, [96, 96])
    q = torch.randn(ROWS, HEADS, 4, 80)
    torch.library.opcheck(torch.ops.hfkvq.qk_pages.default, (q, table, count, parts, spec))
    if "t" in spec:
        parts, table, count, _, _ = pages(spec, "values", 80, [96, 96])
        probs = torch.randn(ROWS, HEADS, 4, 96)
        torch.library.opcheck(torch.ops.hfkvq.sv_pages.default, (probs, table, count, parts, spec, 80))
