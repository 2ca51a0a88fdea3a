"""`hfkvq compare` and `hfkvq report`, as their user types them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.command import assert_refused, flat, invoke

from .files import divergence, divergences, evaluation, kvq, run_files, write


def test_compare(tmp_path: Path) -> None:
    first = run_files(tmp_path / "a", "2026-01-01T00-00-00.1", {"x": [1.0] * 10, "y": [1.0] * 4})
    second = run_files(tmp_path / "b", "2026-01-01T00-00-00.2", {"x": [0.0] * 8 + [1.0] * 2, "y": [1.0] * 4, "z": [1]})
    saved = tmp_path / "compare.json"
    done = invoke("compare", str(first), str(second), "--json", str(saved), columns=100)
    assert done.exit_code == 0, done.output
    assert max(map(len, done.output.splitlines()[:10])) <= 100
    assert "Left out, because only one of the files has them: z." in flat(done.output)
    rows = {row["task"]: row for row in json.loads(saved.read_text(encoding="utf-8"))["rows"]}
    assert rows["x"]["p"] == pytest.approx(2 / 2**8)
    assert rows["x"]["difference"] == pytest.approx(-0.8)
    assert rows["y"]["p"] == 1.0
    assert (rows["pooled"]["samples"], rows["pooled"]["worse"]) == (14, 8)


def test_compare_refuses(tmp_path: Path) -> None:
    first = run_files(tmp_path / "a", "1", {"x": [1.0, 0.0]})
    for other, message in (
        (tmp_path / "none.json", "none.json cannot be read"),
        (
            run_files(tmp_path / "b", "1", {"x": [1.0]}),
            "x: the samples do not match: the first file has 2, the second 1",
        ),
    ):
        assert_refused(invoke("compare", str(first), str(other)), message)


def test_report(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    own = {"a": {"code_bits": 2.0, "total_bits": 3.0, "tokens_per_second": 20.0, "context_tokens": 900.0}}
    write(tmp_path / "m" / "results_1.json", evaluation({"a": {"acc,none": 0.5}}, kvq("kivi-2", 3.5, own)))
    write(tmp_path / "m" / "results_0.json", evaluation({"a": {"acc,none": 0.6}}))
    kld = write(tmp_path / "kld.json", divergences(divergence("kivi-2", 0.02, 3.6)))
    out = tmp_path / "out"
    done = invoke("report", str(tmp_path / "m"), str(kld), "--out", str(out), "--title", "Ours", columns=100)
    assert done.exit_code == 0, done.output
    text = (out / "report.md").read_text(encoding="utf-8")
    assert text.startswith("# Ours\n\n## org/model\n")
    assert "| `kivi-2` | 2.00 | 3.00 |" in text
    for name in ("quality.png", "speed.png"):
        assert f"]({name})" in text
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    done = invoke("report", str(tmp_path / "m"), "--out", str(tmp_path / "bare"), "--no-plots")
    assert done.exit_code == 0, done.output
    assert [path.name for path in (tmp_path / "bare").iterdir()] == ["report.md"]


def test_the_pictures_of_the_kernels_benchmark(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    bench = Path(__file__).resolve().parents[3] / "evals" / "results" / "kernels-h200.json"
    done = invoke("report", str(bench), "--out", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    assert "](kernels.png)" in (tmp_path / "out" / "report.md").read_text(encoding="utf-8")


def test_wrong_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = write(tmp_path / "x.json", {"a": 1})
    for arguments, message in (
        ([str(tmp_path / "none.json")], "none.json does not exist"),
        ([str(foreign)], "was not written by lm-eval, `hfkvq kld --json` or `hfkvq bench kernels --json`"),
        ([str(foreign), "--out", str(tmp_path / "a" / "b")], "out: got"),
    ):
        assert_refused(invoke("report", *arguments), message)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "matplotlib" else find(name, *a))
    assert_refused(invoke("report", str(foreign)), "hfkvq[plot]")
