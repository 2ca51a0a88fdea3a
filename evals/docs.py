"""Generated parts of the documents, from the figures in evals/results and from presets as they are.

    PYTHONPATH=. python evals/docs.py            says what is not up to date (make docs-check)
    PYTHONPATH=. python evals/docs.py --write    writes it, and the pictures

A part stands between two markers, or is a whole file, or cells of a table. Scripts that measure only write JSON.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evals import (
    ablations,
    accuracy,
    figures,
    frontier,
    latents,
    leaderboard,
    model_steps,
    one_layer,
    popular,
    real_docs,
    resources,
    serving,
    several,
    vllm_docs,
)
from evals import kernel_bench as kernels
from evals.figures import read
from evals.matrix_report import markdown as families
from evals.preset_tables import eviction_markdown, request_fields, schemes_markdown
from evals.shapes import get_config
from hfkvq.caches import get_scheme
from hfkvq.measure.presets import PATH as FIGURES
from hfkvq.measure.presets import describe
from hfkvq.tuning.fit import outline_of, plan, weights_of
from hfkvq.tuning.fit.layer import Arrival

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "evals" / "results"
SERVING = [RESULTS / f"serving-{name}-h200.json" for name in ("long", "chat", "one-user")]
GIB = 1024**3


def kernel_times(name: str) -> Any:
    """Figures of `evals/kernel_bench.py`."""
    return kernels.load(RESULTS / f"{name}.json")


TABLES: dict[tuple[str, str], Callable[[], str]] = {
    ("README.md", "ladder"): real_docs.readme,
    ("docs/results.md", "real models"): real_docs.results,
    ("docs/results.md", "real tasks"): real_docs.tasks,
    ("docs/results.md", "smollm2"): frontier.table,
    ("docs/results.md", "accuracy"): lambda: accuracy.markdown(read("accuracy.json")),
    ("docs/results.md", "latents"): latents.table,
    ("docs/results.md", "model steps"): model_steps.table,
    ("docs/results.md", "one layer"): lambda: "\n".join(one_layer.speedups(kernel_times("kernels-h200"))),
    ("docs/results.md", "one layer, others"): lambda: "\n".join(one_layer.beside(kernel_times("kernels-h200"))),
    ("docs/results.md", "one layer, H100"): lambda: "\n".join(one_layer.speedups(kernel_times("kernels-h100"))),
    ("docs/speed.md", "prompts"): lambda: "\n".join(several.prompts(kernel_times("queries-h200"))),
    ("docs/speed.md", "several queries"): lambda: "\n".join(several.steps(kernel_times("queries-h200"))),
    ("docs/speed.md", "resources"): lambda: "\n".join(resources.table(read("resources.json"))),
    ("docs/choosing.md", "popular"): popular.table,
    ("docs/serving.md", "fields"): request_fields,
    ("docs/serving.md", "serving"): lambda: serving.table(serving.rows(SERVING)),
    ("docs/vllm.md", "speed"): vllm_docs.tables,
    ("docs/schemes.md", "presets"): schemes_markdown,
    ("docs/schemes.md", "eviction"): eviction_markdown,
    ("evals/README.md", "ablations"): lambda: ablations.markdown(read("ablations.json")),
}
"""Tables by document and by the name of the markers that they stand between."""


def between(text: str, name: str, table: str) -> str:
    """A document with a table between its two markers, with or without an empty line, as it was."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    before, found, rest = text.partition(begin)
    if not found or end not in rest:
        raise ValueError(f"docs: a document has no markers of {name!r}.")
    gap = "\n" if rest.startswith("\n") else ""
    return f"{before}{begin}{gap}{table}\n{gap}{end}{rest.partition(end)[2]}"


def models(text: str) -> str:
    """docs/models.md: everything but its list of families that were not examined."""
    held, other = read("models.json"), read("models-5.17.json")
    rows = {row["family"]: row for row in held["rows"]}
    made = families(rows, held["transformers"], {other["transformers"]: other["rows"]})
    _, mark, rest = text.partition("\n## Not examined")
    return f"{made.strip()}\n{mark}{rest}"


