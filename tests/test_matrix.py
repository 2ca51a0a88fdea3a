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

# Plain; attention of its own; softcap and sliding windows; another attention for text than for images; two caches.
SLICE = ("llama", "gpt2", "falcon", "gemma2", "qwen3_next", "git", "bart", "whisper")
RESULTS, TABLE = ROOT / "evals/results/models.json", ROOT / "docs/models.md"


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
    row = examine(name, modes=("greedy", "padding"), presets=False)
    assert row["modes"], row
    assert wrong(row) == {}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", families())
def test_everything(name):
    assert wrong(examine(name)) == {}


def test_table_is_that_of_the_results():
    """And all but a few families were examined."""
    held = json.loads(RESULTS.read_text(encoding="utf-8"))
    rows = {row["family"]: row for row in held["rows"]}
    heading, *_, end = TABLE.read_text(encoding="utf-8").partition("\n## Not examined")
    assert heading.strip() == markdown(rows, held["transformers"]).strip()
    if held["transformers"] == transformers.__version__:
        assert read_rows([RESULTS]) == rows
        listed = {word.strip("`. \n") for word in end.split(",")}
        assert families().keys() <= rows.keys() | listed
