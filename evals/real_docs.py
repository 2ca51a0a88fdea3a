"""Two real models in the README and docs/results.md, and their picture, from what `evals/real.py` found.

`evals/docs.py --write` writes them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from evals.shapes import get_config
from hfkvq.caches import get_scheme
from hfkvq.caches.cache import DEFAULT_SCHEME
from hfkvq.measure.presets import describe
from hfkvq.measure.tables import markdown_table, small_number
from hfkvq.tuning.fit import cache_bytes

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "evals" / "results"
SMOLLM2, QWEN = "real-smollm2-h100.json", "real-qwen2.5-coder-1.5b-h100.json"
README = {
    "best-4.3": "the least loss",
    "saw-int4": "short contexts, shared prefixes",
    "triaxial": "agents with tools and images (all tokens in 4 bits here)",
    DEFAULT_SCHEME: "**the default**",
    "best-2.5": "the least memory",
    "kitty-pro": "a published method; loses hard needles",
    "kivi-2": "the baseline of most papers",
    "arkv": "a fixed budget; forgets tokens",
}
"""Rows of the README, and what each is for."""

MORE = ("full", "best-2.8", "kvarn-k4v2", "mixkvq", "kitty", "kvarn-k2v2", "int4", "saw-int4-kv")
PLAIN = (
    "saw-int4:sink_length=1:fit=0:smooth_keys=false", "int4:sink_length=1:smooth_keys=false",
    "triaxial:sink_length=0:smooth_keys=false", "arkv:smooth_keys=false", "best-4.3:smooth_keys=false",
    "kvarn-k4v2:smooth_keys=false", "kvarn-k2v2:smooth_keys=false",
)  # fmt: skip
"""With keys as the model makes them."""


def read(name: str) -> dict[str, Any]:
    """A summary of `evals/real.py`."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def losses(name: str) -> dict[str, dict[str, float]]:
    """Divergence at 8k by preset, as plain numbers: mean, ends of the interval, median, 99.9 %, top-1, perplexity."""
    record, found = read(name), {}
    for row in record.get("printed", {}).get("rows", ()):
        low, high = row["interval"]
        found[row["preset"]] = {
            "kld": row["kld"], "low": low, "high": high, "median": row["median"], "p999": row["p999"],
            "top1": row["top1"], "perplexity": row["perplexity_percent"],
        }  # fmt: skip
    for preset, parts in record["rows"].items():
        row = parts.get("kld8k", {}).get("row")
        if row:
            low, high = row["kld"]["interval"]
            found[preset] = {
                "kld": row["kld"]["mean"], "low": low, "high": high, "median": row["kld"]["median"],
                "p999": row["kld"]["p999"], "top1": row["top1"]["share"],
                "perplexity": 100 * (row["perplexity_ratio"]["value"] - 1),
            }  # fmt: skip
    return found


def task(preset: str, part: str) -> str:
    """A score on Qwen2.5 with lost and gained questions."""
    one = read(QWEN)["rows"].get(preset, {}).get(part)
    if not one:
        return ""
    against = one.get("against_none")
    return f"{one['score']:.1f}" + (f" ({against['lost']}/{against['gained']})" if against else "")


def bits(preset: str) -> str:
    """Bits per element in a long context, heads of 128."""
    least, most = describe(preset, get_scheme(preset))["long_context_bits"]
    return f"{least:.2f}" if least == most else f"{least:.2f} to {most:.2f}"


def held(preset: str | None) -> str:
    """Memory of 32,768 tokens of Qwen3-8B that came in chunks of 2,048; of no preset in bf16."""
    config: Any = get_config("qwen3-8b")
    plain = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 32768
    return f"{(cache_bytes(config, preset, 32768, chunk=2048) if preset else plain) / 2**30:.2f} GiB"


