"""Each scheme's equations with numbers small enough to check by hand, and the registry."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from evals.preset_tables import schemes_markdown
from hfkvq import MixedKVCache, Scheme, get_scheme, list_schemes
from hfkvq.caches.schemes import Kitty, Kivi, SawInt4, base
from hfkvq.caches.schemes.base import Layout, SideLayout, knob
from hfkvq.kernels import PageFormat, channel_widths, hadamard
from hfkvq.measure.demo.run import choose_schemes
from hfkvq.measure.divergence.naming import parse_measured
from hfkvq.measure.presets import describe
from tests.caches.driver import Row, feed_as_is, forward, make, row
from tests.caches.models import config

# Kitty.


def widths(scheme, keys, q_abs=None):
    """What sealing makes of the channels of (B, H, n, G, D)."""
    fmt = scheme.layout(keys.shape[-1], keys.shape[-1]).keys.formats[0]
    return channel_widths(keys, fmt, scheme.channel_rule, q_abs)


def test_kitty_ranks_channels_by_mean_magnitude():
    """Eq. (2): mean |K| over the page, per page and head; signs do not matter, single spikes count by their share."""
    keys = torch.zeros(1, 2, 2, 4, 8)
    # Head 0, page 0: means 3, 2 (negative), 1.5 (one spike of 6), 1; the strongest two are channels 5 and 1.
    keys[0, 0, 0, :, 5] = 3
    keys[0, 0, 0, :, 1] = -2
    keys[0, 0, 0, 0, 7] = 6
    keys[0, 0, 0, :, 2] = 1
    # Head 0, page 1 and head 1: others.
    keys[0, 0, 1, :, [0, 6]] = 1
    keys[0, 1, 0, :, [3, 4]] = -1
    keys[0, 1, 1, :, [2, 7]] = 5
    bits = widths(Kitty(boost_ratio=0.25), keys)
    assert bits.dtype == torch.uint8
    raised = [[(bits[0, h, n] == 4).nonzero().flatten().tolist() for n in range(2)] for h in range(2)]
    assert raised == [[[1, 5], [0, 6]], [[3, 4], [2, 7]]]
    assert set(bits.unique().tolist()) == {2, 4}


def test_kitty_other_scores():
    keys = torch.zeros(1, 1, 1, 4, 8)
    keys[..., 0] = 10
    keys[..., 1] = torch.tensor([-2.0, 2, -2, 2])
    keys[..., 2] = 3
    q_abs = torch.zeros(1, 1, 8)
    q_abs[..., 2] = 1
    q_abs[..., 1] = 1

    def first(score, q):
        return widths(Kitty(boost_ratio=0.125, score=score), keys, q).argmax().item()

    # Mean |K| 10, 2, 3; times mean |Q| 0, 2, 3.
    assert first("k_abs", None) == 0
    assert first("qk_abs", q_abs) == 2
    # No query seen yet.
    assert first("qk_abs", None) == 0
    assert [Kitty(score=s).needs for s in ("k_abs", "qk_abs")] == [set(), {"query"}]


def test_kitty_raises_what_would_lose_most():
    """Codes 0, 1, 2 and 3 of 2 bits are exact; midway between two they err by half a step, more in a wide channel."""
    keys = torch.zeros(1, 1, 1, 8, 8)
    keys[..., 0] = torch.tensor([0.0, 1, 2, 3, 0, 1, 2, 3]) * 100
    keys[..., 1] = torch.tensor([0.0, 0.4, 1.4, 3, 0, 1.6, 2.6, 3])
    keys[..., 2] = 0.5 * keys[..., 1]
    q_abs = torch.tensor([9.0, 1, 3, 1, 1, 1, 1, 1]).view(1, 1, 8)
    for fit in (0, 3):
        error, seen = (Kitty(boost_ratio=0.125, score=score, fit=fit, page_size=8) for score in ("error", "q_error"))
        assert (error.needs, seen.needs) == (set(), {"query"})
        assert widths(error, keys).argmax() == 1
        assert widths(seen, keys, q_abs).argmax() == 2
        assert widths(seen, keys).argmax() == 1


@pytest.mark.parametrize("name", ["kitty-pro", "kivi-2", "mixkvq", "saw-int4-kv", "triaxial", "kvarn"])
def test_fitted_scales_change_how_pages_are_sealed_alone(name):
    """The layout is the paper's but for the fit, which is searched."""
    plain, fitted = (get_scheme(name, **knobs).layout(128, 128) for knobs in ({}, {"fit": 3, "fit_values": 4}))
    for side, own, fit in (("keys", plain.keys, 3), ("values", plain.values, 4)):
        formats = tuple(dataclasses.replace(fmt, fit=fit) for fmt in own.formats)
        assert getattr(fitted, side) == dataclasses.replace(own, formats=formats)
    assert {"fit", "fit_values"} <= set(get_scheme(name).searched())


