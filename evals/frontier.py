"""SmolLM2's table in docs/results.md, and pictures of SmolLM2 and Qwen2.5, from what `hfkvq kld` wrote.

`evals/docs.py --write` writes them, from the files in `FILES`, where the newest row of a cache counts, and `QWEN_16K`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from evals.figures import described, has_changed, read
from hfkvq.measure.presets import describe, long_context_bits
from hfkvq.measure.tables import markdown_table

FILES = (
    "kld-smollm2-ablation-h200.json",
    "kld-smollm2-pages-h200.json",
    "kld-smollm2-h200.json",
    "kld-smollm2-budgets-h200.json",
    "kld-smollm2-heavy-layer-h200.json",
    "kld-smollm2-trellis-h100.json",
    "kld-smollm2-trellis-h200.json",
    "kld-smollm2-best-1.5-h200.json",
)
"""Files of the same windows; of a cache that several have, the newest counts."""

QWEN_16K = "kld-qwen2.5-coder-1.5b-16k-h200.json"
HEAD_DIM = 64
"""Shape of SmolLM2-135M: 30 layers, 3 KV heads."""

SIMULATED_BITS = {
    # Scale and zero point of 16 bits each a token and head.
    "oscar": 2 + 32 / 64,
    # The same for 32 elements, and a norm of 32 bits for each token's keys.
    "oscar-omni": 2 + 32 / 32 + 32 / (3 * 64) / 2,
    # A norm of keys, scale and minimum of values, 16 bits each; the first and last two layers stay in 16 bits.
    "turboquant-4": (26 * (4 + 48 / 128) + 4 * 16) / 30,
    "turboquant-3": (26 * (3 + 48 / 128) + 4 * 16) / 30,
}
"""Bits per element in a long context of what is simulated, by its formats in evals/simulated.py."""

HEAD = ("cache", "long context", "total bits", "KLD", "95 %", "99.9 %", "top-1", "perplexity")


def rows() -> list[dict[str, Any]]:
    """Every row once, those of presets first, then by divergence."""
    records = [read(name) for name in FILES]
    assert len({record["text"]["tokens_sha256"] for record in records}) == 1
    found = {}
    for record in sorted(records, key=lambda record: record["date"]):
        found |= {row["name"]: row for row in record["rows"]}
    return sorted(found.values(), key=lambda row: (":" in row["name"], row["kld"]["mean"]))


def long_context(row: dict[str, Any]) -> str:
    """Bits of pages alone at head size 128; nothing for caches that are not ours."""
    if not row.get("scheme") or row.get("simulated"):
        return ""
    least, most = describe(row["name"].partition(":")[0], described(row["scheme"]))["long_context_bits"]
    return f"{least:.2f}" if least == most else f"{least:.2f} to {most:.2f}"


def table() -> str:
    """The rows in Markdown."""
    lines = []
    for row in rows():
        low, high = row["kld"]["interval"]
        lines.append(
            (
                f"`{row['name']}`"
                + (", simulated" if row.get("simulated") else "")
                + (", as it was" if has_changed(row) else ""),
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


def bits_of(row: dict[str, Any], head_dim: int) -> float:
    """Bits per element in a long context, scales included, at the heads of the model that was measured."""
    if row.get("simulated"):
        return SIMULATED_BITS[row["name"].removeprefix("simulated-")]
    scheme = described(row["scheme"])
    about = describe(row["name"], scheme, head_dim)
    (least, most), (fewest, largest) = long_context_bits(scheme, head_dim), about["code_bits"]
    # Where tokens differ in width, the measured mean of code bits says how many were wide.
    return least if least == most else least + (most - least) * (row["code_bits"] - fewest) / (largest - fewest)


def pictures(folder: Path) -> None:
    """Pictures of SmolLM2 behind 7k tokens, and of Qwen2.5 behind 15k."""
    picture(folder / "frontier-smollm2.svg", rows(), HEAD_DIM, "SmolLM2-135M, contexts of 7,680 tokens")
    behind_16k = "Qwen2.5-Coder-1.5B, contexts of 16,384 tokens"
    picture(folder / "frontier-qwen2.5-16k.svg", read(QWEN_16K)["rows"], 128, behind_16k)


def picture(path: Path, found: Sequence[dict[str, Any]], head_dim: int, words: str) -> None:
    """Divergence against bits, with intervals; the floor of rounding as a line."""
    from matplotlib.lines import Line2D

    from evals.charts import BLACK, BLUE, GREY, RED, is_own, new_figure, save_figure

    figure, grid = new_figure(8.6, 5.2)
    axes, places, colors = grid[0][0], [], {}
    for row in found:
        name = row["name"].removeprefix("simulated-")
        (low, high), mean = row["kld"]["interval"], row["kld"]["mean"]
        if name == "full":
            axes.axhline(mean, color=GREY, linewidth=1, linestyle="--")
            floor = "full: 16 bits, not quantized. What is left is rounding."
            at = {"xycoords": ("axes fraction", "data"), "xytext": (0, 4), "textcoords": "offset points"}
            axes.annotate(floor, (0.995, mean), **at, ha="right", fontsize=8.5)
        elif ":" not in name:
            color = GREY if row.get("simulated") else RED if is_own(name) else BLUE
            mark, size = ("x", 6) if color == GREY else ("D", 8) if color == RED else ("o", 6)
            bits, sides = bits_of(row, head_dim), [[mean - low], [high - mean]]
            fill = {"markerfacecolor": "white"} if has_changed(row) else {}
            axes.errorbar(bits, mean, sides, fmt=mark, color=color, markersize=size, elinewidth=1.3, **fill)
            places.append((name, (bits, mean)))
            colors[name] = BLACK if color == GREY else color
    least, *_, most = sorted(bits for _, (bits, _) in places)
    means = [row["kld"]["mean"] for row in found if ":" not in row["name"]]
    axes.set(yscale="log", xlim=(least - 0.3, most + 0.5), ylim=(min(means) / 1.5, 3 * max(means)))
    axes.set_yticks([0.003, 0.01, 0.03, 0.1, 0.3], ["0.003", "0.01", "0.03", "0.1", "0.3"])
    axes.minorticks_off()
    axes.grid(alpha=0.25)
    axes.set_xlabel(f"bits per element in a long context, scales included, heads of {head_dim} channels (bf16: 16)")
    axes.set_ylabel("KL divergence from DynamicCache, nats")
    axes.set_title(f"Loss against memory (lower left is better): {words}", fontsize=11)
    kinds = ((RED, "D", "hfkvq's own presets"), (BLUE, "o", "published methods, in hfkvq"))
    if any(row.get("simulated") for row in found):
        kinds += ((GREY, "x", "other methods, simulated"),)
    handles = [Line2D([], [], color=color, marker=mark, linestyle="none", label=label) for color, mark, label in kinds]
    hollow = {"color": BLACK, "marker": "o", "markerfacecolor": "white", "linestyle": "none"}
    handles.append(Line2D([], [], **hollow, label="hollow: options have changed since"))
    handles.append(Line2D([], [], color=BLACK, marker="|", markersize=10, linestyle="none", label="95 % interval"))
    axes.legend(handles=handles, frameon=False, loc="upper right", fontsize=9)
    write_names(axes, places, colors, {name for name in colors if is_own(name)})
    save_figure(figure, path)


def write_names(
    axes: Any,
    points: Sequence[tuple[str, tuple[float, float]]],
    colors: Mapping[str, str],
    bold: Collection[str] = (),
) -> None:
    """Writes each name at the first place near its point that is free of points, error bars and the legend.

    Args:
        axes: finished, but for the names.
        points: names and where they are.
        colors: by name.
        bold: names in bold.
    """
    from matplotlib.collections import LineCollection
    from matplotlib.text import Text

    # Positions are known only after a layout.
    axes.get_figure().canvas.draw()
    renderer = axes.get_figure().canvas.get_renderer()
    taken = []
    for _, at in points:
        x, y = axes.transData.transform(at)
        taken.append((x - 5, y - 5, x + 5, y + 5))
    for lines in axes.collections:
        for ends in lines.get_segments() if isinstance(lines, LineCollection) else ():
            bar = axes.transData.transform(ends)
            taken.append((*(bar.min(0) - 3), *(bar.max(0) + 3)))
    legend = axes.get_legend()
    if legend is not None:
        taken.append(legend.get_window_extent(renderer).extents)
    frame = axes.get_window_extent()
    steps = [(8, 0), (-8, 0), (0, 8), (0, -8)]
    steps += [(dx, sign * 13 * k) for k in range(1, 11) for sign in (1, -1) for dx in (10, -10, 40, -40)]
    for name, at in sorted(points, key=lambda point: point[1]):
        best = None
        for dx, dy in steps:
            text = axes.annotate(
                name,
                at,
                xytext=(dx, dy),
                textcoords="offset points",
                fontsize=8.5,
                fontweight="bold" if name in bold else "normal",
                color=colors[name],
                ha="center" if dx == 0 else "left" if dx > 0 else "right",
                va="center" if dx else "bottom" if dy > 0 else "top",
                # A line to the point, where the name had to move away.
                arrowprops={"arrowstyle": "-", "lw": 0.6, "color": "0.5"} if abs(dy) > 12 else None,
            )
            # The extent is the words' alone: an annotation's own takes in its line.
            text.update_positions(renderer)
            window = Text.get_window_extent(text, renderer)
            box = (window.x0, window.y0, window.x1, window.y1)
            inside = frame.x0 <= box[0] and box[2] <= frame.x1 and frame.y0 <= box[1] and box[3] <= frame.y1
            free = all(box[2] < a or c < box[0] or box[3] < b or d < box[1] for a, b, c, d in taken)
            if inside and free:
                best = box
                break
            text.remove()
        if best is None:
            # No place may be free: better over others than not at all.
            axes.annotate(name, at, xytext=(8, 0), textcoords="offset points", fontsize=8.5, color=colors[name])
        else:
            taken.append(best)
