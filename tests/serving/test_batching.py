"""Transformers' continuous batching over compressed pages: the tokens of plain `generate`, blocks shared and freed."""

import copy
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from hfkvq import MixedKVCache, get_scheme
from hfkvq.caches.schemes.preset import get_preset
from hfkvq.kernels import use_interpreter
from tests.caches.driver import OwnChoice

serving = pytest.importorskip("hfkvq.serving", reason="Transformers before 5.19", exc_type=ImportError)

SCHEMES = ["saw-int4", "saw-int4-kv", "int4", "full"]
NEW = 12


def llama(hidden, layers, heads, head_dim, positions):
    """A model with random weights, the same for the same numbers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=hidden, intermediate_size=hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads // 2, head_dim=head_dim,
        max_position_embeddings=positions, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model():
    return llama(128, 2, 4, 64, 1024)


def prompts(*lengths, seed=1):
    torch.manual_seed(seed)
    return [torch.randint(3, 256, (length,)).tolist() for length in lengths]


def settings(**given):
    return ContinuousBatchingConfig(**{"num_blocks": 12, "max_batch_tokens": 256, "max_requests_per_batch": 8} | given)


def generation(**given):
    return GenerationConfig(
        **{"max_new_tokens": NEW, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0} | given
    )


def together(model, inputs, config=None, persistent_manager=False, **given):
    out = model.generate_batch(
        inputs=inputs, generation_config=generation(**given), continuous_batching_config=config or settings(),
        progress_bar=False, persistent_manager=persistent_manager,
    )  # fmt: skip
    assert all(each.error is None for each in out.values())
    return [each.generated_tokens for each in out.values()]


def alone(model, ids, scheme):
    """Plain `generate`, whose prompts come in the same pieces."""
    out = model.generate(
        torch.tensor([ids]), generation_config=generation(),
        past_key_values=MixedKVCache(model, get_scheme(scheme).shared),
        prefill_chunk_size=256,
    )  # fmt: skip
    return out[0, len(ids) :].tolist()


# The others are the same code with a rotation fewer, or without codes.
QUICK = [pytest.param(name, marks=[] if name == "saw-int4-kv" else pytest.mark.slow) for name in SCHEMES]


@pytest.mark.parametrize("scheme", QUICK)
def test_tokens_are_those_of_generate(model, scheme):
    """Prompts of a token, of pages, and longer than a batch, which decode while others are read."""
    inputs = prompts(300, 20, 130, 500, 1)
    with serving.enable(model, scheme):
        got = together(model, inputs, settings(max_batch_tokens=256))
    assert model.config._attn_implementation == "sdpa"
    # A batch has room for 256 tokens, so only the first prompt's pieces are as long as those of `generate`.
    assert got[0] == alone(model, inputs[0], scheme)
    assert got[4] == alone(model, inputs[4], scheme)
    assert all(len(tokens) == NEW for tokens in got)
    with serving.enable(model, scheme):
        got = together(model, inputs, settings(max_batch_tokens=1024, max_blocks_per_request=5))
    for ids, tokens in zip(inputs, got, strict=True):
        expected = model.generate(
            torch.tensor([ids]),
            generation_config=generation(),
            past_key_values=MixedKVCache(model, get_scheme(scheme).shared),
        )
        assert tokens == expected[0, len(ids) :].tolist()


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled in this process")
def test_kernels_take_the_blocks(model):
    """Triton's, interpreted: views of the engine's bytes, tables of its blocks, sources that rows share."""
    pytest.importorskip("triton")
    inputs = prompts(140, 30)
    expected = [alone(model, ids, "saw-int4-kv")[:2] for ids in inputs]
    with serving.enable(model, "saw-int4-kv"), use_interpreter():
        assert together(model, inputs, settings(max_blocks_per_request=2), max_new_tokens=2) == expected


@pytest.mark.gpu
def test_a_first_batch_waits_until_inputs_are_cleared(model):
    """The engine clears them on the default stream when its thread begins, and copies them on another one."""
    own = copy.deepcopy(model).to("cuda", torch.bfloat16)
    inputs, found = prompts(30, 90), []
    for busy in (False, True):
        with serving.enable(own, "saw-int4"):
            manager = own.init_continuous_batching(generation(), settings())
            manager.warmup()
            if busy:
                torch.cuda._sleep(2**31)
            manager.start()
            try:
                for number, ids in enumerate(inputs):
                    manager.add_request(ids, request_id=str(number))
                results = [manager.get_result(timeout=60) for _ in inputs]
            finally:
                manager.stop(block=True)
            found.append({each.request_id: each.generated_tokens for each in results})
    assert found[0] == found[1]
    assert any(any(tokens) for tokens in found[0].values())


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", SCHEMES)
def test_graphs_of_the_engine(scheme):
    """Steps recorded by the engine, without its graphs, among prompts, and of plain `generate`: alike in bf16."""
    own = llama(512, 2, 4, 128, 4096).to("cuda", torch.bfloat16)
    inputs = prompts(300, 20, 130, 1000, 1)
    found = []
    with serving.enable(own, scheme):
        # Graphs are of eight rows, and sums are split by rows: so is the batch without them, filled up by a repeat.
        for given in ({}, {"use_cuda_graph": False}, {"max_blocks_per_request": 0}):
            asked = settings(num_blocks=64, max_batch_tokens=4096, **given)
            found.append(together(own, inputs + inputs[:3], asked, max_new_tokens=40)[: len(inputs)])
    graphs, eager, mixed = (torch.tensor(tokens) for tokens in found)
    assert torch.equal(graphs, eager)
    plain = []
    for ids in inputs:
        out = own.generate(
            torch.tensor([ids], device="cuda"), generation_config=generation(max_new_tokens=40),
            past_key_values=MixedKVCache(own, scheme, graphs=False),
        )  # fmt: skip
        plain.append(out[0, len(ids) :].tolist())
    # A token that another kernel rounds to another one leads elsewhere.
    for other in (mixed, torch.tensor(plain)):
        assert torch.equal(graphs[:, 0], other[:, 0])
        assert (graphs == other).float().mean() > 0.7


def test_pages_are_compressed(model, caplog):
    """In the same bytes four times the tokens, less the scales."""
    with caplog.at_level(logging.INFO, "hfkvq"), serving.enable(model, "saw-int4"):
        manager = model.init_continuous_batching(generation(), settings(num_blocks=32))
        cache = manager._create_batch_processor().cache
    pages = cache.cache_allocators["full_attention"]
    # Heads of 64: 4 bits, and a scale and a zero of 16 each.
    assert pages.bits == 4.5
    stock = super(serving.pages.CompressedPages, type(pages)).get_bytes_per_page(2, 64, torch.float32, 256)
    # `num_blocks` is of the engine's own blocks, of 256 tokens.
    assert pages.num_blocks == pytest.approx(32 * stock / pages.bytes_per_page, abs=1)
    assert "4.50 bits per element" in caplog.text
    manager.switch_to_cb_friendly_attn(model)
    model.set_attn_implementation("sdpa")


def test_requests_share_prefixes_and_give_back_what_they_had(model):
    """A prompt that came before is not computed again; at the end every block is free or kept for its content."""
    first, second = prompts(300, 40)
    with serving.enable(model, "saw-int4"):
        with model.continuous_batching_context_manager(
            generation_config=generation(), continuous_batching_config=settings(max_batch_tokens=1024)
        ) as manager:
            found = []
            for ids in (first, first + second):
                manager.add_request(ids, request_id=str(len(found)), max_new_tokens=NEW)
                found.append(manager.get_result(timeout=60))
            cache = manager.batch_processor.cache
            pages = cache.cache_allocators["full_attention"]
            kept = len(pages.ledger.cached_blocks)
            assert kept >= 2
            assert pages.block_table == {}
            free = pages.pool.count_free_blocks(0) + pages.pool.num_free_sectors
            assert free + kept == pages.num_blocks
        shared = together(model, [first + second])
    assert [len(each.generated_tokens) for each in found] == [NEW, NEW]
    assert found[0].generated_tokens == alone(model, first, "saw-int4")
    # Prefixes come as they are stored, a prompt of its own attends to itself unquantized: close, seldom the same.
    assert len(shared[0]) == NEW


@pytest.mark.slow
def test_two_ranks_serve_together(model, tmp_path):
    """Each holds one KV head of two, and they say what one process says."""
    schemes, inputs = ["saw-int4", "kitty-pro", "best-2.5"], prompts(300, 20, 130, 1)
    model.save_pretrained(tmp_path / "model")
    asked, out = {"new": NEW, "schemes": schemes, "inputs": inputs}, tmp_path / "tokens.json"
    (tmp_path / "model" / "asked.json").write_text(json.dumps(asked))
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command += [str(root / "tests/serving/tensor_parallel.py"), str(tmp_path / "model"), str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())
    for scheme in schemes:
        with serving.enable(model, scheme):
            expected = together(model, inputs, settings(num_blocks=24, max_requests_per_batch=4))
        assert found[scheme] == [[tokens, None] for tokens in expected]


def test_a_model_is_as_before(model):
    inputs = prompts(50)
    before = together(model, inputs)
    handle = serving.enable(model, "int4")
    compressed = together(model, inputs)
    handle.disable()
    assert together(model, inputs) == before
    assert "init_continuous_batching" not in vars(model)
    assert len(compressed[0]) == NEW
    handle.disable()


@pytest.mark.parametrize(
    ("scheme", "reason"),
    [
        ("snapkv", "forgets tokens"),
        ("arkv", "forgets tokens"),
        ("triaxial", "several widths"),
        (OwnChoice(), "no rule that the sealing kernel knows"),
    ],
)
def test_schemes_that_do_not_go(model, scheme, reason):
    with pytest.raises(ValueError, match=f"scheme: got .*saw-int4.*kitty-pro.*{reason}"):
        serving.enable(model, get_preset(scheme).scheme)


def test_models_and_settings_that_do_not_go(model):
    config = MistralConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, sliding_window=16,
    )  # fmt: skip
    sliding = MistralForCausalLM(config)
    with pytest.raises(ValueError, match="sliding_attention, allowed models whose layers all have full attention"):
        serving.enable(sliding, "int4")
    with serving.enable(model, "int4"), pytest.raises(ValueError, match=r"cpu_offload_space: got 1\.0, allowed 0"):
        model.init_continuous_batching(generation(), settings(cpu_offload_space=1.0))
    with pytest.raises(ValueError, match="unknown"):
        serving.enable(model, "saw-int5")


def test_columns_of_a_batch():
    """Requests with tokens held, without, without new ones (whose blocks are listed too), and padding."""
    found = serving.pages.Columns.of([0, 4, 4, 5, 5], [0, 4, 140, 400, 400], lambda tokens: -(-tokens // 128))
    assert found == ((0, 4), (0, 3), (1, 3), (4, 1), (0, 259))
    numbers = torch.tensor([7, 50, 51, 9, 8, 3, -1])
    assert found.table(numbers, 4).tolist() == [[7, 7, 7, 7], [9, 8, 3, 3]]
    assert serving.pages.Columns.of([0, 0, 0], [0, 3, 3], lambda tokens: 1) is None
