"""ARKV: each equation by hand, then what a cache that evicts does with prompts, steps, rows and memory."""

from __future__ import annotations

import copy
import logging
import math

import pytest
import torch
from transformers import DynamicCache

from hfkvq import ARKVCache, MixedKVCache, get_scheme
from hfkvq.caches.eviction.tier_evictor import TierEvictor
from hfkvq.caches.layers.build import group_layers
from hfkvq.caches.schemes import Arkv
from hfkvq.caches.schemes.score_inputs import Attention, tier_widths, token_scores
from hfkvq.caches.store.accounting import nbytes
from hfkvq.caches.store.requantize import positions
from hfkvq.kernels.arguments import AttentionArguments
from hfkvq.kernels.decode import ABSENT, LENGTH, RUNS, START
from tests.caches.driver import (
    DIM,
    HEADS,
    SHARE,
    Questions,
    assert_close,
    assert_same_bits,
    attention,
    feed,
    forward,
    join,
    make,
    row,
    small,
    stored,
)
from tests.caches.models import build, prompt
from tests.caches.test_generate import _generate

TIGHT = {"budget_tokens": 40, "window": 8, "page_size": 8}
NO = torch.zeros(3, dtype=torch.bool)
WHOLE_BYTES, LOW_BYTES = 2 * DIM * 4 + 4, 2 * (DIM + 2) + 4


def arkv(**knobs):
    return Arkv(**TIGHT | knobs)


# Equations.


def paid(probs, real):
    """What is paid with probabilities (N, r, Q, n)."""
    return Attention.of(probs.log(), None, real)


