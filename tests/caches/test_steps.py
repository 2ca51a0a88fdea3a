"""Eager steps of a growing cache: what they seal, in what room, under which masks, and what one that fails leaves."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from hfkvq import get_scheme, kernels
from hfkvq.bench.generate.engines import SpreadTags
from hfkvq.caches.attention import hfkvq_attention, hfkvq_mask
from hfkvq.caches.evict import layer_class
from hfkvq.caches.layer import PaddingReader
from hfkvq.caches.schemes import TriAxial
from hfkvq.caches.store import KVStore
from hfkvq.caches.tokens import TokenRecord
from hfkvq.kernels.decode import LENGTH, run_count
from hfkvq.kernels.masks import has_room
from hfkvq.kernels.pages import PageFormat
from tests.caches.driver import cases, small

MODULE = SimpleNamespace(is_causal=True, num_key_value_groups=4)
HEADS, SHARE = 2, 4


def layer_of(scheme):
    return layer_class(scheme)(scheme, PaddingReader())


def seal_one_by_one(layer):
    """From now on."""
    layer.store.__dict__ |= {"_seals_plainly": False, "_seals_widely": False}


def states(rows, tokens, dim, generator):
    """Queries, keys and values."""
    return [torch.randn(rows, n, tokens, dim, generator=generator) for n in (SHARE * HEADS, HEADS, HEADS)]


def padded(pads, columns):
    """The mask of a step, as models are given it: rows begin with padding."""
    visible = torch.arange(columns) >= torch.tensor(pads)[:, None]
    return hfkvq_mask(len(pads), 1, columns, q_offset=columns - 1, attention_mask=visible.long())


def padded_prompt(layer, given, pads):
    """A prompt of rows that begin with padding."""
    queries, keys, values = given
    tokens = keys.shape[2]
    visible = torch.arange(tokens) >= torch.tensor(pads)[:, None]
    mask = visible[:, None, None, :] & torch.ones(tokens, tokens, dtype=torch.bool).tril()
    hfkvq_attention(MODULE, queries, *layer.update(keys, values), mask, scaling=0.1)


def step(layer, given, mask=None):
    queries, keys, values = given
    return hfkvq_attention(MODULE, queries, *layer.update(keys, values), mask, scaling=0.1)[0]


def assert_same(one, other, room=True):
    """The same tokens, and as much room for more if that is asked for."""
    assert one.store.states == other.store.states
    assert (one.query_sum is None) == (other.query_sum is None)
    for a, b in zip(one.store.tensors(), other.store.tensors(), strict=True):
        assert a.shape == b.shape or not room
    assert torch.equal(one.store.counters, other.store.counters)
    for side in ("keys", "values"):
        assert torch.equal(one.dense(side), other.dense(side))
    for name in ("query_sum", "query_count"):
        if getattr(one, name) is not None:
            assert torch.equal(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize("name", ["triaxial", "arkv"])
def test_generated_tokens_are_sealed_without_a_question(name, monkeypatch):
    """They go to the widest run, which has room: the host knows. What a prompt left in the tail is looked at."""
    knobs = {"budget_tokens": 64} if name.startswith("arkv") else {"page_size": 8, "seal_unit": 32}
    scheme, generator = small(name, **knobs), torch.Generator().manual_seed(0)
    one, other, asked = layer_of(scheme), layer_of(scheme), {}

    def by_width(store, *given):
        asked[id(store)] = asked.get(id(store), 0) + 1
        return real(store, *given)

    real = KVStore._seal_by_width
    monkeypatch.setattr(KVStore, "_seal_by_width", by_width)
    if name == "triaxial":
        one.tokens, other.tokens = TokenRecord(SpreadTags()), TokenRecord(SpreadTags())
    ids = torch.randint(100, (2, 300), generator=generator)
    for tokens in (60, *[1] * 100, 50, *[1] * 60):
        given, seen = states(2, tokens, 32, generator), one.seen
        for layer in (one, other):
            own = ids[:, seen : seen + tokens]
            if layer.tokens is not None and tokens > 1:
                layer.tokens.prompt(own, None, seen)
            elif layer.tokens is not None:
                layer.tokens.step(own, seen)
        # With other room, sums are rounded in other places.
        torch.testing.assert_close(step(one, given), step(other, given))
        seal_one_by_one(other)
    assert_same(one, other, room=False)
    # The second prompt. Of TriAxialKV both, and what their last tokens are sealed with: one page, and two.
    assert asked[id(one.store)] == (5 if name == "triaxial" else 1)
    assert asked[id(other.store)] > 6
    narrow, wide = (int(run_count(one.store.counters, run, "keys").max()) for run in (0, 1))
    assert one.store._wide_most >= wide > 0
    assert narrow > 0 or name == "arkv"


@pytest.mark.parametrize("name", ["triaxial", "arkv"])
def test_rows_that_seal_at_other_times_make_no_more_room(name):
    """Eight rows, of which nearly each is at another place within a unit."""
    scheme, generator = get_scheme(name), torch.Generator().manual_seed(0)
    layer, pads = layer_of(scheme), [0, 3, 7, 11, 14, 19, 23, 30]
    padded_prompt(layer, states(8, 40, 32, generator), pads)
    for columns in range(41, 400):
        step(layer, states(8, 1, 32, generator), padded(pads, columns))
    wide, page = int(run_count(layer.store.counters, 1, "keys").max()), scheme.layout(32, 32).keys.formats[1].page_size
    assert wide > 300
    room = layer.store.runs[1].table.shape[1] * page
    assert wide <= room <= 1.25 * (wide + 64) + 2 * page


def test_crops_of_what_is_no_whole_unit(monkeypatch):
    """What the host takes to be sealed is what is sealed, and a later crop takes its tokens away."""
    layer, generator = layer_of(get_scheme("triaxial", page_size=8, seal_unit=16, group_size=8)), torch.Generator()

    def take(tokens):
        for count in tokens:
            step(layer, states(1, count, 32, generator.manual_seed(layer.seen)))

    for before, back in (([48], 9), ([1] * 6, 2), ([], 8), ([1] * 20, 30)):
        take(before)
        layer.crop(-back)
        (state,) = layer.store.states
        sealed = [int(run_count(layer.store.counters, run, "keys").sum()) for run in (0, 1)]
        assert int(layer.store.counters[LENGTH]) == state.length == layer.seen
        assert sum(sealed) == state.keys <= state.length
        assert sealed[1] <= layer.store._wide_most


@pytest.mark.parametrize("name", ["saw-int4", "triaxial", "arkv", "kivi-2"])
def test_pages_that_find_no_memory_are_not_counted_on(name, monkeypatch):
    """Those of keys were there, those of values were not: the next try makes both."""
    layer, other, failed = layer_of(get_scheme(name)), layer_of(get_scheme(name)), 0
    generator, allocate = torch.Generator(), PageFormat.allocate

    def fails(self, side, *rest):
        if side == "values":
            raise torch.OutOfMemoryError("none left")
        return allocate(self, side, *rest)

    for each in (layer, other):
        step(each, states(1, 250, 64, generator.manual_seed(0)))
    for at in range(1, 140):
        given = states(1, 1, 64, generator.manual_seed(at))
        expected = step(other, given)
        with monkeypatch.context() as patch:
            patch.setattr(PageFormat, "allocate", fails)
            try:
                assert torch.equal(step(layer, given), expected)
                continue
            except torch.OutOfMemoryError:
                failed += 1
        layer._settle()
    assert failed > 0
    assert_same(layer, other)


def test_a_scheme_that_looks_at_tokens_is_asked(monkeypatch):
    """Also of a scheme of somebody else's."""

    class Sizes(TriAxial):
        name = ""

        def token_bits(self, keys, values, position, tags=None):
            return torch.where(keys.float().norm(dim=-1).mean(1) > 5.6, 2, 4).to(torch.uint8)

    layer, generator = layer_of(Sizes(page_size=8, group_size=8)), torch.Generator().manual_seed(0)
    for tokens in (60, *[1] * 100):
        step(layer, states(2, tokens, 32, generator))
    assert int(run_count(layer.store.counters, 0, "keys").min()) > 40


