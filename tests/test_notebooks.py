"""Every notebook runs from its first cell to its last, and is committed without what a run leaves."""

import json
import re
from pathlib import Path

import nbformat
import pytest
from jupyter_client.manager import start_new_kernel
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
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
SMALL = """
import torch
from hfkvq.measure import reference

# Defaults, since notebooks begin without these names.
def load_reference(whole=reference.load_reference, dtype=torch.float32, module=reference):
    model, tokenizer = whole(dtype)
    model.model.layers = model.model.layers[: module.count]
    model.config.layer_types = model.config.layer_types[: module.count]
    model.config.num_hidden_layers = module.count
    return model, tokenizer

reference.load_reference = load_reference
"""

# Presets whose layers differ raise as many heads' channels as others in a model of eight layers, not of four.
LAYERS = {"06_what_the_cache_looks_like": 8}

# No name of an earlier notebook is left, and no scheme.
CLEAN = """
import gc
# What notebooks have imported is many objects, which no reset has to go through again.
gc.freeze()
%reset -f
from hfkvq.caches.schemes import base
for name in [name for name, (scheme, _) in base._PRESETS.items() if scheme.__module__ == "__main__"]:
    del base._PRESETS[name]
from hfkvq.measure import reference
reference.count = {}
%reset -f
"""

on_every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def test_there_are_notebooks():
    """Guards the tests below, which are made from what the folder holds."""
    assert [path.stem[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04", "05", "06"]


def test_the_readme_lists_them():
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"\((\d\d_\w+\.ipynb)\)", text) == [path.name for path in NOTEBOOKS]


@on_every_notebook
def test_committed_without_outputs(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert cells
    assert [cell["id"] for cell in cells if cell["outputs"] or cell["execution_count"] is not None] == []
    assert [cell["id"] for cell in notebook["cells"] if cell["metadata"]] == []
    assert set(notebook["metadata"]) <= {"kernelspec", "language_info"}
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"


@on_every_notebook
def test_names_no_absolute_path(path):
    notebook = nbformat.read(path, as_version=4)
    assert [cell["id"] for cell in notebook.cells if ABSOLUTE.search(cell.source)] == []


@on_every_notebook
def test_links_lead_somewhere(path):
    notebook = nbformat.read(path, as_version=4)
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    assert [link for link in links if not (FOLDER / link).exists()] == []


@pytest.fixture(scope="module")
def kernel():
    """One that notebooks share, one after the other: to import PyTorch and Transformers takes longer than most run."""
    # "python3" is the interpreter that runs the tests, whatever kernels are installed beside it.
    manager, client = start_new_kernel(kernel_name="python3", cwd=str(FOLDER))
    client.execute(SMALL)
    client.stop_channels()
    yield manager
    manager.shutdown_kernel(now=True)


# Quick runs take what a user begins with: caches, and schemes of one's own.
QUICK = ("01_quickstart", "03_add_a_scheme")


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.slow] * (path.stem not in QUICK)) for path in NOTEBOOKS],
    ids=lambda path: path.stem,
)
def test_runs(path, kernel):
    """Raises CellExecutionError, with the cell and its traceback, where a cell fails."""
    notebook = nbformat.read(path, as_version=4)
    for long, short in SHORTER.get(path.stem, {}).items():
        [cell] = [cell for cell in notebook.cells if cell.cell_type == "code" and long in cell.source]
        cell.source = cell.source.replace(long, short)
    for cell in notebook.cells:
        cell.source = cell.source.replace(REAL, 'MODEL = "./none"')
    notebook.cells.insert(0, nbformat.v4.new_code_cell(CLEAN.format(LAYERS.get(path.stem, 4))))
    resources = {"metadata": {"path": str(FOLDER)}}
    NotebookClient(notebook, km=kernel, kernel_name="python3", timeout=240, resources=resources).execute()
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
