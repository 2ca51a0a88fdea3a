"""docs/leaderboard.html: every measured row of real models and of whole steps, in one page that opens from disk.

`evals/docs.py --write` writes it. Rows are those of `hfkvq kld --json` and `evals/real.py` (losses, tasks) and of
`evals/generate.py` (milliseconds a step) in evals/results, so a new file there is a new row (docs/evaluation.md).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from evals.charts import is_own
from evals.figures import as_it_was
from hfkvq.caches.schemes.preset import get_preset
from hfkvq.measure.presets import describe

RESULTS = Path(__file__).parent / "results"
TEMPLATE = Path(__file__).parent / "leaderboard.html"
TASKS = {"gsm8k": "GSM8K, %", "ruler4k": "RULER 4k, %", "ruler16k": "RULER 16k, %"}
TASKS |= {"humaneval": "HumanEval, %", "math500": "MATH-500, %"}
Row = dict[str, Any]


def cache(name: str, scheme: Row | None, code_bits: float | None = None) -> Row:
    """A cache's name, method and bits per element in a long context, heads of 128.

    No bits stand beside caches that evict, and those of others, whose method is "other"; our own presets' is "hfkvq".
    """
    plain = 16 if name.startswith(("dynamic", "static")) else {"none": 16, "vllm": 16, "vllm-fp8": 8}.get(name)
    method = "hfkvq" if is_own(name.split()[-1]) else (scheme or {}).get("scheme", "bf16" if plain == 16 else "other")
    try:
        found = describe("", as_it_was(scheme or {}))
    except (ValueError, KeyError):
        # The scheme has knobs that are gone, or is none of ours.
        return {"name": "DynamicCache" if name == "none" else name, "method": method, "bits": plain}
    (least, most), (fewest, largest) = found["long_context_bits"], found["code_bits"]
    # Where tokens differ in width, the measured mean of code bits says how many were wide.
    wide = 0 if least == most else (code_bits - fewest) / (largest - fewest) if code_bits else float("nan")
    bits = None if found["stays"] or wide != wide else least + wide * (most - least)
    return {"name": name, "method": method, "bits": bits}


def loss(name: str, row: Row) -> Row:
    """Cache, measures and bytes of a row of divergence."""
    kld, words = row["kld"], f"{name}, simulated" if row.get("simulated") else name
    found = {"KLD, mean": kld["mean"], "KLD, median": kld["median"], "KLD, 99.9 %": kld["p999"]}
    found["top-1, %"] = 100 * row["top1"]["share"]
    found["perplexity, % more"] = 100 * (row["perplexity_ratio"]["value"] - 1)
    held = {"total": row.get("total_bits"), "bytes": row.get("held_bytes"), "interval": kld["interval"]}
    return {**cache(words, row["scheme"], row.get("code_bits")), **held, "measures": found}


def of_kld(record: Row) -> Iterator[Row]:
    """Rows of `hfkvq kld`."""
    own, about = record["settings"], {name: record.get(name) for name in ("model", "device", "commit", "date")}
    words = f"{own['prefill']:,} + {own['context'] - own['prefill']:,} tokens, {own['chunk']} at a time, "
    for row in record["rows"]:
        yield {**about, "where": f"{words}{record['windows']} x {record['text']['source']}", **loss(row["name"], row)}


def printed(row: Row) -> Row:
    """A row of divergence of which the printed table alone was kept."""
    found = {"kld": {"mean": row["kld"], **row}, "top1": {"share": row["top1"]}}
    found["perplexity_ratio"] = {"value": 1 + row["perplexity_percent"] / 100}
    return found | {"scheme": get_preset(row["preset"]).scheme.to_dict()}


def of_real(record: Row) -> Iterator[Row]:
    """Rows of `evals/real.py`; tasks stand beside the shorter contexts."""
    settings = {each["part"]: each for each in record["settings"]}
    kept = {row["preset"]: {"kld8k": {"row": printed(row)}} for row in record.get("printed", {}).get("rows", ())}
    about = {name: record["about"][0][name] for name in ("model", "device")} | {"date": record["date"]}
    about["commit"] = ", ".join(each["commit"] for each in record["about"])
    for name, parts in (kept | record["rows"]).items():
        tasks = {words: parts[part]["score"] for part, words in TASKS.items() if part in parts}
        for part, scores in (("kld8k", tasks), ("kld24k", {})):
            row, own, words = parts.get(part, {}).get("row"), settings.get(part), "tasks"
            if own:
                words = f"{own['prompt']:,} + {own['scored']} tokens, {own['limit']} x {', '.join(own['texts'])}"
            if row:
                found = loss(name, row)
                yield {**about, "where": words, **found, "measures": found["measures"] | scores}
            elif scores:
                scheme = None if name == "none" else get_preset(name).scheme.to_dict()
                yield {**about, "where": words, **cache(name, scheme), "measures": scores}


def of_steps(record: Row) -> Iterator[Row]:
    """Rows of `evals/generate.py`: an engine each, with a measure for each size. Steps alone count before calls."""
    engines: dict[str, dict[str, float]] = {}
    for row in sorted(record["rows"], key=lambda row: row["kind"] == "decode"):
        alone = row.get("ms", {}).get("p50") if row["kind"] == "decode" else None
        ms = row.get("step_ms") or row.get("ms_step") or alone
        if row["kind"] in ("decode", "whole") and ms:
            engines.setdefault(row["engine"], {})[f"ms a step, {row['batch']} x {row['context'] // 1024}k"] = ms
    about = {name: record[name] for name in ("commit", "date")} | {"device": record["gpu"], "where": "random weights"}
    about["model"] = f"{record['model']['name']}, shape"
    for name, measures in engines.items():
        yield {**about, **cache(name, record["schemes"].get(name.split()[-1])), "measures": measures}


READERS = {"hfkvq kld": of_kld, "hfkvq real": of_real, "hfkvq generate": of_steps, "hfkvq bench generate": of_steps}


def rows() -> Iterator[Row]:
    """All rows, file by file."""
    for path in sorted(RESULTS.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        kind = record.get("kind", "") if isinstance(record, dict) else ""
        for reader in (read for start, read in READERS.items() if kind.startswith(start)):
            for row in reader(record):
                row["measures"] = {name: float(f"{value:.4g}") for name, value in row["measures"].items()}
                row |= {name: round(row[name], 3) for name in ("bits", "total") if row.get(name) is not None}
                yield row | {"file": path.name, "model": re.sub(r"[ .-]q4_\w+$", "", row["model"].lower())}


def text() -> str:
    """The page."""
    # A "<" within a string could end the script.
    data = ",\n".join(json.dumps(row).replace("<", "\\u003c") for row in rows())
    return TEMPLATE.read_text(encoding="utf-8").replace("/* ROWS */", f"\n{data}\n")
