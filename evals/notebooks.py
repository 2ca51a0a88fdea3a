"""Notebooks run without Jupyter, on any model: each one's output goes to a text file, its pictures beside it.

    PYTHONPATH=. python evals/notebooks.py --model qwen2.5-coder-1.5b-instruct-q4_k_m.gguf --out out [01 06]

They run on a GPU if there is one. A notebook ends at the first cell that fails, and the next one begins.
"""

import argparse
import ast
import contextlib
import json
import linecache
import os
import re
import sys
import time
import traceback
import types
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"


def cells(path: Path, kind: str) -> list[str]:
    """Sources of a notebook's cells of a kind, "code" or "markdown"."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == kind]


def execute(number: int, source: str, names: dict) -> None:
    """One cell, with the names of those before; prints its last value, as Jupyter shows it."""
    source = source.replace("%matplotlib inline", "")
    tree, name = ast.parse(source), f"cell {number}"
    # A traceback shows the cell's lines.
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    shown = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), names)
    if shown is not None and (value := eval(compile(ast.Expression(shown.value), name, "eval"), names)) is not None:
        print(value)


def run(path: Path, model: str | None, out: Path) -> bool:
    """All cells of a notebook; whether none failed."""
    import matplotlib.pyplot as plt

    pictures = 0

    def show() -> None:
        nonlocal pictures
        for figure in plt.get_fignums():
            pictures += 1
            plt.figure(figure).savefig(out / f"{path.stem}-{pictures}.png", dpi=80)
        plt.close("all")

    plt.show = show
    # An empty module in the place of ``__main__``, where dataclasses look for the names of their own.
    module = sys.modules["notebook"] = types.ModuleType("notebook")
    with (out / f"{path.stem}.txt").open("w", encoding="utf-8", buffering=1) as file, contextlib.redirect_stdout(file):
        for number, source in enumerate(cells(path, "code"), start=1):
            if model:
                source = re.sub(r'^MODEL = "[^"]*"', f"MODEL = {model!r}", source, flags=re.MULTILINE)
            start = time.monotonic()
            try:
                execute(number, source, vars(module))
                show()
            except Exception:
                print(traceback.format_exc())
                return False
            finally:
                print(f"[cell {number}: {time.monotonic() - start:.1f} s]\n")
    return True


def main() -> None:
    """Runs the notebooks that are named, or all."""
    import matplotlib

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", help="numbers, for instance 01 06; all unless some are named")
    parser.add_argument("--model", help="a folder, a GGUF file, or a name on the Hub; each notebook's own if left out")
    parser.add_argument("--out", type=Path, required=True, help="folder of the outputs")
    chosen = parser.parse_args()
    found = {path.name[:2]: path for path in sorted(FOLDER.glob("*.ipynb"))}
    if unknown := set(chosen.notebooks) - set(found):
        parser.error(f"notebooks: {', '.join(sorted(unknown))} not found; there are {', '.join(found)}")
    model = str(Path(chosen.model).resolve()) if chosen.model and Path(chosen.model).exists() else chosen.model
    out = chosen.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    matplotlib.use("Agg")
    # They read figures by relative paths.
    os.chdir(FOLDER)
    failed = []
    for number in chosen.notebooks or found:
        start = time.monotonic()
        if not run(found[number], model, out):
            failed.append(found[number].stem)
        print(f"{found[number].stem}: {time.monotonic() - start:.0f} s", flush=True)
    if failed:
        sys.exit(f"failed, see {out}: {', '.join(failed)}")


if __name__ == "__main__":
    main()
