"""Seal: kernels write what the reference writes, bit for bit, and nothing else."""

from __future__ import annotations

import pytest
import torch

from hfkvq.kernels import PageFormat, dequantize_pages, quantize_pages, seal
from hfkvq.kernels.seal import _seal
from tests.kernels.stores import poison

# Infinity times 0 is what the rule says for a constant group; NumPy remarks on it.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

FORMATS = [
    ("2c128p128", "keys", 128),
    ("2c128p128+4x16", "keys", 128),
    ("2c32p64+4x20+16x5", "keys", 80),
    ("2c8p24+16x5+4x3", "keys", 72),
    ("2c16p16+4x8+16x8", "keys", 320),
    ("4c8p24+16x5", "keys", 64),
    ("4c64p64", "keys", 64),
    ("2t128p128", "values", 128),
    ("2t32p64", "values", 96),
    ("2t8p16", "keys", 64),
    ("4t16p40", "keys", 80),
    ("4t64p64", "values", 64),
    ("4t256p16", "values", 256),
    ("8t64p64", "keys", 64),
    ("16t64p64", "values", 64),
    ("16c64p64", "keys", 80),
]
ROWS, HEADS, PAGES = 3, 2, 4


def arguments(spec, side, head_dim, dtype=torch.bfloat16, bad=False):
    """Pages of NaN and a call that seals: all of what is new in row 0, nothing in row 1, a part in row 2."""
    torch.manual_seed(42)
    fmt = PageFormat.parse(spec)
    page = fmt.page_size
    whole = fmt.axis == "channel" and fmt.bits < 8
    room = 2 * page if whole else page + 5
    columns = room + 7
    # As attention hands it over: (B, L, H, D) in memory.
    source = torch.randn(ROWS, columns, HEADS, head_dim).mul(3).to(dtype).transpose(1, 2)
    if bad:
        source[0, 0, 3, 2], source[0, 1, 5], source[2, 1, :, 3] = torch.nan, torch.inf, -torch.inf
        source[2, 0], source[0, 1, :, 1] = torch.nan, 2.0
    count = torch.tensor([0, page, 2 * page] if whole else [3, page - 1, 2 * page], dtype=torch.int32)
    new = torch.tensor([room, 0, page if whole else page - 3], dtype=torch.int32)
    table = torch.randperm(ROWS * PAGES + 1)[: ROWS * PAGES].view(ROWS, PAGES).int()
    index = torch.stack([torch.randperm(columns)[:room] for _ in range(ROWS)]).int()
    for row in range(ROWS):
        index[row, new[row] :] = 1 << 30
    widths = None
    if fmt.raised:
        chosen = torch.tensor([fmt.bits, *dict(fmt.raised)])
        widths = chosen[torch.randint(0, len(chosen), (ROWS, HEADS, room // page, head_dim))].byte()
        # One page with more than there is room for, one with nothing.
        widths[0, 0, 0], widths[0, 1, 0] = fmt.raised[0][0], fmt.bits
    parts = fmt.allocate(side, ROWS * PAGES + 1, HEADS, head_dim, dtype, torch.device("cpu"))
    return [poison(part) for part in parts], table, count, new, source, index, widths


def run(device, parts, call, spec, side):
    """The operation on a device; its pages, back on the CPU."""
    parts = [part.to(device, copy=True) for part in parts]
    table, count, new, source, index, widths = (None if x is None else x.to(device) for x in call)
    seal(parts, table, count, new, source, index, widths, PageFormat.parse(spec), side)
    return [part.cpu() for part in parts]


def same(a, b):
    """Equal bit for bit, but for the payload of NaN."""
    if a.dtype == torch.float8_e4m3fn:
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    return torch.equal(a, b) if not a.is_floating_point() else torch.equal(a.nan_to_num(7e4), b.nan_to_num(7e4))


@pytest.mark.parametrize("bad", [False, True], ids=["finite", "not-finite"])
@pytest.mark.parametrize(("spec", "side", "head_dim"), FORMATS)
def test_kernel_is_reference(triton_backend, spec, side, head_dim, bad):
    dtype = torch.float32 if head_dim in (80, 96) else torch.bfloat16
    parts, *call = arguments(spec, side, head_dim, dtype, bad)
    expected = [part.clone() for part in parts]
    _seal._init_fn(expected, *call, spec, side)
    got = run(triton_backend, parts, call, spec, side)
    for name, a, b in zip(PageFormat.parse(spec).names, got, expected, strict=True):
        assert same(a, b), name


@pytest.mark.parametrize(("spec", "side", "head_dim"), FORMATS)
def test_only_what_is_due_is_written(backend, spec, side, head_dim):
    parts, table, count, new, *call = arguments(spec, side, head_dim)
    got = run(backend, parts, (table, count, new, *call), spec, side)
    page = PageFormat.parse(spec).page_size
    due = {int(table[r, t // page]) for r in range(ROWS) for t in range(int(count[r]), int(count[r] + new[r]))}
    rest = [i for i in range(ROWS * PAGES + 1) if i not in due]
    for part, before in zip(got, parts, strict=True):
        assert torch.equal(part.view(torch.uint8)[rest], before.view(torch.uint8)[rest])
        if part.dim() == 4 and part.shape[0] == ROWS * PAGES + 1:
            assert not torch.equal(part.view(torch.uint8)[sorted(due)], before.view(torch.uint8)[sorted(due)])


@pytest.mark.parametrize(("spec", "side", "head_dim"), FORMATS)
def test_nothing_due_is_nothing_written(backend, spec, side, head_dim):
    parts, table, count, new, *call = arguments(spec, side, head_dim)
    got = run(backend, parts, (table, count, torch.zeros_like(new), *call), spec, side)
    for part, before in zip(got, parts, strict=True):
        assert torch.equal(part.view(torch.uint8), before.view(torch.uint8))


@pytest.mark.parametrize(("spec", "side", "head_dim"), [("4t16p40", "values", 80), ("2t32p64", "keys", 64)])
def test_a_few_at_a_time_is_all_at_once(backend, spec, side, head_dim):
    """Per-token pages filled a few tokens a step hold what they hold when filled in one go."""
    parts, table, count, new, source, index, _ = arguments(spec, side, head_dim)
    expected = run(backend, parts, (table, count, new, source, index, None), spec, side)
    for done in range(0, index.shape[1], 9):
        due = (new - done).clamp(0, 9)
        call = (table, count + new.clamp(max=done), due, source, index[:, done : done + 9], None)
        parts = run(backend, parts, call, spec, side)
    for a, b in zip(parts, expected, strict=True):
        assert same(a, b)


@pytest.mark.parametrize("spec", ["2c32p64+4x20+16x5", "4t16p40"])
def test_sealed_pages_are_quantized_pages(backend, spec):
    """What stands in the first page of row 0 is what quantizing those tokens alone gives."""
    fmt = PageFormat.parse(spec)
    parts, table, count, new, source, index, widths = arguments(spec, "keys", 80)
    count[0] = 0
    got = run(backend, parts, (table, count, new, source, index, widths), spec, "keys")
    tokens = source[:1, :, index[0, : fmt.page_size].long()]
    expected = quantize_pages(tokens, fmt, "keys", None if widths is None else widths[:1, :, 0])
    page = [part[table[0, 0].long()][None] for part in got]
    assert torch.equal(dequantize_pages(page, fmt, "keys", 80), dequantize_pages(expected, fmt, "keys", 80))


@pytest.mark.parametrize("spec", ["2c32p64+4x20+16x5", "2c32p64", "4t16p40"])
def test_opcheck(backend, spec):
    parts, *call = arguments(spec, "keys", 80, torch.float32)
    parts = [part.zero_().to(backend) for part in parts]
    call = [None if x is None else x.to(backend) for x in call]
    torch.library.opcheck(torch.ops.hfkvq.seal.default, (parts, *call, spec, "keys"))
