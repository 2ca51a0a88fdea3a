"""Due: what is to be sealed is what counting units by hand finds, and its slots are where `append` put the tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hfkvq.kernels import PageFormat, StoreFormat, append, due
from hfkvq.kernels.decode import LENGTH, RUNS

CASES: dict[str, dict[str, Any]] = {
    name: {"rows": rows, "sink": sink, "tails": tails, "local": local, "unit": unit, "most": most}
    for name, rows, sink, tails, local, unit, most in (
        # Rows: tokens stored, then keys and values that are sealed.
        ("by the token", [(0, 0, 0), (3, 0, 0), (4, 0, 0), (9, 0, 0), (10, 0, 0), (47, 26, 26), (47, 38, 37)],
         4, (21, 21), (5, 5), (1, 1), (12, 12)),
        ("by the page",
         [(0, 0, 0), (4, 0, 0), (19, 0, 0), (20, 0, 0), (36, 16, 0), (35, 16, 0), (83, 64, 32), (84, 64, 48)],
         4, (31, 47), (0, 16), (16, 16), (16, 32)),
        ("keys by the page, values by the token",
         [(7, 0, 0), (8, 0, 0), (31, 16, 15), (32, 16, 15), (47, 32, 31), (48, 32, 31)],
         0, (23, 32), (0, 16), (8, 1), (16, 1)),
        ("every slot of the tail", [(17, 0, 0), (30, 13, 11), (33, 16, 14), (34, 17, 15), (50, 33, 31)],
         0, (17, 19), (0, 0), (1, 1), (17, 19)),
        ("more slots than the tail has", [(30, 24, 24)],
         2, (5, 7), (1, 0), (2, 4), (11, 9)),
        ("no slots of values", [(40, 16, 21), (2, 0, 0)],
         3, (24, 17), (2, 0), (8, 1), (16, 0)),
        ("no slots of keys", [(40, 32, 21), (70, 64, 50)],
         3, (24, 17), (0, 0), (32, 1), (0, 17)),
        ("prompts ask for no slots", [(400, 0, 0), (1, 0, 0), (263, 128, 56)],
         8, (0, 0), (0, 64), (128, 1), (0, 0)),
        ("more is sealed than would be", [(40, 32, 40), (40, 24, 30), (12, 16, 12)],
         0, (40, 40), (20, 30), (8, 1), (8, 2)),
    )
}  # fmt: skip


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device(request.param)


# The same, and the positions that its last run has room for: it takes what is due, whatever the others hold.
SEVERAL: dict[str, dict[str, Any]] = {
    "two runs": {
        "rows": [(60, 16, 16, 8, 8), (60, 0, 0, 24, 24), (60, 24, 24, 0, 0), (9, 0, 0, 0, 0), (36, 16, 16, 8, 8)],
        "sink": 2, "tails": (39, 39), "local": (10, 10), "unit": (8, 8), "most": (24, 24), "room": 48,
    },
    "three runs": {
        "rows": [(70, 8, 8, 16, 16, 20, 20), (70, 0, 0, 0, 0, 44, 44)],
        "sink": 0, "tails": (30, 30), "local": (4, 4), "unit": (1, 1), "most": (22, 22), "room": 66,
    },
}  # fmt: skip


def counters_of(rows, junk=9):
    """Counters of the runs; padding changes nothing."""
    found = torch.full((RUNS + len(rows[0]) - 1, len(rows)), junk, dtype=torch.int32)
    found[LENGTH] = torch.tensor([row[0] for row in rows])
    found[RUNS:] = torch.tensor([row[1:] for row in rows]).T
    return found


def by_hand(rows, sink, tails, local, unit, most):
    """One row and one unit at a time."""
    new: list[list[int]] = [[], []]
    slots: list[list[list[int]]] = [[], []]
    for side in (0, 1):
        for length, *counts in rows:
            sealed = sum(counts[side::2])
            left = length - sink - local[side]
            target = next((n for n in range(length, 0, -1) if n <= left and n % unit[side] == 0), 0)
            new[side].append(max(target - sealed, 0))
            slots[side].append([(sealed + i) % max(tails[side], 1) for i in range(most[side])])
    shapes = [(len(rows), span) for span in most]
    index = [torch.tensor(own, dtype=torch.int32).view(shape) for own, shape in zip(slots, shapes, strict=True)]
    return torch.tensor(new, dtype=torch.int32), index


def assert_same(got, expected):
    for a, b in zip((*got.new, *got.index), (*expected[0], *expected[1]), strict=True):
        assert a.dtype == b.dtype == torch.int32
        assert a.shape == b.shape
        assert torch.equal(a.cpu(), b.cpu())


@pytest.mark.parametrize("name", CASES)
def test_units_are_counted_by_hand(device, name):
    counters = counters_of(CASES[name]["rows"]).to(device)
    knobs = {key: value for key, value in CASES[name].items() if key != "rows"}
    before = counters.clone()
    got = due(counters, **knobs)
    expected = by_hand(**CASES[name])
    assert_same(got, expected)
    assert torch.equal(torch.stack(got.count), before[RUNS:])
    before[RUNS:] += expected[0].to(device)
    assert torch.equal(counters, before)
    assert all(x.device == counters.device for x in (*got.count, *got.new, *got.index))


@pytest.mark.parametrize("name", SEVERAL)
def test_the_last_run_takes_it(device, name):
    """And notes the tokens' positions, behind those it has, and nothing beside them."""
    case = SEVERAL[name]
    knobs = {key: value for key, value in case.items() if key not in ("rows", "room")}
    counters = counters_of(case["rows"]).to(device)
    pos = torch.full((len(case["rows"]), case["room"]), -7, dtype=torch.int32, device=device)
    before, expected = counters.clone(), by_hand(case["rows"], **knobs)
    assert expected[0].max() > 0
    got = due(counters, **knobs, pos=pos)
    assert_same(got, expected)
    assert torch.equal(torch.stack(got.count), before[-2:])
    before[-2:] += expected[0].to(device)
    assert torch.equal(counters, before)
    for b, (_, *counts) in enumerate(case["rows"]):
        new, sealed, own = int(expected[0][0, b]), sum(counts[::2]), counts[-2]
        held = [-7] * case["room"]
        held[own : own + new] = [case["sink"] + sealed + i for i in range(new)]
        assert pos[b].tolist() == held


def test_slots_hold_the_oldest_tokens(backend):
    """Tokens that tell their position, appended as steps append them: the tail has gone round by then."""
    sink, tails, sealed = 4, (13, 24), (24, 16)
    store = StoreFormat(((PageFormat(16, "token", 1, 8),) * 2,), sink)
    counters = counters_of([(0, 0, 0)], junk=0).to(backend)
    windows = [torch.full((1, 1, size, 8), -1.0, device=backend) for size in (sink, sink, *tails)]
    for at in range(39):
        token = torch.full((1, 1, 1, 8), float(at), device=backend)
        append(token, token, counters, windows, store)
    counters[RUNS:, 0] = torch.tensor(sealed)
    found = due(counters, sink, tails, (0, 2), (8, 1), (8, 17))
    assert [x.tolist() for x in found.new] == [[8], [17]]
    for side in (0, 1):
        held = windows[2 + side][0, 0, found.index[side][0].long(), 0]
        assert held.tolist() == [float(sink + sealed[side] + i) for i in range(int(found.new[side]))]
