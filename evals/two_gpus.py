"""Times decode steps of a model on one GPU, spread over two by layers, and split over two by heads, fused and not.

    PYTHONPATH=. python evals/two_gpus.py --json FILE
    PYTHONPATH=. python evals/two_gpus.py --caches best-3.4 --cases 1x1k --ways one,layers --json FILE

Ways: ``one`` GPU; ``layers``, the first half of them on one GPU (``device_map``); ``heads``, tensor parallelism in two
processes (``tp_plan="auto"``), which reads the model from a folder that is written first. Weights are random; a row is
the median of three calls of greedy `generate`, less those of a call of eight tokens, by token.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import dispatch_model
from transformers import AutoModelForCausalLM

from evals.shapes import build, get_config
from hfkvq import MixedKVCache
from hfkvq.measure.records import commit, device_name, now, versions
from hfkvq.sizes import parse_count

FEW = 8
"""Tokens of the short call."""


def call(model: Any, ids: torch.Tensor, name: str, tokens: int) -> float:
    """Seconds of one call of `generate` with a new cache."""
    cache = MixedKVCache(model, name)
    torch.cuda.synchronize()
    start = time.perf_counter()
    model.generate(
        ids, past_key_values=cache, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0
    )
    torch.cuda.synchronize()
    return time.perf_counter() - start


def rows(model: Any, way: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each cache and size, fused and not."""
    found = []
    for size in arguments.cases.split(","):
        batch, length = (parse_count(x) for x in size.split("x"))
        ids = torch.randint(0, 30000, (batch, length), generator=torch.Generator().manual_seed(0)).to(model.device)
        for name in arguments.caches.split(","):
            for fused in ("0", "1"):
                os.environ["HFKVQ_FUSION"] = fused
                call(model, ids, name, FEW)
                few = min(call(model, ids, name, FEW) for _ in range(2))
                whole = statistics.median(call(model, ids, name, arguments.tokens) for _ in range(3))
                step = (whole - few) / (arguments.tokens - FEW) * 1e3
                row = {"way": way, "cache": name, "size": size, "fused": fused == "1", "step_ms": round(step, 3)}
                found.append(row | {"few_s": round(few, 3)})
                print(json.dumps(found[-1]), file=sys.stderr, flush=True)
                gc.collect()
                torch.cuda.empty_cache()
    return found


def halves(model: Any) -> Any:
    """The model with its layers on two GPUs, embeddings on the first and the head on the second."""
    count = model.config.num_hidden_layers
    places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 1}
    return dispatch_model(model, places | {f"model.layers.{i}": int(2 * i >= count) for i in range(count)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--caches", default="kitty-pro,best-3.4")
    parser.add_argument("--cases", default="1x1k,16x8k")
    parser.add_argument("--tokens", type=int, default=136)
    parser.add_argument("--ways", default="one,layers,heads")
    written = str(Path(tempfile.gettempdir()) / "two-gpus")
    parser.add_argument("--folder", default=written, help="where the model is written for tensor parallelism")
    parser.add_argument("--minutes", type=float, default=8, help="then both processes print where they are")
    parser.add_argument("--json", required=True)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        # A process that waits for the other one forever would say nothing.
        faulthandler.dump_traceback_later(60 * arguments.minutes, exit=True)
        start = time.perf_counter()
        model = AutoModelForCausalLM.from_pretrained(arguments.folder, tp_plan="auto", dtype=torch.bfloat16).eval()
        print(f"loaded in {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
        found = rows(model, "heads", arguments)
        if torch.distributed.get_rank() == 0:
            Path(arguments.json).write_text(json.dumps(found), encoding="utf-8")
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        return
    ways, found = arguments.ways.split(","), []
    if set(ways) == {"heads"} and (Path(arguments.folder) / "config.json").exists():
        model = None
    else:
        model = build(get_config(arguments.model), torch.device("cuda", 0), torch.bfloat16)
    if "heads" in ways and model is not None:
        model.save_pretrained(arguments.folder)
    if "one" in ways:
        found += rows(model, "one", arguments)
    if "layers" in ways:
        found += rows(halves(model), "layers", arguments)
    del model
    gc.collect()
    torch.cuda.empty_cache()
    if "heads" in ways:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", *sys.argv]
        subprocess.run([*command, "--json", f"{arguments.json}.part"], check=True)
        found += json.loads(Path(f"{arguments.json}.part").read_text(encoding="utf-8"))
        Path(f"{arguments.json}.part").unlink()
    made = os.environ.get("HFKVQ_COMMIT", commit())
    record = {"kind": "two gpus", "when": now(), "commit": made, "device": device_name(torch.device("cuda"))}
    record["versions"] = versions("torch", "triton", "transformers", "accelerate")
    Path(arguments.json).write_text(
        json.dumps(record | {"model": arguments.model, "rows": found}, indent=1) + "\n", "utf-8"
    )


if __name__ == "__main__":
    main()
