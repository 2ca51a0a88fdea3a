"""Pages as dense tokens."""

from __future__ import annotations

import pytest
import torch

from hfkvq.kernels import PageFormat, dequantize_pages, quantize_pages, run_pages
from tests.kernels.stores import poison

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
            norm = None
            if fmt.normed:
                norm = torch.rand(1, HEADS, fmt.page_size if fmt.axis == "channel" else head_dim).add(0.5).half()
            made = quantize_pages(x, fmt, side, widths if fmt.raised else None, norm)
            for part, new in zip(parts, made, strict=True):
                part.view(torch.uint8)[table[row, block].long()] = new.contiguous().view(torch.uint8)[0]
            known = dequantize_pages(made, fmt, side, head_dim)[0]
            dense[row, :, block * fmt.page_size : (block + 1) * fmt.page_size] = known
        dense[row, :, count:] = 0
        # Blocks that the row does not have name no page.
        table[row, -(-count // fmt.page_size) :] = -1
    return parts, table, torch.tensor(counts, dtype=torch.int32), dense, fmt


def counts_of(spec):
    """Tokens of two rows: one of whole pages where a page is sealed whole, and one that has less or nothing."""
    page = PageFormat.parse(spec).page_size
    return [3 * page, page] if PageFormat.parse(spec).whole else [2 * page + 5, 0]


def check_keys(device, spec, head_dim, dtype, counts=None):
    """The tokens of pages, to the bit, and anything where a row ends."""
    parts, table, count, dense, fmt = pages(spec, "keys", head_dim, counts or counts_of(spec), dtype)
    parts = [part.to(device) for part in parts]
    got = run_pages(table.to(device), count.to(device), parts, fmt, "keys", head_dim).cpu()
    assert got.dtype == torch.float32
    outside = torch.arange(got.shape[2])[:, None] >= count[:, None, None, None]
    assert torch.equal(got.masked_fill(outside, 0.0), dense.float().masked_fill(outside, 0.0))


@pytest.mark.interpreted("2c8p32+4x8+16x3", "2t20p32", "4t80p16", "16t80p32")
@pytest.mark.parametrize("spec", ["2c32p32", "2c8p32+4x8+16x3", "4c16p32", "2t20p32", "4t80p16", "8t80p32", "16t80p32"])
def test_keys(backend, spec):
    check_keys(backend, spec, 80, torch.float32)


@pytest.mark.parametrize("counts", [[96, 1], [33, 64], [0, 0], [31, 95]])
def test_counts(backend, counts):
    """Rows that end anywhere, and rows that hold nothing, whatever lies in the pages behind them."""
    check_keys(backend, "4t64p32", 64, torch.float32, counts)


def test_no_pages(backend):
    """A table without blocks: no tokens."""
    fmt = PageFormat.parse("4t64p32")
    keys = fmt.allocate("keys", 0, HEADS, 64, torch.float32, backend)
    table, count = (torch.zeros(*size, dtype=torch.int32, device=backend) for size in ((ROWS, 0), (ROWS,)))
    assert run_pages(table, count, keys, fmt, "keys", 64).shape == (ROWS, HEADS, 0, 64)


@pytest.mark.parametrize("spec", ["4c16p32", "4t80p16"])
def test_whole_pages_in_the_models_dtype(backend, spec):
    """Without counts, from any block on, as a cache reads them that goes down a rung."""
    full = [PAGES * PageFormat.parse(spec).page_size] * ROWS
    parts, table, _, dense, fmt = pages(spec, "values", 80, full)
    parts = [part.to(backend) for part in parts]
    got = run_pages(table.to(backend)[:, 1:], None, parts, fmt, "values", 80, torch.bfloat16)
    assert torch.equal(got.cpu(), dense[:, :, fmt.page_size :].bfloat16())
