"""Layers with a window hold a ring of pages: what any cache gives, in as many bytes however long the context is."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache

from hfkvq import MixedKVCache, get_scheme
from hfkvq.caches.layer_state.base import ROLLBACK
from hfkvq.caches.layers import KVLayer, PaddingReader
from hfkvq.caches.layers.build import scheme_for_window
from hfkvq.caches.schemes import Full
from hfkvq.kernels.arguments import AttentionArguments
from hfkvq.kernels.pages import SPARE
from hfkvq.kernels.step import MAX_STEP
from tests.caches.driver import small
from tests.caches.graph_recorder import TapeGraph, captured  # noqa: F401
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


@pytest.mark.parametrize(
    ("family", "length", "graphs"),
    [*((family, None, True) for family in FAMILIES), ("gemma3", 300, True), ("gemma3", 300, False)],
)
def test_beyond_the_ring(family, length, graphs, captured):  # noqa: F811
    """Prompt, steps, chunks that are longer than the window and shorter: the logits of `DynamicCache`."""
    model, ids = build(family), prompt(2, 290)
    parts = [150, *[1] * 5, 60, 7, *[1] * 6]
    cache = MixedKVCache(model, FULL, max_cache_len=length, graphs=graphs)
    expected = logits_of(model, DynamicCache(config=model.config), parts, ids)
    torch.testing.assert_close(logits_of(model, cache, parts, ids), expected, rtol=1e-4, atol=1e-4)
    cache.integrity_check()
    assert all(layer.window == 16 and layer.store.runs[0].keys[0].shape[0] == 2 * 13 for layer in windows(cache))
    assert (TapeGraph.made > 0) is (graphs and cache.graphs is not None)
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
    "saw-int4": get_scheme(small("saw-int4"), page_size=8, local_length=4),
    "kvarn": get_scheme(small("kvarn"), page_size=8),
    "kivi": small("kivi-2", local_length=8),
}


def test_a_long_prompt_is_what_its_end_is():
    """Only the pages that some later query sees are sealed: those that a prompt of chunks has, too."""
    model, ids = build("mistral-sliding", sliding_window=64, num_hidden_layers=1), prompt(2, 330)
    ids[1, :13] = 0
    mask = (ids != 0).long()
    mask[:, 13:] = 1
    caches = [MixedKVCache(model, COMPRESSED["kvarn"]) for _ in range(2)]
    with torch.no_grad():
        model(ids[:, :320], attention_mask=mask[:, :320], past_key_values=caches[0])
        for at in range(0, 320, 40):
            model(ids[:, at : at + 40], attention_mask=mask[:, : at + 40], past_key_values=caches[1])
        logits = [model(ids[:, 320:], attention_mask=mask, past_key_values=cache).logits for cache in caches]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
    for one, two in zip(*(cache.layers[0].store.windows for cache in caches), strict=True):
        assert torch.equal(one, two)


def test_whatever_is_done_to_rows_and_lengths(captured):  # noqa: F811
    model, ids = build("gemma3", sliding_window=24), prompt(3, 400)
    cache, plain = MixedKVCache(model, FULL), DynamicCache(config=model.config)

    def same(start, tokens):
        rows = cache.layers[0].batch_size if cache.layers[0].seen else 3
        parts = [1] * tokens if tokens < 100 else [tokens]
        got, expected = (logits_of(model, each, parts, ids[:rows, start:]) for each in (cache, plain))
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        cache.integrity_check()

    same(0, 150)
    same(150, 9)
    for rows in (torch.tensor([2, 0, 0]), torch.tensor([1, 2, 0])):
        cache.reorder_cache(rows)
        plain.reorder_cache(rows)
    same(159, 9)
    for each in (cache, plain):
        each.batch_select_indices(torch.tensor([1]))
        each.batch_repeat_interleave(2)
    same(168, 12)
    copied, was = copy.deepcopy(cache), copy.deepcopy(plain)
    same(180, 12)
    # What was copied goes its own way.
    cache, plain = copied, was
    same(185, 12)
    cache.reset()
    plain = DynamicCache(config=model.config)
    same(0, 120)


def test_tokens_are_taken_back_as_long_as_pages_hold_what_is_in_sight():
    model, ids = build("gemma3", sliding_window=24), prompt(1, 300)
    cache = MixedKVCache(model, FULL)
    logits_of(model, cache, [200], ids)
    for tokens in (1, 40, 20):
        cache.crop(-tokens)
    cache.integrity_check()
    left, before = cache.get_seq_length(), cache.memory().compressed
    with pytest.raises(NotImplementedError, match="a window of 24 tokens has let go"):
        cache.crop(-60)
    assert (cache.get_seq_length(), cache.memory().compressed) == (left, before)
    plain = DynamicCache(config=model.config)
    logits_of(model, plain, [left], ids)
    expected = logits_of(model, plain, [1] * 9 + [70], ids[:, left:])
    torch.testing.assert_close(logits_of(model, cache, [1] * 9 + [70], ids[:, left:]), expected, rtol=1e-4, atol=1e-4)
    # All of them: nothing is in sight then.
    cache.crop(-cache.get_seq_length())
    assert cache.get_seq_length() == 0
    expected = logits_of(model, DynamicCache(config=model.config), [150], ids)
    torch.testing.assert_close(logits_of(model, cache, [150], ids), expected, rtol=1e-4, atol=1e-4)


def test_which_pages_hold_a_window():
    dims = (128, 128)
    kitty = get_scheme("kitty-pro")
    assert scheme_for_window(kitty, 1024, dims) is kitty
    for name, window in (("kitty-pro", 1023), ("kitty-pro", 5), ("arkv", 4096), ("snapkv", 4096), ("triaxial", 4096)):
        assert scheme_for_window(get_scheme(name), window, dims) == Full(page_size=32)
    assert scheme_for_window(FULL, 16, dims) == FULL
    with pytest.raises(ValueError, match="window: got 100 tokens, but the newest 256 are held outside of pages"):
        kitty.layout(*dims).in_window(100)


def test_a_capacity_within_the_window_hides_nothing():
    """Then such a layer is like any other, with the scheme's first tokens."""
    cache = MixedKVCache(build("mistral-sliding"), small("kitty-pro"), max_cache_len=16)
    assert [layer.window for layer in cache.layers] == [0, 0]
    assert cache.layers[0].scheme.name == "kitty"


