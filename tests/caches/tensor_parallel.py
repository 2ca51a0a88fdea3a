"""One rank of `test_parallel`: a model split by ``tp_plan="auto"``, greedy tokens with caches of both kinds.

torchrun --nproc-per-node 2 tests/caches/tensor_parallel.py MODEL OUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, CompileConfig, DynamicCache

from hfkvq import MixedKVCache
from tests.caches.driver import small


def main(folder: str, out: str) -> None:
    """Generates, and writes the first rank's tokens."""
    gpu = torch.cuda.is_available()
    if not gpu:
        torch.distributed.init_process_group("gloo")
    model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", dtype=torch.float32).eval()
    ids = torch.arange(60).view(2, 30).to(model.device)
    compiling = CompileConfig(backend="eager", mode=None)
    compiling._compile_all_devices = True
    found = {}
    for name in ("dynamic", "full", "kitty", "saw-int4", "mixkvq", "arkv"):
        for length in (None, 120):
            if name == "dynamic":
                cache, kwargs = DynamicCache(config=model.config), {}
            else:
                knobs = {"budget_tokens": 40} if name == "arkv" else {}
                cache = MixedKVCache(model, small(name, **knobs), max_cache_len=length)
                kwargs = {"compile_config": compiling} if length else {}
            tokens = model.generate(
                ids, past_key_values=cache, max_new_tokens=40, do_sample=False, pad_token_id=0, **kwargs
            )
            found[f"{name} {length}"] = tokens.tolist()
            if name != "dynamic":
                found[f"{name} {length} heads"] = cache.compressed_layers[0].heads
                home = cache.compressed_layers[0].buffer.sync.buffers
                found[f"{name} {length} captured"] = home is not None and len(home.recordings)
    if torch.distributed.get_rank() == 0:
        Path(out).write_text(json.dumps(found), encoding="utf-8")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
