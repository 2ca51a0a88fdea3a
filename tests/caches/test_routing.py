"""Routing: what one layer works out serves the others, gives the bytes that each would have come to, and nothing else.

The reference is a twin whose layers each ask the device, because its record of tokens keeps nothing for the next one.
"""

from __future__ import annotations

import copy

import pytest
import torch

from hfkvq import MixedKVCache, TriAxialCache
from hfkvq.caches.layer_state.tags import TokenRecord
from hfkvq.caches.schemes import TriAxial
from hfkvq.caches.schemes.base import UNTAGGED
from hfkvq.caches.store.routing import ColumnTags, SealSource, SealStart, route_by_width
from hfkvq.caches.tags import PAD, parse_tag
from hfkvq.kernels.arguments import AttentionArguments
from hfkvq.kernels.decode import RUNS, run_count
from tests.caches.driver import Questions, assert_same_bits, mask_of, stored
from tests.caches.models import build, config

OBS, USER = "older|text|obs", "current|text|user"
SMALL = {"table": {OBS: 2, USER: 4}, "page_size": 16, "group_size": 8, "seal_unit": 8, "sink_length": 0}
LAYERS = 4


class MostlyObs:
    """Two tokens of three are old tool results."""

    def tag(self, ids, mask=None):
        tags = torch.where(ids % 3 != 0, parse_tag(OBS), parse_tag(USER)).to(torch.uint8)
        return tags if mask is None else tags.masked_fill(mask == 0, PAD)


@pytest.fixture(scope="module")
def model():
    return build("llama", num_hidden_layers=LAYERS, max_position_embeddings=2048, hidden_size=16, intermediate_size=16)


def make(model, **knobs):
    return TriAxialCache(model, tagger=MostlyObs(), **(SMALL | knobs))


def alone(cache):
    """The same cache, each of whose layers works all out for itself."""
    cache.tokens.layers = 1
    return cache


def forward(model, cache, ids, mask=None):
    with torch.no_grad():
        model(input_ids=ids, attention_mask=mask, past_key_values=cache)


def assert_alike(one, other):
    for a, b in zip(one.compressed_layers, other.compressed_layers, strict=True):
        if a.store is not None and a.seen:
            for row in range(a.batch_size):
                assert_same_bits(stored(a, row), stored(b, row))


# What is shared.


def by_hand(cache, chunks, leads, monkeypatch):
    """Feeds every layer tensors of its own: for each chunk how often each layer makes the host wait."""
    lists, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: (lists.append(1), tolist(x))[1])
    generator, seen, batch, found = torch.Generator().manual_seed(0), 0, len(leads), []
    for tokens in chunks:
        ids = torch.randint(3, 100, (batch, tokens), generator=generator)
        valid = torch.arange(seen + tokens) >= torch.tensor(leads)[:, None] if any(leads) else None
        cache.arrive(ids, None if valid is None else valid.long())
        mask = mask_of(cache.layers[0], valid, batch, tokens)
        found.append([])
        for i, layer in enumerate(cache.layers):
            q, k, v = (torch.randn(batch, heads, tokens, 32, generator=generator) for heads in (4, 2, 2))
            lists.clear()
            with Questions() as watch:
                cache.update(k, v, i)
                if layer.begin(mask, tokens):
                    layer.attend(q, AttentionArguments(1.0, mask))
                layer.finish(q, AttentionArguments(1.0, mask))
            found[-1].append(len(watch.asked) + len(lists))
        seen += tokens
    return found


@pytest.mark.parametrize("leads", [[0], [0, 5, 40]])
def test_only_the_first_layer_asks(leads, monkeypatch):
    """Also of later prompts, behind steps that have sealed, and of rows of different lengths."""
    cache = TriAxialCache(config("llama", num_hidden_layers=LAYERS), tagger=MostlyObs(), **SMALL)
    for first, *others in by_hand(cache, [150, *[1] * 30, 90, 1, 1, 12, *[1] * 9, 70], leads, monkeypatch):
        # Of padding, and of the route.
        assert first <= 2
        assert others == [0] * (LAYERS - 1)
    assert min(int(run_count(cache.layers[3].store.counters, run, "keys").min()) for run in (0, 1)) > 30


@pytest.mark.parametrize("leads", [[0, 0], [0, 9]])
def test_each_layout_has_a_route_of_its_own(model, leads, monkeypatch):
    """Three layers share one, the fourth has another, and one that is not compressed in pages of widths asks nobody."""
    cache = make(model, layers={"1": {"page_size": 8}, "3": "full"})
    routes, route = [], ColumnTags.route
    monkeypatch.setattr(ColumnTags, "route", lambda *given: (routes.append(route(*given)), routes[-1])[1])
    mask = (torch.arange(70) >= torch.tensor(leads)[:, None]).long()
    forward(model, cache, torch.arange(3, 73).repeat(2, 1), mask if any(leads) else None)
    assert routes[0] is routes[2]
    assert routes[0] is not routes[1]
    assert len(routes) == 3


