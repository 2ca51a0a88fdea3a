"""`generate` and raw forwards: the lossless scheme is `DynamicCache`, token for token, and nobody else notices."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, FalconConfig, LlamaConfig, StaticCache

from hfkvq import MixedKVCache, get_scheme
from tests.caches.driver import OF_EACH_SCHEME, assert_same_bits, small, stored, within
from tests.caches.models import FAMILIES, build, prompt

# What is generated crosses borders of pages of 8 and 16 tokens.
LENGTH, NEW = 44, 10
FULL = get_scheme("full", page_size=8)


def _generate(model, cache, ids=None, **kwargs):
    ids = prompt(1, LENGTH) if ids is None else ids
    options = {"max_new_tokens": NEW, "do_sample": False} | kwargs
    return model.generate(ids, past_key_values=cache, **options)


def greedy(model, make):
    return _generate(model, make(), prompt(2, LENGTH))


def padding(model, make):
    ids = prompt(3, LENGTH)
    mask = torch.ones_like(ids)
    mask[1, :9], mask[2, :23] = 0, 0
    return _generate(model, make(), ids, attention_mask=mask)


def beams(model, make):
    ids = prompt(2, LENGTH)
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    return _generate(model, make(), ids, attention_mask=mask, num_beams=3, num_return_sequences=2)


def sampling(model, make):
    torch.manual_seed(5)
    return _generate(model, make(), do_sample=True, top_k=20, num_return_sequences=3)


def assisted(model, make):
    return _generate(model, make(), assistant_model=build("llama", seed=1))


def lookup(model, make):
    # A prompt that repeats itself, so that there is something to look up.
    return _generate(model, make(), prompt(1, LENGTH // 4).repeat(1, 4), prompt_lookup_num_tokens=5)


def chunked(model, make):
    ids = prompt(2, LENGTH)
    mask = torch.ones_like(ids)
    # Row 1 begins within the second chunk, so its first chunk is padding only.
    mask[1, :17] = 0
    return _generate(model, make(), ids, attention_mask=mask, prefill_chunk_size=13)


def turns(model, make):
    cache, ids = make(), prompt(2, 12)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    for turn in range(3):
        ids = _generate(model, cache, ids, attention_mask=mask, max_new_tokens=6)
        more = prompt(2, 9, seed=turn)
        mask = torch.cat([mask, mask.new_ones(2, ids.shape[1] - mask.shape[1] + 9)], 1)
        ids = torch.cat([ids, more], 1)
    return ids


def prefix(model, make):
    cache, ids = make(), prompt(1, LENGTH)
    with torch.no_grad():
        model(ids[:, :30], past_key_values=cache)
    out = []
    for seed in (1, 2):
        question = torch.cat([ids[:, :30], prompt(1, LENGTH - 30, seed)], 1)
        out.append(_generate(model, copy.deepcopy(cache), question))
    assert cache.get_seq_length() == 30
    return torch.cat(out)


MODES = {f.__name__: f for f in (greedy, padding, beams, sampling, assisted, lookup, chunked, turns, prefix)}


def forwards(model, make, mask=True):
    """Logits of raw forwards with mixed chunk sizes, at real tokens."""
    cache, ids = make(), prompt(2, 70)
    valid = torch.ones_like(ids)
    valid[1, :11] = 0
    logits, at = [], 0
    with torch.no_grad():
        for chunk in (20, 1, 1, 17, 3, 1, 16, 1, 10):
            new = slice(at, at + chunk)
            at += chunk
            seen = {"attention_mask": valid[:, :at]} if mask else {}
            # Positions as generate counts them.
            places = {"position_ids": (valid.cumsum(1) - 1).clamp(min=0)[:, new]} if mask else {}
            logits.append(model(ids[:, new], past_key_values=cache, **seen, **places).logits)
    logits = torch.cat(logits, 1)
    return torch.cat([logits[0], logits[1, 11:]]) if mask else logits


def reference(family, attention, run, **kwargs):
    model = build(family, attention=attention)
    return run(model, lambda: DynamicCache(config=model.config), **kwargs)


def ours(family, attention, run, scheme=FULL, **kwargs):
    """``attention`` None: switched to "hfkvq" by the constructor."""
    model = build(family, attention=attention)
    return run(model, lambda: MixedKVCache(model, scheme, attach=attention is None), **kwargs)


# Families whose layers all attend in full, as Llama's do.
LIKE_LLAMA = ("qwen3", "qwen3-moe", "qwen2", "mistral", "phi3", "glm4")


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        *(("llama", mode) for mode in MODES),
        *(("gemma3", mode) for mode in ("beams", "assisted")),
        *(("gpt-oss", mode) for mode in ("chunked", "turns")),
        *(
            pytest.param(
                family,
                "turns" if family in ("deepseek-v3", "doge") else "padding",
                marks=[pytest.mark.slow] * (family in LIKE_LLAMA),
            )
            for family in FAMILIES
        ),
    ],
)
def test_lossless_is_dynamic_cache(family, mode):
    """Attached: attention over pages."""
    expected = reference(family, None, MODES[mode])
    assert torch.equal(ours(family, None, MODES[mode]), expected)


@pytest.mark.parametrize(
    ("family", "mask"),
    [
        *((family, True) for family in FAMILIES if family not in (*LIKE_LLAMA, "qwen3-next")),
        *((family, False) for family in ("llama", "gpt-oss", "qwen3-next")),
    ],
)
def test_raw_forwards(family, mask):
    """Chunks shorter and longer than a step, with padding and without any mask, on all three roads.

    Stock linear attention takes padding for tokens in later chunks.
    """
    roads = [None, "eager"] if family in ("gpt-oss", "gemma2") else [None, "sdpa", "eager"]
    expected = reference(family, None, forwards, mask=mask)
    for attention in roads:
        got = ours(family, attention, forwards, mask=mask)
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=2e-4, msg=lambda m, a=attention: f"{a}: {m}")


@pytest.mark.rounding
@pytest.mark.parametrize(
    ("name", "attention"),
    [(name, "sdpa") for name in OF_EACH_SCHEME]
    + [(name, "eager") for name in ("kitty-pro", "kvarn", "arkv", "triaxial")],
)
def test_lossy_schemes_agree_on_every_road(name, attention):
    """One layer holds the same bits and gives the same logits, fused, intercepted or dequantized; all are finite.

    Of one layer, because its keys and values owe nothing to attention, so that every road seals the same numbers. What
    a second layer is given has passed through attention, whose last bits are the road's and the CPU's, and a number on
    a rounding boundary makes a step of a code of them. That layers agree is tested with lossless schemes.
    """
    # Eager attention never shows its mask, so there padding is stored with the rest.
    padded = attention == "sdpa"
    if not padded and "query" in get_scheme(name).needs:
        pytest.skip("nor its queries, on which depends what is sealed")
    # Where attention hides its queries, nothing is evicted.
    scheme = small(name) if padded else within(small(name))
    found = []
    for road in (None, attention):
        model = build("llama", attention=road, num_hidden_layers=1)
        cache = MixedKVCache(model, scheme, attach=road is None)
        logits = forwards(model, lambda cache=cache: cache, mask=padded)
        assert torch.isfinite(logits).all()
        # Where attention was not ours, the last tokens wait for the next forward.
        cache.layers[0].settle()
        found.append((logits, [stored(cache.layers[0], row) for row in range(2)]))
    (expected, bits), (got, same) = found
    for mine, theirs in zip(same, bits, strict=True):
        assert_same_bits(mine, theirs)
    torch.testing.assert_close(got, expected, rtol=2e-4, atol=2e-4)


# Who else is affected.


def attached(cache, model):
    cache.attach(model)
    return cache


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "mistral-sliding", "deepseek-v3"])
def test_other_caches_are_unharmed(family):
    """Once attached, a model's other caches, and no cache at all, give the logits they gave before."""
    model, ids = build(family), prompt(2, 40)
    mask = torch.ones_like(ids)
    mask[1, :9] = 0

    def logits():
        out = []
        for make in (
            lambda: None,
            lambda: DynamicCache(config=model.config),
            lambda: StaticCache(config=model.config, max_cache_len=64),
        ):
            for masks in ({"attention_mask": mask}, {}):
                cache = make()
                with torch.no_grad():
                    if cache is None:
                        out.append(model(ids, use_cache=False, **masks).logits)
                        continue
                    prefill = {"attention_mask": mask[:, :30]} if masks else {}
                    model(ids[:, :30], past_key_values=cache, **prefill)
                    out.append(
                        model(ids[:, 30:39], past_key_values=cache, **{k: m[:, :39] for k, m in masks.items()}).logits
                    )
                    out.append(model(ids[:, 39:], past_key_values=cache, **masks).logits)
        return out

    before = logits()
    cache = MixedKVCache(model)
    assert cache.attached
    for a, b in zip(logits(), before, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_detach_restores_the_name(attention):
    model = build("llama", attention=attention)
    first, second = MixedKVCache(model), MixedKVCache(model, "kitty")
    assert model.config._attn_implementation == "hfkvq"
    second.detach()
    assert model.config._attn_implementation == attention
    # Twice, and through another cache of the model: nothing left to undo.
    first.detach()
    assert model.config._attn_implementation == attention
    # What the user has chosen since is not undone.
    third = MixedKVCache(model)
    model.set_attn_implementation("eager")
    third.detach()
    assert model.config._attn_implementation == "eager"
    MixedKVCache(model).detach()
    assert model.config._attn_implementation == "eager"
    third.attach()
    assert model.config._attn_implementation == "hfkvq"
    third.detach()
    assert model.config._attn_implementation == "eager"
    # A cache outlives its detachment.
    model.set_attn_implementation(attention)
    out = _generate(model, MixedKVCache(model, FULL, attach=False))
    assert torch.equal(out, reference("llama", attention, lambda m, make: _generate(m, make())))


def test_attach_spares_models_that_know_few_names():
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}
    model = AutoModelForCausalLM.from_config(FalconConfig(alibi=False, **sizes)).eval()
    before, ids = model.config._attn_implementation, torch.arange(1, 9)[None]
    cache = MixedKVCache(model)
    cache.attach()
    assert model.config._attn_implementation == before != "hfkvq"
    assert model(ids, past_key_values=cache).logits.isfinite().all()


