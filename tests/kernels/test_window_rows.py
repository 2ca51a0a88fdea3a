"""Rows of a batch whose windows are other rows of larger ones: the same results as with windows of their own."""

from __future__ import annotations

import pytest
import torch

from hfkvq.kernels import PageFormat, StoreFormat, append, decode_attention, seal_side
from hfkvq.kernels.step import observe
from hfkvq.kernels.step.buffer import side_by_side
from tests.kernels.stores import Case, build

ROWS = [4, 1]
"""Rows of the windows that a batch of two has, of six."""


def among_others(x, dim=0):
    """The same rows as ROWS of a larger tensor, beside which there are other numbers."""
    shape = list(x.shape)
    shape[dim] = 6
    large = torch.full(shape, 7, dtype=x.dtype, device=x.device)
    large.index_copy_(dim, torch.tensor(ROWS, device=x.device), x)
    return large


def rows_on(device):
    return torch.tensor(ROWS, dtype=torch.int32, device=device)


@pytest.mark.parametrize(("sink", "rotation"), [(4, 0), (0, 64), (40, 16)])
def test_append(backend, sink, rotation):
    """Counters count the tokens before, and stay; windows of other rows stay as well."""
    torch.manual_seed(0)
    side = PageFormat(16, "token", 1, 16)
    store = StoreFormat(((side, side),), sink, rotation, rotation)
    keys, values = (torch.randn(2, 1, 2, 64, device=backend).transpose(1, 2) for _ in range(2))
    counters = torch.tensor([[0, 0], [3, 45], [0, 16], [0, 16]], dtype=torch.int32, device=backend)
    windows = [torch.randn(2, 2, length, 64, device=backend) for length in (sink, sink, 17, 33)]
    mapped, after = [among_others(x) for x in windows], counters.clone()
    after[1] += 1
    counted = after.clone()
    append(keys, values, after, mapped, store, rows_on(backend))
    assert torch.equal(after, counted)
    append(keys, values, counters, windows, store)
    for got, expected in zip(mapped, windows, strict=True):
        assert torch.equal(got, among_others(expected))


CASES = {
    "pages": Case(),
    "lag": Case(
        runs="2c32p32+4x16/2t64p32", tail=(48, 80), keys=[[64], [32]], values=[[32], [0]], sink=17,
        lengths=[17 + 64 + 17, 17 + 32 + 3],
    ),
    "no-sink": Case(sink=0, lengths=[64 + 17, 32 + 3], rotate_values=64),
    "dense": Case(runs="2c16p16/2t64p16", keys=[[64], [32]], values=[[64], [32]]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_attention(backend, name):
    """Bit for bit."""
    case = CASES[name]
    layer = build(case)
    q, counters, windows, runs = layer.to(torch.device(backend))
    rest = runs, None, None, 0.125, 0.0, case.store
    expected = decode_attention(q, counters, windows, *rest)
    mapped = [among_others(x) for x in windows]
    got = decode_attention(q, counters, mapped, *rest, rows=rows_on(backend))
    assert expected.isfinite().all()
    assert torch.equal(got, expected)
    # Into a tensor of the caller's, whose strides may be its own.
    for own in (torch.empty_like(expected), torch.empty_like(expected.mT).mT):
        assert decode_attention(q, counters, mapped, *rest, rows=rows_on(backend), out=own) is own
        assert torch.equal(own, expected)


def test_observe(backend):
    """Sums begin anew where something was sealed, and only there."""
    torch.manual_seed(0)
    q = torch.randn(2, 4, 1, 64, device=backend)
    sums = torch.rand(2, 2, 64, dtype=torch.float64, device=backend)
    counts = torch.tensor([[3, 5], [3, 5]], dtype=torch.int32, device=backend)
    sealed = torch.tensor([0, 1], dtype=torch.int32, device=backend)
    weight, mapped = torch.zeros(2, 2, 64, device=backend), torch.zeros(2, 2, 64, device=backend)
    large, counted = among_others(sums), among_others(counts, 1)
    observe(q, sums, counts, sealed, weight)
    observe(q, large, counted, sealed, mapped, rows_on(backend))
    assert torch.equal(large, among_others(sums))
    assert torch.equal(counted, among_others(counts, 1))
    assert torch.equal(mapped, weight)
    assert counts[0].tolist() == [4, 1]


@pytest.mark.parametrize(
    ("spec", "side"), [("2c32p32+4x16", "keys"), ("2c32p32f4", "keys"), ("4c32p32n", "keys"), ("2t64p32", "values")]
)
def test_seal_side(backend, spec, side):
    """From tails side by side, of which an index names those of a row."""
    torch.manual_seed(0)
    fmt, head_dim, heads, length = PageFormat.parse(spec), 64, 2, 40
    tail = torch.randn(2, heads, length, head_dim, device=backend)
    large = among_others(tail)
    slots = (torch.arange(32, dtype=torch.int32) + torch.tensor([[3], [30]])).remainder(length).int().to(backend)
    index = slots + rows_on(backend)[:, None] * (heads * length)
    table = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32, device=backend)
    count = torch.tensor([0, 32], dtype=torch.int32, device=backend)
    new = torch.tensor([32, 32], dtype=torch.int32, device=backend)
    found = []
    for source, columns in ((tail, slots), (side_by_side(large, 2), index)):
        parts = fmt.allocate(side, 4, heads, head_dim, torch.float32, torch.device(backend))
        for part in parts:
            part.zero_()
        seal_side(parts, table, count, new, source, columns.contiguous(), fmt, side, "error")
        found.append(parts)
    for got, expected in zip(*found, strict=True):
        assert torch.equal(got, expected)
        assert expected[2].any()
