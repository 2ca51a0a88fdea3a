"""Whole models on full caches, tiny and on the CPU: what is filled, run and timed, and what becomes of failures."""

from __future__ import annotations

import dataclasses
import sys
import types
import weakref

import pytest
import torch
from transformers import Qwen3Config, Qwen3MoeConfig

from hfkvq.kernels.decode import run_count
from hfkvq.measure.bench.generate import decode, run
from hfkvq.measure.bench.generate.cases import Case, Settings
from hfkvq.measure.bench.generate.decode import Decoder, measure_decode
from hfkvq.measure.bench.generate.engines import parse_engines
from hfkvq.measure.bench.generate.fill import chunk_tokens, fill, length
from hfkvq.measure.bench.generate.models import Heads, apply_liger, build
from hfkvq.measure.bench.generate.run import Bench
from hfkvq.measure.bench.generate.turns import Turn

CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 300,
}
CASE = Case(2, 300)
# Two chunks of a layer, and a graph that no compiler makes.
SETTINGS = Settings(warmup=4, steps=2, repeats=2, fill_bytes=2**18, compile={"fullgraph": True, "backend": "eager"})


@pytest.fixture(scope="module")
def model():
    return build(Qwen3Config(**SIZES), CPU, torch.float32, seed=0)


def engine(name: str):
    stock = name.split("-")[0] in ("dynamic", "static", "quanto")
    return parse_engines([name] if stock else [], [] if stock else [name])[0]


def filled(model, cache, case=CASE):
    fill(cache, Heads.of(model.config), case, 300, CPU, torch.float32, SETTINGS.fill_bytes)


# Filling.


@pytest.mark.parametrize(
    "name",
    [
        *("dynamic", "static", "kitty-pro", "kitty-pro:eager", "kitty-pro:fixed", "mixkvq", "saw-int4:fixed"),
        *("arkv:budget_tokens=96", "triaxial", "triaxial:fixed", "triaxial:compiled"),
    ],
)
def test_a_filled_cache_holds_the_context_and_answers(model, name):
    with engine(name).cache(model.config, 320) as cache, torch.no_grad():
        filled(model, cache)
        assert length(cache) == 300
        decoder = Decoder(model, cache, 2, None)
        decoder.check()
        decoder.step()
        assert length(cache) == 302
        assert decoder.ids.shape == (2, 1)
    assert model.config._attn_implementation == "sdpa"


def test_keys_and_values_are_random_and_the_same_again(model):
    one, other = (engine("dynamic").make(model.config, 320) for _ in range(2))
    for cache in (one, other):
        filled(model, cache)
    keys, values = one.layers[1].keys, one.layers[1].values
    assert keys.shape == values.shape == (2, 2, 300, 64)
    assert torch.equal(keys, other.layers[1].keys)
    assert not torch.equal(keys, values)
    assert not torch.equal(keys, one.layers[0].keys)
    assert keys.std() == pytest.approx(1, abs=0.05)
    # Every chunk has numbers of its own.
    assert not torch.equal(keys[:, :, :128], keys[:, :, 128:256])


def test_schemes_seal_evict_and_read_tags_as_after_a_prompt(model):
    stores = {}
    for name in ("kitty-pro", "arkv:budget_tokens=96", "triaxial"):
        with engine(name).cache(model.config, 320) as cache:
            filled(model, cache)
            assert all(layer.staged is None for layer in cache.compressed_layers)
            stores[name.split(":")[0]] = cache.compressed_layers[1].store
    # 300 tokens but 32 of the sink and 12 of a page that is not full, and values of a local window of 128 besides.
    assert run_count(stores["kitty-pro"].counters, 0, "keys").tolist() == [256, 256]
    assert run_count(stores["kitty-pro"].counters, 0, "values").tolist() == [128, 128]
    assert stores["arkv"].row_lengths.max() <= 96
    # All but 16 of the sink, and 12 that do not fill a seal unit of 16, in runs of 2 and 4 bits.
    counters = stores["triaxial"].counters
    assert sum(run_count(counters, i, "keys") for i in (0, 1)).tolist() == [272, 272]


