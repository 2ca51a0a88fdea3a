"""Who may import whom: tuning -> caches -> kernels, and each third-party library behind its own door."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MODULES = sorted((ROOT / "hfkvq").rglob("*.py"))
LAYERS = ("hfkvq.kernels", "hfkvq.caches", "hfkvq.tuning")  # each may import the ones before it
# What measures a cache; the tuner may ask it, and it knows nothing of the tuner.
MEASURES = ("hfkvq.demo", "hfkvq.divergence", "hfkvq.lm_eval", "hfkvq.reference")

TRANSFORMERS_DOORS = {
    f"hfkvq.caches.{name}"
    for name in ("cache", "attention", "dense", "make", "model_config", "layers.build", "layers.layer")
}
# The bench's baseline is a Triton kernel too; it is no operation of the library.
TRITON_DOOR = "hfkvq.bench.split_kv"
TRANSFORMERS_TOPS = {"reference", "cli", "lm_eval", "divergence"}  # and demo*


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[str]:
    """Full names of everything a file imports, at the top or inside a function; `from a import b` yields a and a.b."""
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            up = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*up, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def may_use_transformers(name: str) -> bool:
    top = name.split(".")[1] if "." in name else ""
    if is_in(name, "hfkvq.bench.generate"):
        return True
    return name in TRANSFORMERS_DOORS or top in TRANSFORMERS_TOPS or top.startswith("demo")


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_point_one_way(path):
    name, found = module_name(path), set(imports(path))
    layer = next((i for i, package in enumerate(LAYERS) if is_in(name, package)), None)
    # Command lines stand above all layers, whichever folder they lie in.
    if layer is not None and not name.endswith("cli"):
        below = LAYERS[: layer + 1] + (MEASURES if LAYERS[layer] == "hfkvq.tuning" else ())
        own = {other for other in found if is_in(other, "hfkvq") and other != "hfkvq"}
        assert {other for other in own if not any(is_in(other, package) for package in below)} == set()
    if any(is_in(name, package) for package in MEASURES):
        assert {other for other in found if is_in(other, "hfkvq.tuning")} == set()
    assert {other for other in found if other.split(".")[0] in ("evals", "notebooks", "tests")} == set()


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_each_library_has_its_door(path):
    name, found = module_name(path), set(imports(path))
    if not may_use_transformers(name):
        assert {other for other in found if is_in(other, "transformers")} == set()
    if not is_in(name, "hfkvq.kernels.triton") and name != TRITON_DOOR:
        assert {other for other in found if is_in(other, "triton")} == set()


def test_relative_imports_are_resolved():
    """Guards the guard: a known file's relative import must come out as a full name."""
    assert "hfkvq.kernels.pages.PageFormat" in set(imports(ROOT / "hfkvq/kernels/__init__.py"))


def test_import_stays_light():
    """`import hfkvq` loads none of these; what Transformers loads by itself goes first and does not count."""
    code = """
import sys
import transformers.cache_utils, transformers.masking_utils, transformers.modeling_utils
before = set(sys.modules)
import hfkvq
heavy = {"optuna", "lm_eval", "triton", "matplotlib", "datasets"}
new = set(sys.modules) - before
bad = sorted(name for name in new if name.split(".")[0] in heavy or name.startswith("hfkvq.kernels.triton"))
sys.exit(f"import hfkvq loads {bad}" if bad else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
