"""Steps that append, observe, attend, merge and seal in three launches: to the bit what the operations do."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from hfkvq.kernels import append, append_attend, decode_attention, due, fused_step, seal_tail
from hfkvq.kernels.fused_step import FEW, seals_with_steps
from hfkvq.kernels.pages import split_runs
from hfkvq.kernels.step import observe
from hfkvq.kernels.step_tensors import Observing, Sealing, StepTensors
from tests.kernels.stores import Case, build

F16, BF16 = torch.float16, torch.bfloat16

# Rows: one within its sink, one that just leaves it, one at a page's border, one within a page.
ROWS = {"lengths": [2, 4, 4 + 32, 4 + 41], "starts": [0, 3, 0, 1]}
ALL = {"keys": [[0], [0], [32], [41]], "values": [[0], [0], [32], [41]]}

CASES = {
    "by the token": ({"runs": "4t64p32/4t64p32", **ALL}, (0, 0), (1, 1)),
    "rotated": ({"runs": "4t64p32/2t32p32", "rotate_keys": 64, "rotate_values": 64, **ALL}, (0, 0), (1, 1)),
    "groups across fields": ({"runs": "4t80p32/4t40p32", "head_dim": 80, "value_dim": 80, **ALL}, (0, 0), (1, 1)),
    "unquantized": ({"runs": "16t64p32/16t64p32", **ALL}, (0, 0), (1, 1)),
    "fp8": ({"runs": "8t64p32/8t64p32", **ALL}, (0, 0), (1, 1)),
    "fp8 and unquantized": ({"runs": "8t64p32/16t64p32", **ALL}, (0, 0), (1, 1)),
    "values alone": (
        {"runs": "2c32p32/2t64p32", "keys": [[0], [0], [32], [32]], "values": [[0], [0], [20], [29]]}, (0, 12), (32, 1),
    ),
    "keys alone": (
        {"runs": "4t32p32/2t64p32", "keys": [[0], [0], [24], [33]], "values": [[0], [0], [32], [32]]}, (8, 0), (1, 32),
    ),
    # Of rows that seal four at a time some have nothing due.
    "units": (
        {"runs": "2t64p32/4t64p32", "keys": [[0], [0], [32], [40]], "values": [[0], [0], [24], [28]]}, (0, 8), (4, 2),
    ),
    "fitted": ({"runs": "4t64p32f2/2t32p32f4", **ALL}, (0, 0), (1, 1)),
    "all at once": (
        {"runs": "4t64p32/4t64p32", "keys": [[0], [0], [20], [29]], "values": [[0], [0], [32], [41]]}, (0, 0), (1, 1),
    ),
}  # fmt: skip
"""What there is, newest tokens that stay, and tokens that are sealed together."""


def given(name, tokens, dtype, device, seed=0):
    """A layer's tensors, new tokens, and what is to be sealed."""
    knobs, local, unit = CASES[name]
    case = Case(**{"tail": (32, 32), "pages": 3, "queries": tokens, "dtype": dtype, **ROWS, **knobs})
    layer = build(case, seed)
    dims = {"keys": case.head_dim, "values": case.value_dim}
    new = [torch.randn(4, tokens, case.heads, dim).to(device, dtype).transpose(1, 2) for dim in dims.values()]
    # What is no number, or too large for f16 as it is stored.
    for x in new:
        x[3, 0, -1, 5], x[2, 1, 0, 7] = float("inf"), 5e4
    counters = layer.counters.clone()
    counters[1] += tokens
    sides = case.tail
    found = due(counters, case.sink, sides, local, unit, (0, 0))
    most = (int(found.new[0].max()), int(found.new[1].max()))
    return case.store, layer.to(device), new, Sealing(local, unit, most)


def sums_of(q: Tensor, heads: int, signed: bool) -> Observing:
    batch, _, _, dim = q.shape
    sums = torch.rand(batch, heads, dim, dtype=torch.float64).to(q.device)
    counts = torch.arange(heads * batch, dtype=torch.int32, device=q.device).view(heads, batch)
    return Observing(sums, counts, signed)


def one_by_one(q, new, counters, windows, runs, store, sealing, observing):
    append(*new, counters, windows, store)
    if observing is not None:
        observe(q, observing.sums, observing.counts, signed=observing.signed)
    out = decode_attention(q, counters, windows, runs, None, None, 0.125, 0.0, store)
    if sealing is not None:
        found = due(counters, store.sink, [x.shape[2] for x in windows[2:]], *sealing)
        run = split_runs(store, runs)[0]
        for at, side in enumerate(("keys", "values")):
            if sealing.most[at]:
                parts, fmt = (run.keys, run.values)[at], store.runs[0][at]
                fused_step.seal(
                    parts, run.table, found.count[at], found.new[at], windows[2 + at], found.index[at], None, fmt, side
                )
    return out


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8).cpu()


def copies(x):
    return x.clone() if isinstance(x, Tensor) else [y.clone() for y in x]