class TestEquations:
    """Numbers small enough to check by hand."""

    def test_token_scores(self):
        """Eq. (9): two queries, mean .25 .5 .25 and unbiased variance .125 0 .125; then five neighbours over 5."""
        probs = torch.zeros(1, 1, 2, 6)
        probs[0, 0, 0, :2] = probs[0, 0, 1, 1:3] = 0.5
        seen, past = paid(probs, torch.ones(1, 2, dtype=torch.bool)), torch.ones(1, 6, dtype=torch.bool)
        scores = token_scores(seen, past, gamma=2.0)
        # S = .5 .5 .5 0 0 0
        assert_close(scores, torch.tensor([[0.3, 0.3, 0.3, 0.2, 0.1, 0.0]]))

    def test_padded_queries_do_not_count(self):
        probs = torch.rand(2, 3, 4, 7)
        probs[1] = probs[0]
        probs[1, :, 0] = 9.0
        real = torch.ones(2, 4, dtype=torch.bool)
        real[:, 0] = False
        past = torch.ones(2, 7, dtype=torch.bool)
        alone = probs[:1, :, 1:]
        for stats in ("code", "paper"):
            scheme = arkv(stats=stats)
            statistics = scheme.layer_statistics(paid(probs, real), past)
            assert_close(statistics[1], statistics[0])
            assert_close(statistics[:1], scheme.layer_statistics(paid(alone, real[:1, 1:]), past[:1]))
            found = token_scores(paid(probs, real), past, 2.0, stats == "paper")
            assert_close(found[1], token_scores(paid(alone, real[:1, 1:]), past[:1], 2.0, stats == "paper")[0])

    def test_the_window_is_no_neighbour(self):
        """Eq. (2): what the window is paid counts neither in older tokens' scores nor in a layer's statistics."""
        seen = paid(torch.rand(2, 3, 4, 12).softmax(-1), torch.ones(2, 4, dtype=torch.bool))
        past = (torch.arange(12) < 8).expand(2, -1)
        alone = Attention(*(x[..., :8] if x.dim() == 3 else x for x in vars(seen).values()))
        for stats in ("code", "paper"):
            scheme, all_past = arkv(stats=stats), past[:, :8]
            assert_close(scheme.layer_statistics(seen, past), scheme.layer_statistics(alone, all_past))
            joint = stats == "paper"
            found = token_scores(seen, past, 2.0, joint)[:, :8]
            assert_close(found, token_scores(alone, all_past, 2.0, joint))

    def test_statistics_of_the_code(self):
        """E = 2 ln 2; V = .125 twice; κ: two points are one deviation from their mean, so 1 wherever they differ."""
        probs = torch.zeros(1, 1, 2, 4)
        probs[0, 0, 0, :2] = probs[0, 0, 1, 1:3] = 0.5
        real, past = torch.ones(1, 2, dtype=torch.bool), torch.ones(1, 4, dtype=torch.bool)
        got = arkv().layer_statistics(paid(probs, real), past)
        assert_close(got, torch.tensor([[2 * math.log(2), 0.25, 2.0]]))

    def test_statistics_of_the_paper(self):
        """Eqs. (3) to (5) of p = 1/2, 1/4, 1/4: deviations 1/6, -1/12, -1/12; the window's keys are left out."""
        probs = torch.tensor([0.4, 0.2, 0.2, 0.2]).view(1, 1, 1, 4)
        past = torch.tensor([[True, True, True, False]])
        got = arkv(stats="paper").layer_statistics(paid(probs, torch.ones(1, 1, dtype=torch.bool)), past)
        assert_close(got, torch.tensor([[1.5 * math.log(2), 1 / 72, 1.5]]))

    def test_strength(self):
        """Eq. (6): 2^(1/1) 4^(1/2) 3^(1/.5) = 36; the code sums over KV heads, the paper's reading averages."""
        knobs = {"tau_entropy": 1.0, "tau_variance": 2.0, "tau_kurtosis": 0.5}
        statistics = torch.tensor([[[0.5, 1.0, 2.0], [1.5, 3.0, 1.0]]])
        assert_close(arkv(**knobs).strength(statistics), torch.tensor([36.0]))
        assert_close(arkv(stats="paper", **knobs).strength(2 * statistics), torch.tensor([36.0]))

    def test_share(self):
        """Eq. (7); fixed where the tiers are."""
        own, most = torch.tensor([1.0, 3.0, 0.0]), torch.tensor([4.0, 3.0, 0.0])
        assert arkv().share(own, most).tolist() == [0.25, 1.0, 1.0]
        assert arkv(tiers="origin").share(own, most).tolist() == [1, 1, 1]
        assert arkv(tiers="quant").share(own, most).tolist() == [0, 0, 0]

    def test_kept(self):
        """Eq. (10): floor(.75 * 33) = 24; a prompt fills its 40 - 8; many tokens at once are bounded by that."""
        past = torch.tensor([33, 4, 100])
        share = torch.ones(3)
        assert arkv().kept(past, share, (1, 2), NO).tolist() == [24, 3, 32]
        assert arkv().kept(past, share, (1, 2), ~NO).tolist() == [32, 4, 32]

    def test_kept_in_bytes(self):
        """100 bytes less 10 tokens of 5: 50, less 2 for rounding, over 5, 3 or 4 bytes each."""
        scheme = Arkv(budget_bytes=100, window=10)
        past, share = torch.tensor([90, 90, 90]), torch.tensor([1.0, 0.0, 0.5])
        assert scheme.kept(past, share, (3, 5), ~NO).tolist() == [9, 16, 12]
        assert scheme.kept(past, share, (3, 5), NO).tolist() == [6, 12, 9]

    def test_whole(self):
        assert arkv().whole(torch.tensor([10, 10, 5, 0]), torch.tensor([0.25, 0.31, 1.0, 0.5])).tolist() == [3, 3, 5, 0]

    def test_widths(self):
        scores = torch.tensor([[5.0, 1.0, 4.0, 2.0, 3.0, -torch.inf]])
        whole = torch.ones(1, 6, dtype=torch.bool)
        four, two = torch.tensor([4]), torch.tensor([2])
        assert tier_widths(scores, four, two, whole, 8).tolist() == [[16, 0, 16, 8, 8, 0]]
        # What has few bits already leaves its place to the next.
        whole[0, 0] = False
        assert tier_widths(scores, four, two, whole, 8).tolist() == [[8, 0, 16, 8, 16, 0]]

    def test_token_bytes(self):
        """bf16 at head dim 128: 512 bytes; fp8: 256 and two scales; INT4: 128, and scale and minimum of 8 groups."""
        for bits, low in ((8, 256 + 4), (4, 128 + 32)):
            scheme = Arkv(low_bits=bits)
            assert scheme.token_bytes(scheme.layout(128, 128), 128, 128, 2) == (low + 4, 512 + 4)


