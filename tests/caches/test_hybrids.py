"""Models with recurrent states: attention beside them is compressed, steps are captured, and files hold the states."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionAndFullAttentionLayer

from evals.families import build, families
from hfkvq import MixedKVCache, PrefixStore
from hfkvq.caches import cache_file
from hfkvq.caches.layers import HybridLayer, RecurrentLayer
from tests.caches.driver import small
from tests.caches.graph_recorder import TapeGraph, captured  # noqa: F401
from tests.caches.models import prompt
from tests.caches.test_generate import FULL, beams, greedy, padding, turns

BESIDE = ("falcon_h1", "zaya", "inkling_text", *(pytest.param(x, marks=pytest.mark.slow) for x in ("zamba", "zamba2")))


@functools.cache
def model_of(family):
    if family not in families():
        pytest.skip(f"this Transformers has no {family}")
    model = build(family)
    model.generation_config.eos_token_id = None
    return model


def states(cache):
    """All states of a cache, Transformers' or ours, layer by layer."""
    found = []
    for layer in cache.layers:
        kinds = (getattr(layer, name, {}) for name in ("conv_states", "recurrent_states"))
        found.append([x for held in kinds for x in held.values() if x is not None])
    return found


@torch.no_grad()
def steps(model, cache, ids, tokens):
    """Logits (B, n, vocabulary) of given tokens (B, n), one by one after a prompt."""
    model(ids, past_key_values=cache)
    return torch.cat([model(tokens[:, i : i + 1], past_key_values=cache).logits for i in range(tokens.shape[1])], 1)


def assert_same_states(one, other, **tolerance):
    for mine, theirs in zip(states(one), states(other), strict=True):
        assert len(mine) == len(theirs)
        for x, y in zip(mine, theirs, strict=True):
            torch.testing.assert_close(x, y, **tolerance or {"rtol": 0, "atol": 0})


@pytest.mark.parametrize("family", BESIDE)
def test_attention_beside_states_is_compressed(family):
    model, ids, tokens = model_of(family), prompt(2, 30) % 100, prompt(2, 12, 3) % 100
    stock = DynamicCache(config=model.config)
    expected = steps(model, stock, ids, tokens)
    kinds = [type(layer).__name__ for layer in stock.layers]
    for length in (None, 64):
        cache = MixedKVCache(model, FULL, max_cache_len=length)
        torch.testing.assert_close(steps(model, cache, ids, tokens), expected, rtol=1e-4, atol=2e-5)
        assert_same_states(cache, stock, rtol=1e-4, atol=2e-5)
        # What no attention of ours has had a say in.
        assert torch.equal(states(cache)[0][0], states(stock)[0][0])
        for kind, layer in zip(kinds, cache.layers, strict=True):
            assert isinstance(layer, HybridLayer) == (kind == "LinearAttentionAndFullAttentionLayer")
            assert isinstance(layer, RecurrentLayer) == (kind == "LinearAttentionLayer")
    cache = MixedKVCache(model, small("kitty-pro"))
    assert isinstance(cache.compressed_layers[0], LinearAttentionAndFullAttentionLayer)
    steps(model, cache, ids, tokens)
    assert all(share.quantized > 0.3 for share in cache.memory().tokens)


@pytest.mark.parametrize(
    ("family", "mode"), [("falcon_h1", padding), ("falcon_h1", beams), ("qwen3_next", greedy), ("qwen3_next", turns)]
)
def test_modes_of_generate_are_captured(family, mode, captured):  # noqa: F811
    """Rows of beams are moved between replays, so their states go back to where the graph looks for them."""
    model = model_of(family)
    expected = mode(model, lambda: DynamicCache(config=model.config))
    assert torch.equal(mode(model, lambda: MixedKVCache(model, FULL)), expected)
    assert captured.made


def test_states_that_are_not_in_the_cache_are_neither_captured_nor_saved(captured, caplog, tmp_path):  # noqa: F811
    """A graph would read the tensor that the module had when it was captured. The window beside is held in pages."""
    model = model_of("recurrent_gemma")
    expected = greedy(model, lambda: DynamicCache(config=model.config))
    assert torch.equal(greedy(model, lambda: MixedKVCache(model, FULL)), expected)
    assert not captured.made
    assert "recurrent states in its own modules" in caplog.text
    cache = MixedKVCache(model, FULL)
    with torch.no_grad():
        model(prompt(1, 20) % 100, past_key_values=cache)
    with pytest.raises(ValueError, match="states of layer 1 in its own modules"):
        cache.save(tmp_path / "file")
    assert not [*tmp_path.iterdir()]


