"""Caches named after papers: one for each scheme, whose knobs are keyword arguments."""

import dataclasses
import inspect

import pytest

import hfkvq
from hfkvq.caches.named import NamedCache
from hfkvq.caches.schemes.base import entry_of, presets
from hfkvq.measure.presets import knob_texts
from tests.caches.models import config

NAMED = sorted(
    (cls for name in hfkvq.__all__ if inspect.isclass(cls := getattr(hfkvq, name)) and issubclass(cls, NamedCache)),
    key=lambda cls: cls.__name__,
)


def scheme_of(cls):
    return entry_of(cls.preset_name)[0]


def test_every_scheme_has_one():
    schemes = {entry_of(name)[0] for name in presets()}
    assert {own for own in schemes if own.__module__.startswith("hfkvq.")} == {scheme_of(cls) for cls in NAMED}
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