def test_kitty_page_follows_its_score():
    """What is stored is raised by the score that was asked for."""
    scheme = Kitty(boost_ratio=0.125, score="qk_abs", sink_length=0, local_length=0, page_size=16)
    layer, own = make(scheme), row(1, 16, dim=16)
    # Queries whose channels differ much.
    own = Row(own.queries * torch.linspace(-2, 2, 16).exp(), own.keys, own.values)
    feed_as_is(layer, [own], [16])
    index = layer.store.runs[0].keys[scheme.layout(16, 16).keys.formats[0].names.index("high_index")]
    keys = own.keys[None, :, None]
    q_abs = own.queries.abs().mean(1).unflatten(0, (2, 2)).mean(1)[None]
    expected = widths(scheme, keys, q_abs)[0, :, 0]
    for head in range(2):
        assert sorted(index[0, head, :2].tolist()) == (expected[head] == 4).nonzero().flatten().tolist()
    other = widths(Kitty(boost_ratio=0.125), keys)[0, :, 0]
    assert not torch.equal(other, expected)


# KIVI.


def test_kivi_rotates_keys_before_it_groups_them():
    """Channels that hold 0, 1, 2 and 3 times a step once they are rotated are stored exactly, and not without."""
    codes = torch.tensor(
        [[0, 1, 3, 0], [3, 0, 3, 2], [1, 3, 0, 3], [2, 2, 1, 1], [3, 3, 3, 3], [0, 0, 0, 0]] + 2 * [4 * [1]]
    )
    keys = hadamard(codes.float(), 4)[None, None]
    found = {}
    for rotate in (True, False):
        scheme = Kivi(group_size=8, local_length=8, rotate_keys=rotate)
        assert scheme.layout(128, 64).store.rotate_keys == 128 * rotate
        layer = make(scheme)
        forward(layer, torch.zeros(1, 1, 8, 4), keys, keys.clone())
        found[rotate] = (layer.dense("keys") - keys).abs().max().item()
    assert found[True] < 1e-6
    assert found[False] > 0.05


# SAW-INT4.


@pytest.mark.parametrize(
    ("name", "knobs", "dims", "blocks"),
    [
        ("saw-int4", {}, (128, 64), (128, 0)),
        ("saw-int4", {}, (256, 256), (128, 0)),
        ("saw-int4", {}, (96, 96), (32, 0)),
        ("saw-int4", {}, (15, 15), (0, 0)),
        ("saw-int4", {"block": 16}, (96, 96), (16, 0)),
        ("saw-int4-kv", {}, (128, 64), (128, 64)),
        ("int4", {}, (128, 64), (0, 0)),
        ("kvarn", {}, (256, 256), (128, 128)),
        ("kvarn", {"rotate": "keys"}, (64, 64), (64, 0)),
        ("kvarn", {"rotate": "values"}, (64, 64), (0, 64)),
        ("kvarn", {"rotate": "none"}, (64, 64), (0, 0)),
    ],
)
def test_blocks_of_rotations(name, knobs, dims, blocks):
    layout = get_scheme(name, **knobs).layout(*dims)
    assert (layout.keys.rotate, layout.values.rotate) == blocks