def test_triaxial_has_tokens_of_two_widths(model):
    with engine("triaxial").cache(model.config, 520) as cache:
        fill(cache, Heads.of(model.config), Case(1, 512), 300, CPU, torch.float32, 2**30)
        counters = cache.compressed_layers[0].store.counters
    # 0.7 x 512 = 358 tokens of 2 bits, in whole pages of 32.
    assert [int(run_count(counters, i, "keys")) for i in (0, 1)] == [320, 176]


def test_chunks_stay_below_the_bytes_asked_for():
    heads = Heads(layers=36, heads=32, kv_heads=8, dim=128)
    assert chunk_tokens(heads, 480, torch.bfloat16, 2**30) == 512
    assert 480 * 512 * heads.token_bytes(torch.bfloat16) <= 2**30
    assert chunk_tokens(heads, 1, torch.bfloat16, 2**30) == 2**18
    assert chunk_tokens(heads, 10**6, torch.bfloat16, 2**30) == 128


def test_a_cache_that_lost_tokens_is_found_out(model, monkeypatch):
    cache = engine("dynamic").make(model.config, 320)
    monkeypatch.setattr(cache, "get_seq_length", lambda: 299)
    with pytest.raises(RuntimeError, match="filled with 300 tokens, but the cache holds 299"):
        filled(model, cache)


# Decoding.


def test_compiled_and_eager_caches_of_a_scheme_say_the_same(model):
    said = {}
    for name in ("kitty:compiled", "kitty", "kitty:fixed", "kitty:eager", "kitty:offloaded"):
        with engine(name).cache(model.config, 320) as cache, torch.no_grad():
            filled(model, cache)
            decoder = Decoder(model, cache, 2, SETTINGS.compile if name == "kitty:compiled" else None)
            tokens = []
            for _ in range(6):
                decoder.step()
                tokens.append(decoder.ids[:, 0].tolist())
            said[name] = tokens
    assert said["kitty"] == said["kitty:eager"] == said["kitty:fixed"] == said["kitty:compiled"]
    assert said["kitty:offloaded"] == said["kitty"]
    assert len({tuple(pair) for pair in said["kitty"]}) > 1


@pytest.mark.parametrize(
    "name", ["dynamic", "static-compiled", "arkv:budget_tokens=302:compiled", "kitty-pro", "triaxial"]
)
def test_a_decode_row(model, name):
    row = Bench(model, SETTINGS).decode(engine(name), CASE)
    assert "error" not in row, row
    assert (row["kind"], row["engine"], row["batch"], row["context"]) == ("decode", name, 2, 300)
    assert 0 < row["ms"]["p20"] <= row["ms"]["p50"] <= row["ms"]["p80"]
    assert row["tokens_per_s"] == pytest.approx(2000 / row["ms"]["p50"])
    assert (row["steps"], row["repeats"]) == (2, 2)
    # Memory is known of GPUs.
    assert row["peak_bytes"] is row["cache_bytes"] is None
    if name.endswith("compiled"):
        assert (row["graphs"], row["cudagraph_skips"]) == (1, 0)
        assert row["compile_s"] == row["first_step_s"]
    assert row["first_step_s"] > 0
    assert row["mode"] == engine(name).mode


