"""Key smoothing in steps from CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hfkvq import MixedKVCache
from hfkvq.caches.layer_state import smoothing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def model_with_outliers(device, dtype):
    """A tiny model whose key biases are a hundred times its keys, in channels that RoPE turns fast and slowly."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=4096, eos_token_id=None, pad_token_id=0,
        attention_bias=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for layer in model.model.layers:
        own = layer.self_attn
        own.q_proj.weight.data *= 8
        own.k_proj.weight.data *= 8
        own.k_proj.bias.data.normal_()
        for channel, size in ((2, 60.0), (31, -100.0), (63, 40.0), (64 + 8, 150.0)):
            own.k_proj.bias.data[channel] = size
    return model.to(device, dtype)


def ids(rows=2, tokens=300):
    return torch.randint(3, 256, (rows, tokens), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model, cache, given, prompt=200, chunk=7, mask=None):
    """Of all tokens behind the prompt, a few at a time."""
    outs = []
    pieces = [slice(0, prompt), *(slice(i, i + chunk) for i in range(prompt, given.shape[1], chunk))]
    for piece in pieces:
        more = {} if mask is None else {"attention_mask": mask[:, : piece.stop]}
        outs.append(model(given[:, piece].to(model.device), past_key_values=cache, **more).logits)
    return torch.cat(outs, 1)[:, prompt:]


@pytest.mark.parametrize("name", ["saw-int4", "int4", "best-4.3", "kvarn"])
def test_captured_steps_are_eager_ones(name):
    """Graphs smooth as eager steps do; a cache of the same vectors takes the same graphs, one of others its own."""
    model = model_with_outliers("cuda", torch.bfloat16)
    given = ids(2, 320).cuda()
    eager, captured, second = (MixedKVCache(model, name, graphs=graphs) for graphs in (False, None, None))
    expected = logits(model, eager, given, chunk=1)
    for cache in (captured, second):
        torch.testing.assert_close(logits(model, cache, given, chunk=1), expected, rtol=0.05, atol=0.1)
        assert cache.graphs.sync.buffers.recordings
    smoothing._MEASURED.clear()
    model.model.layers[0].self_attn.k_proj.bias.data += 3
    other, again = (MixedKVCache(model, name, graphs=graphs) for graphs in (None, False))
    torch.testing.assert_close(
        logits(model, other, given, chunk=1), logits(model, again, given, chunk=1), rtol=0.05, atol=0.1
    )


def test_a_model_that_moves_after_it_was_measured():
    """Its caches take the vectors along, and share them."""
    model, given = model_with_outliers("cpu", torch.float32), ids(1, 60)
    expected = logits(model, MixedKVCache(model, "saw-int4"), given, prompt=50)
    model.cuda()
    caches = [MixedKVCache(model, "saw-int4") for _ in range(2)]
    for cache in caches:
        torch.testing.assert_close(logits(model, cache, given, prompt=50).cpu(), expected, rtol=0.05, atol=0.1)
    assert caches[0].layers[1].smoothing is caches[1].layers[1].smoothing
