"""Sizes, architectures, names of caches and the search for the largest batch."""

from __future__ import annotations

import pytest
import torch
from transformers import DeepseekV3Config, LlamaConfig, Qwen3NextConfig, T5Config

from hfkvq.caches.schemes import TriAxial
from hfkvq.caches.tags import parse_tag
from hfkvq.measure.bench.generate.cases import DEFAULT_CASES, Case, Settings, compile_arguments, parse_cases
from hfkvq.measure.bench.generate.engines import (
    NARROW,
    NARROW_SHARE,
    STOCK,
    SpreadTags,
    cache_options,
    check_heads,
    parse_engines,
    parse_scheme_engine,
    scheme_of,
)
from hfkvq.measure.bench.generate.models import ARCHITECTURES, Heads, build, get_config, weight_bytes
from hfkvq.measure.bench.generate.search import largest, search_batch

# Sizes and settings.


def test_cases_are_rows_by_tokens():
    assert parse_cases(["1x1k", "64x8192"]) == [Case(1, 1024), Case(64, 8192)]
    assert Case(64, 8192).title == "64 x 8k"
    assert len(parse_cases(DEFAULT_CASES.split(","))) == 11


@pytest.mark.parametrize("texts", [["8k"], ["x8k"], ["1x"], ["1x8kb"], ["0x1k"], ["1x1k", "1x1024"], []])
def test_cases_of_another_form(texts):
    with pytest.raises(ValueError, match="cases: "):
        parse_cases(texts)


def test_a_mode_or_options_are_given_to_the_compiler():
    assert compile_arguments(False, False) == {"fullgraph": True, "mode": "reduce-overhead"}
    tuned = {"triton.cudagraphs": True, "coordinate_descent_tuning": True}
    assert compile_arguments(True, False) == {"fullgraph": True, "options": tuned}
    assert compile_arguments(False, True) == {"fullgraph": True, "options": {**tuned, "max_autotune": True}}
    # What this PyTorch's compiler knows.
    for arguments in (compile_arguments(False, False), compile_arguments(False, True)):
        torch.compile(lambda x: x, **arguments)


@pytest.mark.parametrize("given", [{"warmup": 3}, {"steps": 0}, {"repeats": 0}, {"seconds": 0.0}, {"fill_bytes": 0}])
def test_settings_that_cannot_be(given):
    (name,) = given
    with pytest.raises(ValueError, match=f"{name}: got"):
        Settings(**given)


@pytest.mark.parametrize(
    ("seconds", "expected"), [(0.001, (24, 5)), (1.0, (4, 5)), (3.9, (1, 5)), (7.0, (1, 2)), (100.0, (1, 1))]
)
def test_slow_steps_are_taken_as_often_as_time_allows(seconds, expected):
    settings = Settings(seconds=20)
    assert settings.new_tokens == 128
    assert settings.affordable(seconds) == expected


# Architectures.


@pytest.mark.parametrize(
    ("name", "billions", "heads"),
    [
        ("qwen3-0.6b", 0.596, Heads(28, 16, 8, 128)),
        ("qwen3-8b", 8.191, Heads(36, 32, 8, 128)),
        ("llama-3.1-8b", 8.030, Heads(32, 32, 8, 128)),
        ("qwen3-32b", 32.762, Heads(64, 64, 8, 128)),
        ("qwen3-30b-a3b", 30.532, Heads(48, 32, 4, 128)),
    ],
)
def test_architectures_have_as_many_weights_as_the_real_ones(name, billions, heads):
    config = get_config(name.upper())
    assert Heads.of(config) == heads
    total, read = weight_bytes(build(config, torch.device("meta"), torch.bfloat16, seed=0))
    assert total / 2e9 == pytest.approx(billions, abs=0.001)
    if name == "qwen3-30b-a3b":
        assert read is None
    else:
        # The input's embedding is not read, unless it is the output's too.
        assert total - read == (0 if name == "qwen3-0.6b" else 2 * config.vocab_size * config.hidden_size)
    assert set(ARCHITECTURES) >= {name}


def test_layers_are_cut():
    config = get_config("qwen3-8b", layers=2)
    assert config.num_hidden_layers == len(config.layer_types) == Heads.of(config).layers == 2
    with pytest.raises(ValueError, match="layers: got 37, allowed 1 to 36"):
        get_config("qwen3-8b", layers=37)


def test_a_config_is_read_from_a_folder(tmp_path):
    LlamaConfig(num_hidden_layers=3, hidden_size=64, num_attention_heads=2).save_pretrained(tmp_path)
    assert Heads.of(get_config(str(tmp_path), layers=2)) == Heads(2, 2, 2, 32)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("qwen3-8", "model: got 'qwen3-8', which is unknown; did you mean 'qwen3-8b'"),
        ("./no-such-folder", "the folder ./no-such-folder does not exist"),
    ],
)
def test_a_model_that_is_not_there(model, message):
    with pytest.raises(ValueError, match=message):
        get_config(model)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (DeepseekV3Config(), "its attention is latent"),
        (Qwen3NextConfig(), "it has layers of linear_attention"),
        (T5Config(), "it has an encoder"),
    ],
)
def test_a_model_that_cannot_be_filled(tmp_path, config, why):
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=why):
        get_config(str(tmp_path))


# Names of caches.


