"""Slots of requests: by hand, and the kernel against the reference over requests that come, go, share and wait."""

from __future__ import annotations

import random

import pytest
import torch

from hfkvq.kernels.claim import ROWS, claim, new_slots
from hfkvq.kernels.dispatch import reference
from tests.kernels.stores import numbers

PAGE = 128


def test_by_hand(backend):
    slots = new_slots(3, backend)

    def found(tables, lengths, **given):
        made = claim(torch.tensor(tables, dtype=torch.int32, device=backend), numbers(*lengths).to(backend), slots,
                     PAGE, len(lengths), **given)  # fmt: skip
        return made.found.T.tolist(), made

    # Two new requests and a row that pads the batch; the first of them fills nothing.
    rows, made = found([[5, 0], [7, 0], [0, 0]], [1, 1, 0])
    assert rows == [[0, 0, 0], [1, 0, 1], [3, 0, -1]]
    assert made.counters.tolist() == [[0] * 3, [1] * 3, [0] * 3, [0] * 3]
    assert made.again.tolist() == [1, 1, 1]
    assert made.full.tolist() == [0, 0, 0]
    assert made.run.tolist() == [[0], [0], [0]]
    # The second one alone, then both in another order, at the ends of their pages.
    assert found([[7, 0]], [2])[0] == [[1, 0, 1]]
    rows, made = found([[7, 0], [5, 0]], [128, 2])
    assert rows == [[1, 0, 1], [0, 0, 0]]
    assert made.full.tolist() == [128, 0]
    assert made.fills.tolist() == [0, -1]
    # Two go on behind block 7: the first has its slot, the other takes one, and what they share from the first's.
    rows, made = found([[7, 9], [7, 8]], [129, 129])
    assert rows == [[1, 0, 1], [2, 1, 1]]
    assert made.run.tolist() == [[9], [8]]
    assert made.start.tolist() == [128, 128]
    assert made.dues.tolist() == [1, -1]
    # One in the middle of its page that has no slot.
    assert int(slots[4]) == 0
    found([[6, 0]], [5])
    assert int(slots[4]) == 1


class Requests:
    """Requests of an engine with few blocks: they come, share prefixes, wait, are preempted and end."""

    def __init__(self, seed, count, blocks, columns):
        self.rng, self.count, self.columns = random.Random(seed), count, columns
        self.free, self.users, self.live, self.full = list(range(1, blocks)), {}, [], {}
        self.rng.shuffle(self.free)

    def take(self):
        block = self.free.pop()
        self.users[block] = 1
        self.full.pop(block, None)
        return block

    def leave(self, own):
        for block in own["blocks"]:
            self.users[block] -= 1
            if not self.users[block]:
                self.free.insert(0, block)
        self.live.remove(own)

    def begin(self):
        own = {"blocks": [], "held": 0, "prompt": self.rng.choice([0, 1, 1, 5, 100, 127, 128, 129, 200, 256, 300])}
        other = self.rng.choice(self.live) if self.live and self.rng.random() < 0.5 else None
        if other is not None:
            shared = min(self.rng.randrange(4), other["held"] // PAGE, self.columns - 1)
            own["blocks"], own["held"] = other["blocks"][:shared], shared * PAGE
            for block in own["blocks"]:
                self.users[block] += 1
        self.live.append(own)

    def batch(self):
        """Blocks, lengths, tokens before, and blocks that are filled by prompts; steps come first."""
        rng = self.rng
        for own in [own for own in self.live if rng.random() < 0.1]:
            self.leave(own)
        while len(self.live) < self.count and rng.random() < 0.7:
            self.begin()
        for own in self.live:
            own["new"] = max(1, min(own["prompt"], rng.choice([1, 64, 300])))
            own["prompt"] = max(0, own["prompt"] - own["new"])
        self.live.sort(key=lambda own: own["new"] > 1)
        for own in list(self.live):
            need = -(-(own["held"] + own["new"]) // PAGE) - len(own["blocks"])
            if need > len(self.free) or len(own["blocks"]) + need > self.columns:
                self.leave(own)
                continue
            own["blocks"] = own["blocks"] + [self.take() for _ in range(need)]
        # All that run are in each batch.
        runs = list(self.live)
        tables = [own["blocks"] + [0] * (self.columns - len(own["blocks"])) for own in runs]
        sealed = []
        for own in runs:
            own["before"] = own["held"]
            own["held"] += own["new"]
            if own["new"] > 1:
                sealed += own["blocks"][own["before"] // PAGE : own["held"] // PAGE]
        steps = sum(own["new"] == 1 for own in runs)
        return tables, [own["held"] for own in runs], [own["before"] for own in runs], sealed, steps


@pytest.mark.parametrize(("seed", "count", "columns"), [(0, 8, 6), (1, 3, 1), (2, 40, 5), (3, 150, 4)])
def test_kernel_is_reference(triton_backend, seed, count, columns):
    requests = Requests(seed, count, 4 * count, columns)
    other, own = new_slots(count, torch.device("cpu")), new_slots(count, triton_backend)
    dues = 0
    for number in range(60 if count < 100 else 12):
        tables, lengths, past, sealed, steps = requests.batch()
        if not tables:
            continue
        prompts = steps < len(tables)
        # Batches of steps alone are padded, as graphs are.
        padding = 0 if prompts else number % 3
        tables, lengths = tables + [[0] * columns] * padding, lengths + [0] * padding
        table, lengths = torch.tensor(tables, dtype=torch.int32), numbers(*lengths)
        given = {"past": numbers(*past), "sealed": numbers(*sealed)} if prompts else {}
        steps += padding
        expected = expected_of(table, lengths, other, steps, **given)
        given = {name: x.to(triton_backend) for name, x in given.items()}
        found = claim(table.to(triton_backend), lengths.to(triton_backend), own, PAGE, steps, **given)
        for x, y in zip([found.found, found.steps, found.run, *own], expected, strict=True):
            assert torch.equal(x.cpu(), y)
        slot = found.found[0].cpu()
        real = slot[lengths > 0].tolist()
        assert len(set(real)) == len(real)
        assert max(real) < count
        assert not int(own[4])
        dues += int(found.found[1].sum())
    assert dues or columns == 1


def expected_of(table, lengths, slots, steps, past=None, sealed=None):
    """Results of the reference for a batch."""
    found, rows = table.new_empty((3, len(table))), table.new_empty((ROWS, steps))
    run = table[:steps] if table.shape[1] == 1 else table.new_empty((steps, table.shape[1] - 1))
    reference("fill_claim")(table, lengths, past, sealed, slots, found, rows, run, PAGE)
    return [found, rows, run, *slots]