@pytest.mark.parametrize("name", ["saw-int4", "kitty", "mixkvq", "full", "triaxial", "kivi-2", "arkv"])
def test_masks_of_steps_are_no_hindrance(name):
    """``generate`` hands steps a padding mask, which shows nothing of rows that begin with padding."""
    scheme, generator = cases()[name], torch.Generator().manual_seed(0)
    one, bare = layer_of(scheme), layer_of(scheme)
    given = states(2, 37, 32, generator)
    for layer in (one, bare):
        padded_prompt(layer, given, [0, 9])
    for columns in range(38, 70):
        given = states(2, 1, 32, generator)
        torch.testing.assert_close(step(one, given, padded([0, 9], columns)), step(bare, given))
    assert_same(one, bare)


def test_a_mask_that_hides_is_heeded():
    """Also what its user hides of what is stored."""
    scheme, generator = get_scheme("saw-int4"), torch.Generator().manual_seed(0)
    one, other, bare = layer_of(scheme), layer_of(scheme), layer_of(scheme)
    given = states(2, 40, 64, generator)
    for layer in (one, other, bare):
        step(layer, given)
    visible = torch.ones(2, 41, dtype=torch.long)
    visible[0, 3:17] = 0
    # No bit of the lowest byte is set.
    visible[1] = 256
    mask = hfkvq_mask(2, 1, 41, q_offset=40, attention_mask=visible)
    given = states(2, 1, 64, generator)
    got, shown = step(one, given, mask), step(bare, given)
    assert torch.equal(got, step(other, given, (visible != 0)[:, None, None, :]))
    assert not torch.equal(got[0], shown[0])
    torch.testing.assert_close(got[1], shown[1])


