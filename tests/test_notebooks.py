"""Every notebook runs from its first cell to its last, and is committed without what a run leaves."""

import json
import re
import sys
import types
import warnings

import pytest
import torch

from evals.notebooks import FOLDER, cells, execute
from hfkvq.caches.schemes import base
from hfkvq.measure import reference
from tests.caches.models import first_layers

NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))

# A path that begins at the root of some machine's disk; addresses have a host before the slash.
ABSOLUTE = re.compile(r"""(?:^|[\s"'(=\[])(?:/(?!/)[\w.-]+/[\w.-]+|[A-Za-z]:\\|file://)""", re.MULTILINE)

# Every line runs, over fewer trials and less text than a reader waits for.
SHORTER = {
    "02_tune_thresholds": {
        "WINDOWS, SCORED = 4, 96": "WINDOWS, SCORED = 2, 64",
        "trials=10": "trials=6",
        "recall(24, seed=seed": "recall(8, seed=seed",
        "zip(start, points, strict=False)} |": "zip(start[:1], points, strict=False)} |",
    },
    "01_quickstart": {
        '"best-4.3", "best-3.4", "saw-int4", "kivi-2"]': '"kivi-2"]',
        'task = "recall-80"': 'task = "recall-24"',
    },
    "03_add_a_scheme": {"TOKENS = 640": "TOKENS = 384", '"kitty", "span", "kitty-pro",': '"span",'},
    "06_what_the_cache_looks_like": {"[:, :672]": "[:, :416]"},
    "05_agent_conversations": {"for seed in range(3)": "for seed in range(1)"},
}

# The real model is not there, and the small one takes its place as it says it does: some of its layers, in f32, which
# CPUs are quicker with.
REAL = 'MODEL = "smollm2"'

# Presets whose layers differ raise as many heads' channels as others in a model of eight layers, not of four.
LAYERS = {"06_what_the_cache_looks_like": 8}


def test_there_are_notebooks():
    """Guards the tests below, which are made from what the folder holds."""
    assert [path.stem[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04", "05", "06"]


def test_the_readme_lists_them():
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"\((\d\d_\w+\.ipynb)\)", text) == [path.name for path in NOTEBOOKS]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_without_what_a_run_leaves(path):
    """No outputs, no metadata, no path of a machine; and its links lead somewhere."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert code
    assert [cell["id"] for cell in code if cell["outputs"] or cell["execution_count"] is not None] == []
    assert [cell["id"] for cell in notebook["cells"] if cell["metadata"]] == []
    assert set(notebook["metadata"]) <= {"kernelspec", "language_info"}
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert [text for kind in ("code", "markdown") for text in cells(path, kind) if ABSOLUTE.search(text)] == []
    links = [link for link in re.findall(r"\]\(([^)]+)\)", "\n".join(cells(path, "markdown"))) if "://" not in link]
    assert [link for link in links if not (FOLDER / link).exists()] == []


@pytest.fixture
def main(monkeypatch):
    """Names of a notebook: an empty module in the place of its ``__main__``, whose schemes go with it."""
    presets = dict(base._PRESETS)
    module = types.ModuleType("notebook")
    monkeypatch.setitem(sys.modules, "notebook", module)
    monkeypatch.setattr("matplotlib.pyplot.show", lambda: sys.modules["matplotlib.pyplot"].close("all"))
    monkeypatch.chdir(FOLDER)
    with warnings.catch_warnings():
        yield vars(module)
    base._PRESETS.clear()
    base._PRESETS.update(presets)


# Quick runs take what a user begins with: caches, and schemes of one's own.
QUICK = ("01_quickstart", "03_add_a_scheme", "04_speed_and_memory")


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.slow] * (path.stem not in QUICK)) for path in NOTEBOOKS],
    ids=lambda path: path.stem,
)
def test_runs(path, main, monkeypatch):
    """Every cell, with the names of those before; the last value is shown."""
    load = reference.load_reference

    def few_layers(dtype=None):
        model, tokenizer = load(torch.float32)
        return first_layers(model, LAYERS.get(path.stem, 4)), tokenizer

    monkeypatch.setattr(reference, "load_reference", few_layers)
    sources = cells(path, "code")
    for long, short in SHORTER.get(path.stem, {}).items():
        [at] = [at for at, source in enumerate(sources) if long in source]
        sources[at] = sources[at].replace(long, short)
    for number, source in enumerate(sources):
        execute(number, source.replace(REAL, 'MODEL = "./none"'), main)