def cells(text: str, heading: str, change: Callable[[str, list[str]], list[str]]) -> str:
    """A document with the cells of the table changed whose head begins with ``heading``, row by row."""
    start = text.index(heading)
    table = text[start:].split("\n\n")[0]
    lines = table.splitlines()
    for at, line in enumerate(lines[2:], start=2):
        name, *rest = re.split(r"\s*\|\s*", line.strip()[2:-2])
        lines[at] = f"| {' | '.join((name, *change(name, rest)))} |"
    return text[:start] + "\n".join(lines) + text[start + len(table) :]


def choosing(text: str) -> str:
    """docs/choosing.md: what fits on 24 GiB, and what a preset costs, as docs/results.md has it."""
    model = outline_of(get_config("qwen3-8b"))
    weights: Any = weights_of(model, model.dtype)
    table = accuracy.markdown(read("accuracy.json")).splitlines()
    measured = {row.split(" | ")[0].removesuffix(accuracy.AS_IT_WAS): row.split(" | ") for row in table}

    def fits(name: str, _: list[str]) -> list[str]:
        preset = None if name == "bf16" else name.split("`")[1]
        found = []
        for tokens in (32768, 131072):
            one = plan(model, "", preset, weights, 24 * GIB, tokens, 1, None, GIB, Arrival(0, 0, 2048))
            found += [f"{one.cache / GIB:.2f} GiB", f"{one.left / GIB:.2f} GiB", str(one.batch or "none")]
        return found

    def costs(name: str, old: list[str]) -> list[str]:
        preset = name.strip("`")
        known = measured.get(f"| {name}") or measured[f"| `{preset}-fractions`"]
        words = accuracy.AS_IT_WAS if known[0].endswith(accuracy.AS_IT_WAS) else ""
        least, most = describe(preset, get_scheme(preset))["long_context_bits"]
        bits = f"{least:.2f}" if least == most else f"{least:.2f} to {most:.2f}"
        bits += " per kept token" if old[0].endswith(" per kept token") else ""
        return [bits, known[6].strip() + words, known[8].strip(" |") + words, *old[3:]]

    text = cells(cells(text, "| cache | 32k tokens", fits), "| cache | bits | KLD", costs)
    return one_layer.choosing(text, kernel_times("kernels-h200"))


def generated() -> dict[Path, str]:
    """Every document with generated parts, as it should be."""
    found: dict[Path, str] = {}
    for (name, part), table in TABLES.items():
        path = ROOT / name
        found[path] = between(found.get(path) or path.read_text(encoding="utf-8"), part, table())
    for name, change in (("README.md", vllm_docs.readme), ("docs/models.md", models), ("docs/choosing.md", choosing)):
        found[ROOT / name] = change(found.get(ROOT / name) or (ROOT / name).read_text(encoding="utf-8"))
    return found | {FIGURES: figures.text(), ROOT / "docs" / "leaderboard.html": leaderboard.text()}


def main() -> None:
    """Compares, or writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write documents and pictures")
    write = parser.parse_args().write
    wrong = []
    for path, text in generated().items():
        held = path.read_text(encoding="utf-8") if path.exists() else ""
        if held == text:
            continue
        if write:
            path.write_text(text, encoding="utf-8")
            print(f"written: {path.relative_to(ROOT)}")
            continue
        pairs = zip(held.splitlines(), text.splitlines(), strict=False)
        line, was, made = next(((n, a, b) for n, (a, b) in enumerate(pairs, 1) if a != b), (0, "its end", "another"))
        wrong.append(f"{path.relative_to(ROOT)}:{line}: is\n  {was}\nand would be\n  {made}")
    if write:
        frontier.pictures(RESULTS)
        real_docs.picture(RESULTS / "real-models.svg")
        one_layer.picture(kernel_times("kernels-h200"), RESULTS / "kernels-h200.svg")
        serving.picture(serving.rows(SERVING), RESULTS / "serving.svg")
        vllm_docs.picture(RESULTS / "vllm.svg")
    if wrong:
        sys.exit("\n".join([*wrong, "Run PYTHONPATH=. python evals/docs.py --write."]))


if __name__ == "__main__":
    main()