def test_what_a_failed_forward_leaves_is_dropped(model):
    """Its tags are not those of the next one."""
    cache, other = make(model), alone(make(model))
    ids = torch.randint(3, 100, (1, 80))
    hook = model.model.layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        forward(model, cache, ids + 1)
    hook.remove()
    assert cache.tokens._shared
    for layer in cache.layers[:2]:
        layer.crop(-80)
    for x in (cache, other):
        forward(model, x, ids)
    assert_alike(cache, other)


# What is known.


KINDS = {
    "windows": {"sink_length": 3, "local_length": 5},
    "fixed": {"max_cache_len": 400, "page_size": 32},
}


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_happens_the_bytes_are_the_same(kind, model):
    caches = [make(model, **KINDS[kind]), alone(make(model, **KINDS[kind]))]
    generator, valid = torch.Generator().manual_seed(0), torch.ones(3, 0, dtype=torch.long)

    def give(tokens, pads=(0, 0, 0, 0, 0, 0)):
        nonlocal valid
        new = (torch.arange(tokens) >= torch.tensor(pads[: len(valid)])[:, None]).long()
        valid, ids = torch.cat([valid, new], 1), torch.randint(3, 100, new.shape, generator=generator)
        for cache in caches:
            forward(model, cache, ids, valid)

    changes = [
        (lambda cache: cache.crop(-1), lambda valid: valid[:, :-1]),
        (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])), lambda valid: valid[[2, 0, 0]]),
        # No model does this, but then layers differ, and must not be given each other's routes.
        (lambda cache: cache.layers[3].reorder_cache(torch.tensor([2, 1, 0])), lambda valid: valid),
        (lambda cache: cache.batch_repeat_interleave(2), lambda valid: valid.repeat_interleave(2, 0)),
        (lambda cache: cache.batch_select_indices(torch.tensor([2, 0])), lambda valid: valid[[2, 0]]),
        (lambda cache: cache.reset(), lambda valid: valid[:, :0]),
    ]
    give(44, (0, 9, 23))
    # Windows meet all changes, the other kind every second one.
    for change, of_mask in changes[slice(None) if kind == "windows" else slice(1, None, 2)]:
        for cache in caches:
            change(cache)
        caches = [copy.deepcopy(cache) for cache in caches]
        valid = of_mask(valid)
        for tokens, pads in ((1, [0] * 6), (40, [0, 3, 0, 17, 0, 0]), (1, [0] * 6)):
            give(tokens, pads)
        assert caches[0].tokens.layers > 1
        assert_alike(*caches)


def test_tokens_that_may_be_taken_back_are_not_counted_as_sealed(model):
    """Generated ones, of which the newest 64 stay in the tail."""
    cache = make(model)
    for layer in cache.layers:
        layer.activate_past_recording()
    forward(model, cache, torch.full((1, 80), 4))
    for _ in range(30):
        forward(model, cache, torch.tensor([[5, 5, 5]]))
    for layer in cache.layers:
        assert int(layer.store.counters[RUNS::2].sum()) == 104


