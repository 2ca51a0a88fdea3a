"""Tables and picture of vLLM's runs: the newest commit of each GPU, and nothing that no file holds."""

import json

import pytest

from evals import vllm_docs


def _row(scheme, kv="auto", tp=1, **more):
    row = {"kind": "users", "scheme": scheme, "kv": kv, "tp": tp, "tokens_that_fit": 8192, "batch": 256}
    return row | {"context": 2048, "new_tokens": 2048} | more


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_docs, "RESULTS", tmp_path)

    def write(name, gpu, commit, date, *rows):
        record = {"gpu": f"NVIDIA {gpu}", "commit": commit, "date": date, "rows": rows}
        (tmp_path / f"vllm-plugin-qwen3-8b-{name}.json").write_text(json.dumps(record))

    write("old", "H100 80GB HBM3", "a", "2026-11-01T00", _row(None, tokens_per_s=1.0))
    write("bf16", "H100 80GB HBM3", "b", "2026-11-02T00", _row(None, tokens_per_s=2000.0))
    wide = _row("best-2.5", tokens_that_fit=81920, tokens_per_s=5000.0)
    narrow = {"kind": "whole", "batch": 1, "context": 1024, "new_tokens": 256, "step_ms": 7.0}
    failed = _row("saw-int4", error="no memory")
    write("ours", "H100 80GB HBM3", "b", "2026-11-02T01", wide, _row("saw-int4") | narrow, failed, _row("int4", tp=2))
    write("h200", "H200", "a", "2026-11-01T00", _row(None, kv="fp8", tokens_per_s=3.0))
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_tables_have_the_newest_commit_of_each_gpu():
    assert vllm_docs.tables().splitlines() == [
        "| H100, 2026-11-02 | bf16 | `saw-int4` | `best-2.5` |",
        "|---|---|---|---|",
        "| tokens that fit beside the weights | 8,192 | 8,192 | 81,920 |",
        "| 1 x 1k, ms a step |  | 7.00 |  |",
        "| 256 users, 2k + 2k tokens, tokens/s | 2,000 |  | 5,000 |",
        "",
        "| H200, 2026-11-01 | fp8 |",
        "|---|---|",
        "| tokens that fit beside the weights | 8,192 |",
        "| 256 users, 2k + 2k tokens, tokens/s | 3 |",
    ]


def test_the_picture_says_what_was_not_measured_and_is_the_same_each_time(folder):
    pytest.importorskip("matplotlib")
    texts = []
    for name in ("one.svg", "two.svg"):
        vllm_docs.picture(folder / name)
        texts.append((folder / name).read_text())
    assert texts[0] == texts[1]
    assert [texts[0].count(words) for words in ("not measured", "20 (10.0x)", "5,000 (2.5x)")] == [1, 1, 1]
