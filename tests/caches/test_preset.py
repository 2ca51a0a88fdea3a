"""Schemes of single layers, and presets as files."""

from __future__ import annotations

import dataclasses
import inspect
import json

import pytest

import hfkvq
from hfkvq import MixedKVCache, get_scheme
from hfkvq.caches import Preset, get_preset
from hfkvq.caches.named import NamedCache
from hfkvq.caches.schemes.base import entry_of, presets
from hfkvq.caches.schemes.sides import Sides
from hfkvq.measure.presets import knob_texts
from tests.caches.models import config

SMALL = {"page_size": 8, "sink_length": 2, "local_length": 8}


def kitty():
    return get_scheme("kitty", **SMALL)


@pytest.mark.parametrize(
    ("layers", "names"),
    [
        ({}, "kitty kitty kitty kitty kitty"),
        ({"0": "full"}, "full kitty kitty kitty kitty"),
        ({0: "full", -1: "saw-int4"}, "full kitty kitty kitty saw-int4"),
        ({"1-3": "full"}, "kitty full full full kitty"),
        ({"0-1": "kivi-2", "-2": "full"}, "kivi kivi kitty full kitty"),
    ],
)
def test_layers_by_hand(layers, names):
    preset = get_preset("kitty", layers)
    assert [scheme.name for scheme in preset.by_layer(5)] == names.split()
    assert get_preset(json.loads(json.dumps(preset.to_dict()))) == preset


def test_layers_by_depth():
    by_depth = get_preset("kitty", wide_from=0.5, wide_to=0.8)
    assert [scheme.value_bits for scheme in by_depth.by_layer(6)] == [2, 2, 2, 4, 4, 2]
    assert [scheme.value_bits for scheme in get_preset("kitty").by_layer(6)] == [2] * 6
    # A layer of its own keeps what it says of its values.
    own = get_preset(by_depth, {"3": {"wide_from": 0.0, "wide_to": 0.0}, "0": "full"})
    assert [getattr(scheme, "value_bits", None) for scheme in own.by_layer(6)] == [None, 2, 2, 2, 4, 2]
    # Keys have shares of their own, and raise no channel there.
    keys = get_preset("best-2.8").by_layer(30)
    assert [i for i, scheme in enumerate(keys) if scheme.key_bits == 4] == [18]
    assert keys[18].needs == frozenset()
    assert keys[17].needs == {"query"}
    wide = keys[18].layout(64, 64).keys
    assert (wide.formats[0].bits, wide.formats[0].raised, wide.rotate) == (4, (), 64)
    pages = get_preset("snapkv", pages="best-3.4").by_layer(30)
    assert [i for i, scheme in enumerate(pages) if scheme.page_scheme.value_bits == 4] == list(range(10, 24))
    assert len({scheme.name for scheme in pages}) == 1


def test_shares_of_the_depth_in_the_wrong_order():
    with pytest.raises(ValueError, match=r"wide_from: got 0\.8 with wide_to=0\.5, allowed at most wide_to"):
        get_scheme("kitty", wide_from=0.8, wide_to=0.5)
    with pytest.raises(
        ValueError, match=r"wide_keys_from: got 0\.8 with wide_keys_to=0\.5, allowed at most wide_keys_to"
    ):
        get_scheme("kitty", wide_keys_from=0.8, wide_keys_to=0.5)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({"4": "full"}, "layers: got '4', but the model has layers 0 to 1"),
        ({"-3": "full"}, "layers: got '-3', but the model has layers 0 to 1"),
        ({"1-0": "full"}, "layers: got '1-0'"),
        ({"0": "full", "0-1": "kitty"}, "layers: layer 0 is named twice, the second time by '0-1'"),
        ({"first": "full"}, "layers: got 'first', allowed a layer"),
        ({"0": "ful"}, "scheme: got 'ful', which is unknown; did you mean 'full'"),
        ({"0": {"tau_bf16": 1}}, "kitty: knob 'tau_bf16' is unknown"),
        ("full", "layers: got 'full', allowed schemes by layer"),
    ],
)
def test_wrong_layers(layers, message):
    with pytest.raises(ValueError, match=message):
        MixedKVCache(config("llama"), "kitty", layers=layers)


def test_a_file_is_a_name(tmp_path):
    path = tmp_path / "tuned.json"
    preset = get_preset(kitty(), {"0": "full"}, origin={"model": "tiny", "kld": 0.01})
    preset.save(path)
    again = Preset.load(path)
    assert again == preset
    assert again.origin == {"model": "tiny", "kld": 0.01}
    for what in (path, str(path), preset, preset.to_dict()):
        cache = MixedKVCache(config("llama"), get_preset(what))
        assert cache.preset == preset
    cache = MixedKVCache(config("llama"), str(path))
    assert cache.scheme == kitty()
    # Overrides of what a file says.
    assert get_preset(path, sink_length=0).scheme.sink_length == 0
    assert get_preset(path, {}).layers == ()


