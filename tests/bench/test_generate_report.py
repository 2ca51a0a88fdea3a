"""The command, its records, tables and pictures: from invented figures, and from a tiny model on the CPU."""

from __future__ import annotations

import contextlib
import copy
import json
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from transformers import Qwen3Config
from typer.testing import CliRunner

from hfkvq.bench.generate import record as records
from hfkvq.bench.generate import report
from hfkvq.bench.generate.cases import DEFAULT_CASES
from hfkvq.bench.generate.engines import DEFAULT_SCHEMES, DEFAULT_STOCK, STOCK
from hfkvq.bench.generate.meeting import Meeting
from hfkvq.bench.generate.models import ARCHITECTURES
from hfkvq.bench.generate.run import Bench
from hfkvq.bench.measure import Timing
from hfkvq.cli import app

CPU = torch.device("cpu")


def row(engine: str, batch: int, context: int, ms: float, kind: str = "decode", **more) -> dict:
    found = {"kind": kind, "engine": engine, "batch": batch, "context": context}
    figures = {"ms": {"p20": 0.9 * ms, "p50": ms, "p80": 1.2 * ms}, "tokens_per_s": 1e3 * batch / ms}
    return {**found, **figures, "cache_bytes": 10**9, "peak_bytes": 2 * 10**10, **more}


def failed(engine: str, batch: int, context: int, **more) -> dict:
    return {"kind": "decode", "engine": engine, "batch": batch, "context": context, "error": "OutOfMemoryError", **more}


def record_of(rows: list[dict]) -> dict:
    records.add_speedups(rows)
    return {
        "kind": records.KIND,
        "gpu": "Synthetic 9000",
        "versions": {"torch": "0.0", "triton": "0.0", "transformers": "0.0"},
        "commit": "0000000",
        "date": "2000-01-01T00:00:00+00:00",
        "method": records.METHOD,
        "model": {"name": "tiny", "weight_bytes": 10**10, "weight_ms_of_a_step": 3.7},
        "settings": {"steps": 1},
        "schemes": {},
        "rows": rows,
    }


ROWS = [
    row("dynamic", 1, 1024, 40.0),
    row("dynamic-nocudnn", 1, 1024, 20.0),
    row("static-compiled", 1, 1024, 6.0),
    row("kitty", 1, 1024, 5.0),
    row("dynamic", 64, 8192, 80.0),
    failed("static-compiled", 64, 8192, oom=True),
    row("kitty", 64, 8192, 16.0, graphs=2, cudagraph_skips=1),
    failed("int4", 64, 8192),
]


def printed(what: object, width: int = 140) -> str:
    console = Console(width=width, record=True, force_terminal=False)
    with console.capture() as capture:
        console.print(what)
    return capture.get()


def lines_of(text: str) -> dict[str, str]:
    return {line.split()[0]: line for line in text.splitlines() if line.strip()}


# Figures.


def test_speedups_are_against_the_better_of_the_baselines_at_the_same_size():
    rows = copy.deepcopy(ROWS)
    records.add_speedups(rows)
    assert (rows[3]["speedup_eager"], rows[3]["against_eager"]) == (4.0, "dynamic-nocudnn")
    assert (rows[3]["speedup_compiled"], rows[3]["against_compiled"]) == (1.2, "static-compiled")
    assert rows[0]["speedup_eager"] == 0.5
    assert rows[6]["speedup_eager"] == 5.0
    # The only compiled baseline of this size did not fit.
    assert "speedup_compiled" not in rows[6]
    assert "speedup_eager" not in rows[7]


def test_kinds_are_not_held_against_each_other():
    rows = [row("dynamic", 1, 1024, 40.0, "prefill"), row("kitty", 1, 1024, 5.0)]
    records.add_speedups(rows)
    assert "speedup_eager" not in rows[1]


@pytest.mark.parametrize("width", [120, 140])
def test_a_table_of_one_size(width):
    rows = record_of(copy.deepcopy(ROWS))["rows"]
    text = printed(report.table(rows[4:]), width)
    assert max(map(len, text.splitlines())) <= width
    assert "decode, 64 x 8k tokens" in text
    lines = lines_of(text)
    assert "4,000" in lines["kitty"]
    assert "5.00x" in lines["kitty"]
    assert "14.40 to 19.20" in lines["kitty"]
    assert "OutOfMemoryError" in lines["static-compiled"]
    flat = " ".join(text.split())
    assert "2 graphs" in flat
    assert "skipped 1" in flat


def test_a_table_of_several_sizes_names_them():
    lines = printed(report.table([row("kitty", 32, 8192, 5.0), row("kitty", 64, 8192, 9.0)]))
    assert "kitty, 32 x 8k" in lines
    assert "kitty, 64 x 8k" in lines