# What is kept.


def held_positions(layer, index=0):
    """Logical columns of a row's tokens in each head, by width: [{16: set, 8: set}, ...]; the tail counts as 16."""
    store, found = layer.store, []
    where = positions(store.state)
    for head in range(store.fold):
        i = index * store.fold + head
        start, sizes = int(store.counters[START, i]), [v.table.shape[1] * 8 for v in store.runs]
        parts = where[i].split([0, *sizes, where.shape[1] - sum(sizes)])
        columns = [{int(x) + start for x in part if x > ABSENT} for part in parts]
        assert sum(map(len, columns)) == len(set().union(*columns)) == int(store.counters[LENGTH, i])
        found.append({8: columns[1], 16: columns[2] | columns[3]})
    return found


def peered(count, scheme):
    layers = [make(scheme) for _ in range(count)]
    group_layers(layers)
    return layers


def test_layers_that_wait_with_sealing_take_a_token_before_their_tiers_are_final():
    """As those that share keys and values do: the next update seals, layer by layer."""
    layers = peered(2, arkv())
    for layer in layers:
        layer.defer = True
    for tokens in (90, 1, 1, 1):
        queries, keys, values = (torch.randn(1, heads, tokens, DIM) for heads in (HEADS * SHARE, HEADS, HEADS))
        for layer in layers:
            forward(layer, queries, keys, values)
    for layer in layers:
        layer.settle()
        assert layer.evicted
        assert layer.eviction.provisional is None
        assert all(92 in held[16] for held in held_positions(layer))


def test_layers_share_is_relative_to_the_strongest_even_if_it_comes_last():
    """Tiers are final when the last layer is done; each layer's are round(ρ b)."""
    rows = [row(1, 90), row(2, 90), row(3, 90)]
    # The later the layer, the more concentrated its attention: stronger, by all three statistics.
    scaled = [type(x)(x.queries * f, x.keys, x.values) for x, f in zip(rows, (0.3, 1.0, 0.7), strict=True)]
    layers = peered(3, arkv())
    for layer, own in zip(layers, scaled, strict=True):
        feed(layer, [own], [90])
    strengths = torch.stack([x.eviction.strength for x in layers])[:, 0]
    assert strengths.argmax() == 1
    for layer, share in zip(layers, strengths / strengths.max(), strict=True):
        for held in held_positions(layer):
            whole = int(share.double() * 32 + 0.5)
            assert (len(held[8]), len(held[16])) == (32 - whole, whole + 8)
        assert layer.eviction.scores is None
    assert 0 < len(held_positions(layers[0])[0][8]) < 32


def test_tokens_leave_the_tail_in_order_however_long_it_is():
    """It is a ring, and longer where room is set aside for steps."""
    found = []
    for more in ({}, {"capacity": 265, "recordable": True}):
        layer = make(small("arkv-window", budget_tokens=40), **more)
        feed(layer, [row(1, 206)], [40, 166])
        found.append(stored(layer, 0))
    assert_same_bits(*found)


# Prompts on a cache that has evicted, rows, padding.


@pytest.mark.parametrize(("more", "low_bits"), [(1, 8), (5, 4), (70, 8)])
def test_attention_after_a_trim_is_over_exactly_what_is_held(more, low_bits):
    layer, own = make(arkv(tiers="quant", low_bits=low_bits)), row(1, 200)
    feed(layer, [own], [90, 1, 1])
    held, dense = held_positions(layer), [layer.dense(side) for side in ("keys", "values")]
    new = own[92 : 92 + more]
    out = forward(layer, *join([new]))
    keys, values = (torch.cat([old, x], 2) for old, x in zip(dense, join([new])[1:], strict=True))
    mask = torch.ones(more, 92 + more, dtype=torch.bool).tril(92)
    visible = torch.ones(HEADS, 92 + more, dtype=torch.bool)
    for head, x in enumerate(held):
        visible[head, :92] = False
        visible[head, sorted(x[8] | x[16])] = True
    mask = mask & visible.repeat_interleave(SHARE, 0)[None, :, None]
    assert_close(out, attention(new.queries[None], keys, values, mask, DIM**-0.5))
    assert (layer.store.counters[LENGTH] <= 40).all()
    assert layer.get_seq_length() == 92 + more


