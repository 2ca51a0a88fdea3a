"""Schemes that evict, in a cache: what stays is what scores say, stored as pages store it, and generation goes on."""

from __future__ import annotations

import pytest
import torch

from hfkvq import MixedKVCache, get_scheme
from hfkvq.caches.base import warn_once
from hfkvq.caches.eviction.evictor import shared
from hfkvq.caches.layers.memory import memory_of
from hfkvq.caches.schemes.score_inputs import evidence_of, keep_mask, prompt_candidates
from hfkvq.caches.store import KVStore
from hfkvq.kernels.arguments import AttentionArguments
from hfkvq.kernels.decode import LENGTH, START
from tests.caches import driver
from tests.caches.driver import (
    DIM,
    EVICTING,
    HEADS,
    Row,
    assert_close,
    assert_same_bits,
    attention,
    evicting,
    feed,
    forward,
    join,
    make,
    row,
    small,
    steady,
    stored,
)
from tests.caches.models import build, prompt
from tests.caches.test_generate import _generate

CASES = evicting()
on_every_case = pytest.mark.parametrize("name", CASES)
on_every_scheme = pytest.mark.parametrize("name", EVICTING)


class Simulated:
    """A row whose tokens are kept whole in plain tensors, and judged by the scheme alone."""

    def __init__(self, scheme, own: Row) -> None:
        self.scheme, self.own, self.seen = scheme, own, 0
        self.held = torch.zeros(HEADS, 0, dtype=torch.long)
        self.scores = torch.full((HEADS, len(own)), torch.nan)

    def tokens(self):
        """Keys and values (1, H, n, D) of the tokens held."""
        index = self.held[..., None].expand(-1, -1, DIM)
        return self.own.keys.gather(1, index)[None], self.own.values.gather(1, index)[None]

    def feed(self, count):
        """Takes so many tokens at once, and trims."""
        scheme, new = self.scheme, torch.arange(self.seen, self.seen + count)
        queries = self.own.queries[None, :, new]
        if "received" not in scheme.evidence:
            queries = queries[:, :, -scheme.queries :]
        self.seen += count
        self.held = torch.cat([self.held, new.expand(HEADS, -1)], 1)
        arguments = AttentionArguments(DIM**-0.5)
        found = evidence_of(prompt_candidates(*self.tokens()), scheme.evidence, scheme.queries, queries, arguments)
        scores = torch.cat([scheme.scores(each) for _, each in found])
        if scheme.asks_every_step:
            old = self.scores.gather(1, self.held)
            scores = torch.where(old.isnan(), scores, scheme.merge(old, scores))
            self.scores.scatter_(1, self.held, scores)
        held, given = torch.tensor(self.held.shape[1]), torch.tensor(self.seen)
        room = scheme.room(given, held, 0, 1)
        if count > 16 or (scheme.interval is not None and held >= room + scheme.interval):
            length = held.expand(HEADS)
            judged = shared(scheme, scores, HEADS)
            stays = keep_mask(judged, length, room.expand(HEADS), scheme.first, scheme.window)
            self.held = self.held[stays].view(HEADS, -1)


@on_every_case
def test_a_prompt_keeps_the_tokens_of_highest_score(name):
    """What is stored is, bit for bit, what the pages make of these tokens: they are quantized once."""
    scheme, own = CASES[name], row(1, 60)
    own = Row(steady(own.queries), own.keys, own.values) if "query" in scheme.needs else own
    layer, expected = make(scheme), Simulated(scheme, own)
    feed(layer, [own], [60])
    expected.feed(60)
    keys, values = expected.tokens()
    count = keys.shape[2]
    assert count < 60
    alone = KVStore(scheme.layout(DIM, DIM), scheme, keys, values, headwise=True)
    alone.extend(
        keys, values, q_abs=None if layer.queries is None else own.queries.view(1, HEADS, -1, DIM).abs().mean(2)
    )
    for side in ("keys", "values"):
        dense = layer.dense(side)
        assert (dense[:, :, : 60 - count] == 0).all()
        assert torch.equal(dense[:, :, 60 - count :], alone.dense(side, count))
    assert layer.get_seq_length() == 60
    assert layer.store.state.dropped.tolist() == [60 - count] * HEADS


@on_every_scheme
@pytest.mark.parametrize("knobs", [{"trim_every": 7, "sink_length": 5}, {"budget_share": 0.5, "trim_every": 7}])
def test_prompts_and_steps_keep_what_scores_say(name, knobs):
    """Turns, chunks, steps of one token and of several: the tokens of a plain simulation, in order."""
    scheme = small(name, **knobs, **({"budget_tokens": None} if "budget_share" in knobs else {}))
    own = row(3, 150)
    layer, expected = make(scheme), Simulated(scheme, own)
    for count in (10, 25, 1, 1, 1, 30, *[1] * 9, 3, 16, 1, 1, 17, *[1] * 8):
        at = expected.seen
        forward(layer, *join([own[at : at + count]]))
        expected.feed(count)
        for side, given in zip(("keys", "values"), expected.tokens(), strict=True):
            kept = given.shape[2]
            assert torch.equal(layer.dense(side)[:, :, expected.seen - kept :], given)
        assert layer.store.counters[LENGTH].tolist() == [kept] * HEADS
        assert layer.store.counters[START].tolist() == [expected.seen - kept] * HEADS
    assert layer.evicted


@on_every_scheme
def test_attention_sees_what_stays(name):
    """A step, and a second prompt, attend to the tokens kept and to the new ones, causally."""
    scheme, own = small(name), row(4, 120)
    layer, expected = make(scheme), Simulated(scheme, own)
    for count in (60, 1, 1, 20, 1):
        at = expected.seen
        queries, keys, values = join([own[at : at + count]])
        before = expected.tokens() if at else (keys[:, :, :0], values[:, :, :0])
        out = forward(layer, queries, keys, values)
        seen = [torch.cat([a, b], 2) for a, b in zip(before, (keys, values), strict=True)]
        assert_close(out, attention(queries, *seen, None, DIM**-0.5))
        expected.feed(count)


