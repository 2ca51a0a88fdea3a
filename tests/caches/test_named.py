"""Caches named after papers: one for each scheme, with its knobs as typed arguments, which its docstring lists."""

import dataclasses
import inspect
import re

import pytest

import hfkvq
from hfkvq.caches.cache import DEFAULT_SCHEME
from hfkvq.caches.knob_texts import knob_texts
from hfkvq.caches.named import OPTIONS, NamedCache
from hfkvq.caches.registry import entry_of, presets
from tests.caches.models import config

NAMED = sorted(
    (cls for name in hfkvq.__all__ if inspect.isclass(cls := getattr(hfkvq, name)) and issubclass(cls, NamedCache)),
    key=lambda cls: cls.__name__,
)
# What the cache of a scheme takes in a way of its own.
OWN = {"TriAxialCache": {"table"}}


def scheme_of(cls):
    return entry_of(cls.preset_name)[0]


def test_every_scheme_has_one():
    schemes = {entry_of(name)[0] for name in presets()}
    assert {own for own in schemes if own.__module__.startswith("hfkvq.")} == {scheme_of(cls) for cls in NAMED}
    assert len({cls.preset_name for cls in NAMED}) == len(NAMED)


@pytest.mark.parametrize("cls", NAMED, ids=lambda cls: cls.__name__)
def test_the_signature_is_that_of_the_scheme(cls):
    """Names, types and defaults, which are written by hand."""
    fields = dataclasses.fields(scheme_of(cls))
    parameters = inspect.signature(cls.__init__).parameters
    own = OWN.get(cls.__name__, set())
    expected = [(each.name, each.type, each.default) for each in fields if each.name not in own]
    names = {each.name for each in fields} - own
    found = [(name, each.annotation, each.default) for name, each in parameters.items() if name in names]
    assert found == expected
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in names)
    assert parameters["options"].annotation == "Unpack[CacheOptions]"


@pytest.mark.parametrize("cls", NAMED, ids=lambda cls: cls.__name__)
def test_the_docstring_lists_every_knob(cls):
    doc = inspect.getdoc(cls)
    arguments = doc.partition("\nArgs:\n")[2].partition("\nRaises:\n")[0]
    listed = re.findall(r"^    (\w+): ", arguments, re.MULTILINE)
    assert set(listed) >= {each.name for each in dataclasses.fields(scheme_of(cls))} | {"model_or_config"}
    assert len(set(listed)) == len(listed)
    assert max(map(len, doc.splitlines())) <= 120


def test_options_are_those_of_the_cache():
    parameters = inspect.signature(hfkvq.MixedKVCache.__init__).parameters
    assert set(OPTIONS) == set(parameters) - {"self", "model_or_config", "scheme", "knobs"}


def test_every_knob_is_explained():
    for name in presets():
        cls = entry_of(name)[0]
        if cls.__module__.startswith("hfkvq."):
            texts = knob_texts(cls)
            assert texts.keys() == {each.name for each in dataclasses.fields(cls)}, name
            assert all(text.endswith(".") and "see `Tok" not in text for text in texts.values()), name


def test_the_default_is_said_plainly():
    doc = " ".join(inspect.getdoc(hfkvq.KittyCache).split())
    assert re.search(rf"``{DEFAULT_SCHEME}`` is [^;]* \(the default of `MixedKVCache`\)", doc)
    assert "The default preset of ``MixedKVCache(model.config)`` is another one" in doc
    assert hfkvq.KittyCache.preset_name != DEFAULT_SCHEME


def test_knobs_and_options_reach_the_cache():
    cache = hfkvq.SnapKVCache(config("llama"), budget_tokens=300, pages="kivi-2", max_cache_len=512, attach=False)
    assert cache.scheme == hfkvq.get_scheme("snapkv", budget_tokens=300, pages="kivi-2")
    assert cache._capacity == 512
    with pytest.raises(ValueError, match=r"kivi: knob 'bit' is unknown; did you mean 'bits'"):
        hfkvq.KIVICache(config("llama"), bit=2)
    with pytest.raises(ValueError, match=r"kernel: got 4, allowed 1, 3"):
        hfkvq.SnapKVCache(config("llama"), kernel=4)
    assert hfkvq.KVarNCache(config("llama"), value_bits=4, attach=False).scheme == hfkvq.get_scheme("kvarn-k4v4")
    defaults = {cls: hfkvq.get_scheme(cls.preset_name) for cls in NAMED}
    assert all(scheme == type(scheme)() for scheme in defaults.values())
