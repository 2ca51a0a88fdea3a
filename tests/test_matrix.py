"""The model matrix: a slice of it, all of it where time does not matter, and its table."""

from __future__ import annotations

import json
import logging

import pytest
import transformers

from evals.families import families
from evals.matrix import examine, read_rows
from evals.matrix_report import markdown
from tests.test_imports import ROOT

# Plain; attention of its own; softcap and sliding windows; latent; another attention for text than for images; two
# caches; both ways.
SLICE = ("llama", "gpt2", "falcon", "gemma2", "qwen3_next", "deepseek_v3", "git", "bart", "whisper", "bert, both ways")
RESULTS, TABLE = ROOT / "evals/results/models.json", ROOT / "docs/models.md"
OTHERS = [ROOT / "evals/results/models-5.17.json"]
FAMILIES = 180


@pytest.fixture(autouse=True)
def quiet():
    """What a tiny model lacks is no news."""
    logger = logging.getLogger("hfkvq")
    before, logger.level = logger.level, logging.ERROR
    yield
    logger.level = before


def wrong(row):
    cells = row.get("modes", {}) | row.get("presets", {})
    return {name: found for name, found in cells.items() if found == "differs" or found.startswith("error")}


@pytest.mark.parametrize("name", SLICE)
def test_slice(name):
    row = examine(name, modes=("greedy", "padding", "crop"), presets=False)
    assert row["modes"], row
    assert wrong(row) == {}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", families())
def test_everything(name):
    """And what could be built when the table was made can be built."""
    row, held = examine(name), read(RESULTS)
    assert wrong(row) == {}
    if held["transformers"] == transformers.__version__:
        assert row.keys() == next((found.keys() for found in held["rows"] if found["family"] == name), row.keys())


def test_table_is_that_of_the_results():
    """And nothing in it is wrong."""
    held = read(RESULTS)
    rows = {row["family"]: row for row in held["rows"]}
    others = {found["transformers"]: found["rows"] for found in map(read, OTHERS)}
    heading, *_, end = TABLE.read_text(encoding="utf-8").partition("\n## Not examined")
    assert heading.strip() == markdown(rows, held["transformers"], others).strip()
    assert [wrong(row) for found in (held["rows"], *others.values()) for row in found if wrong(row)] == []
    assert sum("modes" in row and row["kind"] != "encoder" for row in held["rows"]) >= FAMILIES
    if held["transformers"] == transformers.__version__:
        assert read_rows([RESULTS]) == rows
        listed = {word.strip("`. \n") for word in end.split("`, `")}
        assert families().keys() <= rows.keys() | listed


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))
