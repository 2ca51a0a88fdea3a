"""Prompts in files, copied and stored: seconds and bytes beside the prompt's own.

    PYTHONPATH=. python evals/saved_prompts.py [--shape qwen3-8b] [--layers N] [--tokens 32768]
        [--schemes best-3.4,kitty-pro,saw-int4] [--folder DIR] [--json FILE]

A model of a real architecture with random weights is given a prompt of random tokens, after a shorter one that compiles
kernels. Then: `cache.save`, `MixedKVCache.load` (three times; the file is in the page cache of the operating system),
`copy.deepcopy`, `PrefixStore` (made, `put`, `match`). "same" says that the next 16 tokens after a load, of a copy and
after a match are those of the cache itself. Seconds end with the device idle.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from evals.shapes import build, get_config
from hfkvq import MixedKVCache, PrefixStore
from hfkvq.measure.records import clock, commit, device_name, now, versions

NEW = 16


def timed(call: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """Result of a call, and its seconds."""
    start = clock(device)
    found = call()
    return found, clock(device) - start


@torch.no_grad()
def row(model: Any, scheme: str, ids: torch.Tensor, folder: Path) -> dict[str, Any]:
    """All figures of a scheme."""
    device = ids.device

    def prompt(tokens: int) -> MixedKVCache:
        cache = MixedKVCache(model, scheme)
        model(ids[:, :tokens], past_key_values=cache, logits_to_keep=1)
        return cache

    def answer(cache: MixedKVCache) -> list[int]:
        more = torch.cat([ids, ids[:, :1]], dim=1)
        out = model.generate(more, past_key_values=cache, max_new_tokens=NEW, do_sample=False)
        return out[0, -NEW:].tolist()

    prompt(min(2048, ids.shape[1]))
    cache, seconds = timed(lambda: prompt(ids.shape[1]), device)
    found: dict[str, Any] = {"scheme": scheme, "tokens": ids.shape[1], "prompt_s": seconds}
    found["cache_bytes"] = cache.memory().total
    path = folder / f"{scheme}.safetensors"
    _, found["save_s"] = timed(lambda: cache.save(path, ids), device)
    found["file_bytes"] = path.stat().st_size
    loads = [timed(lambda: MixedKVCache.load(path, model), device) for _ in range(3)]
    found["load_s"] = [seconds for _, seconds in loads]
    held = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    copied, found["copy_s"] = timed(lambda: copy.deepcopy(cache), device)
    found["copy_bytes"] = torch.cuda.memory_allocated() - held if device.type == "cuda" else None
    store, found["store_s"] = timed(lambda: PrefixStore(folder / "store", model, scheme), device)
    _, found["put_s"] = timed(lambda: store.put(cache, ids), device)
    match, found["match_s"] = timed(lambda: store.match(torch.cat([ids, ids[:, :1]], dim=1)), device)
    found["matched"] = match.tokens
    others = [answer(each) for each in (loads[0][0], copied, match.cache)]
    own = answer(cache)
    found["same"] = [other == own for other in others]
    return found


def main() -> None:
    """Runs, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--schemes", default="best-3.4,kitty-pro,saw-int4")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--commit")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = get_config(args.shape, args.layers)
    model = build(config, device, torch.bfloat16 if device.type == "cuda" else torch.float32, seed=0)
    model.generation_config.eos_token_id = None
    ids = torch.randint(10, config.vocab_size, (1, args.tokens), generator=torch.Generator().manual_seed(1)).to(device)
    rows = []
    for scheme in args.schemes.split(","):
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            rows.append(row(model, scheme, ids, Path(folder)))
        print(json.dumps(rows[-1]), flush=True)
    if args.json:
        found = {
            "kind": "evals/saved_prompts",
            "date": now(),
            "device": device_name(device),
            "versions": versions("torch", "transformers", "triton", "safetensors"),
            "commit": args.commit or commit(),
            "rows": rows,
        }
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
