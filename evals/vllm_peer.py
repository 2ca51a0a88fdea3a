"""Whole calls of vLLM's offline engine over random weights: a JSON line for each size, as `evals/generate.py` has them.

    PYTHONPATH=. python -m evals.vllm_peer FOLDER --cases 1x1k,16x8k --tokens 256 [--kv auto|fp8] [--compiled]

FOLDER holds a model's config.json; weights are vLLM's dummies. Decode steps run in full CUDA graphs of the batch sizes
asked for; with --compiled vLLM's torch.compile is on, too. Nothing else may run on the GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import vllm

from evals.generate import parse_cases, quantiles, step_of


def engine(folder: str, kv: str, sizes: list[int], compiled: bool, **more: Any) -> Any:
    """VLLM with dummy weights, whose decode steps of these batch sizes are captured."""
    graphs: dict[str, Any] = {"cudagraph_capture_sizes": sizes}
    graphs |= {} if compiled else {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    given: dict[str, Any] = {
        "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16", "max_model_len": 34000,
        "gpu_memory_utilization": 0.92, "kv_cache_dtype": kv, "compilation_config": graphs,
        "enable_prefix_caching": False, "disable_log_stats": True, "max_num_seqs": max(256, *sizes), "seed": 0,
    }  # fmt: skip
    return vllm.LLM(model=folder, **given | more)


def call(llm: Any, batch: int, context: int, tokens: int, draw: random.Random) -> float:
    """Seconds of a call: random prompts, greedy answers of so many tokens."""
    prompts = [{"prompt_token_ids": [draw.randrange(1000, 50000) for _ in range(context)]} for _ in range(batch)]
    given = vllm.SamplingParams(
        temperature=0.0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, detokenize=False
    )
    torch.cuda.synchronize()
    start = time.perf_counter()
    out = llm.generate(prompts, given, use_tqdm=False)
    torch.cuda.synchronize()
    assert all(len(each.outputs[0].token_ids) == tokens for each in out)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--cases", default="1x1k", help="ROWSxTOKENS")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--kv", default="auto", help="vLLM's --kv-cache-dtype")
    parser.add_argument("--backend", help="vLLM's --attention-backend")
    parser.add_argument("--compiled", action="store_true", help="with vLLM's torch.compile")
    asked = parser.parse_args()
    cases = parse_cases(asked.cases)
    more = {"attention_backend": asked.backend} if asked.backend else {}
    llm = engine(asked.folder, asked.kv, sorted({1, 2, 4, 8, *(rows for rows, _ in cases)}), asked.compiled, **more)
    cache, draw = llm.llm_engine.vllm_config.cache_config, random.Random(0)
    same = {
        "kind": "whole", "version": vllm.__version__, "kv": asked.kv, "compiled": asked.compiled,
        "tokens_that_fit": cache.num_gpu_blocks * cache.block_size, "new_tokens": asked.tokens,
    }  # fmt: skip
    for batch, context in cases:
        row: dict[str, Any] = same | {"batch": batch, "context": context}
        try:
            call(llm, batch, context, 3, draw)
            times = [call(llm, batch, context, asked.tokens, draw) for _ in range(max(1, asked.calls - 2))]
            ones = [call(llm, batch, context, 1, draw) for _ in times]
            ms = quantiles(times)
            row |= {"calls_s": times, "ms": ms, "tokens_per_s": 1e3 * batch * asked.tokens / ms["p50"]}
            row |= step_of(times, ones, asked.tokens)
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        print(json.dumps(row), flush=True)
    # vLLM's threads need not be waited for.
    os._exit(0)


if __name__ == "__main__":
    main()
