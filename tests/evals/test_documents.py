"""Pages, tables and pictures that are made of results."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from evals import leaderboard, real_docs, vllm_docs
from evals.charts import share

PAGE = Path(__file__).resolve().parents[2] / "docs" / "leaderboard.html"
VOID = {"meta", "input"}


@pytest.fixture(scope="module")
def page():
    return PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def rows():
    return list(leaderboard.rows())


def test_rows_say_where_they_come_from(rows):
    for row in rows:
        assert row["measures"], row
        assert all(row[name] for name in ("model", "where", "device", "date", "file", "method")), row
        assert row["bits"] is None or 1 < row["bits"] <= 16, row


def test_the_page_is_html_that_loads_nothing(page):
    open_tags = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attrs):
            assert not {"src", "href"} & {name for name, _ in attrs}, tag
            if tag not in VOID:
                open_tags.append(tag)

        def handle_endtag(self, tag):
            assert open_tags.pop() == tag

    Reader().feed(page)
    assert open_tags == []
    assert "//" not in re.sub(r"^//.*$", "", page.partition("const ROWS")[0], flags=re.MULTILINE)
    assert not re.search(r"https?:|@import|fetch\(|XMLHttpRequest", page)


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


# SciPy and matplotlib take seconds to import, which processes that collect tests do not need.


@pytest.mark.parametrize(("right", "total"), [(0, 8), (3, 8), (8, 8), (191, 192)])
def test_intervals_of_shares_are_those_of_scipy(right, total):
    from scipy.stats import binomtest

    expected = binomtest(right, total).proportion_ci(0.95, method="wilson")
    found = share(right, total)
    assert found.value == pytest.approx(100 * right / total)
    assert (found.low, found.high) == (pytest.approx(100 * expected.low), pytest.approx(100 * expected.high))
