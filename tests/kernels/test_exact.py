"""Exact keys: which they are, that kernels choose and store what the reference does, and what reads them."""

from __future__ import annotations

import pytest
import torch

from hfkvq.kernels import PageFormat, StoreFormat, dequantize_pages, quantize_pages, seal
from hfkvq.kernels.exact import exact_slots
from tests.kernels.stores import poison

# NumPy remarks on what the rules say.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

ROWS, HEADS, PAGES = 3, 2, 3
FORMATS = [("2c128p128e1+4x16", 128), ("4c8p24e3+16x5", 72), ("2c16p32e2", 80), ("2c512p512e2", 64)]


def arguments(spec, head_dim, dtype):
    """Pages of NaN, and two new ones for row 0, none for row 1 and one for row 2."""
    torch.manual_seed(3)
    fmt = PageFormat.parse(spec)
    page = fmt.page_size
    source = torch.randn(ROWS, 2 * page + 5, HEADS, head_dim).to(dtype).transpose(1, 2)
    count = torch.tensor([0, page, 2 * page], dtype=torch.int32)
    new = torch.tensor([2 * page, 0, page], dtype=torch.int32)
    table = torch.randperm(ROWS * PAGES).view(ROWS, PAGES).int()
    index = torch.stack([torch.randperm(source.shape[2])[: 2 * page] for _ in range(ROWS)]).int()
    query = torch.randn(ROWS, HEADS, head_dim)
    # One page's best keys are equal, another has keys that are no numbers, and one query says nothing.
    source[0, 0, index[0, :page].long()[[5, 2]]] = 4 * query[0, 0].to(dtype)
    source[0, 1, index[0, page].long()] = torch.nan
    source[2, 1, index[2, 3].long()] = torch.inf
    query[2, 0] = 0.0
    parts = [poison(x) for x in fmt.allocate("keys", ROWS * PAGES, HEADS, head_dim, dtype, torch.device("cpu"))]
    return fmt, parts, table, count, new, source, index, query


@pytest.mark.parametrize(("spec", "head_dim"), FORMATS)
@pytest.mark.parametrize("asks", [True, False], ids=["query", "no query"])
def test_seal_keeps_what_queries_point_to(backend, spec, head_dim, asks):
    """By definition, in f64; equal scores take the first, and pages that are not due keep what they hold."""
    dtype = torch.float16 if head_dim == 80 else torch.float32
    fmt, parts, table, count, new, source, index, query = arguments(spec, head_dim, dtype)
    page = fmt.page_size
    got = [x.to(backend, copy=True) for x in parts]
    given = [x.to(backend) for x in (table, count, new, source, index)]
    own = query.to(backend) if asks else None
    seal(got, *given, None, fmt, "keys", "k_abs" if fmt.raised else None, query=own)
    exact, slots = (x.cpu() for x in got[-2:])
    written = set()
    for row, block in ((0, 0), (0, 1), (2, 0)):
        at = int(table[row, count[row] // page + block])
        written.add(at)
        keys = source[row][:, index[row, block * page : (block + 1) * page].long()]
        for head in range(HEADS):
            score = (keys[head].double() @ query[row, head].double()).nan_to_num(-1e30, 1e30) if asks else None
            ranks = range(page) if score is None else sorted(range(page), key=lambda t, s=score: (-s[t].item(), t))
            expected = list(ranks)[: fmt.exact]
            assert slots[at, head].tolist() == expected
            assert torch.equal(exact[at, head].nan_to_num(7.0), keys[head, expected].nan_to_num(7.0))
    for x, old in zip((exact, slots), parts[-2:], strict=True):
        rest = [i for i in range(len(x)) if i not in written]
        assert torch.equal(x[rest].nan_to_num(7e4), old[rest].nan_to_num(7e4))


def test_codes_are_those_without_exact_keys(backend):
    fmt, parts, table, count, new, source, index, query = arguments(*FORMATS[0], torch.float32)
    both = []
    for own, held in ((fmt, parts), (fmt.coded, parts[:-2])):
        made = [x.to(backend, copy=True) for x in held]
        given = [x.to(backend) for x in (table, count, new, source, index)]
        seal(made, *given, None, own, "keys", "k_abs", query=query.to(backend) if own.exact else None)
        both.append([x.cpu() for x in made])
    for a, b in zip(*both, strict=False):
        assert torch.equal(a.nan_to_num(7e4), b.nan_to_num(7e4))


def test_pages_read_exact_keys_in_place_of_codes():
    fmt = PageFormat.parse("2c16p16e2+4x8")
    torch.manual_seed(0)
    keys, slots = torch.randn(3, 2, 16, 32), torch.randint(0, 16, (3, 2, 2))
    made = quantize_pages(keys, fmt, "keys", exact=slots)
    coded = dequantize_pages(made[:-2], fmt.coded, "keys", 32)
    where = slots[..., None].expand(-1, -1, -1, 32)
    assert torch.equal(dequantize_pages(made, fmt, "keys", 32), coded.scatter(2, where, keys.gather(2, where)))
    assert fmt.code_bits(32) == fmt.coded.code_bits(32) + 16 * 2 / 16


def test_nan_comes_last_and_queries_may_be_missing():
    keys = torch.tensor([[1.0], [torch.nan], [3.0], [3.0]])
    assert exact_slots(keys, 4, torch.ones(1)).tolist() == [2, 3, 0, 1]
    assert exact_slots(keys, 2, None).tolist() == [0, 1]


@pytest.mark.parametrize("spec", ["2t32p32e1", "8t32p32e1", "2c32p32ne1", "2c32p32e5", "16t32p32e1"])
def test_formats_without_room_for_exact_keys_are_refused(spec):
    with pytest.raises(
        ValueError, match=r"exact: got \d tokens a page of \d+ bits per (token|channel)(, normed)?, all"
    ):
        PageFormat.parse(spec)


def test_exact_keys_are_of_one_run():
    keys, values = PageFormat.parse("2c32p32e1"), PageFormat.parse("2t32p32")
    with pytest.raises(ValueError, match=r"exact: got 1 tokens and 2 runs, allowed in a single one"):
        StoreFormat(((keys, values), (keys, values)))