def test_eager_caches_take_turns(model, monkeypatch):
    """Each with its own attention, another one first in each round; what cannot run keeps no other from it."""
    names = ["dynamic", "dynamic-nocudnn", "kitty", "saw-int4:fixed"]
    bench, order = Bench(model, dataclasses.replace(SETTINGS, repeats=3)), []
    take, logits = Turn.take, Decoder.logits
    attention: dict[str, set[str]] = {}

    def noted(self):
        own = attention.setdefault(type(self.cache).__name__, set())
        own.add(model.config._attn_implementation)
        return logits(self)

    monkeypatch.setattr(Turn, "take", lambda self: (order.append(self.engine.name), take(self))[1])
    monkeypatch.setattr(Decoder, "logits", noted)
    fails = dataclasses.replace(
        engine("dynamic"), name="fails", make=lambda *_: (_ for _ in ()).throw(ImportError("no"))
    )
    rows = bench.turns([*map(engine, names), fails], CASE)
    assert [row["engine"] for row in rows] == [*names, "fails"]
    assert rows.pop()["skipped"]
    assert order == [*names, *names[1:], *names[:1], *names[2:], *names[:2]]
    assert attention == {"DynamicCache": {"sdpa"}, "MixedKVCache": {"hfkvq"}}
    assert model.config._attn_implementation == "sdpa"
    best = min(rows[:2], key=lambda row: row["ms"]["p50"])["engine"]
    for row in rows:
        assert (row["kind"], row["batch"], row["context"], row["steps"], row["repeats"]) == ("turns", 2, 300, 2, 3)
        assert row["tokens_per_s"] == pytest.approx(2000 / row["ms"]["p50"])
        assert row["than"] == best
        share = row["times_as_long"]
        assert 0 < share["p20"] <= share["p50"] <= share["p80"]
        assert (share == {"p20": 1, "p50": 1, "p80": 1}) == (row["engine"] == best)


def test_turns_that_lose_tokens_are_found_out(model, monkeypatch):
    monkeypatch.setattr("hfkvq.measure.bench.generate.turns.length", lambda cache: 7)
    (row,) = Bench(model, SETTINGS).turns([engine("kitty")], CASE)
    assert "the cache holds 7 tokens" in row["error"]


def test_a_cache_that_cannot_be_compiled_is_a_row_that_says_so(model):
    row = Bench(model, SETTINGS).decode(engine("arkv:beta=0.5:compiled"), CASE)
    assert "cannot be compiled" in row["error"]
    assert model.config._attn_implementation == "sdpa"
    assert "measure arkv:beta=0.5." in row["error"]
    assert model.config._attn_implementation == "sdpa"


def test_steps_that_do_not_reach_the_cache_are_found_out(model, monkeypatch):
    monkeypatch.setattr(Decoder, "step", lambda self: None)
    with engine("dynamic").cache(model.config, 320) as cache:
        filled(model, cache)
        with pytest.raises(RuntimeError, match="8 steps were taken"):
            measure_decode(model, cache, CASE, False, SETTINGS)


def test_logits_that_are_not_finite_are_not_timed():
    broken = build(Qwen3Config(**SIZES), CPU, torch.float32, seed=0)
    torch.nn.init.constant_(broken.lm_head.weight, float("nan"))
    row = Bench(broken, SETTINGS).decode(engine("dynamic"), CASE)
    assert "logits are not finite" in row["error"]


def test_slow_steps_get_fewer_of_them(model, monkeypatch):
    seconds = iter(range(10**6))
    monkeypatch.setattr(decode, "clock", lambda device: next(seconds))
    with engine("dynamic").cache(model.config, 320) as cache:
        filled(model, cache)
        found = measure_decode(model, cache, CASE, False, SETTINGS)
    # A second for the two steps looked at, and for each repeat.
    assert (found["steps"], found["repeats"]) == (2, 2)
    assert found["ms"]["p50"] == 500


def test_cudnn_is_as_it_was_afterwards(model):
    before = torch.backends.cuda.cudnn_sdp_enabled()
    for name, inside in (("dynamic", True), ("dynamic-nocudnn", False)):
        with engine(name).cache(model.config, 8):
            assert torch.backends.cuda.cudnn_sdp_enabled() is inside
        assert torch.backends.cuda.cudnn_sdp_enabled() is before


# Prompts.