def test_a_whole_row_tells_prefill_and_steps_apart():
    ms = {"p20": 100.0, "p50": 100.0, "p80": 100.0}
    text = printed(report.table([row("kitty", 1, 1024, 200.0, "whole", ms_prefill=ms, ms_step=1.5)]))
    assert "generate, prefill included" in text
    assert "prefill 100 ms, then 1.50 ms a step" in " ".join(text.split())


LARGEST = [
    {"kind": "largest", "engine": "kitty", "context": 8192, "batch": 480, "largest": 480, "best_batch": 448}
    | {"tokens_per_s": 6000.0, "full": True},
    {"kind": "largest", "engine": "kivi-2", "context": 8192, "batch": 512, "largest": 512, "best_batch": 512}
    | {"tokens_per_s": 7000.0, "full": False},
    {"kind": "largest", "engine": "full", "context": 8192, "batch": 0, "error": "OutOfMemoryError"},
]


def test_a_table_of_what_fits():
    lines = lines_of(printed(report.largest_table(LARGEST)))
    assert "480" in lines["kitty"]
    assert "448" in lines["kitty"]
    assert "512 or more" in lines["kivi-2"]
    assert "OutOfMemoryError" in lines["full"]


def test_markdown_has_a_line_a_cache_and_a_column_a_size():
    text = report.markdown(record_of(copy.deepcopy([*ROWS, *LARGEST])))
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("|")}
    assert lines["decode"] == "| decode | 1 x 1k | 64 x 8k |"
    assert lines["`static-compiled`"] == "| `static-compiled` | 6.00 (167) | out of memory |"
    assert lines["`int4`"] == "| `int4` |  | failed |"
    # The last table's line takes the place of the first's.
    assert lines["`kitty`"] == "| `kitty` | 8k | 480 | 6,000 | 448 |"
    assert "prefill" not in text


def test_notes_name_the_floor():
    text = " ".join(report.notes(record_of([])))
    assert "3.70 ms" in text
    assert "10.0 GB" in text
    silent = record_of([])
    silent["model"]["weight_ms_of_a_step"] = None
    assert "speed of a copy" not in " ".join(report.notes(silent))


def test_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    more = [row(f"e{i}", batch, 8192, 5.0 + i + batch) for i in range(12) for batch in (1, 32, 64)]
    for name, rows in (("all", [*ROWS, *LARGEST, *more]), ("one", ROWS[:1]), ("none", [])):
        path = tmp_path / f"{name}.png"
        report.save_plot(record_of(copy.deepcopy(rows)), path)
        assert path.read_bytes().startswith(b"\x89PNG")


# Files.


def test_a_record_survives_the_file(tmp_path):
    record = record_of(copy.deepcopy(ROWS))
    records.save_record(record, tmp_path / "a.json")
    assert records.load(tmp_path / "a.json") == record
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("content", ["{", "[]", json.dumps({"kind": "hfkvq bench kernels", "rows": []}), None])
def test_a_file_that_is_no_record(tmp_path, content):
    path = tmp_path / "a.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match="resume: "):
        records.load(path)


def test_going_on_keeps_what_ran_and_what_did_not_fit():
    before, after = record_of(copy.deepcopy(ROWS)), record_of([])
    records.resume(after, before)
    assert [each["engine"] for each in after["rows"]] == [each["engine"] for each in ROWS[:-1]]
    assert after["resumed"] == [{"commit": "0000000", "date": before["date"], "settings": {"steps": 1}}]
    assert {each["commit"] for each in after["rows"]} == {"0000000"}
    # The bandwidth is measured each time; another value is no other model.
    faster = record_of([])
    faster["model"] = {**faster["model"], "weight_ms_of_a_step": 1.0}
    records.resume(faster, before)
    assert len(faster["rows"]) == len(ROWS) - 1
    for name, other in (
        ("gpu", {"gpu": "Synthetic 9001"}),
        ("compile", {"settings": {"compile": {"mode": "default"}}}),
    ):
        with pytest.raises(ValueError, match=f"another {name}"):
            records.resume(record_of([]) | other, before)


def test_files_in_a_folder_are_named_after_model_and_gpu(tmp_path):
    assert records.file_name(tmp_path / "a.json", "qwen3-8b", "NVIDIA H200", ".json") == tmp_path / "a.json"
    found = records.file_name(tmp_path, "Qwen/Qwen3-8B", "NVIDIA H200", ".png")
    assert found == tmp_path / "generate-qwen3-8b-h200.png"


# The command.


def run(*arguments: str):
    return CliRunner().invoke(app, ["bench", "generate", *arguments], env={"COLUMNS": "140"})


