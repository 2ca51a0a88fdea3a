"""Seal: kernels write what the reference writes, bit for bit, and nothing else."""

from __future__ import annotations

import pytest
import torch

from hfkvq.kernels import PageFormat, channel_widths, page_norms, seal_side
from hfkvq.kernels.dispatch import reference
from tests.kernels.stores import poison

# NumPy remarks on what the rules say: infinity times 0 in a constant group, the range of a group of NaN.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{remark}:RuntimeWarning")
    for remark in ("invalid value encountered", "All-NaN slice", "overflow encountered")
]

FORMATS = [
    ("2c128p128", "keys", 128),
    ("2c128p128+4x16", "keys", 128),
    ("2c32p64+4x20+16x5", "keys", 80),
    ("2c8p32+16x5+4x3", "keys", 72),
    ("2c16p16+4x8+16x8", "keys", 320),
    ("4c8p32+16x5", "keys", 64),
    ("4c64p64", "keys", 64),
    ("2t128p128", "values", 128),
    ("2t32p64", "values", 96),
    ("2t8p16", "keys", 64),
    ("4t16p32", "keys", 80),
    ("4t64p64", "values", 64),
    ("4t256p16", "values", 256),
    ("2c128p128", "keys", 256),
    ("2c64p64+4x20+16x9", "keys", 512),
    ("4c32p32+16x3", "keys", 192),
    ("4t96p32", "values", 96),
    ("4t32p32", "values", 192),
    ("2t24p8", "keys", 96),
    ("8t64p64", "keys", 64),
    ("8t40p32", "values", 80),
    ("8t192p8", "keys", 192),
    ("8t32p32", "values", 128),
    ("16t64p64", "values", 64),
    ("16c64p64", "keys", 80),
    ("2c16p32n", "keys", 80),
    ("4t64p32n", "values", 64),
    ("2t24p8n", "values", 72),
    ("2c128p128f3+4x16", "keys", 128),
    ("2c32p64f4+4x20+16x5", "keys", 80),
    ("4c8p32f2+16x5", "keys", 64),
    ("2t32p64f4", "values", 96),
    ("4t64p64f2", "keys", 64),
    ("4t128p128f2", "keys", 128),
    ("2t24p8nf3", "values", 72),
    ("2t32p8t", "values", 32),
    ("1t40p32t", "values", 40),
    ("1c32p32t", "keys", 40),
    ("1c16p16t+3x16", "keys", 64),
    ("2t24p8t", "values", 24),
]
ROWS, HEADS, PAGES = 3, 2, 4


def arguments(spec, side, head_dim, dtype=torch.bfloat16, bad=False):
    """Pages of NaN and a call that seals: all of what is new in row 0, nothing in row 1, a part in row 2."""
    torch.manual_seed(42)
    fmt = PageFormat.parse(spec)
    page = fmt.page_size
    whole = fmt.whole
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


def norms(call, spec):
    """Factors of the new pages, where the format is normed."""
    fmt = PageFormat.parse(spec)
    return page_norms(call[3], call[4], fmt.axis, fmt.page_size) if fmt.normed else None


def by_reference(parts, call, spec, side):
    """What the reference makes of the pages."""
    made = [part.clone() for part in parts]
    *places, source, index, widths = call
    rest = PageFormat.parse(spec), side, "", None, widths, norms(call, spec)
    reference("seal")(source, index, made, *places, *rest)
    return made


def run(device, parts, call, spec, side, choose=None, q_abs=None):
    """The operation on a device; its pages, back on the CPU."""
    parts = [part.to(device, copy=True) for part in parts]
    *call, widths, q_abs = (None if x is None else x.to(device) for x in (*call, q_abs))
    seal_side(parts, *call, PageFormat.parse(spec), side, choose, q_abs, widths=widths)
    return [part.cpu() for part in parts]


def same(a, b):
    """Equal bit for bit, but for the payload of NaN."""
    if a.dtype == torch.float8_e4m3fn:
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    return torch.equal(a, b) if not a.is_floating_point() else torch.equal(a.nan_to_num(7e4), b.nan_to_num(7e4))