CHANGES = {
    "step": lambda record: record.note_step(torch.tensor([[7], [7]]), 10),
    "prompt": lambda record: record.tag_prompt(torch.tensor([[7] * 3] * 2), None, 10),
    "crop": lambda record: record.crop(8),
    "rows": lambda record: record.take_rows(torch.tensor([1, 0])),
    "repeat": lambda record: record.take_rows(torch.tensor([0, 0, 1, 1])),
    "clear": lambda record: record.clear(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_routes_are_of_tags_as_they_are(change):
    """One object for all layers, and another once a single tag may be another."""
    record, device = TokenRecord(MostlyObs(), layers=9), torch.device("cpu")
    record.tag_prompt(torch.arange(20).view(2, 10), None, 0)
    shared = record.shared_tags(device)
    assert record.shared_tags(device) is shared
    other = copy.deepcopy(record)
    assert other._shared == {}
    assert torch.equal(other.shared_tags(device).codes, shared.codes)
    assert record.shared_tags(device) is shared
    CHANGES[change](record)
    new = record.shared_tags(device)
    assert new is not shared
    assert new is None if change == "clear" else torch.equal(new.codes, record.tags[:, : record.length])


def test_the_bytes_are_those_of_one_token_after_the_other(model):
    """A second way to the same routes, in Python: 2-bit tokens in whole pages, the rest of them and all others wide."""
    cache, page, unit, sink = make(model, sink_length=3), 16, 8, 3
    generator, leads = torch.Generator().manual_seed(1), [0, 11, 2]
    ids = torch.randint(3, 100, (3, 230), generator=generator)
    mask = (torch.arange(230) >= torch.tensor(leads)[:, None]).long()
    narrow, wide = ([[], [], []] for _ in range(2))
    at, tagged = 0, torch.zeros(230, dtype=torch.bool)
    for tokens in (100, *[1] * 30, 100):
        forward(model, cache, ids[:, at : at + tokens], mask[:, : at + tokens])
        tagged[at : at + tokens] = tokens > 1
        at += tokens
        for row, lead in enumerate(leads):
            sealed = len(narrow[row]) + len(wide[row])
            due = range(sealed, max((at - lead - sink) // unit * unit, sealed))
            small = [x + sink for x in due if tagged[lead + sink + x] and ids[row, lead + sink + x] % 3]
            small = small[: len(small) // page * page]
            narrow[row] += small
            wide[row] += [x + sink for x in due if x + sink not in small]
        for layer in cache.layers:
            for row in range(3):
                held = stored(layer, row)
                got = [held[f"{run} keys positions"].tolist() for run in (0, 1)]
                assert got == [narrow[row], wide[row]]
    assert min(len(x) for x in narrow + wide) > 40
    # Of the first layer, what comes does not depend on what is held. Another token's vector would be far off.
    whole = MixedKVCache(model, "full")
    forward(model, whole, ids, mask)
    for side in ("keys", "values"):
        got, exact = (x.layers[0].dense(side).float() for x in (cache, whole))
        error = (got - exact).square().mean((1, 3)) / exact.square().mean((1, 3)).clamp(min=1e-9)
        assert (error * mask).max() < 0.5


def of(counters, known=None, padding=None, unit=8, local=0, tokens=60, ring=0, hold=0, table=SMALL["table"]):
    """What a route of two rows follows from."""
    scheme = TriAxial(**SMALL | {"table": table, "seal_unit": unit, "local_length": local})
    source = SealSource(torch.zeros(2, 2, ring + tokens, 32), ring, tokens)
    before = torch.tensor([[0, 0]] * 6, dtype=torch.int32)
    start = SealStart(before, tuple(map(tuple, before.tolist())) if known is None else known, padding)
    return torch.tensor(counters, dtype=torch.int32), scheme.layout(32, 32), scheme, (source, source), 64, hold, start


NONE = [[0, 0]] * 4
PLAIN = {"counters": [[0, 0], [60, 60], *NONE]}
# Which arguments differ, and in what.
OTHERS = {
    "counters": ((0, 6), {"counters": [[0, 0], [60, 43], *NONE], "known": ((0, 0), (0, 3), *[(0, 0)] * 4)}),
    "padding": ((0, 6), {"counters": [[0, 9], [60, 51], *NONE], "padding": object()}),
    "unit": ((1,), {"unit": 16}),
    "local": ((1,), {"local": 9}),
    "scheme": ((2,), {"table": {USER: 2}}),
    "new tokens": ((3,), {"tokens": 61}),
    "tail": ((3,), {"ring": 12}),
    "hold": ((5,), {"hold": 9}),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_route_is_for_all_that_it_follows_from(what):
    """Where any of it is another, it is worked out anew."""
    tags = ColumnTags(MostlyObs().tag(torch.randint(3, 100, (2, 80), generator=torch.Generator().manual_seed(5))))
    first, (differ, changes) = of(**PLAIN), OTHERS[what]
    route = tags.route(*first)
    assert tags.route(*first) is route
    given = [new if i in differ else old for i, (old, new) in enumerate(zip(first, of(**PLAIN | changes), strict=True))]
    got, expected = tags.route(*given), route_by_width(*given[:6], tags.codes)
    assert [x.tolist() for x in got.tensors()] == [x.tolist() for x in expected.tensors()]
    assert [x.tolist() for x in got.tensors()] != [x.tolist() for x in route.tensors()]


def test_columns_beyond_the_tags_are_wide():
    given, tags = of(**PLAIN)[:6], MostlyObs().tag(torch.full((2, 40), 4))
    short, padded = (
        route_by_width(*given, codes) for codes in (tags, torch.nn.functional.pad(tags, (0, 40), value=UNTAGGED))
    )
    assert [x.tolist() for x in short.tensors()] == [x.tolist() for x in padded.tensors()]


# Who has a say.


def test_a_scheme_that_looks_at_tokens_is_shown_them(model):
    """Each layer's own, and each layer has a route of its own then."""
    shown = []

    class Sizes(TriAxial):
        name = ""

        def token_bits(self, keys, values, position, tags=None):
            shown.append((keys, position, tags))
            return torch.where(keys.float().mean((1, 3)) > 0, 2, 4).to(torch.uint8)

    scheme = Sizes(**SMALL)
    # Authors are warned of what steps lose by their choices.
    with pytest.warns(UserWarning, match=r"steps are not captured: .*see Scheme\.limits"):
        MixedKVCache(config("llama"), scheme)
    assert scheme.reads_tokens
    assert not TriAxial().reads_tokens
    cache = make(model)
    for layer in cache.layers:
        layer.scheme = scheme
    given = []
    hooks = [
        layer.self_attn.register_forward_pre_hook(lambda *_: given.append(len(shown))) for layer in model.model.layers
    ]
    forward(model, cache, torch.randint(3, 100, (2, 80), generator=torch.Generator().manual_seed(2)))
    for hook in hooks:
        hook.remove()
    assert [len(shown), *given] == [LAYERS, 0, 1, 2, 3]
    assert not torch.equal(shown[0][0], shown[1][0])
    assert all(tags is not None and keys.shape[2] == position.shape[1] == 80 for keys, position, tags in shown)
    assert len({str(stored(layer, 0).get("0 keys positions")) for layer in cache.layers}) == LAYERS
