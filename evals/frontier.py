"""SmolLM2's table in docs/results.md and its picture, from what `hfkvq kld` wrote.

    python evals/frontier.py

Reads results/kld-smollm2-*-h200.json; where two files have a row, the newer one's counts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hfkvq.caches import Scheme
from hfkvq.measure.demo.schemes import describe
from hfkvq.measure.tables import markdown_table

RESULTS = Path(__file__).parent / "results"
DOCUMENT = Path(__file__).parent.parent / "docs/results.md"
BEGIN, END = "<!-- smollm2: begin -->", "<!-- smollm2: end -->"
FILES = ("kld-smollm2-ablation-h200.json", "kld-smollm2-pages-h200.json", "kld-smollm2-h200.json")
"""Older first."""

HEAD = ("cache", "long context", "total bits", "KLD", "95 %", "99.9 %", "top-1", "perplexity")


def rows() -> list[dict[str, Any]]:
    """Every row once, those of presets first, then by divergence."""
    found = {}
    for name in FILES:
        found |= {row["name"]: row for row in json.loads((RESULTS / name).read_text(encoding="utf-8"))["rows"]}
    return sorted(found.values(), key=lambda row: (":" in row["name"], row["kld"]["mean"]))


def long_context(row: dict[str, Any]) -> str:
    """Bits of pages alone at head size 128; nothing for caches that are not ours."""
    if not row.get("scheme") or row.get("simulated"):
        return ""
    least, most = describe(row["name"].partition(":")[0], Scheme.from_dict(row["scheme"]))["long_context_bits"]
    return f"{least:.2f}" if least == most else f"{least:.2f} to {most:.2f}"


def table() -> str:
    """The rows in Markdown."""
    lines = []
    for row in rows():
        low, high = row["kld"]["interval"]
        lines.append(
            (
                f"`{row['name']}`" + (", simulated" if row.get("simulated") else ""),
                long_context(row),
                f"{row['total_bits']:.2f}" + (", computed" if row.get("simulated") else ""),
                f"{row['kld']['mean']:.4f}",
                f"{low:.4f} to {high:.4f}",
                f"{row['kld']['p999']:.2f}",
                f"{row['top1']['share']:.3f}",
                f"{100 * (row['perplexity_ratio']['value'] - 1):+.2f} %",
            )
        )
    return markdown_table(HEAD, lines)


def picture(path: Path) -> None:
    """Divergence against bits, with intervals."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for row in rows():
        if ":" in row["name"]:
            continue
        low, high = row["kld"]["interval"]
        mean, bits = row["kld"]["mean"], row["total_bits"]
        kind = "simulated" if row.get("simulated") else "ours" if row["name"].startswith("best") else "other"
        color = {"simulated": "tab:gray", "ours": "tab:red", "other": "tab:blue"}[kind]
        axes.errorbar(bits, mean, [[mean - low], [high - mean]], fmt="x" if kind == "simulated" else "o", color=color)
        label = row["name"].replace("simulated-", "")
        axes.annotate(label, (bits, mean), (4, 4), textcoords="offset points", fontsize=8)
    axes.set(xscale="log", yscale="log", xlabel="total bits an element, windows and scales included")
    axes.set_xticks([3, 4, 5, 6, 8, 16], ["3", "4", "5", "6", "8", "16"])
    axes.minorticks_off()
    axes.set_ylabel("KLD from DynamicCache, nats")
    axes.set_title("SmolLM2-135M, bf16, 16 windows of 7,680 tokens; grey crosses are simulated", fontsize=10)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    DOCUMENT.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}", encoding="utf-8")
    picture(RESULTS / "frontier-smollm2.png")
