"""Models whose weights are quantized: caches lose what they lose with the weights as they were."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache

from hfkvq import MixedKVCache
from hfkvq.caches.schemes.base import presets
from tests.caches.models import build, prompt

pytestmark = pytest.mark.slow

# Those of keys and values: latents have other models.
PRESETS = [name for name in presets() if not name.startswith("latent")]


def config_of(method):
    if method == "quanto":
        pytest.importorskip("optimum.quanto")
        return transformers.QuantoConfig(weights="int8")
    if method == "torchao":
        quantization = pytest.importorskip("torchao.quantization")
        return transformers.TorchAoConfig(quantization.Int8WeightOnlyConfig())
    pytest.importorskip("bitsandbytes")
    if method == "bitsandbytes-4":
        return transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
    return transformers.BitsAndBytesConfig(load_in_8bit=True)


@torch.no_grad()
def losses(model):
    """Mean difference of the logits of ten steps behind a prompt from `DynamicCache`'s, by preset."""
    ids, more = prompt(2, 300), prompt(2, 10)

    def steps(cache):
        model(ids, past_key_values=cache)
        return torch.cat([model(more[:, i : i + 1], past_key_values=cache).logits for i in range(10)], 1).float()

    expected = steps(DynamicCache(config=model.config))
    return {name: (steps(MixedKVCache(model, name)) - expected).abs().mean() / expected.std() for name in PRESETS}


@pytest.mark.parametrize("method", ["quanto", "torchao", "bitsandbytes-4", "bitsandbytes-8"])
def test_caches_lose_what_they_lose_with_plain_weights(method, tmp_path):
    config = config_of(method)
    build("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    plain, quantized = (
        losses(
            AutoModelForCausalLM.from_pretrained(
                tmp_path, quantization_config=each, dtype=torch.bfloat16, device_map="cpu"
            ).eval()
        )
        for each in (None, config)
    )
    for name in PRESETS:
        # Rounding of activations to 8 bits is part of the model there, and falls elsewhere.
        assert quantized[name] < 1.5 * plain[name] + 0.02, name
