"""Everything a layer holds as dense tensors: against float64, and kernels against the reference bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hfkvq.kernels import (
    PageFormat,
    RunView,
    StoreFormat,
    dequantize_pages,
    gather_requests,
    gather_rows,
    hadamard,
    quantize_pages,
)
from hfkvq.kernels.dispatch import reference
from hfkvq.kernels.pages import split_runs
from tests.kernels.stores import Case, assert_as_good_as_torch, build, on

# Rows of 4 + 160 + 17 and 4 + 33 tokens, so that pages are full, begun, and not there.
LONG = Case(
    sink=4, pages=2, heads=1, tail=(40, 40), lengths=[4 + 128 + 17, 4 + 30], starts=[0, 11], keys=[[128], [0]],
    values=[[130], [30]],
)  # fmt: skip

CASES = {
    "2c-2t": Case(),
    "2c-groups": Case(runs="2c8p32+4x8/2t32p32", dtype=torch.float16),
    "2c-raised-4": Case(runs="2c32p32+4x9/4t64p32", dtype=torch.bfloat16),
    "2c-raised-4-16": Case(runs="2c16p32+4x16+16x5/2t64p32", dtype=torch.bfloat16),
    "2c32p128": replace(LONG, runs="2c32p128/2t32p128", dtype=torch.bfloat16),
    "2c64p128": replace(LONG, runs="2c64p128+4x12/4t32p128", dtype=torch.bfloat16),
    "2c128p128": replace(LONG, runs="2c128p128+4x16/2t64p128", dtype=torch.bfloat16),
    "4c32p128": replace(LONG, runs="4c32p128/2t64p128", dtype=torch.float16),
    "4c-raised-16": Case(runs="4c32p32+16x8/2t16p32"),
    "4c-raised-16-groups": Case(runs="4c16p32+16x3/4t32p32", dtype=torch.bfloat16),
    "4t-4t": Case(runs="4t64p32/4t64p32", keys=[[70], [33]], values=[[70], [33]], tail=(20, 20), dtype=torch.float16),
    "2t-4t-groups": Case(runs="2t32p32/4t16p32", keys=[[69], [30]], values=[[70], [33]]),
    "8t": Case(runs="8t64p32/8t64p32", keys=[[69], [30]], dtype=torch.bfloat16),
    "8t-groups": Case(runs="8t32p32/8t16p32", keys=[[69], [30]]),
    "16": Case(runs="16t64p32/16t64p32", keys=[[69], [30]], dtype=torch.bfloat16),
    "16c": Case(runs="16c64p32/16t64p32", dtype=torch.float16),
    "page-8": Case(runs="2c8p8/2t64p8", keys=[[64], [32]], values=[[60], [33]], pages=9),
    "dim-8": Case(runs="2c32p32/2t8p32", head_dim=8, value_dim=8, rotate_keys=8),
    "dim-8-whole": Case(runs="16t8p32/8t8p32", head_dim=8, value_dim=8, rotate_values=4),
    "dim-80": Case(runs="2c32p32+4x10/2t16p32", head_dim=80, value_dim=80),
    "dim-80-8": Case(runs="8t80p32/8t16p32", head_dim=80, value_dim=80, dtype=torch.bfloat16),
    "dim-96": Case(runs="4c16p32/2t96p32", head_dim=96, value_dim=96, dtype=torch.float16),
    "dim-128": Case(runs="4t32p32/4t128p32", head_dim=128, value_dim=128, dtype=torch.bfloat16),
    "dim-192-128": Case(runs="4t64p32/2t32p32", head_dim=192, value_dim=128, dtype=torch.bfloat16),
    "dim-256": Case(runs="2c32p32+4x16+16x16/2t256p32", head_dim=256, value_dim=256, heads=1, dtype=torch.bfloat16),
    "dim-72-48": Case(runs="2c16p32+16x3/4t24p32", head_dim=72, value_dim=48),
    "rotated": Case(runs="4t64p32/4t64p32", rotate_keys=64, rotate_values=64, dtype=torch.bfloat16),
    "rotated-128": Case(
        runs="4t128p32/8t64p32", head_dim=128, value_dim=128, rotate_keys=128, rotate_values=16, dtype=torch.bfloat16
    ),
    "rotated-blocks": Case(
        runs="2c32p32/2t80p32", head_dim=96, value_dim=80, rotate_keys=32, rotate_values=16
    ),
    "rotated-16": Case(runs="16t96p32/16t80p32", head_dim=96, value_dim=80, rotate_keys=32, rotate_values=2),
    "2cn": Case(runs="2c16p32n/4t16p32n", values=[[64], [0]], tail=(40, 64), dtype=torch.bfloat16),
    "4cn-4tn": Case(runs="4c16p32n/4t96p32n", head_dim=96, value_dim=96, values=[[64], [32]], rotate_keys=32),
    "trellis": replace(LONG, runs="2c128p128/2t64p128t", values=[[128], [0]], dtype=torch.bfloat16),
    "trellis-dim-40": Case(runs="2c8p32/2t40p32t", values=[[64], [32]], value_dim=40, rotate_values=8),
    "trellis-keys": Case(
        runs="1c32p32t+3x24/1t40p32t", values=[[64], [0]], value_dim=40, dtype=torch.bfloat16, tail=(40, 64)
    ),
    "keys-lag": Case(keys=[[32], [0]], values=[[70], [33]], tail=(64, 40)),
    "values-lag": Case(keys=[[64], [32]], values=[[30], [0]], tail=(40, 64)),
    "empty-tail": Case(lengths=[4 + 64, 4 + 32], values=[[64], [32]]),
    "no-sink": Case(sink=0, lengths=[81, 35], values=[[70], [32]]),
    "only-sink": Case(lengths=[4, 2], keys=[[0], [0]], values=[[0], [0]]),
    "no-pages": Case(lengths=[30, 7], keys=[[0], [0]], values=[[0], [0]], pages=0),
    "one-empty-row": Case(lengths=[85, 0], keys=[[64], [0]], values=[[70], [0]]),
    "two-runs": Case(
        runs="2c32p32+4x8/2t64p32|4c32p32/4t64p32", tail=(40, 64), lengths=[4 + 128 + 20, 4 + 64 + 3],
        keys=[[64, 64], [32, 32]], values=[[50, 64], [32, 20]],
    ),
    "three-runs": Case(
        runs="2t64p32/2t64p32|8t64p32/8t64p32|16t64p32/16t64p32", tail=(40, 40), lengths=[4 + 130 + 20, 4],
        keys=[[60, 50, 20], [0, 0, 0]], values=[[60, 50, 20], [0, 0, 0]], dtype=torch.bfloat16,
    ),
    "two-runs-rotated": Case(
        runs="2t64p32/2t64p32|4t64p32/4t32p32", tail=(40, 40), lengths=[4 + 110 + 20, 4 + 30 + 3],
        keys=[[60, 50], [30, 0]], values=[[61, 50], [30, 3]], rotate_keys=64, rotate_values=32, dtype=torch.bfloat16,
    ),
}  # fmt: skip


def gather(layer, device, side, columns=None):
    """The operation under test, over the columns of the longest padded row and a few more."""
    _, counters, windows, runs = layer.to(device)
    case = layer.case
    if columns is None:
        columns = max(a + b for a, b in zip(case.starts, case.lengths, strict=True)) + 3
    return gather_rows(counters, windows, runs, columns, case.store, side).cpu()


def by_reference(layer, side, columns):
    case = layer.case
    return reference("gather_rows")(layer.counters, layer.windows, layer.runs, columns, case.store, side)


def forget_unused_pages(layer):
    """Blocks that a row does not have name no page."""
    case = layer.case
    for i, view in enumerate(split_runs(case.store, layer.runs)):
        page = case.store.runs[i][0].page_size
        for row, counts in enumerate(zip(case.keys, case.values, strict=True)):
            view.table[row, -(-max(count[i] for count in counts) // page) :] = -1


# What is interpreted equals the reference to the bit: see the next test.
@pytest.mark.parametrize("backend", ["reference", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("name", CASES)
def test_gather(backend, name, side):
    layer = build(CASES[name])
    case = layer.case
    got = gather(layer, backend, side)
    assert got.dtype == case.dtype
    exact = layer.dense_keys if side == "keys" else layer.dense_values
    block = case.rotate_keys if side == "keys" else case.rotate_values
    known = hadamard(exact.to(torch.float32), block).to(case.dtype)
    plain = hadamard(known, block)
    for row, (start, length) in enumerate(zip(case.starts, case.lengths, strict=True)):
        own = got[row, :, start : start + length]
        if length:
            assert_as_good_as_torch(own, exact[row, :, :length], plain[row, :, :length])
        assert not got[row, :, :start].any()
        assert not got[row, :, start + length :].any()


# Formats and states that share what they are read with are left to GPUs.
ALIKE = (
    *("2c-2t", "2c-raised-4", "2c32p128", "4c32p128", "4c-raised-16", "4t-4t", "8t", "dim-80", "dim-96", "dim-128"),
    *("dim-256", "dim-8-whole", "rotated", "rotated-16", "no-sink", "two-runs"),
)


@pytest.mark.interpreted(*(name for name in CASES if name not in ALIKE), turns=2, over=("name", "side"))
@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("name", CASES)
def test_kernel_equals_reference_to_the_bit(triton_backend, name, side):
    """A continued prompt must not depend on what computed the tensors it attends to."""
    layer = build(CASES[name], seed=1)
    forget_unused_pages(layer)
    got = gather(layer, triton_backend, side)
    assert torch.equal(got, by_reference(layer, side, got.shape[2]))


WINDOWS = {
    "2c64p128": replace(LONG, runs="2c64p128+4x12/4t32p128", dtype=torch.bfloat16, sink=0, window=17),
    "4t-4t": replace(CASES["4t-4t"], sink=0, window=20),
    "16": replace(CASES["16"], sink=0, window=40, starts=[3, 0]),
    "rotated": replace(CASES["rotated"], sink=0, window=1),
}


@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("name", WINDOWS)
def test_the_newest_of_a_window(backend, name, side):
    """Every row ends with the last column, and pages before the first one may hold anything."""
    case = WINDOWS[name]
    end = max(a + b for a, b in zip(case.starts, case.lengths, strict=True))
    case = replace(case, starts=[end - length for length in case.lengths])
    layer, columns = build(case), case.window
    dense = gather(build(replace(case, window=0)), backend, side)
    got = gather(layer, backend, side, columns)
    assert torch.equal(got, dense[:, :, end - columns : end])
    assert torch.equal(got, by_reference(layer, side, columns))


@pytest.mark.parametrize("name", ["2c-2t", "two-runs"])
def test_windows_behind_more_columns_than_one_program_takes(backend, name):
    """Rows that begin in the second program of what no page holds, and end on either side of a third."""
    near, layer = build(CASES[name]), build(replace(CASES[name], starts=[1984, 1100]))
    whole, got = gather(near, backend, "values"), gather(layer, backend, "values")
    for row, (own, length) in enumerate(zip(near.case.starts, near.case.lengths, strict=True)):
        start = layer.case.starts[row]
        assert torch.equal(got[row, :, start : start + length], whole[row, :, own : own + length])
        assert not got[row, :, :start].any()
        assert not got[row, :, start + length :].any()


@pytest.mark.parametrize("side", ["keys", "values"])
def test_columns_that_no_run_holds_are_zero(backend, side):
    """Positions may have holes: tokens that were dropped, and slots that are said to be nowhere."""
    layer = build(CASES["two-runs"])
    case = layer.case
    before = gather(layer, backend, side)
    gone = []
    for view in split_runs(case.store, layer.runs):
        gone.append(int(view.pos[0, 3]))
        view.pos[0, 3] = -1
    after = gather(layer, backend, side)
    assert before[0, :, gone].any(-1).all()
    assert not after[0, :, gone].any()
    before[0, :, gone] = 0
    assert torch.equal(after, before)


def test_every_fp8_code(backend):
    """Subnormals, signed zeros and the largest numbers are decoded exactly."""
    fmt = PageFormat.parse("8t64p8")
    bytes_ = torch.arange(256, dtype=torch.uint8)
    # Pages never hold the codes of NaN.
    bytes_[[0x7F, 0xFF]] = 0
    codes = bytes_.repeat(2).view(1, 1, 8, 64).view(torch.float8_e4m3fn)
    scale = torch.tensor([1.0, 0.5, 3.0, 2.0**-14, 2.0**-24, 65504.0, 0.1, 7.0]).half().view(1, 1, 1, 8)
    view = RunView(torch.zeros(1, 1, dtype=torch.int32), None, [codes, scale], [codes, scale])
    windows = [torch.zeros(1, 1, size, 64, device=backend) for size in (0, 0, 8, 8)]
    counters = torch.tensor([[0], [8], [8], [8]], dtype=torch.int32, device=backend)
    runs = [part.to(backend) for part in view.flat()]
    expected = codes.float() * scale.float().view(1, 1, 8, 1)
    for side in ("keys", "values"):
        assert torch.equal(gather_rows(counters, windows, runs, 8, StoreFormat(((fmt, fmt),)), side).cpu(), expected)


REQUESTS = ["4t128p32f2/4t128p32", "2c16p32+4x16/2t128p32", "2c32p32n/4t32p32n", "8t128p32/8t32p32"]


def requests_of(spec, dtype, windowed, rotate=(128, 32), strided=True):
    """Four requests: some pages and a part of another, nothing, whole pages only, less than a page."""
    torch.manual_seed(0)
    store = StoreFormat.parse(f"s0;k{rotate[0]};v{rotate[1]};{spec}")
    heads, dim, page = 2, 128, store.runs[0][0].page_size
    held, new = [2 * page + 5, 0, 3 * page, page - 3], [page, 3, 1, 9]
    run = [torch.randperm(17)[:16].view(4, 4).int()]
    for fmt, side in zip(store.runs[0], ("keys", "values"), strict=True):
        widths = torch.full((17, heads, dim), fmt.bits, dtype=torch.uint8).index_fill_(2, torch.arange(3, 19), 4)
        made = quantize_pages(torch.randn(17, heads, page, dim), fmt, side, widths if fmt.raised else None)
        run += [part.contiguous() for part in made]
    windows = []
    if windowed:
        windows = [torch.randperm(8).view(2, 4).int(), *(torch.randn(8, heads, page, dim).to(dtype) for _ in range(2))]
    # Requests are wanted in an order of their own, and one of them is not.
    wanted, requests, begin = [2, 0, 3], torch.zeros(4, 4, dtype=torch.int32), 0
    for row in wanted:
        total = held[row] + new[row]
        requests[:, row] = torch.tensor([begin, held[row], total, sum(new[:row])])
        begin += total
    units = [(row, block) for row in wanted for block in range(-(-int(requests[2, row]) // page))]
    whole = torch.randn(sum(new), 3, heads, dim).to(dtype)
    fresh = [whole[:, at] if strided else whole[:, at].contiguous() for at in (0, 2)]
    return store, fresh, torch.tensor(units, dtype=torch.int32).T.contiguous(), requests, run, windows, begin


def gather_on(device, store, fresh, units, requests, run, windows, tokens):
    given = *on(device, (*fresh, units, requests)), on(device, run), on(device, windows)
    return [x.cpu() for x in gather_requests(*given, tokens, store)]


@pytest.mark.parametrize("windowed", [False, True])
def test_requests_by_hand(backend, windowed):
    """Each token of the requests is where attention looks for it."""
    given = requests_of("4t128p32/2t128p32", torch.float32, windowed, (0, 0))
    store, fresh, _, requests, run, windows, tokens = given
    found = gather_on(backend, *given)
    for at, side, parts in ((0, "keys", run[1:4]), (1, "values", run[4:])):
        expected = torch.empty(tokens, *fresh[at].shape[1:])
        for row in (2, 0, 3):
            begin, held, end, new = requests[:, row].tolist()
            for token in range(end):
                block, slot = divmod(token, 32)
                if token >= held:
                    own = fresh[at][new + token - held]
                elif windowed and (block == 0 or block == held // 32):
                    own = windows[1 + at][windows[0][int(block > 0), row], :, slot]
                else:
                    page = [part[run[0][row, block], None] for part in parts]
                    own = dequantize_pages(page, store.runs[0][at], side, 128)[0, :, slot]
                expected[begin + token] = own
        assert torch.equal(found[at], expected)


@pytest.mark.interpreted(turns=2, over=("spec", "dtype", "windowed"))
@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("spec", REQUESTS)
def test_requests_of_kernel_and_reference(triton_backend, spec, dtype, windowed):
    given = requests_of(spec, dtype, windowed, strided=dtype != torch.float16)
    store, fresh, units, requests, run, windows, tokens = given
    expected = reference("gather_requests")(*fresh, units, requests, run, windows, tokens, store)
    found = gather_on(triton_backend, *given)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
