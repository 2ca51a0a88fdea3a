"""Steps over a buffer, as recorded ones take them, hold to the bit what the operations one by one would."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hfkvq import get_scheme
from hfkvq.caches.attention.interface import hfkvq_attention, hfkvq_mask
from hfkvq.caches.steps.step_buffer import StepBuffer
from hfkvq.kernels.step import ops
from tests.caches.driver import counted, make, small

MODULE = SimpleNamespace(is_causal=True, num_key_value_groups=4)
HEADS, SHARE = 2, 4
PRESETS = ("kitty-pro", "kivi-2", "mixkvq", "saw-int4", "int4", "full", "triaxial", "kvarn", "kivi-4", "arkv")


def states(rows, tokens, dim, dtype, device, generator, odd=False):
    """Queries, keys and values; if odd, values that begin two bytes behind what a kernel would like."""
    made = [torch.randn(rows, n, tokens, dim, generator=generator) for n in (SHARE * HEADS, HEADS, HEADS)]
    queries, keys, values = (x.to(device, dtype) for x in made)
    if odd:
        wide = torch.empty(values.numel() + 1, device=device, dtype=dtype)[1:].view(values.shape)
        values = wide.copy_(values)
    return queries, keys, values


def padded(pads, columns, device):
    """The mask of a step, as models are given it: rows begin with padding."""
    visible = torch.arange(columns, device=device) >= torch.tensor(pads, device=device)[:, None]
    return hfkvq_mask(len(pads), 1, columns, q_offset=columns - 1, attention_mask=visible.long())


def padded_prompt(layer, given, pads):
    """A prompt of rows that begin with padding."""
    queries, keys, values = given
    tokens = keys.shape[2]
    visible = torch.arange(tokens, device=keys.device) >= torch.tensor(pads, device=keys.device)[:, None]
    mask = visible[:, None, None, :] & torch.ones(tokens, tokens, dtype=torch.bool, device=keys.device).tril()
    hfkvq_attention(MODULE, queries, *layer.update(keys, values), mask, scaling=0.1)


def step(layer, given, mask=None):
    queries, keys, values = given
    return hfkvq_attention(MODULE, queries, *layer.update(keys, values), mask, scaling=0.1)[0]


def assert_same(one, other):
    """The same tokens, in the same pages, and the same statistics."""
    assert one.store.states == other.store.states
    assert torch.equal(counted(one).counters, counted(other).counters)
    for side in ("keys", "values"):
        assert torch.equal(one.dense(side), other.dense(side))
    statistics = [[] if x.queries is None else x.queries.tensors() for x in (one, other)]
    for a, b in zip(*statistics, strict=True):
        assert torch.equal(a, b)


@pytest.fixture
def taken(monkeypatch):
    """How many steps have gone over a buffer, and how many of them with a mask."""
    counts, run = {"steps": 0, "masked": 0}, StepBuffer.run

    def noted(self, query, arguments):
        out = run(self, query, arguments)
        counts["steps"] += out is not None
        counts["masked"] += out is not None and arguments.mask is not None
        return out

    monkeypatch.setattr(StepBuffer, "run", noted)
    return counts


@pytest.mark.parametrize(("low_bits", "pads"), [(8, None), (4, [0, 9])])
def test_evicting_layers_trim_between_such_steps(low_bits, pads, taken):
    """Of ARKV: every step in which no trim may be due, and after trims, tokens that each head has to itself."""
    scheme, generator = small("arkv", budget_tokens=40, low_bits=low_bits), torch.Generator().manual_seed(0)
    one, other = make(scheme), make(scheme, recordable=False)
    given = states(2, 37, 32, torch.float32, "cpu", generator)
    for layer in (one, other):
        padded_prompt(layer, given, pads or [0, 0])
    trims = set()
    for columns in range(38, 120):
        given, mask = states(2, 1, 32, torch.float32, "cpu", generator), pads and padded(pads, columns, "cpu")
        torch.testing.assert_close(step(one, given, mask), step(other, given, mask))
        trims.add(one.eviction.trim_at)
    assert one.evicted
    assert len(trims) > 4
    # A trim looks at every step that may need one.
    assert 82 > taken["steps"] > 50
    assert taken["masked"] == (taken["steps"] if pads else 0)
    assert_same(one, other)


def fails_at(monkeypatch, which, of, name):
    """Lets the call of that number fail."""
    calls, real = [], getattr(of, name)

    def call(*given, **named):
        calls.append(given)
        if len(calls) == which:
            raise torch.OutOfMemoryError("none left")
        return real(*given, **named)

    monkeypatch.setattr(of, name, call)
    return calls


# What fails before the query is counted leaves it uncounted, by which MixKVQ weighs channels.
FAILURES = [
    (name, which, of)
    for name in ("saw-int4", "arkv", "mixkvq")
    for which, of in ((1, "advance"), (1, "decode_attention"), (1, "seal_side"), (2, "seal_side"))
    if (name, of) != ("mixkvq", "advance")
]


@pytest.mark.parametrize(("name", "which", "of"), FAILURES)
def test_a_failed_step_can_be_taken_again(name, which, of, monkeypatch):
    """Its token is stored once, whatever has failed, and what was due with it is sealed."""
    scheme, generator = small(name), torch.Generator().manual_seed(0)
    one, other = make(scheme), make(scheme, recordable=False)
    for at, tokens in enumerate((60, *[1] * 24)):
        given = states(1, tokens, 32, torch.float32, "cpu", generator)
        expected = step(other, given)
        failed = False
        if at > 3:
            with monkeypatch.context() as patch:
                calls = fails_at(patch, which, ops, of)
                try:
                    got = step(one, given)
                except torch.OutOfMemoryError:
                    failed = True
                    assert len(calls) == which
        else:
            got = step(one, given)
        if failed:
            # The update has staged the token, which is stored by now, or with the next update.
            one.settle()
        else:
            torch.testing.assert_close(got, expected)
        assert one.store.longest == other.store.longest == one.seen
    assert_same(one, other)


@pytest.mark.parametrize(
    ("dtype", "pads"), [(torch.bfloat16, None), (torch.bfloat16, [0, 21]), (torch.float16, None)], ids=str
)
@pytest.mark.gpu
@pytest.mark.parametrize("name", PRESETS)
def test_steps_on_a_gpu_are_the_operations(name, dtype, pads, taken):
    """Over page borders, growing tables and tails, other strides and alignments, with masks or not: to the bit."""
    scheme, generator = get_scheme(name), torch.Generator().manual_seed(0)
    one, other, columns = make(scheme), make(scheme, recordable=False), 0
    for at, tokens in enumerate((300, *[1] * 200, 3, *[1] * 100)):
        # Not of prompts: other kernels attend to those.
        given = states(2, tokens, 128, dtype, "cuda", generator, odd=tokens == 1 and at % 17 == 0)
        if at % 2:
            # As models hand them over: (B, T, H, D) in memory.
            given = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in given]
        columns, mask = columns + tokens, None
        if pads and not at:
            padded_prompt(one, given, pads), padded_prompt(other, given, pads)
            continue
        if pads and tokens == 1:
            mask = padded(pads, columns, "cuda")
        # A buffer has other room, so programs share the pages out in another way.
        torch.testing.assert_close(step(one, given, mask), step(other, given, mask), rtol=0.02, atol=0.02)
    assert taken["steps"] > 250
    assert (taken["masked"] > 250) == bool(pads)
    assert_same(one, other)
