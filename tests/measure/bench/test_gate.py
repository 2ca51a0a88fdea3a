"""Nothing is timed that is not right, and nothing at all without a GPU."""

from __future__ import annotations

import contextlib
import importlib.util
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hfkvq.kernels.triton import configs
from hfkvq.measure.bench import checks, report
from hfkvq.measure.bench.cases import Shape
from hfkvq.measure.bench.timing import Timing
from tests.command import assert_refused, flat, invoke

from . import peer_fakes as fakes

run = partial(invoke, "bench")
CPU = torch.device("cpu")
SMALL = Shape(1, 8, heads=2, kv_heads=1, head_dim=64)
OPTIONS = ["--heads", "2", "--kv-heads", "1", "--head-dim", "64"]
ALONE = ["--peers", "none", "--skip-tests"]

needs_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled in this process")


# Tests of the kernels, in a checkout made up here.


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ("@pytest.mark.gpu\ndef test_it():\n    pass\n", None),
        ("@pytest.mark.gpu\ndef test_it():\n    raise ValueError\n", "the kernel tests fail"),
        ("def test_it():\n    pass\n", "were all left out"),
    ],
    ids=["pass", "fail", "none"],
)
def test_the_kernel_tests_decide(tmp_path: Path, test, message):
    (tmp_path / "tests" / "kernels").mkdir(parents=True)
    (tmp_path / "tests" / "kernels" / "test_it.py").write_text("import pytest\n\n\n" + test, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs a GPU\n", encoding="utf-8")
    with pytest.raises(checks.GateError, match=message) if message else contextlib.nullcontext():
        checks.run_tests(tmp_path)


def test_kernel_tests_need_pytest(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None)
    with pytest.raises(checks.GateError, match="--skip-tests"):
        checks.run_tests(Path())


def test_tests_run_from_this_checkout(monkeypatch, tmp_path):
    assert checks.checkout() == Path(__file__).resolve().parents[3]
    # As in a wheel.
    monkeypatch.setattr(checks, "__file__", str(tmp_path / "site-packages/hfkvq/measure/bench/checks.py"))
    assert checks.checkout() is None


# The self-check.


def test_error_is_relative_and_infinite_where_not_finite():
    x = torch.tensor([3.0, 4.0])
    assert checks.error_of(x, x) == 0
    assert checks.error_of(1.1 * x, x) == pytest.approx(0.1, rel=1e-5)
    assert checks.error_of(torch.tensor([3.0, float("nan")]), x) == float("inf")


@needs_interpreter
def test_self_check_passes_what_is_right():
    errors = checks.self_check(["kitty", "fp8+16"], [SMALL], CPU)
    assert set(errors) == {"plain Triton", "kitty", "fp8+16"}
    # Here both sides are the reference.
    assert errors["kitty"] == errors["fp8+16"] == 0
    assert 0 < errors["plain Triton"] < 0.01


@needs_interpreter
def test_self_check_refuses_a_format_that_differs(monkeypatch):
    attend = checks.fill.__globals__["KVStore"].attend
    in_reference = []

    @contextlib.contextmanager
    def reference():
        in_reference.append(True)
        yield
        in_reference.pop()

    def wrong(store, query, arguments):
        out = attend(store, query, arguments)
        return out if in_reference or not store.format.sink else out * 1.05

    monkeypatch.setattr(checks.fill.__globals__["KVStore"], "attend", wrong)
    with pytest.raises(checks.GateError, match=r"kitty by 0\.0") as caught:
        checks.self_check(["2-bit", "kitty"], [SMALL], CPU, reference)
    assert "2-bit" not in str(caught.value)


@needs_interpreter
def test_self_check_refuses_a_wrong_baseline(monkeypatch):
    monkeypatch.setattr(checks, "split_kv", lambda q, *rest: torch.full_like(q, float("nan")))
    with pytest.raises(checks.GateError, match="plain Triton by inf"):
        checks.self_check([], [SMALL], CPU)


# The commands.


@pytest.mark.parametrize("command", ["kernels", "tune"])
def test_without_a_gpu_it_says_what_it_needs(command, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = run(command)
    assert_refused(done, "sees no CUDA device")
    assert "NVIDIA GPU" in flat(done.output)


@pytest.fixture
def pretended_gpu(monkeypatch, tmp_path):
    """Commands run on the CPU, with invented times: 10 us for what is dense, 20 us for peers, 5 us for the rest."""
    properties = SimpleNamespace(
        name="Synthetic 9000", major=9, minor=0, multi_processor_count=2, L2_cache_size=10**5, total_memory=10**9
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr("hfkvq.measure.bench.cli.bench_device", lambda: CPU)
    monkeypatch.setattr("hfkvq.measure.bench.timing.copy_bandwidth", lambda device: (10**6, Timing(1, 1, 1, 1, 1, 1)))
    monkeypatch.setenv("HFKVQ_TUNING", str(tmp_path / "tuning.json"))
    configs.reload()

    def invented(us):
        def time_calls(calls, replays=30):
            calls[0]()
            return Timing(us, us, us, len(calls), len(calls), replays)

        return time_calls

    monkeypatch.setattr("hfkvq.measure.bench.baselines.time_calls", invented(10.0))
    monkeypatch.setattr("hfkvq.measure.bench.run.time_calls", invented(5.0))
    monkeypatch.setattr("hfkvq.measure.bench.peers.measure.time_calls", invented(20.0))
    yield
    configs.reload()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--formats", "kity"], "formats: got 'kity', which is unknown; did you mean 'kitty'"),
        (["--formats", ","], "formats: got none"),
        (["--context", "8kb"], "got '8kb', allowed numbers like 8192 or 8k"),
        (["--batch", "0"], "got '0', allowed numbers"),
        (["--heads", "6", "--kv-heads", "4"], "heads: got 6, allowed multiples of kv_heads"),
        (["--sweep", "--batch", "1"], "leave --batch and --context out"),
        (["--sizes", "1x8k", "--context", "8k"], "sizes: it has batches and contexts of its own"),
        (["--sizes", "1x8k", "--sweep"], "sweep: it has sizes of its own"),
        (["--sizes", "8k"], "sizes: got '8k', allowed rows x tokens, like 32x8k"),
        (["--peers", "vllm-fa4"], "peers: got 'vllm-fa4', which is unknown; did you mean 'vllm-fa"),
        (["--peers", "vllm-fa3", "--latents", "16"], "peers: got 'vllm-fa3' with --latents"),
        (["--replays", "5"], "Invalid value for '--replays'"),
        (["--json", "no-such-folder/a.json"], "the folder no-such-folder does not exist"),
        (["--compare", "no-such-file.json"], "compare: no-such-file.json cannot be read"),
    ],
)
def test_wrong_arguments_are_told_before_anything_runs(arguments, message, monkeypatch, pretended_gpu):
    monkeypatch.setattr("hfkvq.measure.bench.checks.run_tests", lambda root: pytest.fail("the tests ran"))
    assert_refused(run("kernels", *arguments), message)


def test_a_picture_needs_the_extra(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "matplotlib" else find(name, *a))
    assert_refused(run("kernels", "--plot", "a.png"), "plot: matplotlib is not installed; pip install 'hfkvq[plot]'")


def test_help_names_the_defaults():
    text = flat(run("kernels", "--help").output)
    assert "[default: 32x32k, 1x128k, 32x8k, 1x8k, 1x1k]" in text


def test_failing_tests_stop_the_run(monkeypatch, pretended_gpu):
    def fail(root):
        raise checks.GateError("the kernel tests fail; nothing was measured.")

    monkeypatch.setattr("hfkvq.measure.bench.checks.run_tests", fail)
    monkeypatch.setattr("hfkvq.measure.bench.run.measure_shape", lambda *rest: pytest.fail("it was measured"))
    assert_refused(run("kernels"), "nothing was measured", 1)


def test_the_self_check_cannot_be_skipped(monkeypatch, pretended_gpu):
    def fail(*rest):
        raise checks.GateError("kernels differ from the torch reference")

    monkeypatch.setattr("hfkvq.measure.bench.checks.run_tests", lambda root: pytest.fail("the tests ran"))
    monkeypatch.setattr("hfkvq.measure.bench.checks.self_check", fail)
    assert_refused(run("kernels", "--skip-tests"), "kernels differ", 1)


@needs_interpreter
def test_a_whole_run(pretended_gpu, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    fakes.flash(monkeypatch)
    options = ["--context", "200,1k", "--formats", "kitty,2-bit,fp8+16", "--peers", "vllm-fa2", "--skip-tests"]
    arguments = [*OPTIONS, *options]
    done = run("kernels", *arguments, "--json", str(tmp_path), "--plot", str(tmp_path), "--commit", "abc")
    assert done.exit_code == 0, done.output
    # It may take a minute.
    assert "compiling kitty" in done.output
    assert (tmp_path / "kernels-synthetic-9000.png").is_file()
    record = report.load(tmp_path / "kernels-synthetic-9000.json")
    assert (record["gpu"], record["commit"], record["checks"]["tests"]) == ("Synthetic 9000", "abc", "skipped")
    assert set(record["versions"]) >= {"torch", "triton", "python", "hfkvq"}
    assert record["copy"]["tb_per_s"] == 1
    formats = [row for row in record["rows"] if row["kind"] == "format"]
    assert [(row["context"], row["name"]) for row in formats] == [
        (context, name) for context in (200, 1024) for name in ("kitty", "2-bit", "fp8+16")
    ]
    assert all(row["speedup"] == 2 and row["bytes"] > 0 and row["copies"] > 1 for row in formats)
    assert formats[0]["spec"] == "s32;k0;v0;2c128p128+4x8/2t64p128"
    peers = [row for row in record["rows"] if row["kind"] == "peer"]
    assert [(row["context"], row["name"], row["us"]["p50"]) for row in peers] == [
        (context, "vllm-fa2", 20.0) for context in (200, 1024)
    ]
    assert set(record["checks"]["peers"]["vllm-fa2"]) == {"pages of 128", "pages of 256"}

    data = str(tmp_path / "kernels-synthetic-9000.json")
    again = run("kernels", *arguments, "--compare", data)
    assert again.exit_code == 0, again.output
    assert "+0.0 %" in again.output
    assert "slower" not in again.output


@needs_interpreter
def test_rows_are_saved_as_they_are_measured(pretended_gpu, monkeypatch, tmp_path):
    """What speed-ups are against and this library's formats first; a run that ends early has left a whole file."""
    fakes.flash(monkeypatch)
    file, seen = tmp_path / "a.json", []
    save = report.save

    def watched(record, path):
        save(record, path)
        row = report.load(file)["rows"][-1]
        if row["kind"] != "baseline":
            seen.append((row["context"], row["name"], row["speedup"]))
        if len(seen) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(report, "save", watched)
    options = ["--sizes", "1x200,1x1k", "--formats", "int4", "--peers", "vllm-fa3-fp8,vllm-fa2", "--skip-tests"]
    done = run("kernels", *OPTIONS, *options, "--json", str(file))
    assert done.exit_code == 130
    assert "a.json has what was measured" in flat(done.output)
    ours = [(tokens, *row) for tokens in (200, 1024) for row in (("vllm-fa2", 0.5), ("int4", 2))]
    assert seen == [*ours, (200, "vllm-fa3-fp8", 0.5)]


@needs_interpreter
def test_a_run_ends_in_time(pretended_gpu, monkeypatch, tmp_path):
    clock = SimpleNamespace(monotonic=iter(range(0, 400, 40)).__next__)
    monkeypatch.setattr("hfkvq.measure.bench.cli.time", clock)
    options = [
        "--context",
        "200",
        "--formats",
        "int4,kivi-4",
        *ALONE,
        "--minutes",
        "2",
        "--json",
        str(tmp_path / "a.json"),
    ]
    done = run("kernels", *OPTIONS, *options)
    assert done.exit_code == 0, done.output
    # Each look at the clock finds it 40 s later, and there is one before the rows and one after each.
    rows = report.load(tmp_path / "a.json")["rows"]
    assert len(rows) == 4, rows
    assert "of 3 rows in 2 minutes" in flat(done.output)


@needs_interpreter
def test_a_format_that_fails_is_reported_and_stops_no_other(pretended_gpu, monkeypatch):
    fill = checks.fill

    def full(name, keys, values):
        if name == "int4":
            raise torch.OutOfMemoryError("CUDA out of memory.\nMore about it.")
        return fill(name, keys, values)

    monkeypatch.setattr("hfkvq.measure.bench.run.fill", full)
    done = run("kernels", *OPTIONS, "--context", "200", "--formats", "int4,kivi-4", *ALONE)
    assert done.exit_code == 1
    lines = {line.split()[0]: line for line in done.output.splitlines() if line.strip()}
    assert "OutOfMemoryError: CUDA out of memory." in lines["int4"]
    assert "2.00x" in lines["kivi-4"]


@needs_interpreter
def test_a_shape_that_does_not_fit_stops_no_other(pretended_gpu, monkeypatch):
    data = Shape.data

    def full(shape, device, seed=0):
        if shape.context == 2048:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return data(shape, device, seed)

    monkeypatch.setattr(Shape, "data", full)
    done = run(
        "kernels", *OPTIONS, "--context", "2k,200", "--formats", "int4,kivi-4", "--peers", "none", "--skip-tests"
    )
    assert done.exit_code == 1
    assert done.output.count("CUDA out of memory.") == 2
    assert done.output.count("2.00x") == 2


def test_tuning_says_when_memory_is_full(pretended_gpu, monkeypatch):
    def full(*rest):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("hfkvq.measure.bench.tune.fill", full)
    assert_refused(run("tune", *OPTIONS, "--context", "64"), "choose fewer or smaller ones", 1)


def test_tuning_a_format_without_parameters(pretended_gpu, monkeypatch):
    monkeypatch.setattr("hfkvq.measure.bench.tune.tune", lambda *rest: ([], 0))
    assert_refused(run("tune", *OPTIONS, "--formats", "full"), "no kernel with launch parameters serves full")


def test_tuning_saves_what_it_found(pretended_gpu, monkeypatch, tmp_path):
    from hfkvq.measure.bench.tune import Finding

    before = dict(configs.DEFAULTS["decode"])
    found = Finding("decode", "2c128/2t128,D128,N8", before, {**before, "stages": 3}, 0.9, late=5)

    def tune(formats, shapes, device, progress, minutes, keep):
        assert minutes == 0.5
        keep(found)
        return [found], 3

    monkeypatch.setattr("hfkvq.measure.bench.tune.tune", tune)
    done = run("tune", *OPTIONS, "--minutes", "0.5", "--json", str(tmp_path / "found.json"))
    assert done.exit_code == 0, done.output
    assert "1 of 3 variants in 0.5 minutes" in " ".join(done.output.split())
    record = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert (record["gpu"], record["findings"][0]["share"]) == ("Synthetic 9000", 0.9)
    assert record["findings"][0]["late"] == 5
    assert "5 candidates were not compiled in time, and so not tried" in " ".join(done.output.split())
    assert "stages 3" in done.output
    assert "-10.0 %" in done.output
    saved = json.loads((tmp_path / "tuning.json").read_text(encoding="utf-8"))
    assert saved == {configs.gpu_key("Synthetic 9000"): {"decode": {found.key: {**before, "stages": 3}}}}


def test_tuning_that_is_stopped_has_saved_what_it_found(pretended_gpu, monkeypatch, tmp_path):
    from hfkvq.measure.bench.tune import Finding

    before = dict(configs.DEFAULTS["decode"])

    def tune(formats, shapes, device, progress, minutes, keep):
        keep(Finding("decode", "2c128/2t128,D128,N8", before, {**before, "stages": 3}, 0.9))
        raise KeyboardInterrupt

    monkeypatch.setattr("hfkvq.measure.bench.tune.tune", tune)
    done = run("tune", *OPTIONS, "--json", str(tmp_path / "found.json"))
    assert done.exit_code != 0
    assert "what was found until now is in" in " ".join(done.output.split())
    for name in ("tuning.json", "found.json"):
        assert '"stages": 3' in (tmp_path / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("content", ["[]", None])
def test_tuning_without_a_place_for_what_it_finds(pretended_gpu, monkeypatch, tmp_path, content):
    """Refused at once: a search takes minutes."""
    monkeypatch.setattr("hfkvq.measure.bench.tune.tune", lambda *rest: pytest.fail("searched"))
    path = tmp_path / "here"
    path.write_text(content or "", encoding="utf-8")
    monkeypatch.setenv("HFKVQ_TUNING", str(path if content else path / "tuning.json"))
    assert_refused(run("tune", *OPTIONS), "HFKVQ_TUNING")