def test_caches_take_turns_in_the_same_graph(captured):  # noqa: F811
    """One is copied, one is reset and given another batch, and each goes on with its own states."""
    model, ids, tokens = model_of("falcon_h1"), prompt(2, 20) % 100, prompt(2, 9, 3) % 100
    first, second = MixedKVCache(model, FULL), MixedKVCache(model, FULL)
    expected = [DynamicCache(config=model.config) for _ in range(3)]
    steps(model, first, ids, tokens)
    steps(model, second, ids.flip(1), tokens)
    third = copy.deepcopy(first)
    for cache, given in zip(expected, (ids, ids.flip(1), ids), strict=True):
        steps(model, cache, given, tokens)
    with torch.no_grad():
        for i in range(4):
            for mine, theirs in zip((first, second, third), expected, strict=True):
                new = tokens[:, i : i + 1] + (mine is third)
                logits = [model(new, past_key_values=cache).logits for cache in (mine, theirs)]
                torch.testing.assert_close(*logits, rtol=1e-4, atol=2e-5)
    second.reset()
    fresh = DynamicCache(config=model.config)
    found = steps(model, second, ids[:1], tokens[:1])
    torch.testing.assert_close(found, steps(model, fresh, ids[:1], tokens[:1]), rtol=1e-4, atol=2e-5)


