"""Models that are unlike most: each is right, or refused with the reason, before anything happens."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertLMHeadModel,
    BigBirdPegasusConfig,
    BigBirdPegasusForConditionalGeneration,
    DynamicCache,
    EncoderDecoderCache,
    GitConfig,
    GitForCausalLM,
    MllamaConfig,
    MllamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from hfkvq import MixedKVCache
from tests.caches.graph_recorder import captured  # noqa: F401
from tests.caches.models import BASE, build, config, prompt

SIZES = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "decoder_start_token_id": 1}
ENCODER_DECODER = {"d_model": 32, "init_std": 0.3, "forced_eos_token_id": None}
ENCODER_DECODER |= {
    f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (("layers", 2), ("ffn_dim", 32))
}
ENCODER_DECODER |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, **SIZES}
T5 = {"d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 2, "num_heads": 2, "initializer_factor": 3.0}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
}
GIT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
GIT |= {"initializer_range": 0.3, "vision_config": VISION | {"patch_size": 8}, **SIZES}
MLLAMA = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "cross_attention_layers": [1],
    "num_attention_heads": 2,
}
MODELS = {
    "git": lambda: GitForCausalLM(GitConfig(**GIT)),
    # Without `is_decoder`: an encoder.
    "bert": lambda: BertLMHeadModel(BertConfig(**{k: x for k, x in GIT.items() if k != "vision_config"})),
    "bart": lambda: BartForConditionalGeneration(BartConfig(**ENCODER_DECODER)),
    "t5": lambda: T5ForConditionalGeneration(T5Config(**T5, **SIZES)),
    "bigbird-pegasus": lambda: BigBirdPegasusForConditionalGeneration(
        BigBirdPegasusConfig(**ENCODER_DECODER, attention_type="original_full")
    ),
    "mllama": lambda: MllamaForCausalLM(
        MllamaConfig(
            text_config={**BASE, **MLLAMA, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}
        ).text_config
    ),
}
NEW = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}


def make(name):
    torch.manual_seed(3)
    model = MODELS[name]().eval()
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return model


def ids(rows=2, tokens=24):
    return prompt(rows, tokens) % 60 + 3


@pytest.mark.parametrize("capacity", [None, 64])
def test_attention_of_their_own_beside_a_table(capacity):
    """GIT takes its images' attention from Transformers' table, and computes its text's itself."""
    model = make("git")
    expected = model.generate(ids(), **NEW)
    cache = MixedKVCache(model, "full", max_cache_len=capacity)
    assert not cache.attached
    assert torch.equal(model.generate(ids(), past_key_values=cache, **NEW), expected)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("capacity", [None, 64])
def test_new_tokens_of_encoders_see_each_other(capacity, graphs, request):
    """Several tokens of a step too, before and after others were taken back."""
    if graphs:
        request.getfixturevalue("captured")
    model, found = make("bert"), []
    for cache in (DynamicCache(config=model.config), MixedKVCache(model, "full", max_cache_len=capacity)):
        cache.activate_past_recording()
        logits = []
        with torch.no_grad():
            for first, last, back in ((0, 22, 0), (22, 23, 0), (23, 24, 0), (24, 25, 0), (25, 30, 4), (26, 31, 0)):
                logits.append(model(ids(2, 40)[:, first:last], past_key_values=cache).logits)
                if back:
                    cache.crop(-back)
        assert cache.get_seq_length() == 31
        found.append(torch.cat(logits, 1))
    assert torch.allclose(*found, atol=1e-4)


@pytest.mark.parametrize("name", ["bart", "t5", pytest.param("bigbird-pegasus", marks=pytest.mark.slow)])
def test_encoder_decoders(name):
    """A bare cache is refused before it holds anything; the line that the refusal names works."""
    model = make(name)
    expected = model.generate(ids(), **NEW)
    for capacity in (None, 64):
        for attach in (True, False):
            cache = MixedKVCache(model, "full", max_cache_len=capacity, attach=attach)
            assert not cache.attached
            with pytest.raises(
                ValueError, match=r"EncoderDecoderCache\(MixedKVCache\(model, ...\), DynamicCache\(\)\)"
            ):
                model.generate(ids(), past_key_values=cache, **NEW)
            assert cache.get_seq_length() == 0
            both = EncoderDecoderCache(cache, DynamicCache())
            assert torch.equal(model.generate(ids(), past_key_values=both, **NEW), expected)
            assert cache.get_seq_length() == 12
    beams = {"num_beams": 3, "num_return_sequences": 2, **NEW}
    both = EncoderDecoderCache(MixedKVCache(model, "full"), DynamicCache())
    assert torch.equal(model.generate(ids(), past_key_values=both, **beams), model.generate(ids(), **beams))


@pytest.mark.parametrize("mode", [{"assistant_model": True}, {"prompt_lookup_num_tokens": 4}])
def test_cross_attention_without_images(mode):
    """Its layers never see a token, so there is none to take back."""
    model = make("mllama")
    if "assistant_model" in mode:
        mode = {"assistant_model": build("llama", vocab_size=BASE["vocab_size"])}
    start = prompt(1, 6).repeat(1, 4)
    try:
        expected = model.generate(start, **NEW, **mode)
    except TypeError:
        pytest.skip("DynamicCache.crop raises a TypeError in layers without tokens, in Transformers 5.17")
    assert torch.equal(model.generate(start, past_key_values=MixedKVCache(model, "full"), **NEW, **mode), expected)


def test_eviction_under_a_model_that_computes_with_values():
    """Doge works out its mask from all cached values; after an eviction that was an error in the middle of a text."""
    with pytest.raises(ValueError, match="DogeConfig computes with all cached keys or values itself"):
        MixedKVCache(config("doge"), "arkv")


@pytest.mark.filterwarnings("ignore:_compile flag")
def test_flex_attention_is_given_plain_tensors():
    """Its compiler followed a handle into what it cannot compile."""
    model = build("llama", attention="flex_attention")
    cache = MixedKVCache(model, "full", attach=False)
    keys, values = (torch.randn(1, 2, 20, 32) for _ in range(2))
    assert all(map(torch.equal, cache.update(keys, values, 0), (keys, values)))
    assert [type(x) for x in cache.update(keys, values, 1)] == [torch.Tensor, torch.Tensor]


def test_cache_of_another_models_layers():
    """Fewer than the model has: said so, and nothing of the refused tokens stays."""
    model, cache = build("llama", num_hidden_layers=3), MixedKVCache(config("llama", num_hidden_layers=2), "full")
    with torch.no_grad():
        build("llama", num_hidden_layers=2)(prompt(1, 9), past_key_values=cache)
        with pytest.raises(ValueError, match=r"made for 2 layers, but got keys of layer 2; make it from the config"):
            model(prompt(1, 5), past_key_values=cache)
    assert [layer.seen for layer in cache.layers] == [9, 9]
