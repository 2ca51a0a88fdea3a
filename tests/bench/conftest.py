from __future__ import annotations

import inspect

import pytest

from hfkvq import MixedKVCache
from hfkvq.bench.generate import engines


@pytest.fixture(autouse=True)
def caches_without_graphs(monkeypatch):
    """Where caches have no graphs yet, there are none to be switched off."""
    if "graphs" not in inspect.signature(MixedKVCache.__init__).parameters:
        options = engines.cache_options

        def without(mode, room):
            return {name: value for name, value in options(mode, room).items() if name != "graphs"}

        monkeypatch.setattr(engines, "cache_options", without)
