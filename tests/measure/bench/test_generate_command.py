"""The command: what it refuses, what it measures with a tiny model on the CPU, and what it saves."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen3Config

from hfkvq.caches.cache import DEFAULT_SCHEME
from hfkvq.caches.registry import listed
from hfkvq.measure.bench.generate import models
from hfkvq.measure.bench.generate import record as records
from hfkvq.measure.bench.generate.cases import DEFAULT_CASES
from hfkvq.measure.bench.generate.engines import DEFAULT_STOCK, STOCK, default_schemes, parse_engines
from hfkvq.measure.bench.generate.models import ARCHITECTURES
from hfkvq.measure.bench.generate.run import Bench
from hfkvq.measure.bench.timing import Timing
from tests.command import assert_refused, flat, invoke

run = partial(invoke, "bench", "generate")
CPU = torch.device("cpu")


@pytest.fixture
def pretended_gpu(monkeypatch):
    """The command runs on the CPU."""
    properties = SimpleNamespace(
        name="Synthetic 9000", major=9, minor=0, multi_processor_count=2, L2_cache_size=10**5, total_memory=10**9
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr("hfkvq.measure.bench.generate.cli.bench_device", lambda: CPU)
    monkeypatch.setattr("hfkvq.measure.bench.timing.copy_bandwidth", lambda device: (10**6, Timing(1, 1, 1, 1, 1, 1)))
    monkeypatch.setattr("hfkvq.measure.bench.generate.run.sweep", lambda device: None)


@pytest.fixture
def tiny(tmp_path):
    """Folder of a config, and the options that make a run short."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 64, "vocab_size": 100, "num_hidden_layers": 3}
    Qwen3Config(num_attention_heads=2, num_key_value_heads=1, **sizes).save_pretrained(tmp_path / "tiny")
    return ["--model", str(tmp_path / "tiny"), "--layers", "1", "--warmup", "4", "--steps", "1", "--repeats", "1"]


def test_without_a_gpu_it_says_what_it_needs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert_refused(run(), "sees no CUDA device")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "qwen"], "model: got 'qwen', which is unknown"),
        (["--layers", "99"], "layers: got 99, allowed 1 to 36"),
        (["--cases", "8k"], "cases: got '8k', allowed ROWSxTOKENS"),
        (["--cases", "1x1k", "--batch", "2"], "leave --batch and --context out"),
        (["--batch", "0"], "allowed numbers like 8192 or 8k"),
        (["--batch", ","], "batch: got ',', allowed rows with commas, or auto"),
        (["--batch", "1", "--context", ","], "context: got ',', allowed tokens"),
        (["--batch", "auto", "--no-decode", "--prefill"], "leave --no-decode out"),
        (["--no-decode"], "nothing is left to measure"),
        (
            ["--turns", "--engines", "static-compiled", "--schemes", "kitty:compiled"],
            "turns: every cache asked for is compiled",
        ),
        (["--engines", "none", "--schemes", "none"], "engines, schemes: got none"),
        (["--engines", "static-compild"], "did you mean 'static-compiled'"),
        (["--schemes", "kity"], "did you mean 'kitty'"),
        (["--schemes", "kitty:grow"], "whose mode is unknown"),
        (["--cold", "kitty"], "cold: got 'kitty', allowed all or what is measured: dynamic,"),
        (["--cold", "all", "--liger"], "liger: first calls (--cold) are those of the model as it is"),
        (["--cold", "all", "--cold-cases", "6"], "cases: got '6', allowed ROWSxTOKENS"),
        (["--cases", "2x1k", "--assisted"], "a draft guesses for one row; add a size such as 1x1k"),
        (["--assisted", "--draft", "llama-3.1-8b"], "llama-3.1-8b has 128256 tokens and the model 151936"),
        (["--seconds", "0"], "seconds: got 0.0, allowed more than 0"),
        (["--warmup", "2"], "Invalid value for '--warmup'"),
        (["--resume"], "name the earlier run's file with --json"),
        (["--json", "no-such-folder/a.json"], "the folder no-such-folder does not exist"),
        (["--markdown", "no-such-folder/a.md"], "the folder no-such-folder does not exist"),
    ],
)
def test_wrong_arguments_are_told_before_anything_runs(arguments, message, monkeypatch, pretended_gpu):
    monkeypatch.setattr("hfkvq.measure.bench.generate.models.build", lambda *rest: pytest.fail("weights were made"))
    assert_refused(run(*arguments), message)


def test_weights_that_do_not_fit(monkeypatch, pretended_gpu):
    def full(*rest):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("hfkvq.measure.bench.generate.models.build", full)
    assert_refused(run(), "cut it with --layers", 1)


