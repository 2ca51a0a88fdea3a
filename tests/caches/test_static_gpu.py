"""Compiled steps as CUDA graphs: the tokens of eager steps, one graph, no synchronization, no memory that grows."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM

from hfkvq import MixedKVCache, get_scheme
from tests.caches.driver import distinct

PROMPT, PAD = 600, 37
CAPTURED = [name for name in distinct() if get_scheme(name).limits(128, 128).captured is None]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        vocab_size=512,
        max_position_embeddings=8192,
    )
    return LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()


def scheme_of(name):
    return get_scheme(name, budget_tokens=500) if name.startswith("arkv") else get_scheme(name)


def generate(model, cache, forward, steps, strict=False):
    """Greedy tokens after a left-padded prompt; no step from the tenth on may wait for the device if ``strict``."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 512, (2, PROMPT), generator=generator).cuda()
    mask = torch.ones_like(ids)
    mask[1, :PAD] = 0
    place, found = torch.tensor([[PROMPT], [PROMPT - PAD]], device="cuda"), []
    with torch.no_grad():
        token = model(ids, attention_mask=mask, past_key_values=cache).logits[:, -1:].argmax(-1)
        try:
            for i in range(steps):
                cache.between_steps()
                # Outputs of a graph are overwritten by its next replay.
                token = forward(input_ids=token, position_ids=place + i, past_key_values=cache).logits[:, -1:]
                token = token.argmax(-1).clone()
                found.append(token)
                if i == 10:
                    torch.cuda.set_sync_debug_mode("error" if strict else "default")
                if i == steps // 2:
                    # By now ARKV has trimmed, for which matrix products have taken their workspace.
                    held = torch.cuda.memory_allocated()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    # Only the tokens found.
    assert torch.cuda.memory_allocated() <= held + 1024 * steps
    return torch.cat(found, 1)


def compare(model, name, steps):
    # Nothing but the graph differs: the backend changes no arithmetic, and both caches have the same shapes.
    torch._dynamo.reset()
    counters.clear()
    caches = [MixedKVCache(model, scheme_of(name), max_cache_len=PROMPT + steps + 8) for _ in range(2)]
    forward = torch.compile(model.forward, backend="cudagraphs", fullgraph=True)
    # A trim asks the device, once in hundreds of steps.
    scheme = get_scheme(name)
    strict = not scheme.evicts or scheme.interval is None
    got = generate(model, caches[0], forward, steps, strict)
    assert counters["stats"]["unique_graphs"] == 1
    expected = generate(model, caches[1], model.forward, steps)
    assert torch.equal(got, expected)
    assert expected.unique().numel() > 8
    assert int(caches[0].get_seq_length()) == PROMPT + steps


@pytest.mark.parametrize("name", CAPTURED)
def test_graphs_give_the_tokens_of_eager_steps(model, name):
    compare(model, name, 300)


@pytest.mark.slow
@pytest.mark.parametrize("name", CAPTURED)
def test_over_many_page_borders(model, name):
    compare(model, name, 2000)


@pytest.mark.parametrize("name", ["kitty-pro", "saw-int4", "arkv"])
def test_generate_as_users_call_it(model, name):
    """Compiled by inductor on its own, prompts in chunks too; rounding differs, so tokens are not compared."""
    torch._dynamo.reset()
    # No token is padding.
    ids = torch.randint(1, 512, (2, PROMPT), generator=torch.Generator().manual_seed(1)).cuda()
    cache = MixedKVCache(model, scheme_of(name), max_cache_len=800)
    for chunk in (None, 256):
        cache.reset()
        out = model.generate(
            ids, past_key_values=cache, max_new_tokens=150, do_sample=False, prefill_chunk_size=chunk, pad_token_id=0
        )
        assert out.shape[1] <= PROMPT + 150
        assert int(cache.get_seq_length()) == out.shape[1] - 1
