"""The picture of real models: others' formats on the bundled texts, where a file has them."""

import json

import pytest

from evals import real_docs

ROWS = {"full": 0.0005, "best-2.5": 0.009, "evals.simulated:TurboQuant": 0.02, "evals.simulated:LlamaCpp": 0.006}


def _record(factor):
    rows = []
    for name, mean in ROWS.items():
        kld = {"mean": mean * factor, "interval": [mean * factor / 2, mean * factor * 2]}
        other = ":" in name
        rows.append(
            {"name": name, "scheme": None, "simulated": other, "total_bits": 4.5 if other else 20.0, "kld": kld}
        )
    return {"rows": rows, "date": f"2026-12-0{factor}"}


def test_the_newest_file_with_formats_of_others_is_drawn(tmp_path, monkeypatch):
    assert real_docs.frontier_of_qwen() == {} or "vLLM turboquant 4" in real_docs.frontier_of_qwen()
    monkeypatch.setattr(real_docs, "RESULTS", tmp_path)
    assert real_docs.frontier_of_qwen() == {}
    for gpu, factor in (("h200", 2), ("h100", 1)):
        (tmp_path / f"kld-qwen2.5-coder-1.5b-frontier-{gpu}.json").write_text(json.dumps(_record(factor)))
    found = real_docs.frontier_of_qwen()
    assert found["best-2.5"] == {"kld": 0.018, "low": 0.009, "high": 0.036}
    assert found["llama.cpp q4_0"] == {"kld": 0.012, "low": 0.006, "high": 0.024, "bits": 4.5}

    pytest.importorskip("matplotlib")
    real_docs.picture(tmp_path / "picture.svg")
    text = (tmp_path / "picture.svg").read_text()
    assert [text.count(f">{name}<") for name in ("vLLM turboquant 4", "llama.cpp q4_0", "best-2.5")] == [1, 1, 1]