def test_saving_a_model_is_not_affected(tmp_path):
    """No trace of hfkvq in what save_pretrained writes, and the saved model loads without it."""
    plain, attached = build("llama"), build("llama")
    cache = MixedKVCache(attached, FULL)
    _generate(attached, cache)
    for name, model in (("plain", plain), ("attached", attached)):
        model.save_pretrained(tmp_path / name)
    for file in ("config.json", "generation_config.json"):
        saved = [json.loads((tmp_path / name / file).read_text()) for name in ("plain", "attached")]
        assert saved[0] == saved[1]
        assert "hfkvq" not in (tmp_path / "attached" / file).read_text()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "attached")
    assert loaded.config._attn_implementation == "sdpa"
    assert torch.equal(_generate(loaded, None), _generate(plain, None))
    assert "hfkvq" not in json.dumps(attached.config.to_dict(), default=str)
    assert "hfkvq" not in json.dumps(attached.config.to_diff_dict(), default=str)


def test_models_with_nothing_to_compress_warn(caplog):
    chunked = LlamaConfig(num_hidden_layers=2, layer_types=["chunked_attention"] * 2, attention_chunk_size=8)
    MixedKVCache(chunked)
    assert "LlamaConfig has no layer with only attention, over all tokens or a window" in caplog.text
    caplog.clear()
    MixedKVCache(build("llama"))
    assert not caplog.text


def test_repr_shows_scheme_tokens_and_memory():
    model = build("llama")
    cache = MixedKVCache(model, "kitty")
    assert repr(cache).startswith("MixedKVCache(Kitty(boost_ratio=0.125")
    assert repr(cache).endswith("layers=2/2, empty)")
    _generate(model, cache)
    # The last token was chosen, not fed.
    assert f"batch=1, seen={LENGTH + NEW - 1}, " in repr(cache)
