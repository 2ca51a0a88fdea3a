"""What `hfkvq fit` computes: real caches hold as many bytes, and figures of known models come out by hand."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from transformers import DeepseekV3Config as DeepseekConfig
from transformers import DynamicCache, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, Qwen3NextConfig
from transformers import Gemma3ForCausalLM as Gemma3
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from evals.shapes import get_config
from hfkvq import MixedKVCache, TriAxialCache, get_scheme
from hfkvq.caches import get_preset
from hfkvq.caches.steps import step_buffer
from hfkvq.caches.store import KVStore
from hfkvq.kernels import seal
from hfkvq.measure.models.outline import outline
from hfkvq.measure.reference import load_reference
from hfkvq.sizes import parse_size
from hfkvq.tuning.fit import cache_bytes, outline_of, weights_of
from hfkvq.tuning.fit.layer import Arrival, layer_bytes
from tests.caches.driver import ALIKE, by_layout
from tests.caches.graph_recorder import captured  # noqa: F401
from tests.command import assert_refused, invoke

run = partial(invoke, "fit")


# PyTorch looks up once which functions a device context redirects; it must not find the poisoned ones of `everywhere`.
with torch.device("meta"):
    torch.empty(0)

QWEN3_8B = get_config("qwen3-8b")
LLAMA_31_8B = LlamaConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, max_position_embeddings=131072, tie_word_embeddings=False, dtype=torch.bfloat16,
    rope_parameters={
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
)  # fmt: skip
TINY = LlamaConfig(
    vocab_size=1024, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, max_position_embeddings=4096, dtype=torch.float32,
)  # fmt: skip
KIB, GIB = 1024, 1024**3


@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(0)
    return LlamaForCausalLM(TINY).eval()


@pytest.fixture(scope="module")
def reader():
    return load_reference()[1]


@torch.no_grad()
def held(model, cache, prompt, generated=0, chunk=None, batch=2):
    """Bytes of a cache that a model has really filled."""
    step = chunk or prompt
    sizes = [min(step, prompt - at) for at in range(0, prompt, step)] + [1] * generated
    for size in sizes:
        model(input_ids=torch.full((batch, size), 7), past_key_values=cache)
    return cache.memory().total


def made(model, name, reader, **options):
    if "tags" in get_preset(name).needs:
        return TriAxialCache(model, reader, **options)
    return MixedKVCache(model, name, **options)


@pytest.mark.parametrize("name", [name for name in by_layout() if name not in ALIKE])
def test_a_filled_cache_holds_what_was_computed(tiny, reader, name):
    for prompt, generated, chunk in ((161, 2, None), (300, 0, 90)):
        generated = 0 if get_scheme(name).evicts else generated
        total = held(tiny, made(tiny, name, reader), prompt, generated, chunk)
        assert total == cache_bytes(TINY, name, prompt + generated, 2, generated=generated, chunk=chunk, graphs=False)


@pytest.mark.parametrize(
    ("name", "prompt", "chunk"),
    [
        ("kitty-pro", 300, None),
        ("arkv-origin", 601, 90),
    ],
)
def test_buffers_of_captured_steps(captured, tiny, reader, name, prompt, chunk, monkeypatch):  # noqa: F811
    """The buffer of the first step is outgrown, and another one made: soon, where there is little room ahead."""
    monkeypatch.setattr(step_buffer, "LEAST_HEADROOM", 32)
    total = held(tiny, made(tiny, name, reader, headroom=0.01), prompt, 45, chunk)
    assert captured.made > 1
    assert total == cache_bytes(TINY, name, prompt + 45, 2, generated=45, chunk=chunk, headroom=0.01)


@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("arkv-origin", {"budget_tokens": 64}),
        ("arkv-quant", {"budget_bytes": 60_000}),
        ("arkv-window", {"budget_tokens": 100}),
    ],
)
def test_a_budget_of_tokens_or_bytes(tiny, name, knobs):
    scheme = get_scheme(name, **knobs)
    for prompt in (300, 333):
        assert held(tiny, MixedKVCache(TINY, scheme), prompt) == cache_bytes(TINY, scheme, prompt, 2, graphs=False)


@pytest.mark.parametrize("name", ["kitty-pro", "saw-int4"])
def test_long_contexts_by_the_store_itself_on_the_meta_device(name, monkeypatch):
    # Tensors without values cannot be sealed.
    monkeypatch.setattr(seal, "_seal", lambda *given: None)
    scheme = get_scheme(name)
    x = torch.empty(2, 8, 131072, 128, dtype=torch.bfloat16, device="meta")
    store = KVStore(scheme.layout(128, 128), scheme, x, x)
    store.extend(x, x)
    expected = sum(tensor.nbytes for tensor in store.state.tensors())
    assert layer_bytes(scheme, 8, 128, 128, 2, 2, Arrival(131072)) == expected
    assert cache_bytes(QWEN3_8B, name, 131072, 2, graphs=False) == 36 * expected


@pytest.mark.parametrize("name", ["kitty", "saw-int4"])
def test_sliding_windows(name):
    """A ring of pages, or of 16-bit pages where a window is too short for the scheme's own."""
    config = Gemma3TextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        sliding_window=40,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        dtype=torch.float32,
    )
    model = Gemma3(config).eval()
    for prompt, generated, chunk in ((20, 1, None), (150, 12, None), (241, 1, 90)):
        total = held(model, MixedKVCache(config, name), prompt, generated, chunk)
        options = {"generated": generated, "chunk": chunk}
        assert total == cache_bytes(config, name, prompt + generated, 2, **options, graphs=False)
    assert cache_bytes(config, None, 1000, 2) < cache_bytes(config, None, 1001, 2)