def test_blocks_of_an_engine_have_no_sink_unless_asked_for():
    assert (SawInt4().shared, SawInt4(sink_length=4).shared) == (SawInt4(sink_length=0), SawInt4(sink_length=4))


# Registry.


# A line a scheme: formats, then local window and seal unit of keys and of values, whose heads have 128 and 64 channels.
LAYOUTS = {
    "arkv": ("s0;k0;v0;8t128p32/8t64p32|16t1p32/16t1p32", (32, 16), (32, 16)),
    "expected-attention": ("s0;k0;v0;16t1p128/16t1p128", (0, 1), (0, 1)),
    "full": ("s0;k0;v0;16t1p128/16t1p128", (0, 1), (0, 1)),
    "h2o": ("s0;k0;v0;16t1p128/16t1p128", (0, 1), (0, 1)),
    "kitty": ("s32;k0;v0;2c128p128+4x16/2t64p128", (0, 128), (128, 128)),
    "kivi": ("s0;k0;v0;2c32p128/2t32p128", (0, 128), (128, 1)),
    "kvarn": ("s128;k128;v64;4c128p128n/2t64p128n", (0, 128), (0, 128)),
    "latent-4": ("s32;k128;v0;4t128p128/8t64p128", (128, 1), (128, 1)),
    "mixkvq": ("s32;k0;v0;2c32p128+4x32+16x8/2t32p128", (0, 128), (0, 128)),
    "pyramidkv": ("s0;k0;v0;16t1p128/16t1p128", (0, 1), (0, 1)),
    "saw-int4": ("s16;k128;v0;4t128p128f2/4t64p128", (0, 1), (0, 1)),
    "sides": ("s32;k128;v64;4c128p128/2t64p128", (128, 128), (128, 128)),
    "snapkv": ("s0;k0;v0;16t1p128/16t1p128", (0, 1), (0, 1)),
    "streaming-llm": ("s0;k0;v0;16t1p128/16t1p128", (0, 1), (0, 1)),
    "tova": ("s0;k0;v0;16t1p128/16t1p128", (0, 1), (0, 1)),
    "triaxial": ("s16;k0;v0;2c32p32/2t32p32|4t32p32/4t32p32", (0, 16), (0, 16)),
}


@pytest.mark.parametrize("name", sorted({type(scheme).name for scheme in list_schemes().values()}))
def test_layout_of_defaults(name):
    layout = get_scheme(name).layout(128, 64)
    keys, values = layout.keys, layout.values
    assert (layout.store.spec, (keys.local, keys.unit), (values.local, values.unit)) == LAYOUTS[name]


@pytest.mark.parametrize("name", list_schemes())
def test_presets(name):
    """One list; every preset is a scheme with knobs of its own, and says whom it is for."""
    scheme, (cls, entry) = get_scheme(name), base.entry_of(name)
    assert type(scheme) is cls
    assert type(scheme).__doc__
    assert scheme == cls(**entry.knobs)
    # Of an alias that nothing is declared of, the other name says it.
    others = [base.entry_of(other)[1] for other, same in list_schemes().items() if same == scheme]
    assert any(other.purpose.endswith(".") for other in others)


@pytest.mark.parametrize("which", base.LISTS)
def test_lists_hold_distinct_presets_in_order(which):
    names = base.listed(which)
    places = [base.entry_of(name)[0].place for name in names]
    assert names
    assert places == sorted(places)
    assert len({get_scheme(name) for name in names}) == len(names)


