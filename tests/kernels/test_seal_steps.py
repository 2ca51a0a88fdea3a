"""Steps seal a few tokens from the tail: to the bit what the reference does."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from torch import Tensor

from hfkvq.kernels import append, due, seal_tail
from hfkvq.kernels.dispatch import _enabled
from hfkvq.kernels.pages import split_runs
from tests.kernels import test_seal
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
    "all at once": (
        {"runs": "4t64p32/4t64p32", "keys": [[0], [0], [20], [29]], "values": [[0], [0], [32], [41]]}, (0, 0), (1, 1),
    ),
}  # fmt: skip
"""What there is, newest tokens that stay, and tokens that are sealed together."""


def given(name, tokens, dtype, seed=0):
    """A layer, new tokens, and what is to be sealed: tokens that stay, units, and the most of a row."""
    knobs, local, unit = CASES[name]
    case = Case(**{"tail": (32, 32), "pages": 3, "queries": tokens, "dtype": dtype, **ROWS, **knobs})
    layer = build(case, seed)
    new = [torch.randn(4, tokens, case.heads, dim).to(dtype).transpose(1, 2) for dim in (case.head_dim, case.value_dim)]
    # What is no number, or too large for f16 as it is stored.
    for x in new:
        x[3, 0, -1, 5], x[2, 1, 0, 7] = float("inf"), 5e4
    counters = layer.counters.clone()
    counters[1] += tokens
    found = due(counters, case.sink, case.tail, local, unit, (0, 0))
    return layer, new, (local, unit, (int(found.new[0].max()), int(found.new[1].max())))


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8).cpu()


def on(device, layer):
    """Copies of counters, windows and runs."""
    return [[y.clone() for y in x] if isinstance(x, list) else x.clone() for x in layer.to(device)[1:]]


def take(device, new, layer, sealing, store):
    """Appends and seals, in place."""
    counters, windows, runs = layer
    append(*(x.to(device) for x in new), counters, windows, store)
    seal_tail(counters, windows, split_runs(store, runs)[0], *sealing, store)


@pytest.mark.parametrize(
    ("name", "tokens"), [*[(name, 1) for name in CASES], ("rotated", 3), ("values alone", 3), ("fp8", 3)]
)
def test_kernels_seal_as_the_reference(triton_backend, name, tokens):
    """To the bit, but for the payload of NaN."""
    cpu = torch.device("cpu")
    for seed, dtype in enumerate((F16, BF16, BF16) if triton_backend.type == "cuda" else (F16,)):
        layer, new, sealing = given(name, tokens, dtype, seed)
        assert any(sealing[2])
        got, expected = on(triton_backend, layer), on(cpu, layer)
        take(triton_backend, new, got, sealing, layer.case.store)
        with _enabled("cpu", enabled=False):
            take(cpu, new, expected, sealing, layer.case.store)
        assert torch.equal(got[0].cpu(), expected[0])
        for a, b in zip([*got[1], *got[2]], [*expected[1], *expected[2]], strict=True):
            assert test_seal.same(a.cpu(), b)


def test_counters_say_what_was_sealed(backend):
    """And rows with nothing due, here those within or at the end of their sink, are as they were."""
    layer, new, sealing = given("by the token", 1, F16)
    counters, _, runs = own = on(backend, layer)
    before = [x.clone() for x in runs]
    take(backend, new, own, sealing, layer.case.store)
    assert counters.tolist()[1:] == [[3, 5, 37, 46], [0, 1, 33, 42], [0, 1, 33, 42]]
    table = runs[0].cpu()
    written = {int(table[row, 0 if row == 1 else 1]) for row in (1, 2, 3)}
    for old, x in zip(before[1:], runs[1:], strict=True):
        changed = (bits(old) != bits(x)).view(x.shape[0], -1).any(1).nonzero().flatten().tolist()
        assert set(changed) == written


def test_a_seal_that_fails_is_not_counted(backend, monkeypatch):
    """That of keys was done, that of values was not: the next try does both."""
    layer, new, sealing = given("by the token", 1, F16)
    store, (counters, windows, runs) = layer.case.store, on(backend, layer)
    module, sealed = import_module("hfkvq.kernels.seal"), []
    real = module.seal

    def fails(*asked):
        sealed.append(asked[8])
        if asked[8] == "values":
            raise RuntimeError("out of resources")
        real(*asked)

    append(*(x.to(backend) for x in new), counters, windows, store)
    before = counters.clone()
    monkeypatch.setattr(module, "seal", fails)
    with pytest.raises(RuntimeError, match="out of resources"):
        seal_tail(counters, windows, split_runs(store, runs)[0], *sealing, store)
    assert sealed == ["keys", "values"]
    assert torch.equal(counters, before)