def test_row_that_starts_in_a_later_chunk():
    """Its first tokens are its prompt, however few, and a step for the rows beside it."""
    rows, pads = [row(1, 80), row(2, 80)], [0, 35]
    layer = make(arkv())
    outs = feed(layer, rows, [30, 10, 10, *[1] * 30], pads)
    for i, (pad, chunks) in enumerate(zip(pads, ([30, 10, 10, *[1] * 30], [5, 10, *[1] * 30]), strict=True)):
        alone = make(arkv())
        (out,) = feed(alone, [rows[i][: 80 - pad]], chunks)
        assert_same_bits(stored(layer, i), stored(alone, 0))
        assert_close(layer.eviction.strength[i], alone.eviction.strength[0])
        assert_close(outs[i], out)


def test_budget_in_bytes_knows_the_dtype_before_anything_is_held():
    layer = make(arkv(budget_tokens=None, budget_bytes=8 * 140))
    with pytest.raises(ValueError, match=r"budget_bytes: got 1120, allowed more than 2080.*in 32 bits; raise it"):
        feed(layer, [row(1, 20)], [20])
    assert layer.store is None
    assert layer.get_seq_length() == 0


# Memory.


def test_budget_in_bytes():
    """Never more than the budget of tokens' bytes; few bits make room for more tokens."""
    budget = 40 * WHOLE_BYTES
    counts = {}
    for tiers in ("origin", "mixed", "quant"):
        own = row(1, 400)
        layer = make(arkv(budget_tokens=None, budget_bytes=budget, tiers=tiers))
        seen, most = [], 0
        for at, t in [(0, 300), *((i, 1) for i in range(300, 340))]:
            forward(layer, *join([own[at : at + t]]))
            low, length = layer.store.counters[RUNS], layer.store.counters[LENGTH]
            held = int((low * LOW_BYTES + (length - low) * WHOLE_BYTES).max())
            assert held <= budget
            most = max(most, held)
            seen.append(int(length[0]))
        assert most > budget - 2 * WHOLE_BYTES
        counts[tiers] = seen
    assert max(counts["origin"]) == 40
    assert counts["quant"][0] > 3 * 32
    assert sum(counts["quant"]) > 1.5 * sum(counts["origin"])


# Models.


def test_attention_that_hides_its_queries_evicts_nothing(caplog):
    model, ids = build("llama", attention="eager"), prompt(1, 60)
    cache = ARKVCache(model, attach=False, **TIGHT)
    expected = _generate(model, DynamicCache(config=model.config), ids, max_new_tokens=20)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(_generate(model, cache, ids, max_new_tokens=20), expected)
    assert sum("did not see the queries" in x.message for x in caplog.records) == 1
    assert not any(layer.evicted for layer in cache.layers)


def test_evicted_tokens_are_never_shown_as_zeros():
    model, ids = build("llama"), prompt(1, 60)
    cache = ARKVCache(model, **TIGHT)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    keys, _ = cache.update(*(torch.randn(1, HEADS, 1, DIM) for _ in range(2)), 0)
    with pytest.raises(RuntimeError, match=r"arkv: tokens have been evicted.*attach=True"):
        keys @ torch.randn(DIM, 1)


@pytest.mark.parametrize("name", ["arkv", "kitty"])
def test_shares_of_whole_quantized_and_evicted_tokens(name):
    """Table VII by layer: counted from what every KV head holds, over what it was given."""
    model = build("llama")
    scheme = small(name, **({"budget_tokens": 48} if name != "kitty" else {}))
    cache = MixedKVCache(model, scheme)
    model.generate(prompt(2, 120), past_key_values=cache, max_new_tokens=9, do_sample=False)
    report = cache.memory()
    for shares, layer in zip(report.tokens, cache.layers, strict=True):
        store = layer.store
        given, held = 128 * store.batch, int(store.counters[LENGTH].sum())
        # The first run is that of few bits.
        few = float(store.counters[RUNS : RUNS + 2].sum()) / 2
        assert_close(torch.tensor(shares), torch.tensor([held - few, few, given - held]) / given)
        assert (shares.evicted > 0.5) == (name != "kitty")
    few = [shares.quantized > 0 for shares in report.tokens]
    # The strongest layer's ρ is 1.
    assert sum(few) == len(few) - (name == "arkv")
    assert ("tokens evicted" in str(report)) == (name != "kitty")