class TestFailures:
    """A step that fails is in no state, or the cache says so."""

    @pytest.fixture
    def begun(self, captured):  # noqa: F811
        model, ids = build("zamba2"), prompt(1, 20) % 100
        cache = MixedKVCache(model, FULL)
        with torch.no_grad():
            model(ids, past_key_values=cache)
        return model, cache, ids

    def test_an_interrupted_replay_is_said_until_reset(self, begun, monkeypatch, tmp_path):
        model, cache, ids = begun
        with torch.no_grad():
            for i in range(3):
                model(ids[:, i : i + 1], past_key_values=cache)

            def interrupted(*_):
                raise KeyboardInterrupt

            with monkeypatch.context() as patch:
                patch.setattr(TapeGraph, "replay", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    model(ids[:, :1], past_key_values=cache)
            for call in (lambda: model(ids[:, :1], past_key_values=cache), lambda: cache.save(tmp_path / "file")):
                with pytest.raises(RuntimeError, match=r"interrupted while it wrote recurrent states.*reset\(\)"):
                    call()
            cache.reset()
            plain = DynamicCache(config=model.config)
            assert torch.allclose(*[steps(model, x, ids, ids[:, :3]) for x in (cache, plain)], rtol=1e-4, atol=2e-5)

    @pytest.mark.parametrize("family", ["qwen3_next", "lfm3"])
    def test_a_prompt_that_fails_midway_is_said_until_reset(self, family, monkeypatch):
        """Before any attention, say: no count of tokens shows it. One that has passed all layers is in the cache."""
        if family not in families():
            pytest.skip(f"this Transformers has no {family}")
        model, ids = build(family), prompt(1, 40) % 100
        cache, first = MixedKVCache(model, FULL), model.model.layers[0]
        mlp, torn = getattr(first, "mlp", None) or first.feed_forward, torch.OutOfMemoryError("here")

        def fail(*_, **__):
            raise torn

        with torch.no_grad():
            model(ids[:, :20], past_key_values=cache)
            with monkeypatch.context() as patch:
                patch.setattr(model.lm_head, "forward", fail)
                with pytest.raises(torch.OutOfMemoryError):
                    model(ids[:, 20:30], past_key_values=cache)
            plain = DynamicCache(config=model.config)
            model(ids[:, :30], past_key_values=plain)
            pair = [model(ids[:, 30:], past_key_values=each).logits for each in (cache, plain)]
            torch.testing.assert_close(*pair, rtol=1e-4, atol=2e-5)
            with monkeypatch.context() as patch:
                patch.setattr(mlp, "forward", fail)
                with pytest.raises(torch.OutOfMemoryError):
                    model(ids, past_key_values=cache)
            with pytest.raises(RuntimeError, match=r"interrupted while it wrote recurrent states.*reset\(\)"):
                model(ids, past_key_values=cache)
            cache.reset()
            plain = DynamicCache(config=model.config)
            pair = [model(ids, past_key_values=each).logits for each in (cache, plain)]
            torch.testing.assert_close(*pair, rtol=1e-4, atol=2e-5)

    @pytest.mark.parametrize("options", [{"debug": True}, {"attach": False}, {"graphs": False}], ids=str)
    def test_too_many_tokens_are_refused_before_states_have_them(self, options):
        model, ids = build("qwen3_next"), prompt(1, 40) % 100
        cache, plain = MixedKVCache(model, FULL, max_cache_len=30, **options), DynamicCache(config=model.config)
        with torch.no_grad():
            for each in (cache, plain):
                model(ids[:, :20], past_key_values=each)
            with pytest.raises(ValueError, match="max_cache_len: 20 tokens and 40 new ones"):
                model(ids, past_key_values=cache)
            pair = [model(ids[:, :1], past_key_values=each).logits for each in (cache, plain)]
        torch.testing.assert_close(*pair, rtol=1e-4, atol=2e-5)
        # Of a model that asks for no mask.
        layer = cache.compressed_layers[0]
        keys = torch.zeros(1, layer.heads, 40, layer.held().dims["keys"])
        with pytest.raises(ValueError, match="max_cache_len"):
            cache.update(keys, keys, cache._compressed[0])
        with pytest.raises(RuntimeError, match=r"reset\(\)"):
            model(ids[:, :1], past_key_values=cache)


class TestFiles:
    def saved(self, family, path, **options):
        model, ids = model_of(family), prompt(2, 40) % 100
        cache = MixedKVCache(model, small("kitty-pro"), **options)
        with torch.no_grad():
            model(ids, past_key_values=cache)
            model(ids[:, :1], past_key_values=cache)
        cache.save(path)
        return model, cache, ids

    @pytest.mark.parametrize("family", ["falcon_h1", "qwen3_next", "nemotron_h", "lfm2_moe"])
    @pytest.mark.parametrize("length", [None, 80])
    def test_states_come_back(self, family, length, tmp_path, captured):  # noqa: F811
        model, cache, ids = self.saved(family, tmp_path / "file", max_cache_len=length)
        loaded = MixedKVCache.load(tmp_path / "file", model)
        assert_same_states(cache, loaded)
        with torch.no_grad():
            for i in range(4):
                pair = [model(ids[:, i : i + 1], past_key_values=x).logits for x in (cache, loaded)]
                torch.testing.assert_close(*pair, rtol=1e-5, atol=1e-6)

    def rewritten(self, path, change):
        """The file with other contents, and the checksum of these."""
        description, tensors = cache_file.read_file(path)
        change(description, tensors)
        cache_file.write_file(path, description, tensors)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda d, t: t.pop("layer0.states.conv0"), "conv0"),
            (lambda d, t: t.update({"layer0.states.conv7": t["layer0.states.conv0"].clone()}), "states"),
            (lambda d, t: t.update({"layer0.states.conv0": t["layer0.states.conv0"][:1]}), "rows"),
            (lambda d, t: t.update({"layer0.states.conv0": t["layer0.states.conv0"][..., :2]}), "columns"),
            (lambda d, t: t.update({"layer0.states.conv0": t["layer0.states.conv0"].int()}), "rows"),
            (lambda d, t: t.update({"layer0.states.recurrent0": torch.zeros(())}), "rows"),
            (lambda d, t: t.update({name: x[:1].clone() for name, x in t.items() if "states." in name}), "other rows"),
            (lambda d, t: d["layers"][0]["states"].update(begun=[5]), "widths"),
            (lambda d, t: d["layers"][0]["states"].update(begun=None), "cannot be loaded"),
            (lambda d, t: d["layers"][0]["states"].update(widths=[-1]), "widths"),
            (lambda d, t: d["layers"][0]["states"].update(widths=[1, 2]), "widths"),
            (lambda d, t: d["layers"][0]["states"].update(states=["conv0", "conv0"]), "states"),
            (lambda d, t: d["layers"][0]["states"].update(states=["conv0", "else0"]), "else0"),
            (lambda d, t: d["layers"][0].pop("states"), "not in both"),
            (lambda d, t: d["layers"][1].update(states={}), "not in both"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, change, message, tmp_path):
        model, _, _ = self.saved("qwen3_next", tmp_path / "file")
        self.rewritten(tmp_path / "file", change)
        with pytest.raises(ValueError, match=message):
            MixedKVCache.load(tmp_path / "file", model)

    def test_a_store_finds_whole_prompts(self, tmp_path):
        """No page begins a cache of its own, and nothing can be taken back."""
        model, ids = model_of("falcon_h1"), prompt(1, 60) % 100
        store = PrefixStore(tmp_path, model, small("saw-int4"))
        cache, known = store.match(ids[:, :40])
        assert known == 0
        with torch.no_grad():
            model(ids[:, :40], past_key_values=cache)
        store.put(cache, ids[:, :40])
        assert store.match(ids[:, :40]).tokens == store.match(ids[:, :39]).tokens == 0
        found, known = store.match(ids)
        assert known == 40
        assert_same_states(found, cache)
        with torch.no_grad():
            pair = [model(ids[:, 40:], past_key_values=x).logits for x in (cache, found)]
        assert torch.equal(*pair)
