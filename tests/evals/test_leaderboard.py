"""The page of all measured rows: whole, closed in itself, and working in a browser where there is one."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from evals import leaderboard

PAGE = Path(__file__).resolve().parents[2] / "docs" / "leaderboard.html"
VOID = {"meta", "input"}


@pytest.fixture(scope="module")
def page():
    return PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def rows():
    return list(leaderboard.rows())


def test_the_page_holds_every_row(page, rows):
    held = re.search(r"const ROWS = (\[.*?\n\]);", page, re.DOTALL)
    assert json.loads(held[1]) == rows
    names = {(row["name"], row["file"]) for row in rows}
    for path in leaderboard.RESULTS.glob("kld-*.json"):
        assert {
            (row["name"], path.name) for row in json.loads(path.read_text())["rows"] if not row.get("simulated")
        } <= names
    real = "real-qwen2.5-coder-1.5b-h100.json"
    scores = {row["name"]: row["measures"].get("GSM8K, %") for row in rows if row["file"] == real}
    assert scores["DynamicCache"] == pytest.approx(49.36, abs=0.01)
    assert {"kivi-2", "best-3.4"} <= scores.keys()


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
