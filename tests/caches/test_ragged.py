"""First tokens of rows of any lengths, one row behind another: stored as if each row had come alone."""

import pytest
import torch

from hfkvq.caches.store import SIDES, KVStore, Ragged
from hfkvq.caches.store.windows import grow
from tests.caches.driver import DIM, HEADS, small

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
    for row, (start, tokens) in enumerate(zip(first, LENGTHS, strict=True)):
        own, alone = slice(start, start + tokens), KVStore(layout, scheme, like[:1], like[:1])
        alone.extend(keys[:, :, own], values[:, :, own], q_abs=None if q_abs is None else q_abs[row : row + 1])
        assert torch.equal(store.counters[:, row], alone.counters[:, 0])
        for side in SIDES:
            got = store.dense(side, max(LENGTHS))[row : row + 1, :, :tokens]
            assert torch.equal(got, alone.dense(side, tokens))
