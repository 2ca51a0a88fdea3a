"""Loose tokens: as many programs are launched as a row may have tokens behind its sink and what the page loop takes."""

from __future__ import annotations

import pytest
import torch

from hfkvq.caches.store import MAX_STEP
from hfkvq.kernels import PageFormat, StoreFormat, decode_attention
from tests.kernels.stores import Case, assert_as_good_as_torch, attend, build


def most_behind(form, key_tail, value_tail, queries):
    """What programs are launched for."""
    from hfkvq.kernels.triton.decode_formats import most_behind

    return most_behind(form, key_tail, value_tail, queries)


def behind(length, keys, values, form, queries):
    """Tokens of rows that no program for pages takes, from the first block on, without a mask.

    As `attend.loop_tokens` counts them. Where tokens have positions, others take what is sealed in pages that the loop
    does not take.
    """
    from hfkvq.kernels.triton.decode_formats import BLOCK, takes_open

    rest = (length - form.sink).clamp(min=0)
    if not form.ordered:
        return rest - keys
    both = torch.minimum(keys, values)
    if queries > 1:
        both = torch.minimum(both, (length - queries - form.sink + 1).clamp(min=0))
    unit = BLOCK if takes_open(*form.runs[0]) else form.runs[0][0].page_size
    return rest - both // unit * unit


# Formats, and how much more is launched for than tails and pages make necessary.
FORMS = {
    "per channel": ("2c16p16", "2t8p16", 0),
    "per channel, in groups": ("2c8p16", "2t8p16", 0),
    "channels of 16 bits": ("16c16p16", "4t16p16", 0),
    "per channel, values by the page": ("4c16p16n", "2t16p16n", 0),
    "per token": ("4t16p16", "4t16p16", 0),
    "fp8": ("8t16p16", "8t16p16", 0),
    "whole": ("16t1p16", "16t1p16", 0),
    "keys whole": ("16t1p16", "4t16p16", 0),
}


@pytest.mark.parametrize("tails", [(16, 16), (31, 16), (16, 47), (40, 33)])
@pytest.mark.parametrize("name", FORMS)
def test_every_row_that_tails_allow(name, tails):
    """All lengths and counts at once: tails need but hold what is not sealed, and whole pages are sealed as such."""
    *specs, spare = FORMS[name]
    formats = [PageFormat.parse(spec) for spec in specs]
    form = StoreFormat((tuple(formats),), 3)
    length, *counts = torch.meshgrid(torch.arange(100), torch.arange(97), torch.arange(97), indexing="ij")
    rest = (length - form.sink).clamp(min=0)
    legal = torch.ones_like(rest, dtype=torch.bool)
    for count, fmt, tail in zip(counts, formats, tails, strict=True):
        legal &= (count <= rest) & (rest - count <= tail)
        if fmt.whole:
            legal &= count % fmt.page_size == 0
    row = [x[legal] for x in (length, *counts)]
    for queries in range(1, MAX_STEP + 1):
        assert int(behind(*row, form, queries).max()) <= most_behind(form, *tails, queries)
    most, bound = int(behind(*row, form, 1).max()), most_behind(form, *tails, 1)
    assert most <= bound <= most + spare


def at_the_bound(**knobs):
    return Case(heads=1, share=2, head_dim=32, value_dim=32, dtype=torch.float16, **knobs)


# Each needs its last program for one token or few: with a bound of a page less, or that forgot how many queries there
# are, nothing would take them.
AT_THE_BOUND = {
    "values in the tail": at_the_bound(
        runs="2c32p32/2t32p32", sink=0, tail=(33, 66), lengths=[97, 40], keys=[[64], [32]], values=[[31], [0]]
    ),
    "keys in the tail": at_the_bound(
        runs="4t32p32/4t32p32", sink=5, tail=(66, 16), lengths=[102, 3], keys=[[31], [0]], values=[[90], [0]]
    ),
    "pages that are almost full": at_the_bound(
        runs="4t32p32/2t32p32", sink=0, tail=(2, 2), lengths=[97, 64], keys=[[95], [63]], values=[[95], [62]]
    ),
    "three queries": at_the_bound(
        runs="4t32p32/2t32p32", queries=3, sink=3, tail=(1, 1), lengths=[68, 37], keys=[[65], [33]], values=[[64], [33]]
    ),
    "sixteen queries": at_the_bound(
        runs="4t32p32/4t32p32", queries=16, sink=3, tail=(1, 1), lengths=[49, 82], keys=[[45], [78]],
        values=[[45], [78]],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", AT_THE_BOUND)
def test_rows_at_the_bound_are_attended_to(backend, name):
    """All of their tokens: each weighs about as much as any other."""
    case = AT_THE_BOUND[name]
    layer = build(case)
    got = decode_attention(*layer.to(backend), None, None, 0.1, 0.0, case.store)
    assert_as_good_as_torch(got, attend(layer, torch.float64, 0.1), attend(layer, case.dtype, 0.1))


@pytest.mark.parametrize("name", AT_THE_BOUND)
def test_rows_at_the_bound_need_what_is_launched(name):
    """The cases above would pass with any bound otherwise, or with a kernel that has none."""
    from hfkvq.kernels.triton.decode_formats import BLOCK, is_served

    case = AT_THE_BOUND[name]
    assert is_served(case.store.spec, case.head_dim, case.value_dim, case.dtype)
    row = torch.tensor(case.lengths), torch.tensor(case.keys)[:, 0], torch.tensor(case.values)[:, 0]
    most = int(behind(*row, case.store, case.queries).max())
    bound = most_behind(case.store, *case.tail, case.queries)
    assert most % BLOCK > 0
    assert -(-most // BLOCK) == -(-bound // BLOCK)
