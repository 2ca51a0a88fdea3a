"""Small results files, as lm-eval and hfkvq write them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hfkvq import get_scheme


def kvq(preset: str | None, bits: float, tasks: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """What `hf-kvq` adds to the config."""
    return {
        "preset": preset,
        "scheme": get_scheme(preset).to_dict() if preset else None,
        "ll_mode": "decode",
        "ll_chunk": 16,
        "code_bits": 2.0,
        "total_bits": bits,
        "peak_cache_bytes": int(bits * 2**20),
        "tokens_per_second": 10.0,
        "tasks": dict(tasks or {}),
        **more,
    }


def evaluation(
    scores: Mapping[str, Mapping[str, float]], bill: Mapping[str, Any] | None = None, date: float = 100.0, **more: Any
) -> dict[str, Any]:
    """The content of results_DATE.json; without a bill plain `hf`'s."""
    config: dict[str, Any] = {"model": "hf-kvq" if bill else "hf", "model_args": {"pretrained": "org/model"}}
    if bill is not None:
        config["kvq"] = dict(bill)
    results = {}
    for task, values in scores.items():
        results[task] = {"alias": task, **values}
        results[task] |= {name.replace(",", "_stderr,"): 0.01 for name in values}
        if bill is not None:
            results[task]["total_bits,none"] = bill["total_bits"]
    counts = {task: {"original": 100, "effective": 50} for task in scores}
    return {"results": results, "config": config, "date": date, "n-samples": counts, "model_name": "org/model", **more}


def divergence(name: str, mean: float, bits: float) -> dict[str, Any]:
    """A row of `hfkvq kld`."""
    return {
        "name": name,
        "scheme": get_scheme(name).to_dict(),
        "kld": {"mean": mean, "interval": [mean / 2, mean * 2], "median": mean, "p99": mean, "p999": mean, "max": mean},
        "top1": {"share": 0.97, "interval": [0.96, 0.98]},
        "perplexity": 5.0,
        "perplexity_ratio": {"value": 1.01, "interval": None},
        "code_bits": 2.0,
        "total_bits": bits,
        "held_bytes": int(bits * 2**20),
        "bf16_bytes": 2**24,
    }


def divergences(*rows: Mapping[str, Any], date: str = "2026-01-01T00:00:00+00:00") -> dict[str, Any]:
    """The content of `hfkvq kld --json`."""
    return {"kind": "hfkvq kld", "model": "org/model", "date": date, "rows": list(rows)}


def write(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def run_files(folder: Path, date: str, tasks: Mapping[str, Sequence[float]], metric: str = "acc", **more: Any) -> Path:
    """Results and samples of a run: the values of one metric, a document each."""
    for task, values in tasks.items():
        lines = [
            {
                "doc_id": number,
                "doc_hash": f"d{number}",
                "prompt_hash": f"p{number}",
                "filter": "none",
                "metrics": [metric],
                metric: value,
            }
            | more
            for number, value in enumerate(values)
        ]
        folder.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"samples_{task}_{date}.jsonl").write_text(text, encoding="utf-8")
    scores = {task: {f"{metric},none": sum(values) / len(values)} for task, values in tasks.items()}
    return write(folder / f"results_{date}.json", evaluation(scores))
