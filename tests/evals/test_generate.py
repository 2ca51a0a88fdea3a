"""evals/generate.py on a tiny model, on the CPU."""

import json

import pytest

from evals import generate
from evals.shapes import get_config


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


def test_what_fails_is_a_row(stand_in, monkeypatch):
    def full(decoder, steps):
        raise RuntimeError("CUDA out of memory.\nMore about it.")

    monkeypatch.setattr(generate.Decoder, "timed", full)
    arguments = "--cases 1x24 --alone --dtype float32 --caches dynamic,kivi-2".split()
    rows = generate.main(["--model", str(stand_in), *arguments])["rows"]
    assert [row["error"] for row in rows] == ["RuntimeError: CUDA out of memory. More about it."] * 2
    assert all(row["oom"] for row in rows)


def test_names_and_configs():
    with pytest.raises(ValueError, match="kity"):
        generate.engine_of("kity:eager")
    with pytest.raises(ValueError, match="model: got 'qwen9'"):
        get_config("qwen9")
    config = get_config("qwen3-8b", 3)
    assert (config.num_hidden_layers, len(config.layer_types)) == (3, 3)