def test_latents_and_linear_attention_by_hand():
    latent = outline(
        DeepseekConfig(num_hidden_layers=2, first_k_dense_replace=1, n_routed_experts=8, n_group=1, topk_group=1)
    )
    assert [(layer.heads, layer.key_dim, layer.value_dim) for layer in latent.layers] == [(1, 512, 64)] * 2
    hybrid = outline(Qwen3NextConfig(num_hidden_layers=4, num_experts=4, num_experts_per_tok=2, dtype=torch.bfloat16))
    assert [layer.compressed for layer in hybrid.layers] == [False, False, False, True]
    # Convolutions over four tokens of 2 * 16 * 128 + 32 * 128 channels, and states of 32 heads, in three layers.
    assert (hybrid.states, hybrid.state_numbers) == (3 * 32 * 128 * 128 * 4, 3 * 8192 * 4)
    for dtype in (torch.bfloat16, torch.float32):
        held = hybrid.states + hybrid.state_numbers * dtype.itemsize
        assert cache_bytes(hybrid, None, 1000, dtype=dtype) == held + 1000 * 2 * 2 * 256 * dtype.itemsize


class TestKnownModels:
    def test_weights_and_bytes_a_token(self):
        for config, parameters, kib in ((LLAMA_31_8B, 8_030_261_248, 128), (QWEN3_8B, 8_190_735_360, 144)):
            model = outline_of(config)
            assert model.parameters == parameters
            assert weights_of(model, torch.bfloat16).total == 2 * parameters
            assert cache_bytes(config, None, 1) == kib * KIB
            assert cache_bytes(config, None, 131072, 3) == 3 * 131072 * kib * KIB


class TestUse:
    @pytest.mark.parametrize(
        ("text", "count"), [("2GiB", 2 * GIB), ("24GB", 24 * 10**9), ("1.5 mib", 1.5 * 2**20), ("8g", 8 * GIB), (7, 7)]
    )
    def test_sizes(self, text, count):
        assert parse_size(text) == count

    def test_stock_cache_is_dynamic_cache(self, tiny):
        cache = DynamicCache(config=TINY)
        with torch.no_grad():
            tiny(input_ids=torch.full((2, 50), 7), past_key_values=cache)
        assert cache_bytes(TINY, None, 50, 2) == sum(x.keys.nbytes + x.values.nbytes for x in cache.layers)


class TestCommand:
    def test_a_config_is_enough(self, tmp_path):
        QWEN3_8B.save_pretrained(tmp_path)
        done = run("--model", str(tmp_path), "--context", "32768", "--schemes", "bf16,kitty-pro", "--json")
        assert done.exit_code == 0, done.output
        found = json.loads(done.stdout)
        assert found["weights"]["parameters"] == 8_190_735_360
        assert [each["cache"] for each in found["caches"]] == [
            cache_bytes(QWEN3_8B, name, 32768, chunk=2048) for name in (None, "kitty-pro")
        ]
        assert found["caches"][1]["batch"] > found["caches"][0]["batch"]

    def test_the_table(self):
        done = run()
        assert done.exit_code == 0, done.output
        assert "reference model" in done.stdout
        assert "kitty-pro" in done.stdout
        assert "An estimate" in done.stdout

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--context", "5000"], "4096 positions; use --context 4096"),
            (["--gpu-memory", "10MiB", "--overhead", "0"], "4.76 MiB too much"),
            (["--prefill-chunk", "8"], "more than 16"),
            (["--generated", "4097"], "no more than the context"),
        ],
    )
    def test_bad_input_has_a_remedy_and_no_traceback(self, arguments, message):
        assert_refused(run(*arguments), message)

    def test_a_config_that_is_no_decoder(self, tmp_path):
        (tmp_path / "config.json").write_text('{"model_type": "vit"}')
        assert "Error: model:" in run("--model", str(tmp_path)).output


def rope_types():
    """Every type of RoPE that the installed Transformers has, with what its config needs."""
    stretched = {"factor": 2.0, "original_max_position_embeddings": 256}
    more = {
        "longrope": stretched | {"short_factor": [1.0] * 16, "long_factor": [1.1] * 16},
        "llama3": stretched | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "proportional": {"partial_rotary_factor": 0.5},
        "default": {},
    }
    return {name: more.get(name, stretched) for name in ("default", *ROPE_INIT_FUNCTIONS)}


@pytest.mark.parametrize("name", rope_types())
def test_a_model_of_every_type_of_rope_is_laid_out(name):
    """Some ask for the positions' numbers, which the meta device does not have."""
    rope = {"rope_type": name, "rope_theta": 1e4} | rope_types()[name]
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 32}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, rope_parameters=rope)
    found = outline(config)
    assert [(x.compressed, x.heads, x.key_dim) for x in found.layers] == [(True, 2, 32)] * 2
    assert found.config.rope_parameters["rope_type"] == name
