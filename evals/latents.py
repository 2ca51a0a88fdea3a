"""Divergence of compressed latents on a small model with latent attention, by what is kept whole and how it is rounded.

    PYTHONPATH=. python evals/reference/train.py --shape mla --minutes 3 --evaluate 0 --text gsm8k_train.jsonl --out mla
    PYTHONPATH=. python evals/latents.py mla --gsm8k gsm8k_test.jsonl

Every row is measured through the cache itself, by `hfkvq kld`'s code, on three texts: the tasks that the model was
trained on, problems of GSM8K as it was trained on others, and GSM8K's answers as the file has them, which look like
nothing that it knows. Results are written after each group of rows.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from evals.reference.train import CHECKPOINT, read_problems
from hfkvq.caches import get_scheme
from hfkvq.measure.divergence.measurement import measure
from hfkvq.measure.divergence.naming import parse_measured
from hfkvq.measure.divergence.run import as_record
from hfkvq.measure.divergence.windows import Text, Windows, cut, read_file, reference_documents
from hfkvq.measure.records import commit, device_name, now, versions
from hfkvq.measure.tables import markdown_table

RESULTS = Path(__file__).parent / "results/latents-kld-h200.json"
HEAD = ("cache", "total bits", "KLD, GSM8K", "95 %", "perplexity, GSM8K", "KLD, tasks")

NONE = "sink_length=0:local_length=0"
"""No token kept whole."""
GROUPS = (
    ("full", f"latent-8:{NONE}", f"latent-4:{NONE}", "latent-4", "latent-8"),
    ("latent-4:local_length=0", "latent-4:sink_length=0", "latent-4:local_length=32"),
    ("latent-4:fit=4", "latent-4:group_size=32", "latent-4:rope_bits=16"),
    (f"latent-4:{NONE}:fit=4", f"latent-4:{NONE}:group_size=64", f"latent-4:{NONE}:group_size=32"),
    (f"latent-4:{NONE}:block=0", f"latent-4:{NONE}:rope_bits=16"),
    ("latent-8:rope_bits=8", f"latent-8:{NONE}:rope_bits=8", "latent-4:fit=4:group_size=32"),
)
"""Rows, the most telling ones first. This model's latents have 128 numbers: a group of 32 is a quarter of one, as 128
are of DeepSeek's."""


def texts(gsm8k: Path) -> dict[str, Text]:
    """Scored texts by name."""
    return {
        "tasks": Text("the reference tasks", reference_documents(), ""),
        "problems": Text("GSM8K, as the model was trained on it", read_problems(gsm8k), ""),
        "answers": Text("GSM8K's answers, with their annotations", read_file(gsm8k, "answer")),
    }


def rows(model: Any, windows: Windows, names: tuple[str, ...], settings: dict[str, int]) -> dict[str, Any]:
    """A group of rows on one text."""
    measured = measure(model, windows.tokens, parse_measured(list(names)), **settings)
    about = {"windows": len(windows.tokens), "tokens_sha256": windows.sha256}
    return as_record(measured, 0, about, windows.names)


def spelled(row: dict[str, Any]) -> str:
    """A row's cache as it is typed today: presets have other windows than when they were measured."""
    name = row["name"].partition(":")[0]
    was, now = get_scheme(row["scheme"]), get_scheme(name)
    values = {field.name: getattr(was, field.name) for field in fields(was)}
    return ":".join([name, *(f"{knob}={value}" for knob, value in values.items() if getattr(now, knob) != value)])


def table() -> str:
    """Table in Markdown: rows by how far they are from `DynamicCache` on problems."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))["texts"]
    tasks = {row["name"]: row for row in found["tasks"]["rows"]}
    lines = []
    for row in sorted(found["problems"]["rows"], key=lambda row: row["kld"]["mean"]):
        low, high = row["kld"]["interval"]
        own = tasks.get(row["name"])
        lines.append(
            (
                f"`{spelled(row)}`",
                f"{row['total_bits']:.2f}",
                f"{row['kld']['mean']:.5f}",
                f"{low:.5f} to {high:.5f}",
                f"{100 * (row['perplexity_ratio']['value'] - 1):+.2f} %",
                "" if own is None else f"{own['kld']['mean']:.5f}",
            )
        )
    return markdown_table(HEAD, lines)


def add(path: Path) -> None:
    """Takes the rows of another run, of the same model and texts, that are not there yet."""
    record, more = (json.loads(each.read_text(encoding="utf-8")) for each in (RESULTS, path))
    for name, found in more["texts"].items():
        kept = record["texts"].setdefault(name, found | {"rows": []})
        if kept["tokens_sha256"] != found["tokens_sha256"] or record["training"] != more["training"]:
            raise ValueError(f"add: {path} is of another model, or its windows of {name} are others.")
        have = {spelled(row) for row in kept["rows"]}
        kept["rows"] += [row for row in found["rows"] if spelled(row) not in have]
    RESULTS.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?", help="folder that train.py wrote")
    parser.add_argument("--gsm8k", type=Path, help="test.jsonl")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--prefill", type=int, default=1536)
    parser.add_argument("--chunk", type=int, default=8)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--texts", default="tasks,problems,answers", help="of these, with commas")
    parser.add_argument("--groups", type=int, default=len(GROUPS), help="of rows, the most telling first")
    parser.add_argument("--rows", action="append", help="these, comma-separated, in place of them; may be repeated")
    parser.add_argument("--minutes", type=float, default=60.0, help="no group is begun later")
    parser.add_argument("--add", type=Path, help="what another run with the same weights has written, for the table")
    args = parser.parse_args()
    if args.add is not None:
        return add(args.add)
    if args.model is None:
        parser.error("the model's folder is needed, or --add")
    begin = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(CHECKPOINT)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).to(device).eval()
    settings = {"prefill": args.prefill, "chunk": args.chunk, "batch_size": args.batch_size}
    training = json.loads((args.model / "training.json").read_text(encoding="utf-8"))
    record: dict[str, Any] = {
        "kind": "divergence of latents on a small model with latent attention",
        "training": {name: value for name, value in training.items() if name != "curve"},
        "learnt": training["curve"][-1] if training["curve"] else None,
        "device": device_name(device),
        "dtype": args.dtype,
        "settings": settings | {"context": args.context},
        "versions": versions(),
        "commit": commit(),
        "date": now(),
        "texts": {},
    }
    chosen = [tuple(each.split(",")) for each in args.rows] if args.rows else list(GROUPS[: args.groups])
    asked = args.texts.split(",")
    given = {
        name: cut([text], tokenizer, args.context, args.windows)
        for name, text in texts(args.gsm8k).items()
        if name in asked
    }
    for group in chosen:
        for name, windows in given.items():
            if time.perf_counter() - begin > 60 * args.minutes:
                return
            found = rows(model, windows, group, settings)
            kept = record["texts"].setdefault(name, found | {"rows": []})
            kept["rows"] += found["rows"]
            args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            for row in found["rows"]:
                shown = f"{row['kld']['mean']:.5f} nats, {row['total_bits']:.2f} bits"
                print(f"{time.perf_counter() - begin:5.0f} s  {name:9} {row['name']:60} {shown}", flush=True)


if __name__ == "__main__":
    main()
