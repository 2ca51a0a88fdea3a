"""Loose tokens: as many programs are launched as a row may have tokens behind its sink and what the page loop takes."""

from __future__ import annotations

import contextlib

import pytest
import torch

from hfkvq import get_scheme
from hfkvq.caches.store import MAX_STEP, SIDES, KVStore, Padding
from hfkvq.caches.store.routing import ColumnTags
from hfkvq.kernels import PageFormat, StoreFormat, decode_attention
from hfkvq.kernels.decode import sealed_count
from tests.kernels.stores import Case, assert_as_good_as_torch, attend, build

DIM = 16

SCHEMES = {
    "kitty": ("kitty", {"sink_length": 4, "local_length": 16, "page_size": 16}),
    "kitty-odd": ("kitty", {"sink_length": 3, "local_length": 37, "page_size": 8}),
    "kitty-bare": ("kitty", {"sink_length": 0, "local_length": 0, "page_size": 32}),
    "kitty-pro": ("kitty-pro", {"sink_length": 5, "local_length": 11, "page_size": 24}),
    "kivi-2": ("kivi-2", {"sink_length": 2, "local_length": 16, "group_size": 16}),
    "kivi-2-groups": ("kivi-2", {"sink_length": 0, "local_length": 32, "group_size": 8}),
    "kivi-4": ("kivi-4", {"sink_length": 7, "local_length": 8, "group_size": 8}),
    "kvarn": ("kvarn", {"sink_length": 4, "page_size": 16}),
    "mixkvq": ("mixkvq", {"sink_length": 4, "page_size": 16, "group_size": 8}),
    "mixkvq-page": ("mixkvq", {"sink_length": 0, "page_size": 16, "group_size": 16}),
    "saw-int4": ("saw-int4", {"sink_length": 3, "local_length": 5, "page_size": 16}),
    "saw-int4-bare": ("saw-int4", {"sink_length": 0, "local_length": 0, "page_size": 8}),
    "full": ("full", {"page_size": 16}),
    "triaxial": ("triaxial", {"sink_length": 4, "local_length": 8, "page_size": 16, "group_size": 8, "seal_unit": 8}),
}


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


class Life:
    """A store that is used at random, in all the ways that layers use one."""

    def __init__(self, name, seed):
        preset, knobs = SCHEMES[name]
        scheme = get_scheme(preset, **knobs)
        self.generator, self.past = torch.Generator().manual_seed(seed), []
        self.seen, self.hold = 0, 0
        empty = torch.zeros(3, 1, 0, DIM)
        self.store = KVStore(scheme.layout(DIM, DIM), scheme, empty, empty)

    def draw(self, low, high):
        """low..high, both included."""
        return int(torch.randint(low, high + 1, (1,), generator=self.generator))

    def tokens(self, count):
        return [torch.randn(3, 1, count, DIM, generator=self.generator) for _ in SIDES]

    def observed(self):
        """What schemes may ask for when they seal: queries, and tags of some widths."""
        queries = torch.rand(3, 1, DIM, generator=self.generator)
        tags = torch.randint(0, 10, (3, self.seen), generator=self.generator).to(torch.uint8)
        return queries, ColumnTags(tags)

    def extend(self, count):
        padding = None
        if not self.seen:
            lead = [0, self.draw(0, count), self.draw(0, count)]
            padding = Padding(torch.tensor(lead, dtype=torch.int32), frozenset(lead), None)
        self.seen += count
        self.store.extend(*self.tokens(count), padding, self.hold, *self.observed())

    def crop(self, count):
        # Some pages of several widths cannot be cut; then nothing has changed.
        with contextlib.suppress(NotImplementedError):
            self.store.crop(count, self.seen)
            self.store.write_pages()
            self.seen -= count

    def do(self):
        """Whatever comes next; its name."""
        what = ("push", "push", "push", "extend", "commit", "hold", "crop")[self.draw(0, 6)] if self.seen else "extend"
        count = 0
        if what == "push":
            count = (1, self.draw(1, MAX_STEP), MAX_STEP)[self.draw(0, 2)]
            # As layers do: to the tail while that has room.
            what = "push" if self.store.fits(count) else "extend"
        elif what == "extend":
            count = self.draw(1, 70)
        if what == "push":
            self.store.push(*self.tokens(count))
            self.seen += count
        elif what == "extend":
            self.extend(count)
        elif what == "commit":
            self.store.commit(self.hold, *self.observed())
        elif what == "hold":
            count = self.hold = (0, 3, 20, 40)[self.draw(0, 3)]
            self.store.reserve_tail(self.hold)
        else:
            count = self.draw(1, min(self.seen, (3, 20, 90)[self.draw(0, 2)]))
            self.crop(count)
        self.past.append(f"{what} {count}")
        return what


@pytest.mark.parametrize("name", SCHEMES)
def test_no_store_has_more_than_the_bound(name):
    """Prompts with padding, steps, seals that hold tokens back, and crops that reopen pages."""
    done, full = set(), 0
    for seed in range(5):
        life = Life(name, seed)
        for _ in range(24):
            done.add(life.do())
            store = life.store
            form, tails = store.format, [window.shape[2] for window in store.windows[2:]]
            sealed = [sealed_count(store.counters, side) for side in SIDES]
            for queries in range(1, MAX_STEP + 1):
                most = int(behind(store.row_lengths, *sealed, form, queries).max())
                bound = most_behind(form, *tails, queries)
                assert most <= bound, f"{queries} queries, seed {seed}, after {', '.join(life.past)}"
            waiting = [store.row_lengths - form.sink - own for own in sealed]
            full += any(int(own.max()) == tail for own, tail in zip(waiting, tails, strict=True))
    assert done == {"push", "extend", "commit", "hold", "crop"}
    assert full, "no tail was ever full"


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
        runs="4t32p32/4t32p32",
        queries=16,
        sink=3,
        tail=(1, 1),
        lengths=[49, 82],
        keys=[[45], [78]],
        values=[[45], [78]],
    ),
}


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
