"""Every mistake gets an error that names it, what was given, what is allowed and what to do; nothing cached is lost."""

from __future__ import annotations

import functools

import pytest
import torch
from transformers import MambaConfig

from hfkvq import KittyCache, MixedKVCache, SawInt4Cache, get_scheme
from tests.caches.driver import (
    DIM,
    HEADS,
    assert_same_bits,
    feed,
    forward,
    make,
    row,
    small,
    stored,
    unit,
)
from tests.caches.models import build, config
from tests.caches.test_contract import CASES_OF_FAMILIES


def filled(scheme, **kwargs):
    layer = make(scheme, **kwargs)
    feed(layer, [row(1, 40), row(2, 40)], [30] + [1] * 10, [0, 7])
    return layer


def states(batch=2, heads=HEADS, tokens=1, key_dim=DIM, value_dim=DIM, value_dtype=None, **like):
    keys, values = (torch.randn(batch, heads, tokens, dim, **like) for dim in (key_dim, value_dim))
    return keys, values.to(value_dtype)


@pytest.mark.parametrize("name", ["kitty", "triaxial"])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batch": 3}, "got batch size 3, but this cache was first used with 2; use a new cache, or call reset"),
        ({"batch": 1}, "got batch size 1, but this cache was first used with 2"),
        ({"heads": 4}, "got KV heads 4, but this cache was first used with 2"),
        ({"key_dim": 16}, "got key dim 16, but this cache was first used with 32"),
        ({"value_dim": 64}, "got value dim 64, but this cache was first used with 32"),
        ({"dtype": torch.bfloat16}, "got torch.bfloat16 on cpu, .* first used with torch.float32 on cpu; use"),
        ({"device": "meta"}, "got torch.float32 on meta, but this cache was first used with"),
        ({"value_dtype": torch.float16}, "keys are torch.float32 on cpu but values torch.float16 on cpu; they must"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_other_tensors_than_the_first(name, given, message):
    layer = filled(small(name))
    held = [stored(layer, i) for i in range(2)]
    dense = layer.dense("keys")
    with pytest.raises(ValueError, match=f"update: .*{message}"):
        layer.update(*states(**given))
    assert layer.get_seq_length() == 40
    assert layer.staged is None
    assert torch.equal(layer.dense("keys"), dense)
    for i in range(2):
        assert_same_bits(stored(layer, i), held[i])
    # And it goes on.
    layer.update(*states())
    assert layer.get_seq_length() == 41


@pytest.mark.parametrize(
    ("keys", "values", "message"),
    [
        (torch.randn(2, 3, 4), torch.randn(2, 3, 4), r"got keys \(2, 3, 4\).*expected \(batch, heads, tokens, dim\)"),
        (torch.randn(2, 2, 3, 4), torch.randn(2, 2, 4, 4), r"got keys \(2, 2, 3, 4\) and values \(2, 2, 4, 4\)"),
        (torch.ones(1, 1, 2, 32).int(), torch.ones(1, 1, 2, 32).int(), "keys of torch.int32, allowed floating point"),
        (torch.empty(1, 1, 2, 32, device="meta"), torch.randn(1, 1, 2, 32), "are torch.float32 on meta but values"),
    ],
)
def test_malformed_tensors(keys, values, message):
    layer = make(small("kitty"))
    with pytest.raises(ValueError, match=message):
        layer.update(keys, values)
    assert layer.get_seq_length() == 0
    assert not layer.is_initialized


@pytest.mark.parametrize("capacity", [None, 60])
@pytest.mark.parametrize(
    "given",
    [{"batch": 3}, {"heads": 1}, {"key_dim": 64, "value_dim": 16}, {"dtype": torch.bfloat16}],
    ids=lambda x: next(iter(x)),
)
def test_reset_takes_any_tensors(capacity, given):
    """The remedy that the error names works, also where the allocation is kept."""
    layer = filled(small("kitty"), capacity=capacity)
    layer.reset()
    keys, values = states(tokens=30, **given)
    forward(layer, keys, keys, values)
    assert layer.dense("values").shape == values.shape
    assert layer.dense("keys").dtype == keys.dtype


# Not finite.


@pytest.mark.parametrize("name", ["kitty", "full"])
@pytest.mark.parametrize(("bad", "side"), [(float("nan"), 0), (-float("inf"), 1)], ids=str)
def test_debug_refuses_what_is_not_finite(name, bad, side):
    layer = filled(small(name), debug=True)
    held = [stored(layer, i) for i in range(2)]
    given = states(tokens=3)
    given[side][1, 0, 2, 5] = bad
    with pytest.raises(ValueError, match=r"update: keys or values hold NaN or infinity; nothing was cached\. Look for"):
        layer.update(*given)
    assert layer.get_seq_length() == 40
    for i in range(2):
        assert_same_bits(stored(layer, i), held[i])
    layer.update(*states(tokens=3))


def fed_with(scheme, first):
    """A layer with two rows, the second always the same."""
    layer = make(scheme)
    feed(layer, [first, row(2, 70)], [60, 1, 8, 1])
    return layer


@functools.cache
def _without_bad(scheme, where):
    """Bits of the second row, and both sides of the first with a neighbour's copy for a token."""
    clean = row(1, 70)
    # Left out of the range: what a copy of a neighbour would not widen either.
    clean.keys[:, where], clean.values[:, where] = clean.keys[:, where - 1], clean.values[:, where - 1]
    layer = fed_with(scheme, clean)
    return stored(fed_with(scheme, row(1, 70)), 1), {side: layer.dense(side)[0] for side in ("keys", "values")}


@pytest.mark.parametrize(
    ("scheme", "bad"), [(scheme, (float("nan"), 1e30)[at % 2]) for at, scheme in enumerate(CASES_OF_FAMILIES.values())]
)
def test_bad_token_harms_no_other(scheme, bad):
    """Without debug: one token whose vector is bad leaves every other token as it would have been without it."""
    own, spoiled = row(1, 70), row(1, 70)
    # Behind every sink, in a page's middle.
    where = 4 + unit(scheme) + 5
    spoiled.keys[:, where], spoiled.values[:, where] = bad, bad
    layer, (mate, clean) = fed_with(scheme, spoiled), _without_bad(scheme, where)
    # The batch mate has the same bits.
    assert_same_bits(stored(layer, 1), mate)
    rest = torch.arange(70) != where
    layout = scheme.layout(DIM, DIM)
    keys = layout.keys.formats[0]
    block = slice(unit(scheme) * 2 + 4, None)
    for side, own_side in (("keys", layout.keys), ("values", layout.values)):
        got, expected = layer.dense(side)[0], clean[side]
        # What is held in the model's own dtype comes back as it was, whatever it was; some keys' raised channels do.
        exact = own_side.formats[0].bits == 16 or keys.raised_count(16)
        assert torch.isfinite(got[:, rest]).all()
        if not exact:
            assert torch.isfinite(got[:, where]).all() or not (layer.store.counters[2:, 0] > where).all()
        assert torch.equal(got[:, block], expected[:, block])
        # Raised channels are ranked without the bad entry, so its own page may rank as the neighbour's copy does not.
        # Factors of a normed page are of means, to which the copy adds and the bad entry does not. Equal entries,
        # rotated, leave zeros in all channels but one, and the ranges of those take them in. Trellis codes are walked
        # over two neighbours together.
        together = own_side.formats[0].trellis
        if keys.normed or together or (layout.keys.rotate and keys.axis == "channel" and side == "keys"):
            error, usual = ((x - getattr(own, side))[:, rest].square().mean() for x in (got, expected))
            assert error <= 1.1 * usual
        elif not keys.raised or side == "values":
            assert torch.equal(got[:, rest], expected[:, rest])


# Shapes that a scheme cannot hold.


@pytest.mark.parametrize(
    ("name", "knobs", "dim", "message"),
    [
        ("saw-int4", {"block": 64}, 96, r"rotate \(keys\): got block 64, .* head_dim 96; the largest block .* is 32"),
        ("saw-int4", {"block": 48}, 96, r"rotate \(keys\): got block 48, allowed 0 \(no rotation\) or a power of two"),
        ("saw-int4-kv", {"block": 64}, 32, r"rotate \(keys\): got block 64, which does not divide head_dim 32"),
        (
            "kivi",
            {"group_size": 32},
            48,
            r"group_size: got 32, which does not divide head_dim 48.*choose a divisor",
        ),
        ("kivi", {"group_size": 24}, 48, r"group_size: got 24, which does not divide the page of 128 tokens"),
        ("kitty", {"page_size": 20}, 64, r"page_size: got 20, allowed powers of two"),
    ],
)
def test_scheme_that_cannot_hold_the_model(name, knobs, dim, message):
    """At construction, before any token."""
    with pytest.raises(ValueError, match=message):
        MixedKVCache(config("llama", head_dim=dim), get_scheme(name, **knobs))


def test_latents_that_a_scheme_cannot_hold():
    """At construction: 32 channels, and 8 of rotary parts."""
    with pytest.raises(ValueError, match=r"got block 64, which does not divide head_dim 32; the largest .* is 32"):
        MixedKVCache(config("deepseek-v3"), get_scheme("saw-int4", block=64))
    with pytest.raises(ValueError, match=r"group_size: got 24, which does not divide head_dim 32"):
        MixedKVCache(config("deepseek-v3"), get_scheme("latent-4", group_size=24))


@pytest.mark.parametrize("scheme", ["latent-4", "latent-8"])
def test_schemes_of_latents_need_latents(scheme):
    with pytest.raises(ValueError, match=r"got 'latent-4', which is for models with latent attention .* LlamaConfig"):
        MixedKVCache(config("llama"), scheme)
    with pytest.raises(ValueError, match=r"choose another, e\.g\. 'best-3\.4'"):
        MixedKVCache(config("llama"), "full", layers={"0": scheme})


# Construction.


@pytest.mark.parametrize("make_cache", [MixedKVCache, KittyCache, SawInt4Cache])
def test_models_without_attention(make_cache):
    with pytest.raises(ValueError, match=r"model_or_config: MambaConfig has no attention layers, so there is no"):
        make_cache(MambaConfig(hidden_size=32, num_hidden_layers=2))


@pytest.mark.parametrize("first", [None, "meta-llama/Llama-3.1-8B", 3, {}, torch.nn.Linear(2, 2)])
def test_wrong_first_argument(first):
    with pytest.raises(ValueError, match=r"model_or_config: got \w+, allowed a Transformers model or its config"):
        MixedKVCache(first)


@pytest.mark.parametrize("length", [0, -5, 2.5, "100", True, torch.tensor(5)])
def test_invalid_capacity(length):
    with pytest.raises(ValueError, match=r"max_cache_len: got .*, allowed a positive number of tokens or None"):
        MixedKVCache(config("llama"), max_cache_len=length)


@pytest.mark.parametrize("scheme", [4, ["kitty"], "kittyy"])
def test_invalid_scheme(scheme):
    with pytest.raises(ValueError, match=r"scheme: got .*, which is unknown; .*Known: .*arkv, arkv-origin"):
        MixedKVCache(config("llama"), scheme)


def test_failed_construction_leaves_the_config_alone():
    model = build("llama")
    for bad in ({"scheme": "nope"}, {"max_cache_len": 0}, {"scheme": get_scheme("saw-int4", block=64)}):
        with pytest.raises(ValueError, match="got"):
            MixedKVCache(model, **bad)
        assert model.config._attn_implementation == "sdpa"


# Cropping.


def test_reading_an_empty_layer():
    layer = make(small("kitty"))
    assert layer.keys is None
    assert layer.values is None
    with pytest.raises(RuntimeError, match=r"This cache layer is empty: call update\(\) first"):
        layer.dense("keys")
    # Verbs that have nothing to do.
    layer.crop(0)
    layer.reorder_cache(torch.tensor([0]))
    layer.batch_repeat_interleave(2)
    layer.batch_select_indices(torch.tensor([0]))
    layer.reset()
    assert layer.get_seq_length() == 0


def test_pages_cannot_be_assigned():
    layer = filled(small("kitty"))
    for side in ("keys", "values"):
        with pytest.raises(AttributeError, match=rf"{side}: pages cannot be assigned; use update\(\)"):
            setattr(layer, side, torch.zeros(1))
