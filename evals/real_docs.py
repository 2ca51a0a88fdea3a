"""Two real models in the README and docs/results.md, and their picture, from what `evals/real.py` found.

`evals/docs.py --write` writes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from evals.charts import is_own
from evals.figures import RESULTS, has_changed, read
from evals.shapes import get_config
from hfkvq.caches import get_scheme, list_schemes
from hfkvq.caches.cache import DEFAULT_SCHEME
from hfkvq.measure.presets import describe, widest_first
from hfkvq.measure.tables import NOTHING, markdown_table, small_number
from hfkvq.tuning.fit import cache_bytes

SMOLLM2, QWEN = "real-smollm2-h100.json", "real-qwen2.5-coder-1.5b-h100.json"
LATER = "real-qwen2.5-coder-1.5b-h200.json"
"""Tasks of the presets that `QWEN` has none of, by a later run with a baseline of its own."""
STEPS = "vllm-backend-qwen3-8b-h100.json"
IN_VLLM = "vllm-plugin-qwen3-8b-h100.json"
SIZES = ((1, 1024), (16, 8192))
"""Rows and tokens of the steps in the ladder."""
USES = {
    "best-4.3": "the least loss",
    DEFAULT_SCHEME: "**the default**: answers close to bf16 in a quarter of its memory",
    "best-2.8": "a fifth less memory than the default, somewhat more loss",
    "best-2.5": "a fifth of bf16's memory; hard tasks begin to suffer",
    "trellis-2.5": "`best-2.5` with less loss",
    "best-2.0": "an eighth of bf16's memory: measure your task first",
    "best-1.5": "the least memory: measure your task first",
    "saw-int4": "short contexts, and prefixes that requests share",
    "kitty-pro": "a published method, for comparison",
}
"""Uses of presets, in the ladder's last column."""

FRONTIER = "kld-qwen2.5-coder-1.5b-frontier-*.json"
OTHERS = {
    "evals.simulated:FP8": "vLLM fp8",
    "evals.simulated:TurboQuant": "vLLM turboquant 4",
    "evals.simulated:TurboQuant:key_bits=3:value_bits=3": "vLLM turboquant 3",
    "evals.simulated:LlamaCpp": "llama.cpp q4_0",
    "evals.simulated:LlamaCpp:bits_each=8": "llama.cpp q8_0",
}
"""Names of simulated formats in the picture."""

MOST_KLD = 0.6
"""Divergence at the picture's upper edge; what lies above is written there as a number."""

PUBLISHED = ("saw-int4", "kitty-pro")
"""Methods of others in the ladder."""

MORE = ("full", "kivi-2", "triaxial", "kvarn-k4v2", "mixkvq", "kitty", "kvarn-k2v2", "int4", "saw-int4-kv", "arkv")
PLAIN = (
    "saw-int4:sink_length=1:fit=0:smooth_keys=false", "int4:sink_length=1:smooth_keys=false",
    "triaxial:sink_length=0:smooth_keys=false", "arkv:smooth_keys=false", "best-4.3:smooth_keys=false",
    "kvarn-k4v2:smooth_keys=false", "kvarn-k2v2:smooth_keys=false",
)  # fmt: skip
"""With keys as the model makes them."""


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


def ladder() -> list[str]:
    """Presets of the README's table, the widest first: all of our own that were measured on Qwen2.5, then others."""
    known = losses(QWEN)
    return widest_first(name for name in list_schemes() if is_own(name) and name in known) + list(PUBLISHED)


def step_times(engine: str) -> str:
    """Milliseconds of a step at both sizes; those of hfkvq within vLLM where `generate` was not timed."""
    for file, field, words in ((STEPS, "engine", ""), (IN_VLLM, "scheme", ", in vLLM")):
        rows = [row for row in read(file)["rows"] if row["kind"] == "whole" and row[field] == engine]
        found = {(row["batch"], row["context"]): row["step_ms"] for row in rows}
        if found:
            return " / ".join(f"{found[size]:.1f}" for size in SIZES) + words
    return NOTHING


def task(preset: str, part: str) -> str:
    """A score on Qwen2.5 with lost and gained questions."""
    runs = (read(name)["rows"].get(preset, {}).get(part) for name in (QWEN, LATER))
    if not (one := next(filter(None, runs), None)):
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
    """The README's ladder."""
    known = losses(QWEN)
    lines = [
        ("bf16", "16", held(None), NOTHING, NOTHING, task("none", "gsm8k"), f"{step_times('vllm')}, vLLM's own", "")
    ]
    for name in ladder():
        loss = small_number(known[name]["median"]), f"{known[name]['p999']:.2f}"
        given = bits(name), held(name), *loss, task(name, "gsm8k") or NOTHING, step_times(name)
        lines.append((f"`{name}`", *given, USES.get(name, "")))
    head = ("preset", "bits", "32k tokens", "KLD, median", "KLD, 99.9 %", "GSM8K, %", "ms a step", "what it is for")
    return markdown_table(head, lines)


