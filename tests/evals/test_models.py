"""Scripts that run models, on tiny ones: raised channels, agents in turns, steps, and planned bytes."""

from __future__ import annotations

import argparse
import json

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from evals import generate, model_steps
from evals.channels import raised_channels
from evals.late_rounds import answer, held_bytes, play
from hfkvq import MixedKVCache, get_scheme
from hfkvq.caches.steps import step_buffer
from hfkvq.tuning.fit.layer import layer_bytes
from tests.caches.models import build


@pytest.fixture(scope="module")
def filled():
    """Two rows of 150 tokens through two layers of two heads, pages of 32 tokens."""
    model = build("qwen3")
    caches = {}
    for name, scheme in {
        "kitty": get_scheme("kitty", page_size=32, sink_length=0, local_length=16, boost_ratio=0.25),
        "mixkvq": get_scheme("mixkvq", select="thresholds", tau_bf16=0.9, tau_int4=0.4),
        "kivi-2": get_scheme("kivi-2"),
    }.items():
        cache = caches[name] = MixedKVCache(model, scheme)
        ids = torch.randint(3, 120, (2, 300), generator=torch.Generator().manual_seed(1))
        with torch.inference_mode():
            model(input_ids=ids, past_key_values=cache, use_cache=True)
    return caches


def test_what_the_pages_hold(filled):
    """Counted from the dense keys: of 32 tokens, a channel in 2 bits has four values at the most."""
    cache = filled["kitty"]
    shares = raised_channels(cache)
    assert list(shares) == [0, 1]
    for layer, widths in shares.items():
        assert list(widths) == [4]
        assert widths[4].sum(1).tolist() == pytest.approx([8.0, 8.0])
        # 9 pages of 32 tokens in each of two rows.
        pages = cache.layers[layer].dense("keys")[:, :, :288].unflatten(2, (9, 32)).sort(3).values
        values = 1 + (pages.diff(dim=3) != 0).sum(3)
        torch.testing.assert_close(widths[4], (values > 4).float().mean((0, 2)))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 1, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=2, head_dim=64, **sizes)).eval()


def args(budget, agents=3):
    return argparse.Namespace(budget=budget, agents=agents, rounds=2, first=512, turn=64, new=4, chunk=256)


def computed(row):
    return [each["computed"] for each in row["rounds"]]


EACH, AGAIN, MORE = 512 + 64, 512 + 64 + 4 + 64, 64 + 1
"""Tokens of a first turn, a second one from nothing, one behind a cache (which lacks an answer's last token)."""


def test_caches_that_went_are_computed_again(model, tmp_path):
    """The budget holds the compressed caches, but two of the three others."""
    cache = DynamicCache(config=model.config)
    ids = torch.ones(1, AGAIN + 3, dtype=torch.int64)
    answer(model, cache, ids, 1, 512)
    budget = int(2.5 * held_bytes(cache))
    dynamic = play(model, "dynamic", args(budget), tmp_path, 100)
    assert computed(dynamic) == [3 * EACH, 3 * AGAIN]
    assert dynamic["rounds"][0]["dropped"] == 1
    assert all(each["bytes"] <= budget for each in dynamic["rounds"])
    assert computed(play(model, "saw-int4", args(budget), tmp_path, 100)) == [3 * EACH, 3 * MORE]


def test_rows_of_steps_and_calls(stand_in, tmp_path, capsys):
    caches = "dynamic,kitty-pro,kitty-pro:eager,saw-int4:fixed,triaxial"
    arguments = f"--cases 1x40,2x24 --steps 2 --repeats 2 --warmup 4 --chunk 24 --dtype float32 --caches {caches}"
    file = tmp_path / "a.json"
    record = generate.main(["--model", str(stand_in), *arguments.split(), "--json", str(file)])
    assert json.loads(file.read_text(encoding="utf-8"))["rows"] == record["rows"]
    rows = {(row["engine"], row["context"]): row for row in record["rows"]}
    assert len(rows) == 10
    for row in rows.values():
        assert row["ms"]["p50"] > 0, row
        assert row["prompt_ms"] > 0
        assert row["than"] == "dynamic"
    assert rows["kitty-pro:eager", 40]["mode"] == "eager"
    assert record["schemes"]["kitty-pro"]["scheme"] == "kitty"
    assert "kitty-pro" in capsys.readouterr().out
    arguments = "--cases 1x9 --tokens 3 --calls 2 --cold --dtype float32 --caches kivi-2".split()
    record = generate.main(["--model", str(stand_in), *arguments])
    (row,) = record["rows"]
    assert (row["kind"], row["new_tokens"], len(row["calls_s"])) == ("whole", 3, 2)


def test_the_planner_agrees_with_what_was_measured(monkeypatch):
    """To the byte, with the room that buffers had then."""
    monkeypatch.setattr(step_buffer, "MOST_HEADROOM", 1 << 30)
    # Bytes of a layer are kept by what they follow from, which this is not.
    layer_bytes.cache_clear()
    try:
        for row in json.loads(model_steps.RESULTS.read_text(encoding="utf-8"))["rows"]:
            grown = row["shape"] in ("bloom-7b1", "gpt-j-6b") and row["cache"] == "kitty-pro"
            # These kept no tokens whole then.
            bare = ":sink_length=0:local_length=0" if row["cache"].startswith("latent") else ""
            if row["cache"] != "DynamicCache" and not grown:
                planned = model_steps.planned(row | {"cache": row["cache"] + bare})
                assert planned == row["bytes"], (row["shape"], row["cache"])
    finally:
        layer_bytes.cache_clear()