def test_sinks_of_folded_heads():
    """Every head has its own sinks, as in a store whose heads are not folded."""
    own = [row(1, 40), row(2, 40)]
    layers = [make(arkv()), make(get_scheme("full", page_size=8))]
    queries, keys, values = join(own)
    sinks = torch.linspace(-2.0, 2.0, HEADS * SHARE)
    outs = []
    for layer in layers:
        feed(layer, [x[:30] for x in own], [30])
        layer.update(keys[:, :, 30:31], values[:, :, 30:31])
        assert layer.begin(None, 1)
        outs.append(layer.attend(queries[:, :, 30:31], AttentionArguments(0.3, sinks=sinks)))
        plain = layer.attend(queries[:, :, 30:31], AttentionArguments(0.3))
        layer.finish(queries[:, :, 30:31], AttentionArguments(0.3))
    assert_close(outs[0], outs[1])
    assert (outs[0] - plain).abs().max() > 1e-3


# First prompts beyond a budget: cut without asking the device, and then what the general way would have left.


WHOLE = 2 * DIM * 2 + 4
KNOBS = {
    "mixed": {},
    "origin": {"tiers": "origin"},
    "quant": {"tiers": "quant"},
    "four bits": {"low_bits": 4},
    "recency": {"tiers": "origin", "score": "recency"},
    "the paper's statistics": {"stats": "paper"},
    "bytes": {"budget_tokens": None, "budget_bytes": 40 * WHOLE},
    "bytes, few": {"budget_tokens": None, "budget_bytes": 40 * WHOLE, "tiers": "quant"},
    "pages of other size": {"page_size": 32, "window": 5},
}


def tensors(layer, rows, tokens, seed, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(rows, heads, tokens, DIM, generator=generator) for heads in (HEADS * SHARE, HEADS, HEADS)]
    # Layers differ in how concentrated their attention is.
    made[0] = made[0] * (0.3 + layer)
    return [x.to(dtype) for x in made]


def take(layer, queries, keys, values, mask=None, softcap=0.0, sinks=None):
    """Attention as "hfkvq" does it; the prompt's own result is not used."""
    layer.update(keys, values)
    out = queries
    if layer.begin(mask, queries.shape[2]):
        out = layer.attend(queries, AttentionArguments(DIM**-0.5, mask, softcap, sinks))
    layer.finish(queries, AttentionArguments(DIM**-0.5, mask, softcap, sinks))
    return out


def run(layers, rows, chunks, mask=None, dtype=torch.bfloat16, **more):
    outs = []
    for i, tokens in enumerate(chunks):
        for at, layer in enumerate(layers):
            queries, keys, values = tensors(at, rows, tokens, 10 * i + at, dtype)
            outs.append(take(layer, queries, keys, values, mask if i == 0 else None, **more))
    return outs


def general(monkeypatch):
    monkeypatch.setattr(TierEvictor, "_room_of_prompt", lambda self: 0)


@pytest.mark.parametrize(("name", "rows"), [(name, 2) for name in KNOBS if name not in ("quant", "bytes, few")])
def test_it_leaves_what_the_general_way_leaves(name, rows, monkeypatch):
    """The same tokens in the same tiers, and the same from then on, trims and another prompt included."""
    first, second = peered(2, arkv(**KNOBS[name])), peered(2, arkv(**KNOBS[name]))
    for chunks in ([90], [1, 1, *[1] * 20, 30, 1]):
        got = run(first, rows, chunks)
        with monkeypatch.context() as patch:
            general(patch)
            expected = run(second, rows, chunks)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)
        for a, b in zip(first, second, strict=True):
            assert torch.equal(a.store.counters, b.store.counters)
            assert torch.equal(a.store.state.dropped, b.store.state.dropped)
            assert (a.eviction.trim_at, a.eviction.full_at) == (b.eviction.trim_at, b.eviction.full_at)
            for side in ("keys", "values"):
                assert torch.equal(a.dense(side), b.dense(side))
            if chunks == [90]:
                assert a.evicted
                assert a.store.state.settled == 90 - a.scheme.window
                if KNOBS[name].get("score") != "recency":
                    assert_close(a.eviction.strength, b.eviction.strength)
                assert nbytes(a.store.state).total <= nbytes(b.store.state).total
            else:
                assert a.store.states == b.store.states