@on_every_scheme
def test_crop_takes_back_the_newest_or_refuses(name):
    scheme, own = small(name), row(5, 90)
    layer, plain = make(scheme), make(scheme)
    for each in (layer, plain):
        feed(each, [own], [60])
    held = stored(layer, 0)
    with pytest.raises(NotImplementedError, match="a trim has evicted tokens"):
        layer.crop(-50)
    assert layer.get_seq_length() == 60
    assert_same_bits(stored(layer, 0), held)
    for side in ("keys", "values"):
        before = layer.dense(side)
        layer.crop(-1) if side == "values" else None
        assert torch.equal(layer.dense(side)[:, :, :59], before[:, :, :59])
    for token in range(59, 80):
        forward(layer, *join([own[token : token + 1]]))
    assert layer.get_seq_length() == 80


@pytest.mark.parametrize("name", ["snapkv+mixkvq", "h2o+mixkvq"])
def test_a_step_taken_back_leaves_what_an_eviction_has_sealed(name):
    """A second prompt's eviction seals values up to no unit's end; the host knew nothing of that after a crop."""
    model, ids = build("llama"), prompt(1, 150)
    cache = MixedKVCache(model, small(name), graphs=False)
    with torch.no_grad():
        for tokens in (136, 139, 1):
            model(ids[:, :tokens], past_key_values=cache)
        cache.crop(-1)
        cache.integrity_check()
        model(ids[:, :1], past_key_values=cache)
    cache.integrity_check()


def test_where_padding_stands_among_tokens_nothing_is_evicted(caplog):
    """Columns of masks would be those of other tokens."""
    warn_once.cache_clear()
    layer, plain, own = make(small("snapkv")), make(small("full")), row(6, 90)
    valid = torch.ones(1, 60, dtype=torch.bool)
    valid[:, 20:26] = False
    for each in (layer, plain):
        forward(each, *join([own[:60]]), valid)
    assert not layer.evicted
    assert "padding stands among its tokens" in caplog.text
    for side in ("keys", "values"):
        assert torch.equal(layer.dense(side), plain.dense(side))


def test_padded_queries_weigh_no_channels(monkeypatch):
    """Padding of a row that starts in a later chunk has no part in the weights of its channels."""
    monkeypatch.setattr(driver, "steady", lambda queries: queries)
    one, other, held = row(1, 80), row(2, 45), []
    valid = torch.arange(80) >= torch.tensor([0, 35])[:, None]
    for junk in (1.0, 1000.0):
        layer = make(small("h2o+mixkvq"))
        lead = (
            junk * torch.linspace(-1, 1, DIM).expand(heads, 35, DIM) for heads in (one.queries.shape[0], HEADS, HEADS)
        )
        tokens = (other.queries, other.keys, other.values)
        padded = Row(*(torch.cat(both, 1) for both in zip(lead, tokens, strict=True)))
        for new in (slice(0, 20), slice(20, 80)):
            forward(layer, *join([one[new], padded[new]]), valid[:, : new.stop])
        held.append(stored(layer, 1))
    assert_same_bits(*held)


def test_layers_of_several_kinds():
    """A budget of tokens, one of tiers, and none, in one cache; a pyramid's budgets are those of its layers."""
    model, ids = build("llama", num_hidden_layers=4), prompt(2, 60)
    pyramid = small("pyramidkv", budget_tokens=40, window=8, beta=4)
    layers = {0: small("arkv", budget_tokens=40), 1: small("full")}
    cache = MixedKVCache(model, pyramid, layers=layers, graphs=False)
    _generate(model, cache, ids, max_new_tokens=2)
    given = torch.tensor(60)
    budgets = [int(pyramid.budget(given, layer, 4)) for layer in (2, 3)]
    assert budgets[0] > budgets[1]
    lengths = [layer.store.counters[LENGTH].max().item() for layer in cache.layers]
    # And the token that was generated.
    assert lengths == [lengths[0], 61, budgets[0] + 1, budgets[1] + 1]
    assert lengths[0] <= 40


@pytest.mark.parametrize(
    ("name", "capacity"), [("snapkv+kitty-pro", False), ("snapkv+kitty-pro", True), ("h2o", False), ("tova", True)]
)
def test_the_budget_is_the_room(name, capacity):
    """Bits are those of the tokens held, of what may come before a trim, and of a page or two that are not full."""
    budget, page, generated = 128, 16, 120
    scheme = get_scheme(small(name), budget_tokens=budget)
    recordable = capacity and scheme.limits(DIM, DIM).captured is None
    for first in (budget - 3, budget + 5, 2 * budget):
        total, seen = first + generated, 0
        layer = make(scheme, capacity=total if capacity else None, recordable=recordable)
        own = row(first, total, dtype=torch.bfloat16)
        for new in (first, *[15] * (generated // 15)):
            forward(layer, *join([own[seen : seen + new]]))
            seen += new
            if seen - first not in (0, 105, 300):
                continue
            store = layer.store
            most = int(store.row_lengths.max())
            if recordable:
                # Of prompts alone, what is left of the capacity; else the whole budget, and steps before a trim.
                most = most + total - seen if scheme.interval is None else budget + scheme.interval + 32
            assert store.runs[-1].table.shape[1] <= -(-most // page) + 1
            if scheme.pages.name == "full":
                most += 2 * page + store.windows[2].shape[2]
                assert memory_of([layer], seen).total_bits <= 16.5 * most / seen