@pytest.mark.interpreted(turns=2, over=("spec", "bad"))
@pytest.mark.parametrize("bad", [False, True], ids=["finite", "not-finite"])
@pytest.mark.parametrize(("spec", "side", "head_dim"), FORMATS)
def test_kernel_is_reference(triton_backend, spec, side, head_dim, bad):
    dtype = torch.float32 if head_dim in (80, 96) else torch.bfloat16
    parts, *call = arguments(spec, side, head_dim, dtype, bad)
    expected = by_reference(parts, call, spec, side)
    got = run(triton_backend, parts, call, spec, side)
    for name, a, b in zip(PageFormat.parse(spec).names, got, expected, strict=True):
        assert same(a, b), name


# Pages per channel, raised and not, per token in groups that do and do not fit the fields of a word, fp8.
ADVERSE = [
    ("2c32p32+4x8+16x8", "keys", 64),
    ("4c16p32", "keys", 128),
    ("2t64p32", "values", 64),
    ("4t32p32", "values", 64),
    ("2t24p8", "keys", 96),
    ("8t32p32", "values", 64),
    ("8t80p16", "keys", 80),
    ("2c32p32n", "keys", 64),
    ("4t32p16n", "values", 64),
    ("2t24p8t", "values", 24),
    ("2c32p32f3+4x8+16x8", "keys", 64),
    ("4c16p32nf4", "keys", 64),
    ("4t32p32f2", "values", 64),
    ("2t24p8f4", "keys", 96),
]


def adverse(x, kind):
    """(B, H, L, D) of random numbers made difficult."""
    x = x.clone()
    if kind == "outliers":
        x[..., ::7] *= 1000
    elif kind == "constant":
        x = x[:, :, :1].expand_as(x).clone()
        x[0, 0] = 1.2345
    elif kind == "offset":
        # The zero's rounding is larger than the range.
        x = x * 1e-3 + 3000.7
    elif kind == "subnormal":
        x = x * torch.tensor(10.0).pow(-torch.arange(x.shape[-1]).remainder(40))
    elif kind == "zeros":
        x = torch.where(torch.arange(x.shape[2])[:, None] % 3 == 0, -0.0, 0.0).expand_as(x).clone()
    elif kind == "huge":
        x = x * torch.tensor(10.0).pow(torch.arange(x.shape[-1]).remainder(7))
    elif kind == "bad":
        x[:, :, ::5, ::3] = torch.nan
        x[:, :, 1::5, 1::4], x[:, :, 2::5, 2::4] = torch.inf, -torch.inf
        x[0, 0, :, :5], x[0, 1, 3] = torch.nan, -torch.inf
    return x


KINDS = ["outliers", "constant", "offset", "subnormal", "zeros", "huge", "bad"]


@pytest.mark.interpreted(
    *("2c32p32+4x8+16x8", "2t24p8", "2t24p8t", "8t32p32", "4c16p32nf4", "4t32p32f2"), turns=3, over=("spec", "kind")
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("spec", "side", "head_dim"), ADVERSE)
def test_kernel_is_reference_on_adverse_data(triton_backend, spec, side, head_dim, kind):
    parts, table, count, new, source, *call = arguments(spec, side, head_dim, torch.float32)
    call = (table, count, new, adverse(source, kind), *call)
    expected = by_reference(parts, call, spec, side)
    got = run(triton_backend, parts, call, spec, side)
    for name, a, b in zip(PageFormat.parse(spec).names, got, expected, strict=True):
        assert same(a, b), name


def test_fp8_rounds_to_even_and_saturates(backend):
    """Every e4m3 value, every midpoint of two and its neighbours, each sign: as torch rounds."""
    exact = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (exact[1:] + exact[:-1]) / 2
    points = torch.cat([exact, middle, middle * (1 + 2**-20), middle * (1 - 2**-20)])
    # A scale of 1 (448 in every group), so that codes are the points themselves.
    x = torch.zeros(8, 64)
    x.view(-1)[: points.numel()] = points
    x[:, 63] = 448
    x = torch.cat([x, -x]).view(1, 1, 16, 64)
    fmt = PageFormat(8, "token", 64, 16)
    parts = [poison(part) for part in fmt.allocate("keys", 1, 1, 64, torch.float32, torch.device("cpu"))]
    zero = torch.zeros(1, 1, dtype=torch.int32)
    index = torch.arange(16, dtype=torch.int32)[None]
    codes, scale = run(backend, parts, (zero, zero[0], zero[0] + 16, x, index, None), fmt.spec, "keys")
    assert (scale == 1).all()
    assert torch.equal(codes.view(torch.uint8)[0], x[0].to(torch.float8_e4m3fn).view(torch.uint8))