def compare(name, tokens, device, observes, seals, dtype=F16, seed=0, signed=False):
    store, (q, *held), new, sealing = given(name, tokens, dtype, device, seed)
    assert any(sealing.most)
    assert seals_with_steps(store, sealing.most)
    own, other = [[copies(x) for x in held] for _ in range(2)]
    seen = sums_of(q, 2, signed) if observes else None
    again = Observing(*copies(seen[:2]), signed) if observes else None
    sealed = sealing if seals else None
    expected = one_by_one(q, new, *own, store, sealed, seen)
    got = append_attend(q, *new, StepTensors(*other, store), 0.125, 0.0, sealed, again)
    assert got is not None
    assert got.shape == (q.shape[0], tokens, *got.shape[2:])
    got = got.transpose(1, 2)
    assert got.dtype == dtype
    assert torch.equal(bits(got), bits(expected))
    assert torch.equal(own[0], other[0])
    for a, b in zip(own[1] + own[2], other[1] + other[2], strict=True):
        assert torch.equal(bits(a), bits(b))
    if observes:
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(seen[:2], again[:2], strict=True))


@pytest.mark.parametrize(
    ("name", "tokens"), [*[(name, 1) for name in CASES], ("rotated", 3), ("values alone", 3), ("fp8", 3)]
)
def test_a_step_is_its_operations(triton_backend, name, tokens):
    compare(name, tokens, triton_backend, observes=False, seals=True)
    if triton_backend.type == "cuda":
        # From the second time on launches are remembered.
        for seed in (1, 2):
            compare(name, tokens, triton_backend, False, True, BF16, seed)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("seals", [False, True])
def test_steps_observe(triton_backend, seals, tokens):
    for seed in range(1 if tokens == 3 or triton_backend.type == "cpu" else 3):
        compare("by the token", tokens, triton_backend, True, seals, seed=seed, signed=seals)


def test_counters_say_what_was_sealed(triton_backend):
    """And rows with nothing due, here those within or at the end of their sink, are as they were."""
    store, (q, counters, windows, runs), new, sealing = given("by the token", 1, F16, triton_backend)
    before = [x.clone() for x in runs]
    append_attend(q, *new, StepTensors(counters, windows, runs, store), 0.125, 0.0, sealing)
    assert counters.tolist()[1:] == [[3, 5, 37, 46], [0, 1, 33, 42], [0, 1, 33, 42]]
    table = runs[0].cpu()
    written = {int(table[row, 0 if row == 1 else 1]) for row in (1, 2, 3)}
    for old, x in zip(before[1:], runs[1:], strict=True):
        changed = (bits(old) != bits(x)).view(x.shape[0], -1).any(1).nonzero().flatten().tolist()
        assert set(changed) == written


def test_what_no_compiler_takes_leaves_everything_as_it_was(triton_backend, monkeypatch):
    """Launches are compiled before the first of them is made."""
    lines = fused_step._launches()
    store, (q, counters, windows, runs), new, sealing = given("by the token", 1, F16, triton_backend)
    before = [x.clone() for x in (counters, *windows, *runs)]

    def fail(launch, tensors):
        raise RuntimeError("out of resource")

    monkeypatch.setattr(lines.Launch, "prepare", fail)
    lines.end_launch.cache_clear(), lines._step.cache_clear()
    with pytest.raises(RuntimeError, match="out of resource"):
        append_attend(q, *new, StepTensors(counters, windows, runs, store), 0.125, 0.0, sealing)
    for a, b in zip(before, (counters, *windows, *runs), strict=True):
        assert torch.equal(bits(a), bits(b))


@pytest.mark.parametrize(
    ("runs", "most", "expected"),
    [
        ("4t64p32/4t64p32", (1, 1), True),
        ("4t64p32/4t64p32", (FEW, FEW + 1), False),
        ("2c32p32/2t64p32", (0, 1), True),
        ("2c32p32/2t64p32", (32, 1), False),
        ("2c32p32/2t64p32n", (0, 1), False),
        ("2t32p32/2t32p32|4t32p32/4t32p32", (1, 1), False),
    ],
)
def test_what_steps_seal(runs, most, expected):
    assert seals_with_steps(dataclasses.replace(Case(), runs=runs).store, most) is expected


def test_sealing_in_the_end_is_sealing_a_tail(triton_backend):
    """The same once more, with what an eager layer would call otherwise."""
    store, (q, *held), new, sealing = given("fp8", 1, F16, triton_backend)
    (own, *_), other = held, [copies(x) for x in held]
    append_attend(q, *new, StepTensors(*held, store), 0.125, 0.0, sealing)
    append_attend(q, *new, StepTensors(*other, store), 0.125, 0.0)
    seal_tail(other[0], other[1], split_runs(store, other[2])[0], *sealing, store)
    assert torch.equal(own, other[0])
    for a, b in zip(held[2], other[2], strict=True):
        assert torch.equal(bits(a), bits(b))
