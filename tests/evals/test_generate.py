"""evals/generate.py on a tiny model, on the CPU."""

import json

from evals import generate


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
