"""`hfkvq kld`, as its user types it."""

from __future__ import annotations

import contextlib
import json
import re
from functools import partial
from pathlib import Path

import pytest

from hfkvq import get_scheme
from tests.command import assert_refused, flat, invoke

run = partial(invoke, "kld")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "story.txt"
    path.write_text("Keys and values, please. The cache holds 4 bits of each. " * 40, encoding="utf-8")
    return path


def test_a_table_and_json(stand_in: Path, text: Path, tmp_path: Path) -> None:
    saved = tmp_path / "kld.json"
    arguments = ["--model", str(stand_in), "--text", str(text), "--schemes", "full,kivi-2,kivi-2:local_length=32"]
    arguments += ["--context", "200", "--prefill", "140", "--windows", "3", "--batch-size", "2", "--device", "cpu"]
    done = run(*arguments, "--dtype", "float32", "--json", str(saved), columns=100)
    assert done.exit_code == 0, done.output
    lines = [line for line in done.output.splitlines() if not line.startswith("Saved")]
    assert max(map(len, lines)) <= 100
    assert "180 scored tokens in 3 windows of 200 of story.txt, after prompts of 140" in flat(done.output)

    record = json.loads(saved.read_text(encoding="utf-8"))
    assert record["kind"] == "hfkvq kld"
    assert (record["windows"], record["tokens"]) == (3, 180)
    assert record["model"] == stand_in.name
    assert str(tmp_path) not in saved.read_text(encoding="utf-8")
    assert record["settings"]["chunk"] == 16
    assert len(record["text"]["tokens_sha256"]) == 64
    assert {"torch", "transformers", "scipy", "hfkvq", "python"} <= set(record["versions"])
    assert record["commit"] is None or re.fullmatch(r"[0-9a-f]{40}(-dirty)?", record["commit"])
    full, two, small = record["rows"]
    assert full["kld"]["mean"] < 1e-6
    assert full["top1"]["share"] == 1.0
    assert two["scheme"] == get_scheme("kivi-2").to_dict()
    assert small["scheme"]["local_length"] == 32
    low, high = two["kld"]["interval"]
    assert 0 < low <= two["kld"]["mean"] <= high
    assert two["kld"]["median"] <= two["kld"]["p99"] <= two["kld"]["p999"] <= two["kld"]["max"]
    assert two["perplexity_ratio"]["value"] == pytest.approx(two["perplexity"] / record["baseline"]["perplexity"])
    again = run(*arguments, "--dtype", "float32", "--json", str(saved))
    assert again.exit_code == 0
    assert json.loads(saved.read_text(encoding="utf-8"))["rows"] == record["rows"]


def test_ctrl_c(stand_in: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows that were finished are shown and saved, and it is said how to go on."""
    saved = tmp_path / "kld.json"
    arguments = ["--model", str(stand_in), "--text", str(text), "--schemes", "kivi-2", "--context", "0k"]
    assert_refused(run(*arguments), "got '0k', allowed numbers like 8192 or 8k, from 3 on")
    arguments[-1] = "200"
    arguments += ["--windows", "2", "--device", "cpu", "--json", str(saved)]

    def stop_at(call: int) -> str:
        left = iter(range(call))

        def tell(name: str, share: float) -> None:
            if next(left, None) is None:
                raise KeyboardInterrupt

        monkeypatch.setattr("hfkvq.cli.progress_bar", lambda: contextlib.nullcontext(tell))
        done = run(*arguments)
        assert done.exit_code == 130, done.output
        return flat(done.output)

    assert "Stopped: no window was finished" in stop_at(1)
    assert not saved.exists()
    said = stop_at(3)
    assert "Stopped: 1 of 2 windows were finished, and the figures are of those." in said
    assert "with --windows 1 it measures what is here" in said
    part = json.loads(saved.read_text(encoding="utf-8"))
    monkeypatch.undo()
    assert run(*arguments, "--windows", "1").exit_code == 0
    whole = json.loads(saved.read_text(encoding="utf-8"))
    assert (part["rows"], part["text"]) == (whole["rows"], whole["text"])


def test_models_that_cannot_be_measured(encoder_decoder: Path, stand_in: Path, text: Path) -> None:
    assert_refused(
        run("--model", str(encoder_decoder), "--text", str(text)),
        "is an encoder-decoder model; choose a decoder-only one",
    )
    # 48 does not divide heads of 64.
    done = run("--model", stand_in, "--text", text, "--context", 64, "--schemes", "kivi-2:group_size=48")
    assert_refused(done, "48")