def tasks() -> str:
    """The table of tasks in docs/results.md."""
    parts = ("gsm8k", "ruler4k", "ruler16k", "humaneval", "math500")
    lines = [("`DynamicCache`", *(task("none", part) for part in parts))]
    for name in (*ladder(), "trellis-2.5", "best-2.0", "best-1.5", *MORE):
        scores = [task(name, part) for part in parts]
        if any(scores):
            lines.append((f"`{name}`", *scores))
    return markdown_table(("cache", "GSM8K", "RULER 4k", "RULER 16k", "HumanEval", "MATH-500"), lines)


def results() -> str:
    """The table of docs/results.md: both models, medians and tails."""
    models, lines = [losses(SMOLLM2), losses(QWEN)], []
    for name in (*ladder(), *MORE, *PLAIN):
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


def points(rows: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Divergence of rows of `hfkvq kld` by cache; simulated ones with their bits, under the names of `OTHERS`."""
    found = {}
    for row in rows:
        (low, high), name = row["kld"]["interval"], OTHERS.get(row["name"], row["name"])
        found[name] = {"kld": row["kld"]["mean"], "low": low, "high": high}
        if row.get("simulated"):
            found[name]["bits"] = row["total_bits"]
    return found


def frontier_of_qwen() -> dict[str, dict[str, Any]]:
    """Rows of Qwen2.5 on the bundled texts with formats of others, of the newest such file; nothing without one."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.glob(FRONTIER)]
    newest = max(records, key=lambda record: record["date"], default={})
    return points(row for row in newest.get("rows", ()) if not has_changed(row))


def picture(path: Path) -> None:
    """Divergence against bits: Qwen2.5 with names and intervals, SmolLM2 and formats of vLLM and llama.cpp in grey."""
    from matplotlib.lines import Line2D

    from evals.charts import BLUE, GREY, RED, new_figure, save_figure
    from evals.frontier import rows, write_names

    both = (losses(SMOLLM2), losses(QWEN))
    if found := frontier_of_qwen():
        both = (points(row for row in rows() if not has_changed(row) and not row.get("simulated")), found)

    figure, grid = new_figure(8.6, 5.2)
    axes, places, colors = grid[0][0], [], {}
    for model, grey in zip(both, (True, False), strict=True):
        for preset, one in model.items():
            # Evicting presets have no bits of their own; rotated values add nothing to see.
            if preset in ("full", "arkv", "saw-int4-kv") or ":" in preset:
                continue
            x = one.get("bits") or float(bits(preset).split(" to ")[-1])
            color, mark = (RED, "D") if is_own(preset) else (GREY, "x") if "bits" in one else (BLUE, "o")
            color = GREY if grey else color
            if one["kld"] > MOST_KLD:
                at = {"xycoords": ("data", "axes fraction"), "ha": "center", "va": "top", "fontsize": 8}
                axes.annotate(f"{preset}:\n{one['kld']:.1f}", (x, 0.985), **at, color="0.35")
                continue
            sides = [[one["kld"] - one["low"]], [one["high"] - one["kld"]]]
            axes.errorbar(x, one["kld"], None if grey else sides, fmt=mark, color=color, markersize=5 if grey else 7)
            if not grey:
                places.append((preset, (x, one["kld"])))
                colors[preset] = "0.35" if color == GREY else color
        floor = model["full"]["kld"]
        axes.axhline(floor, color=GREY, linewidth=0.8 if grey else 1.2, linestyle="--")
        words = f"{'SmolLM2' if grey else 'Qwen2.5-Coder'} in 16 bits: rounding alone"
        at = {"xycoords": ("axes fraction", "data"), "xytext": (0, 3), "textcoords": "offset points"}
        axes.annotate(words, (0.005, floor), **at, fontsize=8, color="0.4")
    least, *_, most = sorted(x for _, (x, _) in places)
    axes.set(yscale="log", xlim=(least - 0.3, most + 0.6), ylim=(0.00025, MOST_KLD))
    axes.set_yticks([0.001, 0.003, 0.01, 0.03, 0.1, 0.3], ["0.001", "0.003", "0.01", "0.03", "0.1", "0.3"])
    axes.minorticks_off()
    axes.grid(alpha=0.25)
    axes.set_xlabel("bits per element in a long context, scales included (bf16: 16)")
    axes.set_ylabel("KL divergence from DynamicCache, nats")
    axes.set_title(
        "Loss against memory (lower left is better): Qwen2.5-Coder-1.5B, contexts of 7,680 tokens", fontsize=11
    )
    kinds = (
        (RED, "D", "hfkvq's own presets"),
        (BLUE, "o", "published methods, in hfkvq"),
        (GREY, "o", "the same on SmolLM2-135M"),
    )
    if any("bits" in one for one in both[1].values()):
        kinds += ((GREY, "x", "vLLM's and llama.cpp's formats, simulated"),)
    handles = [Line2D([], [], color=color, marker=mark, linestyle="none", label=label) for color, mark, label in kinds]
    axes.legend(handles=handles, frameon=False, loc="lower right", bbox_to_anchor=(1.0, 0.2), fontsize=9)
    write_names(axes, places, colors, {name for name in colors if is_own(name)})
    save_figure(figure, path)