def test_unknown_lists_and_groups():
    with pytest.raises(ValueError, match="lists: got 'dmo', which is unknown; did you mean 'demo'"):
        base.Entry("Nobody.", lists=("dmo",))
    with pytest.raises(ValueError, match="group: got 'best', allowed 'scheme', 'eviction', 'control', 'baseline'"):
        base.Entry("Nobody.", group="best")


@pytest.mark.parametrize("name", list_schemes())
def test_description_round_trip(name):
    scheme = get_scheme(name)
    described = json.loads(json.dumps(scheme.to_dict()))
    assert described["scheme"] == type(scheme).name
    assert get_scheme(described) == scheme
    # Knobs that are not named take the scheme's defaults.
    assert get_scheme({"scheme": name}) == scheme


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("kity", "'kitty'"), ("kitty_pro", "'kitty-pro'"), ("saw", "'saw-int4'"), ("kivi2", "'kivi-2'")],
)
def test_unknown_preset_shows_the_nearest(name, nearest):
    with pytest.raises(ValueError, match=rf"scheme: got '{name}', which is unknown; did you mean .*{nearest}") as error:
        get_scheme(name)
    for known in list_schemes():
        assert known in str(error.value)


@pytest.mark.parametrize("make_scheme", [get_scheme, lambda n, **k: get_scheme({"scheme": n} | k)])
def test_unknown_knob_shows_the_nearest(make_scheme):
    with pytest.raises(ValueError, match=r"kitty: knob 'boost' is unknown; did you mean 'boost_ratio'.*page_size"):
        make_scheme("kitty-pro", boost=0.2)


@pytest.mark.parametrize(
    ("name", "knobs", "message"),
    [
        ("kitty", {"boost_ratio": 1.5}, r"boost_ratio: got 1\.5, allowed 0\.0 to 1\.0"),
        ("kitty", {"boost_ratio": -0.1}, r"boost_ratio: got -0\.1, allowed"),
        ("kitty", {"boost_ratio": float("nan")}, r"boost_ratio: got nan, allowed"),
        ("kitty", {"boost_ratio": "0.2"}, r"boost_ratio: got '0\.2', allowed a number"),
        ("kitty", {"score": "k"}, r"score: got 'k', allowed 'k_abs', 'qk_abs', 'error'"),
        ("kitty", {"page_size": 4}, r"page_size: got 4, allowed 8 to 1024"),
        ("kitty", {"page_size": 64.0}, r"page_size: got 64\.0, allowed a whole number"),
        ("kitty", {"page_size": True}, r"page_size: got True, allowed a number"),
        ("kitty", {"page_size": None}, r"page_size: got None, allowed"),
        ("kitty", {"sink_length": -1}, r"sink_length: got -1, allowed 0 to 1024"),
        ("kivi", {"bits": 3}, r"bits: got 3, allowed 2, 4"),
        ("kivi", {"local_length": 0}, r"local_length: got 0, allowed 8 to 1024"),
        ("saw-int4", {"rotate": "values"}, r"rotate: got 'values', allowed 'keys', 'both', 'none'"),
        ("saw-int4", {"block": 1}, r"block: got 1, allowed 2 to 1024"),
        ("saw-int4", {"block": 2.5}, r"block: got 2\.5, allowed a whole number"),
        ("full", {"page_size": 2000}, r"page_size: got 2000, allowed 8 to 1024"),
        ("mixkvq", {"most_bf16": 0.6, "most_int4": 0.5}, r"most_bf16, most_int4: got 0\.6 and 0\.5, .* together"),
        ("mixkvq", {"group_size": 48}, r"group_size: got 48, which does not divide the page of 128 tokens"),
        ("mixkvq", {"page_size": 100}, r"page_size: got 100, allowed powers of two"),
        ("arkv", {"budget_tokens": 32}, r"budget_tokens: got 32, allowed more than the window of 32 .*raise it"),
        ("arkv", {"window": 2000}, r"budget_tokens: got 1024, allowed more than the window of 2000"),
        ("arkv", {"alpha": 0.0}, r"alpha: got 0.*more than 0 up to 1"),
        ("arkv", {"tau_variance": 0.0}, r"tau_variance: got 0"),
        ("arkv", {"budget_tokens": 64, "budget_bytes": 99}, r"budget_tokens, budget_bytes: got 64 and 99.*one of them"),
        ("arkv", {"budget_bytes": 1000}, r"budget_bytes: got 1000, allowed more than \d+, .* window of 32.*raise it"),
    ],
)
def test_knob_out_of_range(name, knobs, message):
    with pytest.raises(ValueError, match=message):
        MixedKVCache(config("llama"), name, **knobs)


