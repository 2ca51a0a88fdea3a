"""The model matrix: a slice of it, and all of it where time does not matter."""

from __future__ import annotations

import json
import logging

import pytest
import transformers

from evals.families import families
from evals.matrix import examine
from tests.test_imports import ROOT

# Attention of its own; two caches; both ways. tests/caches has others.
SLICE = ("gpt2", "falcon", "whisper", "bert, both ways")
# Attention of their own that is given dequantized tensors.
DEQUANTIZED = ("bloom", "gptj")
RESULTS = ROOT / "evals/results/models.json"


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


@pytest.mark.parametrize("name", DEQUANTIZED)
def test_presets_of_dequantized_families(name):
    row = examine(name, modes=("padding", "crop"))
    assert row["what"]["dequantized"]
    assert set(row["modes"].values()) == {"equal"}
    found = {preset: said.split(":")[0] for preset, said in row["presets"].items()}
    equal = dict.fromkeys(("kitty-pro", "saw-int4-kv", "kvarn-k4v2"), "equal")
    assert found == equal | {"mixkvq": "runs"} | dict.fromkeys(("arkv", "snapkv"), "refused")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", families())
def test_everything(name):
    """And what could be built when the table was made can be built."""
    row, held = examine(name), json.loads(RESULTS.read_text(encoding="utf-8"))
    assert wrong(row) == {}
    if held["transformers"] == transformers.__version__:
        assert row.keys() == next((found.keys() for found in held["rows"] if found["family"] == name), row.keys())