@pytest.mark.parametrize("name", ["mixed", "bytes, few"])
def test_nothing_is_asked_but_once_for_all_layers(name):
    layers = peered(4, arkv(**KNOBS[name]))
    for at, layer in enumerate(layers):
        queries, keys, values = tensors(at, 2, 90, at)
        with Questions() as watch:
            take(layer, queries, keys, values)
        # Numbers of tokens that stay go to the host, of all layers in one tensor.
        assert len(watch.asked) <= (2 if at == 3 else 1), (at, watch.asked)
        if at < 3:
            assert layer.eviction.provisional is not None


HIDING = torch.ones(90, 90, dtype=torch.bool).tril()[None, None].clone()
HIDING[..., 20:30] = False
HIDING |= torch.eye(90, dtype=torch.bool)


@pytest.mark.parametrize("more", [{"mask": HIDING}, {"softcap": 5.0, "sinks": torch.tensor([3.0, -1.0, 0.5, 2.0])}])
def test_what_else_attention_is_given(more, monkeypatch):
    """A mask of the user's own, softcap and sinks have the say that they have in the general way."""
    first, second, plain = (peered(3, arkv()) for _ in range(3))
    run(first, 2, [90], dtype=torch.float32, **more)
    run(plain, 2, [90], dtype=torch.float32)
    general(monkeypatch)
    run(second, 2, [90], dtype=torch.float32, **more)
    for a, b, other in zip(first, second, plain, strict=True):
        assert_close(a.eviction.strength, b.eviction.strength)
        assert torch.equal(a.dense("keys"), b.dense("keys"))
        assert not torch.allclose(a.eviction.strength, other.eviction.strength)
        # Scores are averaged over five neighbours.
        assert "mask" not in more or (a.dense("keys")[:, :, 22:28] == 0).all()


def test_what_moves_before_tiers_are_final():
    """A layer that has not seen the prompt yet: the others' rows move, a copy is made, a step comes."""
    for change in ("reorder", "copy", "step"):
        layers = peered(2, arkv())
        first, last = layers
        take(first, *tensors(0, 2, 90, 1))
        assert first.eviction.provisional is not None
        if change == "reorder":
            first.reorder_cache(torch.tensor([1, 0]))
        elif change == "copy":
            first, last = copy.deepcopy(layers)
        else:
            take(first, *tensors(0, 2, 1, 2))
        take(last, *tensors(1, 2, 90, 3))
        for layer in (first, last):
            assert layer.eviction.provisional is None
            assert int(layer.store.counters[LENGTH].max()) <= 41
        held = first.dense("keys")
        keys = tensors(0, 2, 90, 1)[1]
        keys = keys[[1, 0]] if change == "reorder" else keys
        # A step moves the window of 8 on.
        newest = keys[:, :, -7:]
        assert torch.equal(held[:, :, 83:90].to(newest.dtype), newest)


def test_prompts_of_models_are_not_trimmed(monkeypatch):
    """They go this way, and not the general one; also where layers have copied what they hold into buffers by then."""

    def never(self, *args):
        raise AssertionError("a prompt was trimmed")

    monkeypatch.setattr(TierEvictor, "_trim", never)
    model = build("llama")
    cache = ARKVCache(model, **TIGHT, max_cache_len=160)
    model(prompt(2, 90), past_key_values=cache, use_cache=True)
    for layer in cache.layers:
        assert layer.evicted
        assert layer.eviction.provisional is None
        assert layer.eviction.trim_at
