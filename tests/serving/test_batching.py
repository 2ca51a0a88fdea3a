"""Transformers' continuous batching over compressed pages: tokens of plain `generate`, blocks, and slots of windows."""

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
RequestState = pytest.importorskip("transformers.generation.continuous_batching.requests").RequestState

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


SMALL = {
    "kitty-pro": {"page_size": 32, "sink_length": 8, "local_length": 32},
    "best-2.5": {"page_size": 32, "sink_length": 8, "local_length": 32, "key_local_length": 16},
    "trellis-2.5": {"page_size": 32, "sink_length": 8, "local_length": 32, "key_local_length": 16},
    "best-2.0": {"page_size": 32, "sink_length": 8, "local_length": 32, "key_local_length": 16},
    "best-1.5": {"page_size": 32, "sink_length": 8, "local_length": 32, "key_local_length": 16},
    "best-3.4": {"page_size": 32, "group_size": 16, "sink_length": 8, "local_length": 32, "key_local_length": 16},
    "best-4.3": {"local_length": 32, "group_size": 16, "sink_length": 8, "key_local_length": 16},
    "kivi-2": {"local_length": 32, "group_size": 16},
    "kvarn": {"page_size": 32, "sink_length": 16},
    "mixkvq": {"page_size": 32, "sink_length": 8, "accumulate": True},
}
"""Pages and windows that a short prompt fills, by preset."""


def small(name):
    return get_scheme(name, **SMALL.get(name, {})).shared


def by_generate(model, ids, scheme, new, chunk=None):
    cache = MixedKVCache(model, scheme)
    out = model.generate(
        torch.tensor([ids], device=model.device), generation_config=generation(max_new_tokens=new),
        past_key_values=cache, prefill_chunk_size=chunk,
    )  # fmt: skip
    return out[0, len(ids) :].tolist(), cache


def made(model, scheme, **given):
    """Cache of an engine that is not started."""
    with serving.enable(model, scheme):
        manager = model.init_continuous_batching(generation(), settings(**given))
        cache = manager._create_batch_processor().cache
    manager.switch_to_cb_friendly_attn(model)
    model.set_attn_implementation("sdpa")
    return cache


def pages_in(manager):
    return manager.batch_processor.cache.cache_allocators["full_attention"]


def check_all_is_back(pages):
    """No block and no slot is lost, or anybody's twice."""
    assert pages.slots == pages.block_table == {}
    assert sorted(pages._free) == list(range(1, pages.config.max_requests_per_batch + 1))
    assert pages.pool.count_free_blocks(0) + pages.pool.num_free_sectors == pages.num_blocks
    assert pages.window_bytes == 0


def serve(model, scheme, inputs, new, padded=False, **given):
    """Tokens, after a look at whether everything has come back; batches ``padded`` and warmed up as graphs want it."""
    with serving.enable(model, scheme):
        manager = model.init_continuous_batching(
            generation(max_new_tokens=new), settings(**{"num_blocks": 24, "max_requests_per_batch": 8} | given)
        )
        manager.batch_processor = manager._create_batch_processor()
        manager.batch_processor.model_runner.pad_inputs |= padded
        manager.warmup()
        manager.start()
        pages = pages_in(manager)
        try:
            for number, ids in enumerate(inputs):
                manager.add_request(ids, request_id=str(number), max_new_tokens=new)
            found = {}
            while len(found) < len(inputs):
                result = manager.get_result(timeout=60)
                assert result is not None
                assert result.error is None
                found[int(result.request_id)] = result.generated_tokens
        finally:
            manager.stop(block=True)
        if pages.window_room:
            check_all_is_back(pages)
    manager.switch_to_cb_friendly_attn(model)
    model.set_attn_implementation("sdpa")
    return [found[number] for number in range(len(inputs))]


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
    assert got[0] == by_generate(model, inputs[0], small(scheme), NEW, 256)[0]
    assert got[4] == by_generate(model, inputs[4], small(scheme), NEW, 256)[0]
    assert all(len(tokens) == NEW for tokens in got)
    with serving.enable(model, scheme):
        got = together(model, inputs, settings(max_batch_tokens=1024, max_blocks_per_request=5))
    assert got == [by_generate(model, ids, small(scheme), NEW)[0] for ids in inputs]


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