def flat(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture
def pretended_gpu(monkeypatch):
    """The command runs on the CPU."""
    properties = SimpleNamespace(
        name="Synthetic 9000", major=9, minor=0, multi_processor_count=2, L2_cache_size=10**5, total_memory=10**9
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr("hfkvq.bench.cli._bench_device", lambda: CPU)
    monkeypatch.setattr("hfkvq.bench.measure.copy_bandwidth", lambda device: (10**6, Timing(1, 1, 1, 1, 1, 1)))
    monkeypatch.setattr("hfkvq.bench.generate.run.sweep", lambda device: None)


@pytest.fixture
def tiny(tmp_path):
    """Folder of a config, and the options that make a run short."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 64, "vocab_size": 100, "num_hidden_layers": 3}
    Qwen3Config(num_attention_heads=2, num_key_value_heads=1, **sizes).save_pretrained(tmp_path / "tiny")
    return ["--model", str(tmp_path / "tiny"), "--layers", "1", "--warmup", "4", "--steps", "1", "--repeats", "1"]


def test_without_a_gpu_it_says_what_it_needs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = run()
    assert done.exit_code == 2
    assert "sees no CUDA device" in flat(done.output)
    assert "Traceback" not in done.output


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
        (["--turns", "--engines", "static-compiled", "--schemes", "kitty"], "turns: every cache asked for is compiled"),
        (["--engines", "none", "--schemes", "none"], "engines, schemes: got none"),
        (["--engines", "static-compild"], "did you mean 'static-compiled'"),
        (["--schemes", "kity"], "did you mean 'kitty'"),
        (["--seconds", "0"], "seconds: got 0.0, allowed more than 0"),
        (["--warmup", "2"], "Invalid value for '--warmup'"),
        (["--resume"], "name the earlier run's file with --json"),
        (["--json", "no-such-folder/a.json"], "the folder no-such-folder does not exist"),
        (["--markdown", "no-such-folder/a.md"], "the folder no-such-folder does not exist"),
    ],
)
def test_wrong_arguments_are_told_before_anything_runs(arguments, message, monkeypatch, pretended_gpu):
    monkeypatch.setattr("hfkvq.bench.generate.models.build", lambda *rest: pytest.fail("weights were made"))
    done = run(*arguments)
    assert done.exit_code == 2
    assert message in flat(done.output)
    assert "Traceback" not in done.output


def test_weights_that_do_not_fit(monkeypatch, pretended_gpu):
    def full(*rest):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("hfkvq.bench.generate.models.build", full)
    done = run()
    assert done.exit_code == 1
    assert "cut it with --layers" in flat(done.output)


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
    assert "eager decode, in turns, 2 x 64 tokens" in done.output
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


def test_a_failure_ends_nothing_but_shows_in_the_exit_code(pretended_gpu, tiny, tmp_path, monkeypatch):
    decode = Bench._decode

    def broken(self, engine, case):
        if engine.name == "dynamic":
            raise RuntimeError("no such kernel")
        return decode(self, engine, case)

    monkeypatch.setattr(Bench, "_decode", broken)
    path = tmp_path / "a.json"
    done = run(*tiny, "--cases", "1x64", "--engines", "dynamic,static", "--schemes", "none", "--json", str(path))
    assert done.exit_code == 1
    assert "RuntimeError: no such kernel" in flat(done.output)
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
    text = flat(run("--help").output.replace("│", " "))
    for name in (*ARCHITECTURES, *STOCK):
        assert name in text
    assert f"[default: {DEFAULT_CASES.replace(',', ', ')}]" in text
    # Long words may be folded.
    assert f"[default: {','.join(DEFAULT_SCHEMES)}]" in text.replace(" ", "").replace("[default:", "[default: ")
    assert set(STOCK) - set(DEFAULT_STOCK) == {"static", "static-compiled-nocudnn"}


def test_runs_that_meet_take_turns(tmp_path):
    """None times before all are ready, no two at a time, and none prepares its next line before all have.

    A line that fails, and a run that has no more of them, keep nobody waiting.
    """
    events, start = [], time.monotonic()

    def run(name, lines):
        meeting = Meeting(tmp_path / "meet", 3, patience=60, name=name)
        for i in range(lines):
            with meeting.line(), contextlib.suppress(RuntimeError):
                events.append(("prepares", i))
                if (name, i) == ("b", 1):
                    raise RuntimeError("no memory")
                with meeting.turn():
                    events.append(("in", i))
                    time.sleep(0.05)
                    events.append(("out", i))
        meeting.leave()

    threads = [threading.Thread(target=run, args=own) for own in (("a", 3), ("b", 3), ("c", 1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - start < 30
    took = [3, 1, 2]
    assert [what for what, _ in events] == [
        what for i in range(3) for what in ("prepares",) * (3, 2, 2)[i] + ("in", "out") * took[i]
    ]
    with Meeting(tmp_path / "alone", 2, patience=0.0).turn():
        pass
    with pytest.raises(ValueError, match="of: got 0, allowed 1 or more runs"):
        Meeting(tmp_path, 0)