@pytest.fixture
def restored(monkeypatch):
    """The registry as it was."""
    monkeypatch.setattr(base, "_PRESETS", dict(base._PRESETS))


def test_names_are_taken_once(restored):
    with pytest.raises(ValueError, match=r"preset: 'kitty' is taken by Kitty; choose another name"):

        class Other(Scheme):
            name = "kitty"

    with pytest.raises(ValueError, match=r"preset: 'kitty-pro' is taken by Kitty"):

        class Another(Scheme):
            name = "another"
            presets = {"kitty-pro": {}}  # noqa: RUF012

    assert type(get_scheme("kitty")) is Kitty
    assert get_scheme("kitty-pro").boost_ratio == 0.25
    # Refused as a whole.
    assert "another" not in list_schemes()


def test_a_scheme_of_one_file_is_in_every_list(restored):
    """Commands ask the registry, each time."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class New(Kivi):
        """Another KIVI."""

        name = "new"
        place = 1
        presets = {  # noqa: RUF012
            "new": base.Entry("Whoever wants sinks.", lists=base.LISTS),
            "new-wide": base.Entry("The same, wide.", {"bits": 4}, ("demo",)),
        }
        sink_length: int = knob(8, low=0)

    for found in (choose_schemes(), parse_measured([]), base.listed("fit")):
        assert "new" in list(found)
    assert list(choose_schemes())[:2] == ["new", "new-wide"]
    assert list_schemes()["new-wide"] == get_scheme("new", bits=4) == New(bits=4)
    assert "| `new-wide` | The same, wide. | 5.00 |" in schemes_markdown()
    assert describe("new", New())["lists"] == list(base.LISTS)


def test_layout_checks_what_the_store_relies_on():
    with pytest.raises(NotImplementedError, match="Scheme defines no layout"):
        Scheme().layout(8, 8)
    narrow, wide = PageFormat(2, "channel", 8, 8), PageFormat(4, "token", 8, 8)
    values = SideLayout((PageFormat(2, "token", 8, 8),))
    with pytest.raises(ValueError, match=r"keys: got a seal unit of 1 tokens, .* multiple of the page of 8"):
        Layout(SideLayout((narrow,)), values)
    with pytest.raises(ValueError, match="local, unit: keys and values must leave the tail together"):
        Layout(SideLayout((narrow, wide), unit=8), SideLayout((wide, wide), local=8, unit=8))


def test_layers_that_look_strings_up_have_keys_of_more_bits():
    """Layers of best-1.5 by depth: of 28, those that were measured."""
    layers = [get_scheme("best-1.5").in_layer(layer, 28) for layer in range(28)]
    assert [layer.key_bits for layer in layers] == [1] * 17 + [4, 1] + [2] * 5 + [1] * 4
    assert {(layer.key_bits, layer.boost_ratio) for layer in layers} >= {(1, 0.1875), (2, 0.25)}
    assert {(layer.value_bits, layer.two_bit_keys_to) for layer in layers} == {(1, 0.0)}
    with pytest.raises(ValueError, match=r"two_bit_keys_from: got 0\.9 with two_bit_keys_to=0\.86"):
        get_scheme("best-1.5", two_bit_keys_from=0.9)
