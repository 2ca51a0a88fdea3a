"""Rules that keep the package readable: imports that go one way, one writer of pages, and tests that mirror it."""

import ast
import re
from collections.abc import Iterable
from graphlib import TopologicalSorter

from tests.test_imports import MODULES, ROOT, imported, imports, is_in, module_name, walked

# Each may import itself and the ones before it.
LAYERS = (
    "hfkvq.bounded",
    "hfkvq.sizes",
    "hfkvq.version",
    "hfkvq.kernels",
    "hfkvq.caches",
    "hfkvq.terminal",
    "hfkvq.measure",
    "hfkvq.serving",
    "hfkvq.vllm",
    "hfkvq.lm_eval",
    "hfkvq.tuning",
)


def nodes_of_all() -> dict[str, tuple[ast.AST, ...]]:
    return {module_name(path): walked(path) for path in MODULES}


def dotted(node: ast.AST) -> str:
    """``a.b`` of such an expression; empty for any other."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def forbidden(name: str, found: frozenset[str]) -> set[str]:
    """What a module may not import: a layer above its own, and what only stands in a checkout."""
    outside = {other for other in found if other.split(".")[0] in ("evals", "notebooks", "tests")}
    layer = next((i for i, package in enumerate(LAYERS) if is_in(name, package)), None)
    if layer is None:
        return outside
    own = {other for other in found if is_in(other, "hfkvq") and other != "hfkvq"}
    return outside | {other for other in own if not any(is_in(other, package) for package in LAYERS[: layer + 1])}


def test_imports_point_one_way():
    """Also those inside of functions."""
    found = {module_name(path): forbidden(module_name(path), imports(path)) for path in MODULES}
    assert {name: others for name, others in found.items() if others} == {}


def loads(name: str, nodes: Iterable[ast.AST], is_package: bool, known: set[str]) -> set[str]:
    """The modules of `known` that module `name` imports: also within functions, and for type checkers alone.

    `from a import b` names module a.b where there is one, and otherwise a. That importing a.b runs a's ``__init__``
    first does not count: a package may gather what its modules define.
    """
    found: set[str] = set()
    for node in nodes:
        names = imported(node, name if is_package else name.rpartition(".")[0])
        if isinstance(node, ast.ImportFrom):
            names = [each if each in known else names[0] for each in names[1:]]
        found.update(names)
    return found & known


FOLDERS = (*("base", "tags", "schemes", "store", "layer_state", "eviction", "steps", "layers", "attention"),)
"""Folders of hfkvq/caches: each may import itself and the ones before it. Modules beside them may import all."""


def floor(name: str) -> int:
    """Index of a module's folder in `FOLDERS`; behind the last for modules beside the folders."""
    folder = name.split(".")[2] if name.count(".") > 1 else ""
    return FOLDERS.index(folder) if folder in FOLDERS else len(FOLDERS)


def test_folders_of_caches_import_from_the_ones_before():
    """Type-only imports and imports in functions count; CONTRIBUTING.md has the table."""
    known = set(nodes_of_all())
    climbs = {
        (module_name(path), other)
        for path in MODULES
        if is_in(module_name(path), "hfkvq.caches") and path.name != "__init__.py"
        for other in imports(path) & known
        if is_in(other, "hfkvq.caches") and other != "hfkvq.caches" and floor(other) > floor(module_name(path))
    }
    assert climbs == set()
    table = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `hfkvq/caches/(\w+)`", table, re.MULTILINE) == list(FOLDERS)


def test_no_imports_go_in_a_circle():
    """Raises CycleError, with the circle, where some do."""
    packages = {module_name(path) for path in MODULES if path.name == "__init__.py"}
    known = nodes_of_all()
    found = {name: loads(name, nodes, name in packages, set(known)) for name, nodes in known.items()}
    TopologicalSorter(found).prepare()


def test_imports_of_every_kind_are_found():
    """Guards the guard."""
    source = (
        "from __future__ import annotations\nfrom . import x, y\nfrom .. import z\nif TYPE_CHECKING:\n    import p.t"
    )
    source += "\nelse:\n    import p.u\ntry:\n    import p.v\nexcept ImportError:\n    pass\ndef f():\n    import p.w"
    known = {"p", "p.q", "p.q.x", "p.t", "p.u", "p.v", "p.w"}
    nodes = [*ast.walk(ast.parse(source))]
    assert loads("p.q", nodes, True, known) == known
    assert loads("p.q.m", nodes, False, known) == known