@pytest.mark.parametrize("name", ["dynamic", "kitty", "triaxial:fixed"])
def test_a_prefill_row(model, monkeypatch, name):
    seen = []
    monkeypatch.setattr(run, "sweep", lambda device: None)
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    row = Bench(model, SETTINGS).prefill(engine(name), Case(1, 100), 64)
    hook.remove()
    assert "error" not in row, row
    # One to warm up, and two repeats.
    assert seen == [64, 36] * 3
    assert row["tokens_per_s"] == pytest.approx(1e5 / row["ms"]["p50"])


@pytest.mark.parametrize(
    "name", ["dynamic", "static", "static-compiled", "kitty", "kitty:fixed", "kitty:compiled", "kitty:eager"]
)
def test_a_whole_row(model, monkeypatch, name):
    monkeypatch.setattr(run, "sweep", lambda device: None)
    row = Bench(model, SETTINGS).whole(engine(name), Case(2, 40), 4)
    assert "error" not in row, row
    assert row["new_tokens"] == 4
    assert row["tokens_per_s"] == pytest.approx(8000 / row["ms"]["p50"])
    assert row["ms_step"] == pytest.approx((row["ms"]["p50"] - row["ms_prefill"]["p50"]) / 3)
    assert model.config._attn_implementation == "sdpa"


# Failures.


def test_a_missing_package_is_a_row(model, monkeypatch):
    monkeypatch.setattr("transformers.cache_utils.is_optimum_quanto_available", lambda: False)
    row = Bench(model, SETTINGS).decode(engine("quanto-2"), CASE)
    assert row["error"].startswith("ImportError: ")
    assert row["skipped"]
    assert "oom" not in row


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."), True),
        (RuntimeError("backend='inductor' raised:\nOutOfMemoryError: CUDA out of memory."), True),
        (RuntimeError("something else"), False),
    ],
)
def test_a_full_memory_is_told_from_other_failures(model, monkeypatch, error, full):
    def fail(*rest, **options):
        raise error

    monkeypatch.setattr(run, "fill", fail)
    monkeypatch.setattr(run, "sweep", lambda device: None)
    row = Bench(model, SETTINGS).decode(engine("dynamic"), CASE)
    assert row.get("oom", False) is full
    assert type(error).__name__ in row["error"]
    assert "\n" not in row["error"]
    assert ("OutOfMemoryError" in row["error"]) is full


def test_a_failure_keeps_no_tensor_alive(model, monkeypatch):
    held = []

    def fail(cache, *rest, **options):
        large = torch.zeros(8)
        held.append(weakref.ref(large))
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(run, "fill", fail)
    Bench(model, SETTINGS).decode(engine("dynamic"), CASE)
    run.sweep(CPU)
    assert held[0]() is None


# Liger.


def test_liger_is_applied_to_the_model_that_is_measured(model, monkeypatch):
    given = {}
    liger = types.ModuleType("liger_kernel.transformers")
    liger.apply_liger_kernel_to_qwen3 = lambda **kwargs: given.update(kwargs)
    monkeypatch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", liger)
    apply_liger(model)
    assert given == {"fused_linear_cross_entropy": False, "model": model}
    del liger.apply_liger_kernel_to_qwen3
    with pytest.raises(ValueError, match="liger: this release of liger-kernel has nothing for qwen3"):
        apply_liger(model)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", None)
    with pytest.raises(ValueError, match="pip install liger-kernel"):
        apply_liger(model)


# Experts.


def test_experts_are_chosen_where_there_are_any(model):
    sizes = {**SIZES, "moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
    mixture = build(Qwen3MoeConfig(**sizes), CPU, torch.float32, seed=0, experts="eager")
    assert mixture.config._experts_implementation == "eager"
    row = Bench(mixture, SETTINGS).decode(engine("kitty"), Case(1, 64))
    assert "error" not in row, row
    with pytest.raises(ValueError, match=r"experts: got 'eager', but Qwen3ForCausalLM has no experts"):
        build(model.config, CPU, torch.float32, seed=0, experts="eager")