# Channels chosen by the kernel, or where a program cannot rank them, by its launcher.
CHOSEN = [
    ("2c128p128+4x16", 128),
    ("2c32p32+4x8", 64),
    ("2c16p32+4x5+16x9", 64),
    ("4c32p32+16x8", 80),
    ("2c16p16+4x24", 96),
    ("2c8p8+4x50", 320),
    ("2c64p128+4x24", 512),
    ("2c32p64f4+4x8", 80),
    ("1c16p16t+3x24", 48),
]


@pytest.mark.interpreted(
    *("2c32p32+4x8", "4c32p32+16x8", "2c16p16+4x24", "2c32p64f4+4x8", "2c64p128+4x24"),
    "1c16p16t+3x24",
    turns=2,
    over=("spec", "choose"),
)
@pytest.mark.parametrize(("choose", "weigh"), [("k_abs", False), ("k_abs", True), ("error", True)])
@pytest.mark.parametrize(("spec", "head_dim"), CHOSEN)
def test_chosen_channels_are_those_of_the_rule(backend, spec, head_dim, choose, weigh):
    """The pages are those that the rule's widths give."""
    fmt = PageFormat.parse(spec)
    parts, table, count, new, source, index, _ = arguments(spec, "keys", head_dim, torch.float32)
    source *= torch.rand(head_dim).mul(2).exp()
    q_abs = torch.rand(ROWS, HEADS, head_dim) if weigh else None
    columns = index.clamp(max=source.shape[2] - 1).long()[:, None, :, None].expand(-1, HEADS, -1, head_dim)
    pages = source.gather(2, columns).unflatten(2, (-1, fmt.page_size))
    widths = channel_widths(pages, fmt, choose, q_abs)
    for width, room in fmt.raised:
        assert ((widths == width).sum(-1) == room).all()
    expected = by_reference(parts, (table, count, new, source, index, widths), spec, "keys")
    got = run(backend, parts, (table, count, new, source, index, None), spec, "keys", choose, q_abs)
    for name, a, b in zip(fmt.names, got, expected, strict=True):
        assert same(a, b), name


def test_ties_and_bad_channels_when_choosing(backend):
    """Of equal scores the lower channel; NaN counts as nothing, infinity as most."""
    x = torch.ones(1, 1, 16, 64)
    x[..., ::2, :] = -1
    x[..., 40] *= 2
    x[..., 3, 50], x[..., 3, 2] = torch.inf, torch.nan
    fmt = PageFormat(2, "channel", 16, 16, ((4, 8),))
    parts = [poison(part) for part in fmt.allocate("keys", 1, 1, 64, torch.float32, torch.device("cpu"))]
    zero, index = torch.zeros(1, 1, dtype=torch.int32), torch.arange(16, dtype=torch.int32)[None]
    got = run(backend, parts, (zero, zero[0], zero[0] + 16, x, index, None), fmt.spec, "keys", "k_abs")
    found = dict(zip(fmt.names, got, strict=True))["high_index"][0, 0].tolist()
    assert found == [0, 1, 3, 4, 5, 6, 40, 50]


def test_rules_that_do_not_go():
    parts, *call, widths = arguments("2c32p64+4x20+16x5", "keys", 80)
    fmt = PageFormat.parse("2c32p64+4x20+16x5")
    with pytest.raises(ValueError, match="'largest', allowed None, 'k_abs', 'range'"):
        seal_side(parts, *call, fmt, "keys", "largest")
    with pytest.raises(ValueError, match="a rule and widths"):
        seal_side(parts, *call, fmt, "keys", "k_abs", widths=widths)


# What is interpreted is the reference in every page: `test_kernel_is_reference`.
@pytest.mark.parametrize("backend", ["reference", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
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
