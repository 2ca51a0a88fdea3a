"""The figures that ship in the package, from what was measured: hfkvq/measure/figures.json.

`evals/docs.py --write` writes the file, and `hfkvq schemes` and `hfkvq recommend` show it. A preset has a figure where
a file measured its very knobs; knobs that a file does not name are at their defaults.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hfkvq.caches import Scheme, get_scheme, list_schemes
from hfkvq.caches.schemes.preset import get_preset
from hfkvq.measure.presets import KIND

RESULTS = Path(__file__).parent / "results"
# The first of several files with a preset counts.
LOSS = "real-smollm2-h100.json"
"""The model whose figures the package ships: of the two measured, it loses more with every preset."""
STEPS = (
    "generate-steps-qwen3-8b-h200.json",
    "generate-heavy-layer-qwen3-8b-h200.json",
    "generate-budgets-qwen3-8b-h200.json",
    "generate-kvarn-256-steps-qwen3-8b-h200.json",
    "generate-triaxial-pages-qwen3-8b-h200.json",
)
ATTENTION = "kernels-h200.json"
BATCH, CONTEXT = 32, 32768


def read(name: str) -> dict[str, Any]:
    """A file of results."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def plain(scheme: Scheme) -> Scheme:
    """With a default budget written out."""
    budget = getattr(scheme, "budget_tokens", 0)
    if budget is None and not getattr(scheme, "budget_bytes", None) and not getattr(scheme, "budget_share", None):
        return dataclasses.replace(scheme, budget_tokens=scheme.tokens)  # type: ignore[call-arg, attr-defined]
    return scheme


GONE = {"requantize_on_turn_end": False, "seed": 0, "signs": 0, "quantize_first": False}
"""Knobs that are gone, with the value that all schemes are of now."""


def described(description: dict[str, Any]) -> Scheme:
    """The scheme that a file describes."""
    return get_scheme({key: x for key, x in description.items() if key not in GONE or x != GONE[key]})


def as_it_was(description: dict[str, Any]) -> Scheme:
    """The scheme that a file describes; before there was smoothing of keys, none were smoothed.

    Raises:
        ValueError: it has other knobs that are gone.
    """
    scheme: Any = described(description)
    smooths = getattr(scheme, "smooth_keys", False) and "smooth_keys" not in description
    return dataclasses.replace(scheme, smooth_keys=False) if smooths else scheme


def has_changed(row: dict[str, Any]) -> bool:
    """True if the preset of a row's name has other knobs since it was measured."""
    if not row.get("scheme") or row.get("simulated"):
        return False
    try:
        then = as_it_was(row["scheme"])
    except ValueError:
        return True
    now = get_preset(row["name"]).scheme
    return any(then.in_layer(layer, 100) != now.in_layer(layer, 100) for layer in range(100))


def presets_of(description: dict[str, Any] | None) -> Iterator[str]:
    """The presets, aliases too, that are what a file describes; none where it has knobs that are gone."""
    if not description or "scheme" not in description:
        return
    try:
        measured = plain(as_it_was(description))
    except ValueError:
        return
    yield from (name for name, scheme in list_schemes().items() if plain(scheme) == measured)


def loss() -> dict[str, Any]:
    """Divergence and perplexity on SmolLM2, by preset."""
    record, found = read(LOSS), {}
    (about,) = record["about"]
    first: dict[str, Any] = {}
    for parts in record["rows"].values():
        part = parts["kld8k"]
        row = part.get("row")
        for name in presets_of(row["scheme"]) if row else ():
            # Runs are compared on the same scored tokens.
            first = first or part
            assert part["tokens_sha256"] == first["tokens_sha256"]
            found[name] = {
                "kld": round(row["kld"]["mean"], 6),
                "kld_interval": [round(end, 6) for end in row["kld"]["interval"]],
                "top1": round(row["top1"]["share"], 5),
                "perplexity_ratio": round(row["perplexity_ratio"]["value"], 6),
                "file": LOSS,
                "commit": about["commit"],
            }
    settings = record["settings"][0]
    prompt, scored = settings["prompt"], settings["scored"]
    own = {"model": "SmolLM2-135M-Instruct", "dtype": "bfloat16", "device": about["device"]}
    own |= {"windows": first["windows"], "tokens": first["tokens"], "context": prompt + scored, "prefill": prompt}
    return {**own, "chunk": 8, "presets": dict(sorted(found.items()))}


def steps() -> dict[str, Any]:
    """Milliseconds of a captured step, by preset."""
    found: dict[str, Any] = {}
    for file in STEPS:
        record = read(file)
        assert (record["gpu"], record["model"]["name"]) == ("NVIDIA H200", "qwen3-8b")
        assert not record["settings"].get("liger")
        for row in record["rows"]:
            if (row["kind"], row["batch"], row["context"], row.get("mode")) == ("decode", 1, CONTEXT, "graphs"):
                for name in presets_of(record["schemes"].get(row["engine"])):
                    own = {"ms": round(row["ms"]["p50"], 2), "file": file, "commit": record["commit"]}
                    found.setdefault(name, own)
    first = read(STEPS[0])["rows"]
    stock = next(row for row in first if (row["engine"], row["context"]) == ("dynamic-nocudnn", CONTEXT))
    about = {"model": "Qwen3-8B's shape, random weights", "device": "NVIDIA H200", "batch": 1, "context": CONTEXT}
    return {**about, "dynamic_ms": round(stock["ms"]["p50"], 2), "presets": dict(sorted(found.items()))}


def attention() -> dict[str, Any]:
    """Speed-up of one layer's decode attention against the fastest bf16 kernel, by preset."""
    record, found = read(ATTENTION), {}
    for row in record["rows"]:
        # Rows without one say what went wrong.
        at = (row["kind"], row["batch"], row["context"]) == ("format", BATCH, CONTEXT) and "speedup" in row
        if at and row["name"] in list_schemes():
            scheme = get_scheme(row["name"])
            # Pages and windows as they were then.
            if row["spec"] == scheme.layout(row["head_dim"], row["head_dim"]).store.spec:
                found |= {name: round(row["speedup"], 2) for name, own in list_schemes().items() if own == scheme}
    about = {"device": record["gpu"], "batch": BATCH, "context": CONTEXT, "file": ATTENTION, "commit": record["commit"]}
    return {**about, "presets": dict(sorted(found.items()))}


def figures() -> dict[str, Any]:
    """All of it."""
    return {"kind": KIND, "loss": loss(), "steps": steps(), "attention": attention()}


def text() -> str:
    """Text of the file."""
    return json.dumps(figures(), indent=1) + "\n"
