"""MixKVQ's equations with numbers small enough to check by hand, and what its bounds on room change."""

from __future__ import annotations

import math

import pytest
import torch

from hfkvq import MixedKVCache, get_scheme
from hfkvq.caches.schemes import MixKVQ
from hfkvq.kernels.seal import channel_widths
from tests.caches import driver
from tests.caches.driver import (
    DIM,
    HEADS,
    SHARE,
    Row,
    assert_close,
    feed,
    feed_as_is,
    make,
    row,
    stored,
)
from tests.caches.models import build, prompt

# Room for 8 channels of 32 at 16 bits and 8 at 4.
TAUS = {"select": "thresholds", "tau_bf16": 2.0, "tau_int4": 1.0, "most_bf16": 0.25, "most_int4": 0.25}


def ranges(*spans, channels=32, page=8):
    """Keys (1, 1, 1, page, channels) whose first channels have these ranges; the others are constant."""
    keys = torch.full((1, 1, 1, page, channels), 5.0)
    for channel, span in enumerate(spans):
        keys[0, 0, 0, :, channel] = torch.linspace(0, span, page)
    return keys


def flat(x):
    return x[0, 0, 0].tolist()


def widths(scheme, keys, q_abs):
    """Widths of channels by the scheme's rule: u8 (B, H, n, D)."""
    asks, dim = "query" in scheme.needs, keys.shape[-1]
    rule = scheme.step_rule(dim, not asks or q_abs is not None)
    return channel_widths(keys, scheme.layout(dim, dim).keys.formats[0], rule, q_abs if asks else None)


# Equations.


@pytest.mark.parametrize("chunks", [[16, 3, 1], [3, 15, 1, 1]])
def test_queries_of_what_waits_stay_counted(monkeypatch, chunks):
    """A page is judged by the queries of its own R tokens, also where a prompt brought some of them."""
    given = []

    def spy(self, keys, q_abs):
        given.append(q_abs.clone())

    monkeypatch.setattr(MixKVQ, "channel_bits", spy)
    # Without a rule for the kernel, sealing asks `channel_bits`.
    monkeypatch.setattr(MixKVQ, "step_rule", lambda self, head_dim, seen=True: None)
    monkeypatch.setattr(driver, "steady", lambda queries: queries)
    monkeypatch.setattr("hfkvq.caches.layer_state.query_statistics.MAX_STEP", 1)
    layer = make(MixKVQ(page_size=8, group_size=8, sink_length=3))
    rows = [row(seed, 20) for seed in (1, 2)]
    # The second row begins a column later, so its second page is due a step later.
    feed(layer, rows, chunks, [0, 1])
    for own, q_abs, index in zip(rows, given[-2:], (0, 1), strict=True):
        of_page = own.queries.unflatten(0, (HEADS, SHARE))[:, :, 3 + 8 : 3 + 16].abs().double()
        assert_close(q_abs[index], of_page.mean((1, 2)).float())


def above(keys, tau, q_abs=None, **knobs):
    """Channels whose salience exceeds a threshold, with room for all: bool (B, H, n, D)."""
    scheme = MixKVQ(select="thresholds", tau_bf16=tau, most_bf16=1.0, most_int4=0.0, **knobs)
    return widths(scheme, keys, torch.ones(1, 1, keys.shape[-1]) if q_abs is None else q_abs) == 16


@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf, -math.inf, 1e30])
def test_sensitivity_is_the_step_of_two_bits(bad):
    """Eq. (7) with B = 2: range over 3, over the page's tokens that are finite in f16, whatever their sign."""
    keys = torch.zeros(1, 1, 1, 4, 3)
    keys[..., 0] = torch.tensor([-1.0, 5, 2, bad])
    keys[..., 1] = 7 if bad == 0 else bad
    keys[..., 2] = torch.tensor([-9.0, -3, -3, -6])
    for tau, expected in ((1.99, [True, False, True]), (2.0, [False] * 3), (0.0, [True, False, True])):
        assert flat(above(keys, tau, salience="error_only")) == expected


@pytest.mark.parametrize(
    ("salience", "expected"),
    # S = 2, 4, 0, 2 and I = 1, 2, 3, 0.5; sqrt(D) = 2.
    [("raw", [2.0, 8.0, 0.0, 1.0]), ("raw_logit", [1.0, 4.0, 0.0, 0.5]), ("error_only", [2.0, 4.0, 0.0, 2.0])],
)
def test_salience_is_importance_times_sensitivity(salience, expected):
    """Eq. (8), and what its readings make of it."""
    keys, q_abs = ranges(6, 12, 0, 6, channels=4), torch.tensor([[[1.0, 2, 3, 0.5]]])
    for each in filter(None, expected):
        for tau in (0.999 * each, 1.001 * each):
            assert flat(above(keys, tau, q_abs, salience=salience)) == [x > tau for x in expected]


def test_tiers():
    """Section 4.2: A > tau_BF16; tau_INT4 < A <= tau_BF16; the rest. Each threshold belongs to the tier below."""
    scheme = MixKVQ(salience="raw", **TAUS)
    # A = 3, 2, 1.5, 1, 0.5, 0, ...
    bits = widths(scheme, ranges(9, 6, 4.5, 3, 1.5), torch.ones(1, 1, 32))
    assert bits.dtype == torch.uint8
    assert flat(bits) == [16, 4, 4, 2, 2, *[2] * 27]
    # I decides where S does not: A = 1.5, 4, 0.75, 1.5, 0.
    q_abs = torch.ones(1, 1, 32)
    q_abs[0, 0, :5] = torch.tensor([0.5, 2, 0.5, 1.5, 0])
    assert flat(widths(scheme, ranges(9, 6, 4.5, 3, 60), q_abs))[:6] == [4, 16, 2, 4, 2, 2]


