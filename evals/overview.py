"""The picture that README.md opens with: bytes of a long context, and seconds of `generate`, beside `DynamicCache`.

Bytes are computed by `hfkvq fit`'s own functions, seconds read from evals/results. Run from the repository's root:

    python evals/overview.py
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib.pyplot as plt

from hfkvq.measure.bench.generate.models import get_config
from hfkvq.tuning.fit import outline_of, plan, weights_of
from hfkvq.tuning.fit.layer import Arrival

RESULTS = Path(__file__).parent / "results"
CALLS = RESULTS / "generate-calls-qwen3-8b-h200.json"
PRESETS = (None, "kivi-4", "saw-int4", "kivi-2", "kitty-pro")
CASES = ((1, 1024, "1 x 1k"), (1, 32768, "1 x 32k"), (16, 8192, "16 x 8k"))
ENGINES = (("dynamic-nocudnn", "DynamicCache", "#9aa5b1"), ("kitty-pro", "kitty-pro", "#2c7fb8"))
TOKENS, GIB = 32768, 2**30


def bytes_of_presets() -> dict[str, float]:
    """GiB that 32k tokens of one row take, the prompt in pieces of 2,048; bf16 first."""
    model = outline_of(get_config("qwen3-8b"))
    weights = weights_of(model, model.dtype)
    pieces = Arrival(0, 0, 2048)
    found = {p: plan(model, "", p, weights, 24 * GIB, TOKENS, 1, None, GIB, pieces) for p in PRESETS}
    return {preset or "bf16": one.cache / GIB for preset, one in found.items()}


def seconds_of_calls() -> dict[tuple[str, int, int], float]:
    """Median seconds of `generate` with 256 new tokens, by engine, batch and context."""
    rows = json.loads(CALLS.read_text(encoding="utf-8"))["rows"]
    return {(r["engine"], r["batch"], r["context"]): r["ms"]["p50"] / 1e3 for r in rows if r["kind"] == "whole"}


def main() -> None:
    """Draws it."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2), dpi=150)
    held = bytes_of_presets()
    bars = left.barh([*held][::-1], [*held.values()][::-1], color=["#2c7fb8"] * (len(held) - 1) + ["#9aa5b1"])
    left.bar_label(bars, fmt=" %.2f GiB")
    left.set(title="KV cache of 32k tokens, Qwen3-8B", xlim=(0, 5.4), xlabel="GiB, computed")
    seconds = seconds_of_calls()
    for i, (engine, label, color) in enumerate(ENGINES):
        heights = [seconds[engine, batch, context] for batch, context, _ in CASES]
        bars = right.bar([x + 0.4 * i for x in range(len(CASES))], heights, 0.4, label=label, color=color)
        right.bar_label(bars, fmt="%.1f s")
    right.set_xticks([x + 0.2 for x in range(len(CASES))], [name for *_, name in CASES])
    right.set(title="generate, 256 new tokens, one H200", ylabel="seconds, prompt included", ylim=(0, 17))
    right.legend(frameon=False, loc="upper left")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(RESULTS / "overview.png")


if __name__ == "__main__":
    main()
