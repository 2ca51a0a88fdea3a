"""Each third-party library is imported behind its own door, and `import hfkvq` loads none."""

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODULES = sorted((ROOT / "hfkvq").rglob("*.py"))
LAYERS = ("build", "layer", "recurrent")
TRANSFORMERS_DOORS = {
    f"hfkvq.caches.{name}"
    for name in (
        "cache",
        "attention.interface",
        "compile",
        "named",
        "using",
        "base.model_config",
        "layer_state.smoothing",
        *(f"layers.{x}" for x in LAYERS),
    )
}
TRANSFORMERS_PACKAGES = (
    "hfkvq.cli",
    "hfkvq.lm_eval",
    "hfkvq.serving",
    *(f"hfkvq.measure.{name}" for name in ("demo", "divergence", "models", "reference")),
)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def walked(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(parsed(path)))


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Full names of everything a file imports, at the top or inside a function; `from a import b` has a and a.b."""
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    return frozenset(name for node in walked(path) for name in imported(node, package))


def imported(node: ast.AST, package: str) -> list[str]:
    """Full names of what a statement in a module of this package imports; of ``from a import b`` a comes first."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    up = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
    base = ".".join([*up, *([node.module] if node.module else [])])
    return [base, *(f"{base}.{alias.name}" for alias in node.names)]


def is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def may_use_transformers(name: str) -> bool:
    return name in TRANSFORMERS_DOORS or any(is_in(name, package) for package in TRANSFORMERS_PACKAGES)


def test_each_library_has_its_door():
    for path in MODULES:
        name, found = module_name(path), imports(path)
        if not may_use_transformers(name):
            assert {other for other in found if is_in(other, "transformers")} == set(), name
        if not is_in(name, "hfkvq.kernels.triton"):
            assert {other for other in found if is_in(other, "triton")} == set(), name


START = """
import sys
from typer.main import get_command
from typer.testing import CliRunner
import hfkvq

def loaded(*names):
    return sorted(set(names) & set(sys.modules))

assert set(hfkvq.__all__) <= set(dir(hfkvq)) and hfkvq.__version__
assert not hasattr(hfkvq, "NoSuchCache")
assert not loaded("torch", "transformers"), "import hfkvq"

from hfkvq.cli import app

def paths(command, path):
    yield path
    for name, one in getattr(command, "commands", {}).items():
        yield from paths(one, (*path, name))

for arguments in [("--version",), *((*path, "--help") for path in paths(get_command(app), ()))]:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 0, done.output
    assert not loaded("torch", "transformers"), arguments
    print(*arguments)

"""


def test_a_fresh_interpreter_loads_what_is_asked_for():
    """`import hfkvq` and every command's help load neither PyTorch nor Transformers, which take seconds."""
    done = subprocess.run([sys.executable, "-c", START], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {"--version", "--help", "kld --help"} <= set(done.stdout.splitlines())


def loaded_with(path: Path) -> Iterator[str]:
    """Full names of what an import of a file imports: at its top, not in functions or for types alone."""
    tops = [node for node in parsed(path).body if not isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.If))]
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    for node in tops:
        yield from imported(node, package)


def test_names_of_hfkvq_load_no_heavy_library():
    """Nothing that all of them import, one through another, imports one."""
    files = {module_name(path): path for path in MODULES}
    waiting, seen = ["hfkvq.caches", "hfkvq.kernels"], set()
    while waiting:
        name = waiting.pop()
        parts = name.split(".")
        for module in (".".join(parts[: n + 1]) for n in range(len(parts))):
            if module in files and module not in seen:
                seen.add(module)
                waiting += loaded_with(files[module])
        seen.add(name)
    assert {"hfkvq.caches.cache", "hfkvq.kernels.seal", "torch", "transformers.cache_utils"} <= seen
    heavy = ("optuna", "lm_eval", "triton", "matplotlib", "datasets", "hfkvq.kernels.triton")
    assert sorted(name for name in seen if any(is_in(name, other) for other in heavy)) == []


def test_names_of_lazy_packages_are_no_modules():
    """An imported module becomes its package's attribute, and would stand in the place of what it defines."""
    for package in ("", "tuning", "tuning/fit", "measure/divergence"):
        folder = ROOT / "hfkvq" / package
        names = next(
            ast.literal_eval(node.value)
            for node in parsed(folder / "__init__.py").body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        )
        assert [name for name in names if (folder / name).is_dir() or (folder / f"{name}.py").is_file()] == []