def test_masks_of_steps_are_folded_once_for_all_layers():
    """And look alike from step to step, so that what is launched for one serves the next."""
    layer = layer_of(small("arkv"))
    step(layer, states(2, 20, 32, torch.Generator().manual_seed(0)))
    kinds = set()
    for columns in (21, 22):
        mask = padded([0, 9], columns)
        folded = layer.store.folded_mask(mask, SHARE * HEADS)
        assert folded is layer.store.folded_mask(mask, SHARE * HEADS)
        assert torch.equal(folded, mask.repeat_interleave(HEADS, 0))
        kinds.add((has_room(folded), folded.stride()))
    assert len(kinds) == 1


def test_a_failed_seal_leaves_tokens_in_the_windows(monkeypatch):
    layer, generator = layer_of(get_scheme("saw-int4")), torch.Generator().manual_seed(0)
    step(layer, states(1, 50, 128, generator))
    other = layer_of(get_scheme("saw-int4"))
    generator.manual_seed(0)
    step(other, states(1, 50, 128, generator))
    given = states(1, 1, 128, generator)

    def fails(*given):
        raise torch.OutOfMemoryError("none left")

    with monkeypatch.context() as patch:
        patch.setattr(import_module("hfkvq.kernels.seal"), "seal", fails)
        with pytest.raises(torch.OutOfMemoryError):
            step(layer, given)
    step(other, given)
    given = states(1, 1, 128, generator)
    step(layer, given), step(other, given)
    assert_same(layer, other)


@pytest.mark.parametrize("which", ["append", "decode_attention"])
def test_a_step_that_fails_can_be_taken_again(which, monkeypatch):
    """Its token is stored once, whichever operation it was."""
    generator, failed = torch.Generator().manual_seed(0), []
    one, other = layer_of(get_scheme("saw-int4")), layer_of(get_scheme("saw-int4"))

    def fails(*given):
        failed.append(which)
        raise RuntimeError("out of resources")

    for tokens in (20, 1, 1, 1):
        given = states(1, tokens, 64, generator)
        expected = step(other, given)
        if tokens == 1 and not failed:
            with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of resources"):  # noqa: PT012
                patch.setattr(kernels, which, fails)
                step(one, given)
            continue
        assert torch.equal(step(one, given), expected)
    assert failed == [which]
    assert_same(one, other)
