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
from hfkvq.measure.divergence.naming import parse_scheme
from hfkvq.measure.tables import markdown_table

RESULTS = Path(__file__).parent / "results"
DOCUMENT = Path(__file__).parent.parent / "docs/results.md"
BEGIN, END = "<!-- smollm2: begin -->", "<!-- smollm2: end -->"
FILES = (
    "kld-smollm2-ablation-h200.json",
    "kld-smollm2-pages-h200.json",
    "kld-smollm2-h200.json",
    "kld-smollm2-budgets-h200.json",
    "kld-smollm2-heavy-layer-h200.json",
)
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


def earlier(row: dict[str, Any]) -> bool:
    """Whether what a name stands for has been given other knobs since it was measured."""
    if not row.get("scheme") or row.get("simulated"):
        return False
    then, now = Scheme.from_dict(row["scheme"]), parse_scheme(row["name"]).scheme
    return any(then.in_layer(layer, 100) != now.in_layer(layer, 100) for layer in range(100))


def table() -> str:
    """The rows in Markdown."""
    lines = []
    for row in rows():
        low, high = row["kld"]["interval"]
        lines.append(
            (
                f"`{row['name']}`"
                + (", simulated" if row.get("simulated") else "")
                + (", as it was" if earlier(row) else ""),
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
    from matplotlib.lines import Line2D

    from hfkvq.measure.drawing import BLACK, BLUE, GREY, RED, new_figure, write_names

    figure, grid = new_figure(8.6, 5.2)
    axes, places, colors = grid[0][0], [], {}
    shown = [row for row in rows() if ":" not in row["name"]]
    for row in shown:
        low, high = row["kld"]["interval"]
        mean, bits, name = row["kld"]["mean"], row["total_bits"], row["name"].replace("simulated-", "")
        color = GREY if row.get("simulated") else RED if name.startswith("best") else BLUE
        axes.errorbar(bits, mean, [[mean - low], [high - mean]], fmt="x" if color == GREY else "o", color=color)
        places.append((name, (bits, mean)))
        colors[name] = BLACK if color == GREY else color
    axes.set(xscale="log", yscale="log", xlim=(2.8, 24))
    axes.set_xticks([3, 4, 5, 6, 8, 12, 16], ["3", "4", "5", "6", "8", "12", "16"])
    axes.set_yticks([0.001, 0.003, 0.01, 0.03, 0.1, 0.3], ["0.001", "0.003", "0.01", "0.03", "0.1", "0.3"])
    axes.minorticks_off()
    axes.grid(alpha=0.25)
    axes.set_xlabel("total bits per element, windows and scales included (DynamicCache: 16)")
    axes.set_ylabel("KLD from DynamicCache, nats (lower is better)")
    axes.set_title("What a compressed cache costs: SmolLM2-135M, contexts of 7,680 tokens, 95 % intervals", fontsize=11)
    kinds = ((RED, "o", "hfkvq's presets by budget"), (BLUE, "o", "published methods in hfkvq"))
    kinds += ((GREY, "x", "others, simulated"),)
    handles = [Line2D([], [], color=color, marker=mark, linestyle="none", label=label) for color, mark, label in kinds]
    axes.legend(handles=handles, frameon=False, loc="upper right", fontsize=9)
    write_names([(axes, places)], colors)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    DOCUMENT.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}", encoding="utf-8")
    picture(RESULTS / "frontier-smollm2.png")
