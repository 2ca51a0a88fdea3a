"""Forecasts of rows, against a plain count of each row's tokens."""

import random

import pytest
import torch

from hfkvq.caches.store import SIDES, KVStore, Ragged
from hfkvq.caches.store.row_lengths import RowState, WindowSizes, forecast
from hfkvq.caches.store.windows import grow
from tests.caches.driver import DIM, HEADS, feed, make, row, small


def sealed_by_hand(length: int, sink: int, local: int, unit: int, sealed: int) -> int:
    """Tokens behind the sink that are sealed once whole units have left the window; nothing is taken back."""
    count = sealed
    while length - sink - local >= count - count % unit + unit:
        count += unit - count % unit
    return count


def test_a_forecast_counts_every_row():
    chance = random.Random(0)
    for _ in range(300):
        sizes = WindowSizes(
            chance.choice([0, 4, 32]),
            (chance.choice([0, 8, 64]), chance.choice([0, 8, 64])),
            (chance.choice([1, 16, 32]), chance.choice([1, 16, 32])),
        )
        states = set()
        for _ in range(chance.randint(1, 4)):
            length = chance.randint(0, 200)
            sealed = [
                sealed_by_hand(length, sizes.sink, local, unit, 0)
                for local, unit in zip(sizes.local, sizes.unit, strict=True)
            ]
            states.add(RowState(length, *sealed))
        tokens, hold = chance.randint(0, 70), chance.choice([0, 0, 32, 100])
        found = forecast(frozenset(states), sizes, tokens, hold)
        joined, after, slots, due = set(), set(), [0, 0], [0, 0]
        for state in states:
            length = state.length + tokens
            now = []
            for at, (local, unit, sealed) in enumerate(zip(sizes.local, sizes.unit, state[1:], strict=True)):
                now.append(sealed_by_hand(length, sizes.sink, max(local, hold), unit, sealed))
                due[at] = max(due[at], now[at] - sealed)
                # New tokens pass through the tail before any is known to belong in the sink.
                slots[at] = max(slots[at], max(state.length - sizes.sink, 0) + tokens - sealed)
            joined.add(RowState(length, *state[1:]))
            after.add(RowState(length, *now))
        assert (found.appended, found.sealed) == (joined, after)
        assert (found.tail_slots, found.due) == (tuple(slots), tuple(due))
        assert found.most_sealed == max(max(row[1:]) for row in after)


@pytest.mark.parametrize("first", range(1, 8))
def test_a_prompt_goes_on_wherever_the_sink_is_filled(first):
    """Prompts that begin before, at and behind the sink's last slot leave what one prompt leaves, token by token."""
    own, dense = row(1, 60), []
    for chunks in ([60], [first, 60 - first]):
        layer = make(small("int4"))
        feed(layer, [own], chunks)
        dense.append([layer.dense("keys"), layer.dense("values")])
    for one, other in zip(*dense, strict=True):
        assert torch.equal(one, other)


# First tokens of rows of any lengths, one row behind another.


LENGTHS = (70, 3, 41, 1, 17)


@pytest.mark.parametrize("name", ["kitty-pro", "best-2.5", "kivi-2", "kvarn", "mixkvq", "saw-int4"])
def test_rows_are_stored_as_if_each_came_alone(name):
    torch.manual_seed(0)
    scheme = small(name)
    layout, first = scheme.layout(DIM, DIM), [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
    keys, values = torch.randn(2, 1, HEADS, sum(LENGTHS), DIM).bfloat16()
    q_abs = torch.rand(len(LENGTHS), HEADS, DIM) if "query" in scheme.needs else None
    like = keys.expand(len(LENGTHS), -1, -1, -1)
    store = KVStore(layout, scheme, like, like)
    store.state = store.state.replace(runs=grow(store.state, 0, 8).runs)
    for side in SIDES:
        store.grow_tail(side, store.tail_limit[side], True)
    store.extend_ragged(keys, values, Ragged(first, LENGTHS, keys.device), q_abs)
    for at, (start, tokens) in enumerate(zip(first, LENGTHS, strict=True)):
        own, alone = slice(start, start + tokens), KVStore(layout, scheme, like[:1], like[:1])
        alone.extend(keys[:, :, own], values[:, :, own], q_abs=None if q_abs is None else q_abs[at : at + 1])
        assert torch.equal(store.counters[:, at], alone.counters[:, 0])
        for side in SIDES:
            got = store.dense(side, max(LENGTHS))[at : at + 1, :, :tokens]
            assert torch.equal(got, alone.dense(side, tokens))