def readme() -> str:
    """The README's table."""
    smol, qwen = losses(SMOLLM2), losses(QWEN)
    base = [task("none", part) for part in ("gsm8k", "ruler4k", "ruler16k")]
    lines = [("`DynamicCache`", "16", held(None), "–", "–", *base, "")]
    for name, use in README.items():
        given = bits(name), held(name), small_number(smol[name]["kld"]), small_number(qwen[name]["kld"])
        lines.append((f"`{name}`", *given, *(task(name, part) for part in ("gsm8k", "ruler4k", "ruler16k")), use))
    head = ("cache", "bits", "32k", "KLD, SmolLM2", "KLD, Qwen2.5", "GSM8K", "RULER 4k", "RULER 16k", "what it is for")
    return markdown_table(head, lines)


def results() -> str:
    """The table of docs/results.md: both models, medians and tails."""
    models, lines = [losses(SMOLLM2), losses(QWEN)], []
    for name in (*README, *MORE, *PLAIN):
        cells: list[str] = []
        for model in models:
            one = model.get(name)
            if one is None:
                cells += [""] * 5
                continue
            ends = f"{small_number(one['kld'])} ({one['low']:.4f} to {one['high']:.4f})"
            cells += [ends, small_number(one["median"]), f"{one['p999']:.2f}", f"{one['top1']:.3f}"]
            cells.append(
                f"{one['perplexity']:+.2f} %" if one["perplexity"] < 1000 else f"x {one['perplexity'] / 100:,.0f}"
            )
        lines.append((f"`{name}`", *cells))
    head = ["cache"]
    for model in ("SmolLM2", "Qwen2.5"):
        head += [f"{model}: KLD (95 %)", "median", "99.9 %", "top-1", "perplexity"]
    return markdown_table(tuple(head), lines)


def picture(path: Path) -> None:
    """Divergence against bits on both models; arrows from keys as they are to smoothed keys."""
    from matplotlib.lines import Line2D

    from evals.charts import BLUE, GREY, RED, new_figure

    figure, grid = new_figure(11.5, 5.0, 2)
    for axes, name, title in zip(grid[0], (SMOLLM2, QWEN), ("SmolLM2-135M", "Qwen2.5-Coder-1.5B"), strict=True):
        found = losses(name)
        axes.axhline(found["full"]["kld"], color=GREY, linewidth=1, linestyle="--")
        for preset in (*README, *MORE):
            if preset in ("full", "arkv", "saw-int4-kv") or preset not in found:
                continue
            one, x = found[preset], float(bits(preset).split(" to ")[-1])
            color = RED if preset.startswith("best") else BLUE
            axes.plot(x, one["kld"], "D" if color == RED else "o", color=color, markersize=6)
            axes.annotate(preset, (x, one["kld"]), xytext=(5, 3), textcoords="offset points", fontsize=8)
            before = next((found[plain] for plain in PLAIN if plain.split(":")[0] == preset and plain in found), None)
            if before and before["kld"] > 1.3 * one["kld"]:
                axes.annotate(
                    "", (x, one["kld"] * 1.15), (x, before["kld"]),
                    arrowprops={"arrowstyle": "->", "color": GREY, "linewidth": 1.2},
                )  # fmt: skip
                axes.plot(x, before["kld"], "x", color=GREY, markersize=7)
        axes.set(yscale="log", xlim=(2.1, 5.9), ylim=(0.0003, 15), title=f"{title}, contexts of 7,680 tokens")
        axes.grid(alpha=0.25)
        axes.set_xlabel("bits per element in a long context, scales included (bf16: 16)")
    grid[0][0].set_ylabel("KL divergence from DynamicCache, nats")
    kinds = ((RED, "D", "hfkvq's own presets"), (BLUE, "o", "published methods, in hfkvq"))
    kinds += ((GREY, "x", "the same with keys as the model makes them"),)
    handles = [Line2D([], [], color=color, marker=mark, linestyle="none", label=label) for color, mark, label in kinds]
    handles.append(Line2D([], [], color=GREY, linestyle="--", label="16 bits: rounding alone"))
    grid[0][0].legend(handles=handles, frameon=False, loc="upper right", fontsize=8.5)
    figure.savefig(path, dpi=150)
