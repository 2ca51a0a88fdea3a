"""A step's tokens in windows and pages: the kernels against what they are one after another."""

from __future__ import annotations

import pytest
import torch

from hfkvq.kernels import StoreFormat
from hfkvq.kernels.claim import Claimed
from hfkvq.kernels.dispatch import reference
from hfkvq.kernels.norms import Balance
from hfkvq.kernels.take import take_page, take_token
from tests.kernels.stores import numbers, on

HEADS, QUERY_HEADS, DIM, PAGE, PAGES = 2, 4, 64, 128, 20

TOKENS = ["k64;v0;4t64p128f2/4t64p128", "k0;v64;4t32p128/2t64p128", "k0;v0;4t64p128/4t64p128"]
WHOLE = [
    ("k0;v64;2c128p128f4+4x16/2t64p128", "error", True),
    ("k0;v0;2c64p128+4x16/2t64p128", "k_abs", True),
    ("k0;v0;2c128p128+4x8/2t32p128", "k_abs", False),
    # Minutes under the interpreter.
    pytest.param(("k0;v64;2c128p128f4+4x16/2t64p128t", "error", True), marks=pytest.mark.gpu),
    ("k64;v64;4c128p128/4t64p128", "", False),
    ("k64;v64;4c128p128n/2t64p128n", "", False),
]


def new_tokens(rows, dim, dtype):
    """Queries, keys and values (B, H, 1, D), parts of one projection."""
    heads = QUERY_HEADS, HEADS, HEADS
    whole = torch.randn(rows, sum(heads) * dim).to(dtype)
    return [x.unflatten(1, (-1, dim))[:, :, None] for x in whole.split([n * dim for n in heads], 1)]


def pages_of(form, dim, dtype):
    """Tensors of both sides' pages, with something in them."""
    found = []
    for fmt, side in zip(form.runs[0], ("keys", "values"), strict=True):
        shapes = fmt.shapes(side, HEADS, dim)
        own = {name: torch.randint(1, 9, (PAGES, *shape)).to(kind or dtype) for name, (shape, kind) in shapes.items()}
        for name in {"high_index", "full_index"} & set(own):
            # A channel is raised once: of two codes for one channel either may be read.
            order = torch.rand(*own[name].shape[:-1], dim).argsort(-1)
            own[name] = order[..., : own[name].shape[-1]].to(own[name].dtype)
        found.append(list(own.values()))
    return found


def table_of(rows, columns):
    return torch.randperm(PAGES)[: rows * columns].view(rows, columns).int()


@pytest.mark.parametrize("spec", TOKENS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tokens_are_appended_and_sealed(triton_backend, spec, dtype):
    """Rows in the middle of a page, at its ends, in its slot 0, and one that pads the batch."""
    store = StoreFormat.parse(f"s0;{spec}")
    lengths = numbers(1, 128, 129, 300, 0)
    _, keys, values = new_tokens(5, DIM, dtype)
    tails = [torch.randn(7, HEADS, 16, DIM).to(dtype) for _ in range(2)]
    parts, table = pages_of(store, DIM, dtype), table_of(5, 3)

    def run(take, device, store):
        own_tails, own = on(device, [x.clone() for x in tails]), [on(device, [x.clone() for x in p]) for p in parts]
        given = on(device, [keys, values, lengths])
        take(*given, own_tails, own, table.to(device), store)
        return [x.cpu() for x in (*own_tails, *own[0], *own[1])]

    expected, found = run(reference("take_token"), "cpu", store), run(take_token, triton_backend, store)
    assert all(map(torch.equal, found, expected))
    before = [*tails, *parts[0], *parts[1]]
    assert not any(map(torch.equal, found, before))


def claimed(lengths, slots, dues, spare, device):
    """Rows as `claim` makes them, where the map of slots is known."""
    lengths = numbers(*lengths)
    past = (lengths - 1).clamp(min=0)
    start, slot = past // PAGE * PAGE, numbers(*slots)
    due, source = numbers(*[x is not None for x in dues]), numbers(*[-1 if x is None else x for x in dues])
    full = (lengths % PAGE == 0) & (slot < spare)
    lists = []
    for chosen in (full, due > 0):
        own = chosen.nonzero()[:, 0].tolist()
        lists.append(numbers(*own, *[-1] * (len(lengths) - len(own))))
    before = (start - PAGE).clamp(min=0)
    steps = torch.stack([past * 0, past + 1, before, before, (past == start).int(), start, full * PAGE, *lists]).int()
    steps = steps.to(device)
    return Claimed(torch.stack([slot, due, source]).to(device), steps, *steps[4:].unbind(), slot[:, None].to(device))


@pytest.mark.interpreted(turns=2, over=("spec", "dtype"))
@pytest.mark.parametrize("spec", WHOLE)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_pages_are_filled_sealed_and_restored(triton_backend, spec, dtype):
    """Rows in a first page and in others, some of them full, and rows that lack their first page.

    One takes it from a slot whose last token comes in this step, one from a page, one from a slot that is whole.
    """
    name, rule, weighs = spec
    store = StoreFormat.parse(f"s128;{name}")
    spare = 9
    lengths, slots = (5, 128, 256, 129, 257, 129, 300, 384, 0), (4, 0, 7, 2, 5, 1, 6, 3, spare)
    rows, dues = len(lengths), (None, None, None, 0, -1, 7, None, None, None)
    query, keys, values = new_tokens(rows, DIM, dtype)
    windows = [torch.randn(2 * spare + 2, HEADS, PAGE, DIM).to(dtype) for _ in range(2)]
    parts, table = pages_of(store, DIM, dtype), torch.arange(rows * 2).view(rows, 2).int()
    table = torch.cat([table, table[:, :1] * 0 + 19], 1)
    sums = [torch.rand(spare + 1, HEADS, DIM).double(), torch.randint(1, 50, (HEADS, spare + 1)).int()]
    balance = Balance(2, "error"), Balance(1, "deviation" if store.runs[0][1].normed else "error")

    def run(take, device, restores):
        own = [on(device, [x.clone() for x in each]) for each in (windows, *parts, sums if weighs else [])]
        given, made = on(device, [query, keys, values]), claimed(lengths, slots, dues, spare, device)
        take(*given, made, own[0], own[1:3], table.to(device), own[3], store, rule, balance, restores)
        return [x.cpu() for each in own for x in each]

    before = [*windows, *parts[0], *parts[1], *(sums if weighs else [])]
    for restores in (True, False):
        expected, found = run(reference("take_page"), "cpu", restores), run(take_page, triton_backend, restores)
        for x, y in zip(found, expected, strict=True):
            # Padding rows share a window, which no row reads.
            assert torch.equal(x, y)
        assert not any(map(torch.equal, found, before))
        first = found[0][:spare]
        assert torch.equal(first[2], first[0]) == restores
        assert torch.equal(first[1], first[7]) == restores