def test_channels_above_the_room_go_down_a_tier():
    """Ten channels above tau_BF16 for a room of eight; the two of least A, by rank, get 4 bits, and so on down."""
    spans = [9, 30, 10, 30, 30, 30, 30, 30, 30, 30, *[4.5] * 7, 3]
    bits = flat(widths(MixKVQ(salience="raw", **TAUS), ranges(*spans), torch.ones(1, 1, 32)))
    assert [channel for channel, width in enumerate(bits) if width == 16] == [1, 3, 4, 5, 6, 7, 8, 9]
    # Room for eight at 4 bits: the two from above, and the first six of seven equal ones.
    assert [channel for channel, width in enumerate(bits) if width == 4] == [0, 2, 10, 11, 12, 13, 14, 15]
    # Without room at 4 bits they have to do with 2; also where the middle tier is empty, they get it if it is there.
    none = MixKVQ(salience="raw", **TAUS | {"most_int4": 0.0})
    assert flat(widths(none, ranges(*spans), torch.ones(1, 1, 32))).count(4) == 0
    empty = MixKVQ(salience="raw", **TAUS | {"tau_int4": 50.0})
    bits = flat(widths(empty, ranges(*spans), torch.ones(1, 1, 32)))
    assert [channel for channel, width in enumerate(bits) if width == 4] == [0, 2]


@pytest.mark.parametrize("salience", ["raw_logit", "raw"])
def test_fractions_fill_the_room_by_rank(salience):
    """No threshold: of falling A the first eight, the next eight, the rest; a constant channel needs no bits."""
    scheme = MixKVQ(salience=salience)
    q_abs = torch.linspace(2, 1, 32)[None, None]
    assert flat(widths(scheme, ranges(*[1e-3] * 32), q_abs)) == [16] * 8 + [4] * 8 + [2] * 16
    bits = flat(widths(scheme, ranges(0, *[1e-3] * 9), q_abs))
    assert bits == [2] + [16] * 8 + [4] + [2] * 22
    # Backwards.
    assert flat(widths(scheme, ranges(*[1e-3] * 32), q_abs.flip(-1))) == [2] * 16 + [4] * 8 + [16] * 8


def test_bad_queries_raise_nothing():
    q_abs = torch.ones(1, 1, 32)
    q_abs[0, 0, 0], q_abs[0, 0, 1] = math.nan, math.inf
    bits = flat(widths(MixKVQ(salience="raw", **TAUS), ranges(9, 9, 9), q_abs))
    assert bits[:4] == [2, 16, 16, 2]


# Layout and room.


@pytest.mark.parametrize(("dim", "group"), [(128, 32), (64, 32), (80, 20), (96, 32), (24, 24), (72, 24), (13, 13)])
def test_values_take_the_largest_group_that_fits(dim, group):
    assert MixKVQ().layout(128, dim).values.formats[0].group_size == group


# What is stored.


def weighted(own, seed):
    """The same row with queries whose channels differ."""
    generator = torch.Generator().manual_seed(seed)
    return Row(own.queries * torch.randn(1, 1, DIM, generator=generator).exp(), own.keys, own.values)


SMALL = {"page_size": 16, "group_size": 8, "sink_length": 0}


@pytest.mark.parametrize("capacity", [None, 64])
def test_an_accumulator_that_is_never_reset(capacity, monkeypatch):
    """Appendix D.2: every page is chosen by all queries so far; growing, and by steps over a buffer."""
    rows = [weighted(row(seed, 48), seed) for seed in (1, 2)]
    scheme = MixKVQ(**SMALL, accumulate=True)
    layer = make(scheme, capacity=capacity, recordable=capacity is not None)
    feed_as_is(layer, rows, [20] + [1] * 28)
    assert layer.queries is not None
    if layer.buffer is not None:
        layer.buffer.close()
    assert layer.queries.counts.tolist() == [[48, 48]] * layer.heads
    for at, own in enumerate(rows):
        held = stored(layer, at)
        for page, queries in ((1, 32), (2, 48)):
            q_abs = own.queries[:, :queries].unflatten(0, (HEADS, SHARE)).abs().double().mean((1, 2)).float()
            keys = own.keys[None, :, None, 16 * page : 16 * (page + 1)]
            bits = widths(scheme, keys, q_abs[None])[0, :, 0]
            for head in range(HEADS):
                chosen = sorted(held[f"0 keys full_index {page}"][head].tolist())
                assert chosen == (bits[head] == 16).nonzero()[:, 0].tolist()


# Attention that shows no queries.


def test_without_queries_the_error_decides():
    """No threshold has a meaning then: the room goes to the channels of greatest S."""
    q_abs, keys = None, ranges(*range(32, 0, -1))
    for name in ("mixkvq", "mixkvq-r1-qwen-32b"):
        scheme = get_scheme(name)
        bits = widths(scheme, keys, q_abs)
        assert torch.equal(bits, widths(get_scheme(scheme, select="fractions", salience="error_only"), keys, None))


@pytest.mark.parametrize("name", ["kitty:score=qk_abs", "mixkvq"])
def test_every_scheme_that_reads_queries_says_that_none_are_shown(name):
    model = build("llama", attention="eager")
    cache = MixedKVCache(model, driver.small(name), attach=False)
    with torch.no_grad():
        model(prompt(1, 60), past_key_values=cache)
        # The prompt is sealed before the next tokens.
        with pytest.warns(UserWarning, match=rf"^{cache.scheme.name}: .* does not expose its queries"):
            model(prompt(1, 1), past_key_values=cache)