# Interpreted kernels have their own tests.
@pytest.mark.parametrize("backend", ["reference", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
@pytest.mark.parametrize("name", ["full", "kitty", "kvarn"])
def test_attention_over_pages_is_attention_over_what_is_dense(name, device):
    """Across page borders far beyond the ring, of rows of which one is padded; and that row is the same alone."""
    scheme = (COMPRESSED | {"full": FULL})[name]
    start, steps, pad = 203, 20, 6
    generator = torch.Generator().manual_seed(1)
    queries, keys, values = (torch.randn(2, h, start + steps, 32, generator=generator) for h in (4, 2, 2))
    both, alone = (KVLayer(scheme, PaddingReader(), window=64) for _ in range(2))
    assert both.is_sliding

    def step(layer, rows, first, last):
        parts = [x[rows, :, first:last].to(device) for x in (queries, keys, values)]
        layer.update(*parts[1:])
        column = torch.arange(last - layer.columns, last, device=device)
        newest = torch.arange(first, last, device=device)[:, None]
        seen = (column <= newest) & (column > newest - 64)
        shown = torch.stack([seen & (column >= own) for own in ([0, pad] if layer is both else [pad])])[:, None]
        pages = layer.begin(shown, last - first)
        assert pages is (last - first <= 16)
        if pages:
            out = layer.attend(parts[0], AttentionArguments(0.2, shown))
        dense = [layer.dense(side).repeat_interleave(2, 1) for side in ("keys", "values")]
        plain = torch.nn.functional.scaled_dot_product_attention(parts[0], *dense, shown, scale=0.2)
        if pages:
            torch.testing.assert_close(out, plain, rtol=2e-5, atol=2e-5)
        layer.finish(parts[0], AttentionArguments(0.2))
        return plain

    for first, last in ((0, start), *((i, i + 1) for i in range(start, start + steps))):
        together, own = step(both, slice(0, 2), first, last), step(alone, slice(1, 2), first, last)
        torch.testing.assert_close(together[1, :, -1], own[0, :, -1], rtol=2e-5, atol=2e-5)
    assert both.get_mask_sizes(5) == (63 + 5, start + steps - 63)
