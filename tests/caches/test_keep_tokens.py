"""`keep_tokens`: of any layout, each row keeps the tokens it is told to, and goes on as rows of that length do."""

from __future__ import annotations

import pytest
import torch

from hfkvq.caches.store import SIDES, KVStore, Padding
from hfkvq.caches.store.requantize import keep_tokens
from hfkvq.caches.store.routing import ColumnTags
from hfkvq.caches.store.row_lengths import RowState
from hfkvq.caches.tags import parse_tag
from hfkvq.kernels.arguments import AttentionArguments
from hfkvq.kernels.decode import LENGTH, START, sealed_count
from tests.caches.driver import DIM, HEADS, SHARE, Questions, assert_close, small

OBS = parse_tag("older|text|obs")
LAYOUTS = {
    **{name: small(name) for name in ("kitty-pro", "kivi-2", "saw-int4", "full", "kvarn", "mixkvq")},
    "kitty, odd windows": small("kitty-pro", sink_length=3, local_length=5),
    "int4, sink": small("int4", sink_length=4, local_length=5),
    "arkv": small("arkv"),
}
KINDS = [(name, headwise) for name in LAYOUTS for headwise in (False, True) if (name, headwise) != ("arkv", False)]


class Life:
    """A store that is fed, and the tokens of each of its rows beside it: vectors and logical columns."""

    def __init__(self, name, headwise=False, rows=2, seed=0):
        self.generator, self.seen, self.scheme = torch.Generator().manual_seed(seed), 0, LAYOUTS[name]
        empty = torch.zeros(rows, HEADS, 0, DIM)
        layout = self.scheme.layout(DIM, DIM)
        self.store = KVStore(layout, self.scheme, empty, empty, headwise=headwise)
        self.rows, self.fold = rows, getattr(self.store, "fold", 1)
        self.tokens = {side: torch.zeros(rows * self.fold, HEADS // self.fold, 0, DIM) for side in SIDES}
        # Of each row of the store, the columns that its tokens came in, and those in which they are found.
        self.held, self.places = ([[] for _ in range(rows * self.fold)] for _ in range(2))

    def drawn(self, *shape):
        return torch.randn(*shape, generator=self.generator)

    def take(self, new):
        for side, x in zip(SIDES, new, strict=True):
            x = self.store.folded(x) if self.fold > 1 else x
            self.tokens[side] = torch.cat([self.tokens[side], x], 2)

    def prompt(self, count, lead=(0, 0)):
        new = [self.drawn(self.rows, HEADS, count, DIM) for _ in SIDES]
        padding, tags = None, None
        if any(lead):
            padding = Padding(torch.tensor(lead, dtype=torch.int32), frozenset(lead), None)
        if "tags" in self.scheme.needs:
            codes = torch.full((self.rows, self.seen + count), OBS, dtype=torch.uint8)
            codes[:, ::5] = 255
            tags = ColumnTags(codes)
        self.store.extend(*new, padding, 0, None, tags)
        self.take(new)
        self.come(count, lead)

    def come(self, count, lead=None):
        for columns in (self.held, self.places):
            for row, own in enumerate(columns):
                own += range(self.seen + (0 if lead is None else lead[row // self.fold]), self.seen + count)
        self.seen += count

    def step(self, count=1):
        new = [self.drawn(self.rows, HEADS, count, DIM) for _ in SIDES]
        if self.store.fits(count):
            self.store.push(*new)
            self.store.commit()
        else:
            self.store.extend(*new)
        self.take(new)
        self.come(count)

    def keep(self, share=0.5, newest=0, masks=None):
        """Forgets tokens at random, but for the newest; returns what was kept of the tokens that each row had."""
        keep = torch.zeros(len(self.held), max(map(len, self.held)), dtype=torch.bool)
        for row, held in enumerate(self.held):
            own = torch.rand(len(held), generator=self.generator) < share
            own[len(held) - newest :] = True
            keep[row, : len(held)] = own if masks is None else masks[row]
        done = keep_tokens(self.store, keep)
        for columns in (self.held, self.places):
            for own, stay in zip(columns, keep.tolist(), strict=True):
                own[:] = [column for column, stays in zip(own, stay, strict=False) if stays]
        sealed = sealed_count(self.store.counters, "keys").tolist()
        for own, count in zip(self.places, sealed, strict=True):
            # Sealed tokens that have positions stay where they were; all others come to the newest columns.
            some = count if not self.store.format.ordered and not self.store.format.sink else 0
            own[some:] = range(self.seen - len(own) + some, self.seen)
        return done

    def dense(self, side):
        """What is stored of each row's tokens, oldest first: a list of (H, n, D)."""
        dense = self.store.dense(side, self.seen)
        dense = self.store.folded(dense) if self.fold > 1 else dense
        return [x[:, own] for x, own in zip(dense, self.places, strict=True)]

    def check(self):
        """Counts, what the host knows of them, dense tensors, and attention."""
        counters = self.store.counters
        lengths = torch.tensor([len(held) for held in self.held])
        assert torch.equal(counters[LENGTH].long(), lengths)
        assert ((counters[START] + counters[LENGTH]) == self.seen).all()
        sealed = [sealed_count(counters, side).tolist() for side in SIDES]
        assert {RowState(*row) for row in zip(lengths.tolist(), *sealed, strict=True)} <= self.store.states
        for side, tail, count in zip(SIDES, self.store.windows[2:], sealed, strict=True):
            rest = (lengths - self.store.layout.sink).clamp(min=0) - torch.tensor(count)
            assert ((rest >= 0) & (rest <= tail.shape[2])).all()
            for row, (got, held) in enumerate(zip(self.dense(side), self.held, strict=True)):
                expected = self.tokens[side][row][:, held]
                # Whatever quantization has done to it, each vector is nearest to its own token.
                distance = torch.cdist(*(x.transpose(0, 1).flatten(1) for x in (got, expected)))
                assert distance.argmin(1).tolist() == list(range(len(held)))
        self.attend()

    def attend(self):
        query = self.drawn(self.rows, HEADS * SHARE, 1, DIM)
        got = self.store.attend(query, AttentionArguments(DIM**-0.5))
        got = got.view(len(self.held), -1, SHARE, DIM)
        query = query.view(len(self.held), -1, SHARE, DIM)
        keys, values = self.dense("keys"), self.dense("values")
        for row in range(len(self.held)):
            if self.held[row]:
                weights = (query[row] @ keys[row].mT * DIM**-0.5).softmax(-1)
                assert_close(got[row], weights @ values[row], 1e-4)


# Prompts, by turns: of whole pages, within the sink, and just longer than the windows.
@pytest.mark.parametrize(
    ("name", "headwise", "prompt"), [(*each, (133, 3, 133, 40)[at % 4]) for at, each in enumerate(KINDS)]
)
def test_rows_keep_what_they_are_told(name, headwise, prompt):
    """Twice, among steps and prompts that seal pages before and after; rows begin with padding, and differ in all."""
    life = Life(name, headwise)
    life.prompt(prompt, (0, prompt // 2))
    for _ in range(5):
        life.step()
    life.check()
    for share, newest in ((0.6, 3), (0.4, 1)):
        with Questions() as watch:
            assert life.keep(share, newest)
        # The reference of KVarN's factors asks whether any page is new, which its kernel does not.
        assert len(watch.asked) <= 1 + (name == "kvarn")
        life.check()
        for _ in range(12):
            life.step()
        life.prompt(37)
        life.check()


@pytest.mark.parametrize(("name", "headwise"), KINDS)
def test_what_is_not_sealed_by_pages_keeps_its_bits(name, headwise):
    """Tokens of formats per token, of windows, and of pages of which all tokens stay together."""
    life = Life(name, headwise)
    life.prompt(120)
    for _ in range(9):
        life.step()
    before, own = {side: life.dense(side) for side in SIDES}, [list(held) for held in life.held]
    runs = life.store.format.runs
    life.keep(0.6, 3)
    for at, side in enumerate(SIDES):
        whole = any(pair[at].whole for pair in runs)
        for old, new, was, held in zip(before[side], life.dense(side), own, life.held, strict=True):
            old = old[:, [was.index(column) for column in held]]
            # What has left a page is quantized again, or whole hereafter.
            assert (old - new).square().mean() < 0.2 * old.square().mean()
            assert whole or torch.equal(old, new)
    # A page's length of the oldest tokens goes: others stay together.
    before, count = {side: life.dense(side) for side in SIDES}, [len(held) for held in life.held]
    page, sink = runs[0][0].page_size, life.store.layout.sink
    sealed = {side: (sealed_count(life.store.counters, side) // page * page).tolist() for side in SIDES}
    ranks = torch.arange(max(count))
    if min(min(x) for x in sealed.values()) >= page:
        life.keep(masks=[((ranks < sink) | (ranks >= sink + page))[:n] for n in count])
        for side in SIDES:
            for old, new, pages in zip(before[side], life.dense(side), sealed[side], strict=True):
                assert torch.equal(old[:, sink + page : sink + pages], new[:, sink : sink + pages - page])


@pytest.mark.parametrize("name", ["kitty-pro", "int4, sink"])
def test_all_and_nothing(name):
    """All tokens stay: nothing happens. None stays: the rows are empty, and take tokens again."""
    life = Life(name)
    life.prompt(60)
    state = life.store.state
    assert not life.keep(1.1)
    assert life.store.state is state
    assert life.keep(-1.0)
    assert life.store.counters[LENGTH].tolist() == [0, 0]
    assert life.store.state.dropped.tolist() == [60, 60]
    life.prompt(50)
    life.step()
    life.check()
    assert not keep_tokens(Life(name).store, torch.zeros(2, 0, dtype=torch.bool))