def test_knobs_behind_a_name_and_as_arguments(tmp_path):
    """One spelling for caches, layers, files and commands."""
    expected = get_scheme("kitty", boost_ratio=0.2, sink_length=0)
    get_preset(expected).save(tmp_path / "mine.json")
    given = [
        ("kitty:boost_ratio=0.2:sink_length=0", {}),
        ("kitty:sink_length=0", {"boost_ratio": 0.2}),
        ("kitty", {"boost_ratio": 0.2, "sink_length": 0}),
        (get_scheme("kitty"), {"boost_ratio": 0.2, "sink_length": 0}),
        (f"{tmp_path / 'mine.json'}:rotate_values=true", {"rotate_values": False}),
        (f"{tmp_path / 'mine.json'}", {}),
    ]
    for what, knobs in given[:4] + given[5:]:
        assert (
            MixedKVCache(config("llama"), what, **knobs).preset.scheme == get_preset(what, **knobs).scheme == expected
        )
    (tmp_path / "run:lr=0.1").mkdir()
    get_preset(expected).save(tmp_path / "run:lr=0.1" / "mine.json")
    assert get_preset(f"{tmp_path}/run:lr=0.1/mine.json").scheme == expected
    layers = {"0": "kitty:boost_ratio=0.2:sink_length=0"}
    assert MixedKVCache(config("llama"), "full", layers=layers).preset.by_layer(2)[0] == expected
    assert get_preset(f"{tmp_path / 'mine.json'}:rotate_values=true").scheme.rotate_values
    with pytest.raises(ValueError, match="gives rotate_values twice"):
        get_preset(given[4][0], **given[4][1])


@pytest.mark.parametrize(
    ("scheme", "knobs", "message"),
    [
        ("kitty", {"max_cache_length": 9}, "max_cache_length: neither an option .* did you mean 'max_cache_len'"),
        ("kitty", {"boost": 0.2}, "boost: neither an option of the cache nor of its scheme; did you mean 'boost_r"),
        ("kitty:boost=0.2", {}, "kitty: knob 'boost' is unknown; did you mean 'boost_ratio'"),
        ("latent-4:bits=8.0", {}, "bits: got 8.0, allowed 4, 8"),
        ("kitty:fit=false", {}, "fit: got False, allowed"),
        ("snapkv+kitty:boost_ratio=0.2", {}, "snapkv: knob 'boost_ratio' is unknown"),
    ],
)
def test_wrong_knobs(scheme, knobs, message):
    with pytest.raises(ValueError, match=message):
        MixedKVCache(config("llama"), scheme, **knobs)


# Caches named after papers: one for each scheme, whose knobs are keyword arguments.


NAMED = sorted(
    (cls for name in hfkvq.__all__ if inspect.isclass(cls := getattr(hfkvq, name)) and issubclass(cls, NamedCache)),
    key=lambda cls: cls.__name__,
)


def scheme_of(cls):
    return entry_of(cls.preset_name)[0]


def test_every_scheme_has_one():
    schemes = {entry_of(name)[0] for name in presets()}
    # A cache with a budget has layers of `Sides`.
    assert {own for own in schemes if own.__module__.startswith("hfkvq.")} - {Sides} == {
        scheme_of(cls) for cls in NAMED
    }
    assert len({cls.preset_name for cls in NAMED}) == len(NAMED)


def test_every_knob_is_explained():
    for name in presets():
        cls = entry_of(name)[0]
        if cls.__module__.startswith("hfkvq."):
            texts = knob_texts(cls)
            assert texts.keys() == {each.name for each in dataclasses.fields(cls)}, name
            assert all(text.endswith(".") and "see `Tok" not in text for text in texts.values()), name


def test_knobs_and_options_reach_the_cache():
    cache = hfkvq.SnapKVCache(config("llama"), budget_tokens=300, pages="kivi-2", max_cache_len=512, attach=False)
    assert cache.scheme == hfkvq.get_scheme("snapkv", budget_tokens=300, pages="kivi-2")
    assert cache._capacity == 512
    with pytest.raises(ValueError, match=r"bit: neither an option of the cache nor of its scheme; did you mean 'bits'"):
        hfkvq.KIVICache(config("llama"), bit=2)
    with pytest.raises(ValueError, match=r"kernel: got 4, allowed 1, 3"):
        hfkvq.SnapKVCache(config("llama"), kernel=4)
    assert hfkvq.KVarNCache(config("llama"), value_bits=4, attach=False).scheme == hfkvq.get_scheme("kvarn-k4v4")
    defaults = {cls: hfkvq.get_scheme(cls.preset_name) for cls in NAMED}
    assert all(scheme == type(scheme)() for scheme in defaults.values())