def callers(*functions: str) -> set[str]:
    """Modules that call functions of `hfkvq.kernels`: as ``kernels.f(...)``, or within that package as ``f(...)``."""
    names = {f"kernels.{name}" for name in functions}
    return {
        module
        for module, nodes in nodes_of_all().items()
        for node in nodes
        if isinstance(node, ast.Call)
        and (dotted(node.func) in names or (is_in(module, "hfkvq.kernels") and dotted(node.func) in functions))
    }


def test_pages_have_one_writer():
    """A side's tokens become bytes in `kernels.seal_side` alone."""
    assert callers("page_norms", "quantize_pages") == {"hfkvq.kernels.seal"}


def test_stores_alone_change_their_state():
    """Outside of `hfkvq.caches.store`, objects assign a ``state`` of their own at most."""
    found = {
        module
        for module, nodes in nodes_of_all().items()
        for node in nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and node.attr == "state"
        and dotted(node.value) != "self"
    }
    assert {module for module in found if not is_in(module, "hfkvq.caches.store")} == set()


FLOATS = frozenset({"zeros", "ones", "empty", "eye", "linspace", "logspace", "rand", "randn", "full", "tensor"})
MAKERS = FLOATS | {"arange", "as_tensor", "asarray", "empty_strided", "randint", "randperm", "range", "scalar_tensor"}


def by_globals(nodes: Iterable[ast.AST]) -> list[str]:
    """Calls that make a tensor of the default dtype, or on the default device."""
    found = []
    for node in nodes:
        name = dotted(node.func) if isinstance(node, ast.Call) else ""
        if name.startswith("torch.") and name[6:] in MAKERS:
            given = {keyword.arg for keyword in node.keywords}
            # Further arguments (``**more``) may be either.
            needed = {"device", "dtype"} if name[6:] in FLOATS else {"device"}
            if None not in given and needed - given:
                found.append(ast.unparse(node))
    return found


def test_no_tensor_is_made_by_globals():
    """Users change the default dtype and device (`torch.set_default_dtype`, ``with torch.device``)."""
    assert {name: found for name, nodes in nodes_of_all().items() if (found := by_globals(nodes))} == {}
    source = "torch.zeros(3); torch.arange(2); torch.ones(1, device=d); torch.arange(2, device=d)"
    assert by_globals(ast.walk(ast.parse(source))) == ["torch.zeros(3)", "torch.arange(2)", "torch.ones(1, device=d)"]


def test_folders_of_tests_are_those_of_the_package():
    """Every package of hfkvq has a folder in tests/; a folder there is one of hfkvq, or of evals."""
    packages = {path.parent.name for path in (ROOT / "hfkvq").glob("*/__init__.py")}
    folders = {path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")}
    assert {path.name for path in folders if len(path.parts) == 1} >= packages
    assert [path for path in folders if not ((ROOT / "hfkvq" / path).is_dir() or path.parts[:1] == ("evals",))] == []


CLAUSES = re.compile(r"(Of|Or|Not|Last|First|Once|By|As|Else|What|Who|Nobody|Somebody|Nothing|That|Those|Asked)\b")
RIDDLES = re.compile(r"(What|Whether|How|Which|Where|Who|Whose|When|Those|That|Of|Or|Not|Nothing|Nobody|Somebody)\b")


def test_docstrings_and_comments_name_their_object():
    """CONTRIBUTING.md, "Errors, docstrings, comments": no first word is one of these."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = []
    for path in MODULES:
        for node in walked(path):
            text = ast.get_docstring(node) if isinstance(node, kinds) else None
            if text and RIDDLES.match(text):
                found.append((module_name(path), text.splitlines()[0]))
        before = ""
        for line in path.read_text(encoding="utf-8").splitlines():
            comment = line.strip()
            if comment.startswith("# ") and not before.startswith("#") and CLAUSES.match(comment[2:]):
                found.append((module_name(path), comment))
            before = comment
    assert found == []