def test_a_scheme_has_a_mode_and_knobs():
    texts = ("kitty", "kitty:fixed", "arkv:compiled", "kitty:offloaded", "kitty:boost_ratio=0.2:eager")
    engines = [parse_scheme_engine(text) for text in texts]
    assert [engine.name for engine in engines] == list(texts)
    assert [engine.mode for engine in engines] == ["graphs", "fixed", "compiled", "offloaded", "eager"]
    assert [engine.graphs for engine in engines] == [True, True, False, True, False]
    assert [engine.fixed for engine in engines] == [False, True, True, False, False]
    assert [engine.compiled for engine in engines] == [False, False, True, False, False]
    assert engines[-1].preset.scheme.boost_ratio == 0.2
    assert [scheme_of(text) for text in texts] == ["kitty", "kitty", "arkv", "kitty", "kitty:boost_ratio=0.2"]


def test_caches_are_told_of_graphs_only_where_users_would_tell_them():
    assert cache_options("graphs", 64) == {}
    assert cache_options("fixed", 64) == {"max_cache_len": 64}
    assert cache_options("compiled", 64) == {"max_cache_len": 64, "graphs": False}
    assert cache_options("eager", 64) == {"graphs": False}
    assert cache_options("offloaded", 64) == {"offloading": True}


def test_stock_caches_have_modes_too():
    found = {name: engine.mode for name, engine in STOCK.items()}
    assert {name for name, mode in found.items() if mode == "compiled"} == {
        "static-compiled",
        "static-compiled-nocudnn",
    }
    assert set(found.values()) == {"compiled", "eager", "offloaded"}
    assert [name for name, engine in STOCK.items() if not engine.croppable] == [
        "static",
        "static-compiled",
        "static-compiled-nocudnn",
    ]
    ours = ("kitty", "kitty:fixed", "kitty:compiled", "kitty:eager")
    assert [parse_scheme_engine(text).croppable for text in ours] == [True, True, False, True]


def test_engines_come_in_order_stock_first():
    engines = parse_engines(["static-compiled", "dynamic-nocudnn"], ["kitty", "kitty:eager"])
    assert [engine.name for engine in engines] == ["static-compiled", "dynamic-nocudnn", "kitty", "kitty:eager"]
    assert [engine.ours for engine in engines] == [False, False, True, True]
    assert {name for name, engine in STOCK.items() if engine.compiled} == {
        "static-compiled",
        "static-compiled-nocudnn",
    }


@pytest.mark.parametrize(
    ("stock", "schemes", "message"),
    [
        (["dynamc"], [], "engines: got 'dynamc', which is unknown; did you mean 'dynamic'"),
        ([], ["kity"], "scheme: got 'kity', which is unknown"),
        ([], ["kitty:fast"], "schemes: got 'kitty:fast', whose mode is unknown; .*Known: fixed, compiled, eager"),
        ([], ["kitty:boost=1"], "knob 'boost' is unknown"),
        (["dynamic", "dynamic"], [], "'dynamic' is given twice"),
        ([], [], "engines, schemes: got none"),
    ],
)
def test_names_that_are_wrong(stock, schemes, message):
    with pytest.raises(ValueError, match=message):
        parse_engines(stock, schemes)


def test_heads_that_a_scheme_cannot_hold():
    config = get_config("qwen3-8b", layers=2)
    check_heads(parse_engines(["dynamic"], ["kitty", "arkv", "triaxial"]), config)
    config.head_dim = 40
    with pytest.raises(ValueError, match="40"):
        check_heads(parse_engines([], ["kivi-2"]), config)


def test_spread_tags_hold_a_share_in_two_bits():
    tags = SpreadTags().tag(torch.zeros(3, 1000, dtype=torch.long))
    assert tags.shape == (3, 1000)
    assert tags.dtype == torch.uint8
    assert (tags == parse_tag(NARROW)).float().mean() == pytest.approx(NARROW_SHARE, abs=0.01)
    bits = TriAxial().tag_bits(tags)
    assert (bits == 2).float().mean() == pytest.approx(NARROW_SHARE, abs=0.01)


# The largest batch.


def memory_for(rows: int, measured: list[int]):
    def measure(batch: int) -> dict:
        measured.append(batch)
        if batch > rows:
            return {"batch": batch, "error": "OutOfMemoryError: CUDA out of memory.", "oom": True}
        # The rate stops growing at 100 rows.
        return {"batch": batch, "tokens_per_s": float(min(batch, 100))}

    return measure


@pytest.mark.parametrize(
    ("fits", "expected", "best"),
    [
        (480, [32, 64, 128, 256, 512, 384, 448, 480], 480),
        (100, [32, 64, 128, 96], 96),
        (64, [32, 64, 128, 96, 80], 64),
        (5, [32, 16, 8, 4, 6, 5], 5),
        (1, [32, 16, 8, 4, 2, 1], 1),
        (0, [32, 16, 8, 4, 2, 1], None),
    ],
)
def test_batches_are_doubled_then_the_gap_is_halved(fits, expected, best):
    measured: list[int] = []
    rows = search_batch(memory_for(fits, measured))
    assert measured == expected
    found = largest(rows)
    if best is None:
        assert found is None
    else:
        assert (found["largest"], found["full"]) == (best, True)
        assert found["tokens_per_s"] == min(best, 100)


def test_a_search_ends_at_its_limit_and_at_other_failures():
    measured: list[int] = []
    rows = search_batch(memory_for(10**6, measured), first=8, most=100)
    assert measured == [8, 16, 32, 64, 100]
    assert largest(rows) == {"largest": 100, "best_batch": 100, "tokens_per_s": 100.0, "full": False}
    rows = search_batch(lambda batch: {"batch": batch, "error": "ImportError: no quanto"})
    assert [row["batch"] for row in rows] == [32]
    assert largest(rows) is None