def check_alike(own, name, inputs, found):
    """Tokens of recorded steps are those without graphs, and close to those among prompts and of plain `generate`."""
    graphs, eager, mixed = (torch.tensor(tokens) for tokens in found)
    assert torch.equal(graphs, eager)
    plain = []
    for ids in inputs:
        out = own.generate(
            torch.tensor([ids], device="cuda"), generation_config=generation(max_new_tokens=graphs.shape[1]),
            past_key_values=MixedKVCache(own, name, graphs=False),
        )  # fmt: skip
        plain.append(out[0, len(ids) :].tolist())
    # A token that another kernel rounds to another one leads elsewhere.
    for other in (mixed, torch.tensor(plain)):
        assert torch.equal(graphs[:, 0], other[:, 0])
        assert (graphs == other)[:, :40].float().mean() > 0.7


def test_pages_and_windows_take_the_bytes_asked_for(model, caplog):
    """`num_blocks` says how many bytes there are, in the engine's own blocks of 256 tokens, whatever they hold."""
    with caplog.at_level(logging.INFO, "hfkvq"):
        plain, windowed = (made(model, small(name), num_blocks=32) for name in ("saw-int4", "kitty-pro"))
    sizes = []
    for cache in (plain, windowed):
        pages = cache.cache_allocators["full_attention"]
        sizes.append(pages.num_blocks * pages.bytes_per_block + pages.window_room)
        assert cache.pool.num_free_sectors == cache.num_sectors == pages.num_blocks
    assert sizes[1] == pytest.approx(sizes[0], rel=0.01)
    # A sink of 8, tails of 32 and 64: keys and values in 32 bits, two heads of 64, two layers; nobody's slot as well.
    assert pages.bytes_per_slot == (8 + 32 + 8 + 64) * 4 * 2 * 64 * 2
    assert pages.window_room == pytest.approx(9 * pages.bytes_per_slot, abs=pages.bytes_per_block)
    pages = plain.cache_allocators["full_attention"]
    # Heads of 64: 4 bits, and a scale and a zero of 16 each. In the same bytes four times the tokens, less the scales.
    assert pages.bits == 4.5
    stock = super(serving.pages.CompressedPages, type(pages)).get_bytes_per_page(2, 64, torch.float32, 256)
    assert pages.num_blocks == pytest.approx(32 * stock / pages.bytes_per_page, abs=1)
    for words in ("4.50 bits per element", "windows of 8 requests", "prefixes are not shared"):
        assert words in caplog.text


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
    assert found[0].generated_tokens == by_generate(model, first, small("saw-int4"), NEW)[0]
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