def test_a_run_is_saved_shown_and_taken_up_again(pretended_gpu, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.cache_utils.is_optimum_quanto_available", lambda: False)
    files = [part for option in ("--json", "--plot", "--markdown") for part in (option, str(tmp_path))]
    options = [*tiny, "--cases", "1x64,2x64", "--engines", "dynamic,quanto-2", "--commit", "abc", *files]
    done = run(*options, "--schemes", "kitty:eager", "--turns", "--prefill", "--whole", "--new-tokens", "3")
    # A missing package is no failure.
    assert done.exit_code == 0, done.output
    path = tmp_path / "generate-tiny-synthetic-9000.json"
    assert path.with_suffix(".png").is_file()
    assert "| `kitty:eager` |" in path.with_suffix(".md").read_text(encoding="utf-8")
    record = records.load(path)
    assert (record["gpu"], record["commit"], record["model"]["num_hidden_layers"]) == ("Synthetic 9000", "abc", 1)
    assert record["model"]["weight_bytes"] > record["model"]["weight_bytes_of_a_step"] > 0
    assert record["settings"]["compile"] == {"fullgraph": True, "mode": "reduce-overhead"}
    assert record["schemes"]["kitty:eager"]["scheme"] == "kitty"
    kinds = [(each["kind"], each["batch"]) for each in record["rows"] if each["engine"] == "kitty:eager"]
    assert kinds == [("prefill", 1), *((kind, rows) for rows in (1, 2) for kind in ("decode", "turns", "whole"))]
    assert all(each["speedup_eager"] > 0 for each in record["rows"] if each["engine"] == "kitty:eager")
    assert all(each["skipped"] for each in record["rows"] if each["engine"] == "quanto-2")
    assert "decode, 2 x 64 tokens" in done.output
    assert "decode, not compiled, in turns, 2 x 64 tokens" in done.output
    turn = next(each for each in record["rows"] if each["kind"] == "turns" and each["engine"] == "kitty:eager")
    assert f"{turn['times_as_long']['p50']:.2f} times dynamic" in done.output

    measured = []
    decode = Bench.decode
    monkeypatch.setattr(
        Bench,
        "decode",
        lambda self, engine, case: measured.append((engine.name, case.batch)) or decode(self, engine, case),
    )
    again = run(*options, "--schemes", "kitty:eager,full:eager", "--resume")
    assert again.exit_code == 0, again.output
    # What was skipped is tried again.
    assert measured == [("quanto-2", 1), ("full:eager", 1), ("quanto-2", 2), ("full:eager", 2)]
    assert len(records.load(path)["rows"]) == len(record["rows"]) - 5 + 2
    assert "kitty:eager" in again.output

    other = run(*options[:2], "--layers", "2", *options[4:], "--schemes", "none", "--resume")
    assert other.exit_code == 2
    assert "the earlier run has another model" in flat(other.output)


def test_generate_is_timed_as_users_call_it(pretended_gpu, tiny, tmp_path, monkeypatch):
    """First calls before there are weights in this process, whole calls, and drafts where there is one row."""
    events = []

    def children(orders):
        for order in orders:
            events.append(("cold", order.engine, order.layers, order.tokens))
            size = {"batch": 1, "context": 6, "new_tokens": order.tokens, "mode": "eager"}
            figures = {"calls_s": [2.0, 1.0, 1.0], "first_token_s": [1.0, 0.5, 0.5], "above_bytes": None, "after": []}
            yield [{"kind": "cold", "engine": order.engine, **size, **figures, "tokens": "1", "digest": "a"}]

    built = models.build

    def noted(config, device, *rest):
        events.append(("weights", device.type))
        return built(config, device, *rest)

    monkeypatch.setattr("hfkvq.measure.bench.generate.session.measure_processes", children)

    def compile_ahead(model, presets, steps, tell):
        events.append(("compiled", [preset.scheme.name for preset in presets], len(steps)))

    monkeypatch.setattr("hfkvq.measure.bench.generate.models.build", noted)
    monkeypatch.setattr("hfkvq.caches.warm.compile_ahead", compile_ahead)
    path = tmp_path / "a.json"
    options = [*tiny, "--no-decode", "--engines", "dynamic,static", "--schemes", "kitty", "--json", str(path)]
    options += ["--cold", "dynamic,kitty", "--cold-cases", "1x6", "--cold-tokens", "8"]
    done = run(*options)
    assert done.exit_code == 0, done.output
    assert "first calls of generate, s, 8 new tokens" in done.output
    # Nothing else was asked for, so there are no weights but shapes.
    assert events == [("weights", "meta"), ("cold", "dynamic", 1, 8), ("cold", "kitty", 1, 8)]

    events.clear()
    more = ["--whole", "--new-tokens", "5", "--assisted", "--draft", tiny[1], "--assisted-tokens", "6"]
    done = run(*options, "--cases", "1x64,2x64", *more, "--prompt-lookup", "3", "--resume")
    assert done.exit_code == 0, done.output
    # Drafts have steps of any number of tokens.
    assert events == [("weights", "meta"), ("weights", "cpu"), ("weights", "cpu"), ("compiled", ["kitty"], 16)]
    record = records.load(path)
    found = [(each["kind"], each["engine"], each["batch"], each["new_tokens"]) for each in record["rows"]]
    assert found == [
        *(("cold", name, 1, 8) for name in ("dynamic", "kitty")),
        *(("whole", name, 1, 5) for name in ("dynamic", "static", "kitty")),
        *((kind, name, 1, 6) for kind in ("assisted", "lookup") for name in ("dynamic", "kitty")),
        *(("whole", name, 2, 5) for name in ("dynamic", "static", "kitty")),
    ]
    assert record["modes"] == {"dynamic": "eager", "static": "eager", "kitty": "graphs"}
    assert {each["mode"] for each in record["rows"] if each["engine"] == "kitty" and each["kind"] == "whole"} == {
        "graphs"
    }
    assert all("with" in each["agrees"] for each in record["rows"] if each["engine"] == "kitty")
    assert record["settings"]["draft"] == tiny[1]
    for title in ("generate, prefill included, 1 x 64", "generate, a model guessing", "generate, guesses looked up"):
        assert title in done.output


def test_a_failure_ends_nothing_but_shows_in_the_exit_code(pretended_gpu, tiny, tmp_path, monkeypatch):
    decode = Bench._decode

    def broken(self, engine, case):
        if engine.name == "dynamic":
            raise RuntimeError("no such kernel")
        return decode(self, engine, case)

    monkeypatch.setattr(Bench, "_decode", broken)
    path = tmp_path / "a.json"
    assert_refused(
        run(*tiny, "--cases", "1x64", "--engines", "dynamic,static", "--schemes", "none", "--json", str(path)),
        "RuntimeError: no such kernel",
        1,
    )
    rows = records.load(path)["rows"]
    assert ["error" in each for each in rows] == [True, False]


def test_auto_looks_for_the_largest_batch(pretended_gpu, tiny, tmp_path, monkeypatch):
    def invented(self, engine, case):
        if case.batch * (2 if engine.name == "dynamic" else 1) > 200:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return {"ms": {"p20": 9.0, "p50": 10.0, "p80": 11.0}, "tokens_per_s": 100.0 * case.batch}

    monkeypatch.setattr(Bench, "_decode", invented)
    path = tmp_path / "a.json"
    options = [*tiny, "--batch", "1,auto", "--context", "8k", "--engines", "dynamic", "--schemes", "kitty"]
    done = run(*options, "--json", str(path))
    # A full memory is what was looked for.
    assert done.exit_code == 0, done.output
    rows = records.load(path)["rows"]
    tried = [each["batch"] for each in rows if each["engine"] == "kitty" and each["kind"] == "decode"]
    assert tried == [1, 32, 64, 128, 256, 192, 224]
    found = {each["engine"]: each for each in rows if each["kind"] == "largest"}
    assert (found["kitty"]["largest"], found["kitty"]["tokens_per_s"]) == (192, 19200.0)
    assert found["dynamic"]["largest"] == 96
    assert "Rows that fit" in done.output
    again = run(*options, "--json", str(path), "--resume")
    assert again.exit_code == 0, again.output
    assert len(records.load(path)["rows"]) == len(rows)


def test_help_names_architectures_and_defaults():
    text = flat(run("--help").output)
    for name in (*ARCHITECTURES, *STOCK):
        assert name in text
    assert f"[default: {DEFAULT_CASES.replace(',', ', ')}]" in text
    assert set(STOCK) - set(DEFAULT_STOCK) == {"dynamic-offloaded", "static", "static-compiled-nocudnn"}


def test_default_schemes_are_the_registry_s_and_the_default_in_other_modes():
    names = default_schemes()
    assert [each.name for each in parse_engines((), names)] == list(names)
    assert names[:-2] == listed("bench generate")
    assert {name.partition(":")[0] for name in names[-2:]} == {DEFAULT_SCHEME} <= set(names)
