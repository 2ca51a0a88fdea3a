"""Logits of pages, against dense float64."""

from __future__ import annotations

import pytest
import torch

from hfkvq.kernels import PageFormat, dequantize_pages, qk_pages, quantize_pages
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


def check_qk(device, spec, head_dim, rows, dtype, counts=None):
    """Logits of random queries: as good as torch in their dtype, and -inf where a row ends."""
    parts, table, count, dense, fmt = pages(spec, "keys", head_dim, counts or counts_of(spec), dtype)
    # As models hand them over: heads behind tokens.
    q = torch.randn(ROWS, rows, HEADS, head_dim).to(dtype).transpose(1, 2)
    parts = [part.to(device) for part in parts]
    got = qk_pages(q.to(device), table.to(device), count.to(device), parts, fmt).cpu()
    assert got.dtype == torch.float32
    outside = torch.arange(got.shape[-1]) >= count[:, None, None, None]
    assert (got.masked_select(outside) == -torch.inf).all()
    exact = (q.double() @ dense.double().transpose(-1, -2)).masked_fill(outside, 0.0)
    plain = (q @ dense.to(dtype).transpose(-1, -2)).masked_fill(outside, 0.0)
    assert_as_good_as_torch(got.masked_fill(outside, 0.0), exact, plain)


@pytest.mark.interpreted("2c8p32+4x8+16x3", "2t20p32", "4t80p16", "16t80p32", turns=2, over=("spec", "rows"))
@pytest.mark.parametrize("rows", [1, 4, 7])
@pytest.mark.parametrize("spec", ["2c32p32", "2c8p32+4x8+16x3", "4c12p24", "2t20p32", "4t80p16", "8t80p32", "16t80p32"])
def test_qk(backend, spec, rows):
    check_qk(backend, spec, 80, rows, torch.float32)


SHAPES = [
    ("2c32p128", 64, torch.bfloat16),
    ("2c64p128+4x12", 128, torch.bfloat16),
    ("2c128p128+4x16+16x8", 128, torch.float16),
    ("2c16p64+16x5", 96, torch.bfloat16),
    ("4c32p64", 128, torch.float16),
    ("4c64p64+16x8", 192, torch.bfloat16),
    ("2t32p64", 64, torch.float16),
    ("2t128p64", 128, torch.bfloat16),
    ("4t32p64", 128, torch.bfloat16),
    ("4t64p64", 192, torch.float32),
    ("4t256p32", 256, torch.bfloat16),
    ("8t64p64", 64, torch.bfloat16),
    ("8t32p64", 128, torch.float16),
    ("16t96p64", 96, torch.bfloat16),
    ("16c64p64", 64, torch.float16),
    ("2t8p8", 8, torch.float32),
    ("2c64p64n+4x12+16x8", 96, torch.float16),
    ("2t64p64n", 64, torch.bfloat16),
    ("4t16p24n", 80, torch.float32),
]


# Of each layout one: alike are those that differ in head dims and dtypes alone.
INTERPRETED = pytest.mark.interpreted(
    *("2c128p128+4x16+16x8", "2c16p64+16x5", "4c64p64+16x8", "2t32p64", "4t256p32", "8t32p64", "16c64p64", "2t8p8"),
    *("2c64p64n+4x12+16x8", "4t16p24n"),
)


@INTERPRETED
@pytest.mark.parametrize(("spec", "head_dim", "dtype"), SHAPES)
def test_qk_shapes(backend, spec, head_dim, dtype):
    check_qk(backend, spec, head_dim, 4, dtype)


@pytest.mark.parametrize("counts", [[96, 1], [33, 64], [0, 0], [31, 95]])
def test_counts(backend, counts):
    """Rows that end anywhere, and rows that hold nothing, whatever lies in the pages behind them."""
    check_qk(backend, "4t64p32", 64, 3, torch.float32, counts)


def test_no_pages(backend):
    """A table without blocks: no logits."""
    fmt = PageFormat.parse("4t64p32")
    keys = fmt.allocate("keys", 0, HEADS, 64, torch.float32, backend)
    table, count = (torch.zeros(*size, dtype=torch.int32, device=backend) for size in ((ROWS, 0), (ROWS,)))
    x = torch.zeros(ROWS, HEADS, 4, 64, device=backend)
    assert qk_pages(x, table, count, keys, fmt).shape == (ROWS, HEADS, 4, 0)
