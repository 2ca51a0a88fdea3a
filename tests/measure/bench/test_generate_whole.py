"""``generate`` whole, tiny and on the CPU: warm, with a draft, and first calls in processes of their own."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config

from hfkvq.measure.bench.generate import cold, run, whole
from hfkvq.measure.bench.generate.cases import Case, Settings
from hfkvq.measure.bench.generate.cold import ColdCalls, ColdProcess, engine_of, measure_cold, measure_processes
from hfkvq.measure.bench.generate.models import build
from hfkvq.measure.bench.generate.prompts import random_prompt
from hfkvq.measure.bench.generate.run import Bench
from hfkvq.measure.bench.generate.session import Plan, cold_rows
from hfkvq.measure.bench.generate.whole import Draft, TokenTimes, calls

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
SETTINGS = Settings(warmup=4, steps=2, repeats=2)


@pytest.fixture(scope="module")
def model():
    return build(Qwen3Config(**SIZES), CPU, torch.float32, seed=0)


@pytest.fixture(scope="module")
def small():
    return build(Qwen3Config(**{**SIZES, "num_hidden_layers": 1, "hidden_size": 64}), CPU, torch.float32, seed=1)


@pytest.fixture(autouse=True)
def no_sweep(monkeypatch):
    monkeypatch.setattr(run, "sweep", lambda device: None)


# Warm.


def test_times_of_tokens_leave_the_prompt_out():
    times = TokenTimes()
    for value in (torch.zeros(2, 40), torch.zeros(2), torch.zeros(1, 3)):
        times.put(value)
    times.end()
    assert times.counts == [1, 3]
    assert len(times.times) == 2
    assert times.times[0] <= times.times[1]


@pytest.mark.parametrize(("name", "warms_up"), [("dynamic", False), ("kitty:eager", False), ("kitty", True)])
def test_a_whole_row_has_tokens_and_their_times(model, monkeypatch, name, warms_up):
    asked, config = [], whole._generation

    def noted(engine, settings, tokens, draft):
        asked.append(tokens)
        return config(engine, settings, tokens, draft)

    monkeypatch.setattr(whole, "_generation", noted)
    case = Case(2, 40)
    row = Bench(model, SETTINGS).whole(engine_of(name), case, 12)
    assert "error" not in row, row
    # A small call to warm up and two that count; or two whole ones that record, and then two that count.
    assert asked == ([12] * 4 if warms_up else [8, 12, 12])
    assert ("first_s" in row) == warms_up
    assert (row["new_tokens"], row["repeats"], row["mode"]) == (12, 2, "graphs" if warms_up else "eager")
    assert 0 < row["ms_token"]["p20"] <= row["ms_token"]["p50"] <= row["ms_token"]["p80"]
    assert 0 < row["ms_prefill"]["p50"] < row["ms"]["p50"]
    assert row["above_bytes"] is None
    ids = random_prompt(model, case, 0)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    if name == "dynamic":
        assert row["tokens"] == " ".join(str(token) for token in out[0, 40:].tolist())


def test_the_digest_is_of_all_rows():
    one, other = torch.tensor([[1, 2], [3, 4]]), torch.tensor([[1, 2], [3, 5]])
    assert whole.describe_tokens(one)["tokens"] == whole.describe_tokens(other)["tokens"] == "1 2"
    assert whole.describe_tokens(one)["digest"] != whole.describe_tokens(other)["digest"]


def test_caches_are_made_anew_or_reset_and_nothing_is_left_behind(model):
    for name, made in (("kitty", 3), ("kitty:fixed", 1)):
        engine = engine_of(name)
        caches, make = [], engine.make
        object.__setattr__(engine, "make", lambda *rest, make=make, to=caches: to.append(make(*rest)) or to[-1])
        with calls(model, engine, Case(1, 40), 4, SETTINGS) as call:
            found = [call(count).tokens for count in (4, 2, 4)]
            assert model.config._attn_implementation == "hfkvq"
        assert len(caches) == made
        assert torch.equal(found[0], found[2])
        assert torch.equal(found[0][:, :2], found[1])
        assert model.config._attn_implementation == "sdpa"


def test_generate_that_stops_early_is_found_out(model, monkeypatch):
    monkeypatch.setattr(model, "generate", lambda ids, **options: ids)
    row = Bench(model, SETTINGS).whole(engine_of("dynamic"), Case(1, 40), 4)
    assert row["error"] == "RuntimeError: generate stopped after 0 tokens."
    assert row["new_tokens"] == 4


# With a draft.


@pytest.mark.parametrize("name", ["dynamic", "kitty", "kitty:fixed"])
def test_an_assisted_row_says_what_the_model_says(model, small, name):
    case, engine = Case(1, 40), engine_of(name)
    row = Bench(model, SETTINGS, draft=small).assisted(engine, case, "assisted", 20, 5)
    assert "error" not in row, row
    assert (row["kind"], row["draft_tokens"], row["new_tokens"]) == ("assisted", 5, 20)
    # Every forward gives its guesses that are right, and a token of its own.
    assert row["forwards"] * (1 + row["accepted"]) == pytest.approx(20)
    assert row["tokens_per_s"] == pytest.approx(2e4 / row["ms"]["p50"])
    plain = Bench(model, SETTINGS).whole(engine, case, 20)
    assert row["tokens"] == plain["tokens"]
    assert small.generation_config.num_assistant_tokens_schedule == "constant"


def test_a_draft_that_knows_is_taken_at_its_word(model):
    twin = build(model.config, CPU, torch.float32, seed=0)
    row = Bench(model, SETTINGS, draft=twin).assisted(engine_of("dynamic"), Case(1, 40), "assisted", 19, 5)
    # 18 tokens are three times five guesses and one more, then the last.
    assert (row["forwards"], row["accepted"]) == (4, 3.75)
    assert row["ms_forward"]["p50"] > 0


def test_guesses_are_looked_up(model):
    row = Bench(model, SETTINGS).assisted(engine_of("kitty:eager"), Case(1, 40), "lookup", 20, 4)
    assert "error" not in row, row
    assert (row["kind"], row["draft_tokens"]) == ("lookup", 4)
    assert row["forwards"] * (1 + row["accepted"]) == pytest.approx(20)


def test_a_draft_guesses_at_least_one_token():
    with pytest.raises(ValueError, match="draft tokens: got 0, allowed 1 or more"):
        Draft(0)


# Cold.


def test_first_calls_are_told_apart(model):
    rows = list(measure_cold(model, engine_of("kitty"), [Case(1, 6), Case(2, 50)], 4, SETTINGS))
    assert [(row["kind"], row["engine"], row["batch"], row["context"]) for row in rows] == [
        ("cold", "kitty", 1, 6),
        ("cold", "kitty", 2, 50),
    ]
    assert [len(row["calls_s"]) for row in rows] == [3, 2]
    assert [row["after"] for row in rows] == [[], ["1 x 6"]]
    for row in rows:
        assert all(0 < first < whole for first, whole in zip(row["first_token_s"], row["calls_s"], strict=True))
        assert len(row["tokens"].split()) == row["new_tokens"] == 4


def order_for(folder: Path, **changes) -> ColdCalls:
    Qwen3Config(**SIZES).save_pretrained(folder / "tiny")
    sizes = {"cases": [[1, 6], [2, 50]], "tokens": 4, "compile": {"fullgraph": True, "mode": "reduce-overhead"}}
    where = {"model": str(folder / "tiny"), "layers": 1, "device": "cpu", "dtype": "float32", "seed": 0}
    return ColdCalls(**{"engine": "dynamic", "experts": "auto", **where, **sizes, **changes})


@pytest.mark.slow
def test_a_process_of_its_own_finds_no_compiled_code(tmp_path, monkeypatch):
    """And says the same as this one."""
    for name in cold.CACHES:
        monkeypatch.setenv(name, str(tmp_path / "used"))
    seen, start = [], ColdProcess.__init__

    def noted(self, order, folder):
        start(self, order, folder)
        environment = Path(f"/proc/{self.process.pid}/environ")
        seen.append(environment.read_bytes().decode() if environment.exists() else None)

    monkeypatch.setattr(ColdProcess, "__init__", noted)
    (answers,) = measure_processes([order_for(tmp_path)])
    model = build(Qwen3Config(**{**SIZES, "num_hidden_layers": 1}), CPU, torch.float32, seed=0)
    own = list(measure_cold(model, engine_of("dynamic"), [Case(1, 6), Case(2, 50)], 4, SETTINGS))
    assert [row["digest"] for row in answers] == [row["digest"] for row in own]
    assert all(row["build_s"] > 0 for row in answers)
    for environment in filter(None, seen):
        assert str(tmp_path / "used") not in environment


def test_an_order_that_fails_is_rows_that_say_so(tmp_path, monkeypatch):
    """What the process does, in this one."""
    order = order_for(tmp_path, model=str(tmp_path / "absent"))
    (tmp_path / "order.json").write_text(json.dumps(dataclasses.asdict(order)), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.StringIO("go\n"))
    cold.main(str(tmp_path))
    rows = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
    assert [row["error"].partition(":")[0] for row in rows] == ["ValueError", "ValueError"]
    assert [(row["batch"], row["context"], row["new_tokens"]) for row in rows] == [(1, 6, 4), (2, 50, 4)]


def test_a_process_that_dies_is_rows_that_say_so(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "false")
    (rows,) = measure_processes([order_for(tmp_path)])
    assert [row["error"] for row in rows] == ["the process ended with 1: "] * 2
    assert not any(row.get("oom") for row in rows)


def test_processes_are_ended_with_what_asked_for_them(tmp_path, monkeypatch):
    children, start = [], ColdProcess.__init__
    monkeypatch.setattr(ColdProcess, "__init__", lambda self, *rest: (children.append(self), start(self, *rest))[1])
    monkeypatch.setattr(ColdProcess, "wait", lambda self: None)
    monkeypatch.setattr(ColdProcess, "rows", lambda self: [])
    for _ in measure_processes([order_for(tmp_path), order_for(tmp_path)]):
        break
    assert len(children) == 2
    assert [child.process.poll() for child in children] == [-9, -9]


def test_engines_that_a_record_holds_are_not_called_again(monkeypatch):
    plan = Plan(decode=False, cold=("dynamic", "kitty"), cold_cases=(Case(1, 6), Case(2, 50)), cold_tokens=4)
    asked = []

    def answer(orders):
        for name in orders:
            asked.append(name)
            yield [cold_row(name, batch, context) for batch, context in ((1, 6), (2, 50))]

    def cold_row(name, batch, context):
        size = {"batch": batch, "context": context, "new_tokens": 4}
        return {"kind": "cold", "engine": name, **size, "tokens": "1 2 3 4", "digest": "0", "calls_s": [1.0]}

    monkeypatch.setattr("hfkvq.measure.bench.generate.session.measure_processes", answer)
    held = [cold_row("dynamic", 1, 6), cold_row("dynamic", 2, 50), cold_row("kitty", 2, 50)]
    record = {"rows": held}
    rows = cold_rows(plan, {"dynamic": "dynamic", "kitty": "kitty"}, record)
    # Of kitty the size that came first is missing, and the other depends on it.
    assert asked == ["kitty"]
    assert [(row["engine"], row["batch"]) for row in rows] == [
        ("dynamic", 1),
        ("dynamic", 2),
        ("kitty", 1),
        ("kitty", 2),
    ]
    assert len(record["rows"]) == 4
    assert rows[2]["agrees"] == {"with": "dynamic", "tokens": 4, "all": True}
    assert json.loads(json.dumps(rows)) == rows