def test_rows_of_a_batch():
    """Requests with tokens held, without, without new ones (whose blocks are listed too), and padding."""
    found = serving.pages.rows_of([0, 4, 4, 5, 5], [0, 4, 140, 400, 400], lambda tokens: -(-tokens // 128))
    assert found == [(0, 0, 1, 4, 0), (4, 3, 3, 1, 259)]
    assert serving.pages.rows_of([0, 0, 0], [0, 3, 3], lambda tokens: 1) == []


# One whose queries have a say and whose layers differ, and factors; the others are the same code.
NOW = {"best-3.4", "kvarn"}
NAMES = [pytest.param(name, marks=[] if name in NOW else [pytest.mark.slow]) for name in SMALL]


@pytest.mark.parametrize("name", NAMES)
def test_tokens_with_windows(model, name):
    """By block tables and among prompts, through seals of both sides."""
    inputs, scheme = prompts(90, 5, 130, 1), small(name)
    expected = [by_generate(model, ids, scheme, 12)[0] for ids in inputs]
    assert serve(model, scheme, inputs, 12, max_blocks_per_request=8) == expected
    # A batch of 80 tokens has prompts in pieces among steps of others.
    assert serve(model, scheme, inputs, 12, max_batch_tokens=240) == expected


@pytest.mark.parametrize(("name", "blocks"), [("best-3.4", 8), ("mixkvq", 0)])
def test_what_is_stored_is_what_a_cache_stores(model, name, blocks, monkeypatch):
    """Pages bit for bit, windows, and statistics of queries, of a prompt in pieces and steps behind it."""
    ids, scheme, held = prompts(150)[0], small(name), {}

    def free(pages, request, no_cache=False):
        slot, table = pages.slots.get(request), torch.tensor(pages.block_table.get(request, []))
        for layer in pages.layer_indices if slot else []:
            sums = [x.clone() for x in pages._sums[layer]]
            again = bool(pages._again[slot])
            parts = [part[table] for side in pages._parts[layer] for part in side]
            held[layer] = parts, [x[slot].clone() for x in pages._windows[layer]], sums, again, slot
        real(pages, request, no_cache)

    real = serving.windows.WindowedPages.free_blocks
    monkeypatch.setattr(serving.windows.WindowedPages, "free_blocks", free)
    given = {"max_batch_tokens": 37, "max_blocks_per_request": blocks}
    (tokens,) = serve(model, scheme, [ids], 30, **given)
    expected, cache = by_generate(model, ids, scheme, 30, 37)
    assert tokens == expected
    for layer, (parts, windows, sums, again, slot) in held.items():
        # Counters count what the last step has sealed from now on, and statistics are those of the step buffer.
        cache.layers[layer].buffer.catch_up()
        state, queries = cache.layers[layer].store.state, cache.layers[layer].queries
        _, length, keys, values = state.counters[:, 0].tolist()
        run, page = state.runs[0], state.format.runs[0][0].page_size
        full = [keys // page] * len(run.keys) + [values // page] * len(run.values)
        assert min(full) > 1
        for part, other, count in zip(parts, (*run.keys, *run.values), full, strict=True):
            mine, theirs = part[:count], other[run.table[0, :count].long()]
            # What stays whole has rounded differently in another order of sums.
            close = (mine - theirs).abs() < 1e-5 if part.dtype == torch.float32 else mine == theirs
            assert close.all()
        for side, sealed in enumerate((keys, values)):
            torch.testing.assert_close(windows[side], state.windows[side][0])
            mine, theirs = windows[2 + side], state.windows[2 + side][0]
            waits = torch.arange(sealed, length - state.format.sink)
            torch.testing.assert_close(mine[:, waits % mine.shape[1]], theirs[:, waits % theirs.shape[1]])
        if queries is not None:
            kept = not again or queries.always
            assert torch.equal(sums[1][:, slot] * kept, queries.counts[:, 0])
            torch.testing.assert_close(sums[0][slot] * kept, queries.sums[0], atol=1e-5, rtol=1e-5)


def test_batches_that_are_padded(model, caplog):
    """Rows that nobody has go to nobody's slot, and warming up leaves nothing behind."""
    inputs, scheme = prompts(90, 5), small("best-3.4")
    expected = [by_generate(model, ids, scheme, 20)[0] for ids in inputs]
    padding = {"q_padding_interval_size": 64, "kv_padding_interval_size": 256}
    with caplog.at_level("INFO", "ContinuousBatchingLogger"):
        assert serve(model, scheme, inputs, 20, padded=True, max_blocks_per_request=8, **padding) == expected
    assert "Warmup completed" in caplog.text
    assert "Failed to warm up" not in caplog.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled in this process")
@pytest.mark.parametrize("name", ["saw-int4-kv", "best-3.4", pytest.param("kivi-2", marks=pytest.mark.slow)])
def test_kernels_take_blocks_and_slots(model, name):
    """Triton's, interpreted: views of the engine's bytes, tables of its blocks, sources that rows share."""
    pytest.importorskip("triton")
    inputs, scheme = prompts(70 if name in SMALL else 140, 9), small(name)
    expected = [by_generate(model, ids, scheme, 4)[0] for ids in inputs]
    with use_interpreter():
        assert serve(model, scheme, inputs, 4, max_blocks_per_request=4) == expected


def test_requests_wait_for_a_slot(model):
    """Of seven, three at a time; and for a block, of which there are too few for those."""
    inputs, scheme = prompts(*[60 + number for number in range(7)]), small("kitty-pro")
    expected = [by_generate(model, ids, scheme, 12)[0] for ids in inputs]
    assert serve(model, scheme, inputs, 12, max_requests_per_batch=3) == expected


def test_a_pool_that_is_too_small_for_all_at_once(model, monkeypatch):
    """Requests that outgrow the blocks together give theirs back, slots too, and come again."""
    scheme, again, real = small("kitty-pro"), [], RequestState.create_equivalent_initial_request
    monkeypatch.setattr(
        RequestState, "create_equivalent_initial_request", lambda state: again.append(state) or real(state)
    )
    given = {"num_blocks": 1, "page_size": 256, "max_requests_per_batch": 3}
    blocks = made(model, scheme, **given).cache_allocators["full_attention"].num_blocks
    # A prompt has room for its first piece beside another, not for the rest.
    lengths = [blocks // 2 * 32 + 60 + number for number in range(3)]
    found = serve(model, scheme, prompts(*lengths), 40, max_blocks_per_request=64, **given)
    assert [len(tokens) for tokens in found] == [40] * 3
    assert again


def test_requests_that_go_lose_nothing(model):
    """One that is cancelled while it waits, one among its steps, and one that is answered; then a new one."""
    scheme, inputs = small("best-2.5"), prompts(100, 60, 80, 90)
    expected = [by_generate(model, inputs[at], scheme, 12)[0] for at in (0, 3)]
    with (
        serving.enable(model, scheme) as handle,
        model.continuous_batching_context_manager(
            generation_config=generation(max_new_tokens=12),
            continuous_batching_config=settings(max_requests_per_batch=2, num_blocks=24),
        ) as manager,
    ):
        for number, new in enumerate((12, 600, 600)):
            manager.add_request(inputs[number], request_id=str(number), max_new_tokens=new)
        stays = manager.get_result("0", timeout=60)
        assert handle.usage().bytes >= pages_in(manager).window_bytes > 0
        for number in ("1", "2"):
            manager.cancel_request(number)
        manager.add_request(inputs[3], request_id="3", max_new_tokens=12)
        later = manager.get_result("3", timeout=60)
        assert [stays.generated_tokens, later.generated_tokens] == expected
        pages, usage = pages_in(manager), handle.usage()
        assert usage.room > pages.window_room > 0
        with pytest.raises(ValueError, match=r"request: got \d+ tokens and 30 new ones, allowed \d+ together"):
            manager.add_request(inputs[0] * 1000, request_id="4", max_new_tokens=30)
    check_all_is_back(pages)


@pytest.mark.parametrize("slots", [8, 2])
def test_several_sequences_of_a_request(model, slots):
    """A fork has a copy of the windows; without a slot it waits, and is computed anew."""
    scheme, ids, sure = small("best-3.4"), prompts(85)[0], copy.deepcopy(model)
    # What is drawn is what is likeliest.
    sure.lm_head.weight.data *= 1000
    # The last token of the prompt is each fork's own; of what is computed anew it comes with the others.
    forked, whole = (by_generate(sure, ids, scheme, 16, chunk)[0] for chunk in (len(ids) - 1, None))
    assert forked != whole
    with serving.enable(sure, scheme):
        out = sure.generate_batch(
            inputs=[ids], progress_bar=False,
            generation_config=generation(do_sample=True, num_return_sequences=3, max_new_tokens=16),
            continuous_batching_config=settings(max_requests_per_batch=slots, num_blocks=24),
        )  # fmt: skip
    found = [each.generated_tokens for each in out.values()]
    assert sorted(found) == sorted([forked] * min(slots, 3) + [whole] * max(0, 3 - slots))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*SCHEMES, *SMALL])
def test_graphs_of_the_engine(name):
    """Steps recorded by the engine, without its graphs, among prompts, and of plain `generate`: alike in bf16."""
    own = llama(512, 4, 4, 128, 4096).to("cuda", torch.bfloat16)
    inputs, new = prompts(300, 20, 130, 1000, 1), 300
    found = [
        serve(own, name, inputs, new, num_blocks=64, max_batch_tokens=4096, **given)
        for given in ({}, {"use_cuda_graph": False, "padded": True}, {"max_blocks_per_request": 0})
    ]
    check_alike(own, name, inputs, found)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["saw-int4", "kitty-pro", "best-3.4", "kvarn"])
def test_steps_on_a_gpu_ask_the_host_nothing(name, monkeypatch):
    """Steps of tokens alone, without a graph: nothing waits for the device."""
    own = llama(256, 2, 2, 128, 2048).to("cuda", torch.bfloat16)
    real, seen = serving.pages.CompressedPages.attend, []

    def watched(pages, *args):
        if args[-1]["block_table"] is None:
            return real(pages, *args)
        before = torch.cuda.get_sync_debug_mode()
        # The first calls compile.
        torch.cuda.set_sync_debug_mode("error" if len(seen) > 40 else before)
        try:
            return real(pages, *args)
        finally:
            torch.cuda.set_sync_debug_mode(before)
            seen.append(1)

    monkeypatch.setattr(serving.pages.CompressedPages, "attend", watched)
    serve(own, name, prompts(300, 20), 300, num_blocks=32, max_batch_tokens=1024, use_cuda_graph=False)
    assert len(seen) > 400


@pytest.mark.parametrize("name", ["best-3.4", "mixkvq"])
def test_a_slot_keeps_nothing_of_the_request_before(model, name):
    """Not even where a request's first token comes like a step's."""
    with serving.enable(model, small(name), requests=1):
        manager = model.init_continuous_batching(
            generation(max_new_tokens=10), settings(num_blocks=24, max_blocks_per_request=8, max_requests_per_batch=1)
        )
        manager.start()
        pages = pages_in(manager)
        try:
            for ids in (prompts(30)[0], [7]):
                manager.add_request(ids, max_new_tokens=10)
                assert manager.get_result(timeout=60).error is None
        finally:
            manager.stop(block=True)
    # Ten tokens have asked; what was sealed meanwhile is of one page at the most.
    assert all(int(counts[:, 1].max()) <= 10 for _, counts in pages._sums.values())
    assert all(int(counts[:, 1].min()) > 0 for _, counts in pages._sums.values())


def together_with(model, **given):
    return model.generate_batch(
        inputs=[[1, 2, 3], [1] * 9000], progress_bar=False, generation_config=generation(max_new_tokens=4),
        continuous_batching_config=settings(**given),
    )  # fmt: skip


def test_a_prompt_that_is_too_long_fails_alone(model):
    with serving.enable(model, "int4"):
        short, long = together_with(model, num_blocks=2).values()
    assert short.error is None
    assert len(short.generated_tokens) == 4
    assert "got 9000 tokens and 4 new ones, allowed" in long.error


@pytest.mark.parametrize("scheme", ["int4", "kivi-2"])
def test_an_empty_prompt_fails_alone(model, scheme):
    """Alone in a batch it would end the engine, and whoever asked later would wait for ever."""
    with (
        serving.enable(model, small(scheme)),
        model.continuous_batching_context_manager(
            generation_config=generation(max_new_tokens=4), continuous_batching_config=settings()
        ) as manager,
    ):
        with pytest.raises(ValueError, match="got a prompt without tokens"):
            manager.add_request([], request_id="empty")
        (empty,) = manager.add_requests([[]])
        assert "without tokens" in manager.get_result(empty, timeout=60).error
        manager.add_request([1, 2, 3], request_id="later")
        assert len(manager.get_result("later", timeout=60).generated_tokens) == 4
