"""Layers with a window hold a ring of pages: what any cache gives, in as many bytes however long the context is."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache

from hfkvq import MixedKVCache, get_scheme
from hfkvq.caches.layers.base import ROLLBACK
from hfkvq.caches.layout import Layout
from hfkvq.caches.schemes import Full
from hfkvq.caches.window import in_window
from hfkvq.kernels.pages import SPARE
from hfkvq.kernels.step import MAX_STEP
from tests.caches.driver import small
from tests.caches.graph_recorder import PythonGraph, captured  # noqa: F401
from tests.caches.models import build, prompt

# Rings of 13 pages of 8 tokens: contexts of 200 tokens go round.
FULL = get_scheme("full", page_size=8)
FAMILIES = ("gemma3", "gpt-oss", "mistral-sliding", "gemma2")


def logits_of(model, cache, parts, ids):
    """Logits of tokens that come in parts of these lengths."""
    out, at = [], 0
    with torch.no_grad():
        for count in parts:
            out.append(model(ids[:, at : at + count], past_key_values=cache).logits)
            at += count
    return torch.cat(out, 1)


def windows(cache):
    return [layer for layer in cache.compressed_layers if layer.window]


def test_pages_hold_what_may_be_taken_back():
    assert SPARE == MAX_STEP + ROLLBACK


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("length", [None, 300])
@pytest.mark.parametrize("family", FAMILIES)
def test_beyond_the_ring(family, length, graphs, captured):  # noqa: F811
    """Prompt, steps, chunks that are longer than the window and shorter: the logits of `DynamicCache`."""
    model, ids = build(family), prompt(2, 290)
    parts = [150, *[1] * 12, 60, 7, *[1] * 40]
    cache = MixedKVCache(model, FULL, max_cache_len=length, graphs=graphs)
    expected = logits_of(model, DynamicCache(config=model.config), parts, ids)
    torch.testing.assert_close(logits_of(model, cache, parts, ids), expected, rtol=1e-4, atol=1e-4)
    cache.integrity_check()
    assert all(layer.window == 16 and layer.store.runs[0].keys[0].shape[0] == 2 * 13 for layer in windows(cache))
    assert (PythonGraph.made > 0) is (graphs and cache.graphs is not None)
    assert len(cache.compressed_layers) == len(cache.layers)


@pytest.mark.parametrize("length", [None, 400])
def test_bytes_do_not_grow_beyond_the_window(length):
    model, ids = build("mistral-sliding"), prompt(1, 390)
    cache = MixedKVCache(model, FULL, max_cache_len=length)
    logits_of(model, cache, [150], ids)
    held = cache.memory().compressed
    logits_of(model, cache, [100, *[1] * 30, 90], ids)
    now = cache.memory().compressed
    assert (now.codes, now.metadata, now.windows) == (held.codes, held.metadata, held.windows)
    # Four bytes for each page of each row.
    assert now.tables - held.tables <= 2 * 4 * (390 // 8 + 16)
    assert cache.memory().elements == 2 * 16 * 2 * 2 * 32
    assert sum(cache.memory().tokens[0]) == pytest.approx(1)


# Windows of 64 tokens pay for pages of 8 with these.
COMPRESSED = {
    "kitty": get_scheme(
        "kitty", page_size=8, group_size=8, local_length=4, key_local_length=2, sink_length=3, score="qk_abs"
    ),
    "saw-int4": get_scheme(small("saw-int4"), page_size=8),
    "kvarn": get_scheme(small("kvarn"), page_size=8),
    "mixkvq": get_scheme(small("mixkvq"), page_size=8),
}


@pytest.mark.parametrize("length", [None, 300])
@pytest.mark.parametrize("name", COMPRESSED)
def test_captured_steps_are_those_that_dequantize(name, length, captured):  # noqa: F811
    """Growing and fixed, and those that keep on without graphs."""
    model, ids = build("gemma3", sliding_window=64), prompt(2, 290)
    found = []
    for options in ({}, {"graphs": False}, {"attach": False}):
        cache = MixedKVCache(build("gemma3", sliding_window=64) if options else model, COMPRESSED[name],
                             max_cache_len=length, **options)
        own = [layer.scheme for layer in windows(cache)]
        assert all(type(scheme) is not Full for scheme in own)
        found.append(logits_of(model, cache, [170, *[1] * 60, 30, *[1] * 10], ids))
        cache.integrity_check()
    assert PythonGraph.made
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-3)
