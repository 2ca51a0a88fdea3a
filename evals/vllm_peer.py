"""Whole calls of vLLM's offline engine, with its own caches or hfkvq's, over random weights: a JSON line for each size.

    PYTHONPATH=. python -m evals.vllm_peer qwen3-8b --cases 1x1k,16x8k,96x8k:128 --scheme best-2.5 --json FILE
    PYTHONPATH=. python -m evals.vllm_peer qwen3-8b --prefixes 64,256 --kv fp8
    PYTHONPATH=. python -m evals.vllm_peer qwen3-8b --users 256x2k:2048 --max-num-seqs 256 --tp 2

One process has one cache: --scheme (of hfkvq's plug-in, docs/vllm.md), or vLLM's own by --kv. The model is one of
`evals.shapes`, or a folder with a config.json; weights are vLLM's dummies. --prefixes times a call of so many requests
that share a prefix of 768 tokens and have 64 of their own, the first of its prefix and the next one. --users times one
call of so many requests, which run --max-num-seqs at a time as far as blocks last. Decode steps run in full CUDA
graphs; with --compiled vLLM's torch.compile is on, too. Nothing else may run on the GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from evals.generate import quantiles, step_of
from evals.shapes import SHAPES, get_config
from hfkvq.measure.records import commit, now, versions
from hfkvq.sizes import parse_count
from hfkvq.vllm import DTYPE

PREFIX, OWN = 768, 64
"""Tokens of a shared prefix, and of each request behind it."""

Row = dict[str, Any]


def parse_sizes(text: str, tokens: int) -> list[tuple[int, int, int]]:
    """Rows, tokens and new tokens: ``16x8k,96x8k:128``; ``tokens`` where a size says nothing. Raises ValueError."""
    found = []
    for part in filter(None, text.split(",")):
        size, _, new = part.strip().partition(":")
        rows, _, context = size.partition("x")
        counts = [parse_count(x, "sizes") for x in (rows, context)]
        found.append((counts[0], counts[1], parse_count(new, "sizes") if new else tokens))
    return found


def cache_of(scheme: str | None, kv: str = "auto") -> Row:
    """Options of vLLM for a cache of hfkvq's or its own; names the scheme for this process and its children."""
    if scheme is None:
        os.environ.pop("HFKVQ_SCHEME", None)
        return {"kv_cache_dtype": kv}
    os.environ["HFKVQ_SCHEME"] = scheme
    return {"attention_backend": "CUSTOM", "kv_cache_dtype": DTYPE}


def engine(model: str, scheme: str | None, sizes: list[int] | None = None, compiled: bool = False, **more: Any) -> Any:
    """VLLM, whose decode steps are captured, for these batch sizes alone if they are given."""
    import vllm

    graphs: Row = {"cudagraph_capture_sizes": sizes} if sizes else {}
    graphs |= {} if compiled else {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    cache = cache_of(scheme, more.pop("kv_cache_dtype", "auto"))
    given: Row = {
        "dtype": "bfloat16", "gpu_memory_utilization": 0.92, "compilation_config": graphs,
        "enable_prefix_caching": False, "disable_log_stats": True, "seed": 0,
    }  # fmt: skip
    return vllm.LLM(model=model, **given | cache | more)


def write_model(model: str, layers: int | None, folder: str) -> None:
    """Writes the config of a model of random weights into a folder."""
    config = get_config(model, layers)
    config.architectures = config.architectures or [type(config).__name__.replace("Config", "ForCausalLM")]
    config.save_pretrained(folder)


def header(kind: str, **more: Any) -> Row:
    """Head of a record: device, versions, commit and date."""
    from vllm.platforms import current_platform

    found = versions("vllm", "torch", "triton", "transformers")
    made = os.environ.get("HFKVQ_COMMIT", commit())
    gpu = current_platform.get_device_name()
    return {"kind": kind, "gpu": gpu, "versions": found, "commit": made, "date": now(), **more, "rows": []}


def keep(record: Row, row: Row, path: Path | None) -> None:
    """Prints a row, and writes the record with it."""
    print(json.dumps(row), flush=True)
    record["rows"].append(row)
    if path:
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def free_blocks(llm: Any) -> tuple[int, int]:
    """Blocks that no request holds, and all; vLLM keeps one for itself."""
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    return pool.get_num_free_blocks(), pool.num_gpu_blocks


def leave(llm: Any, code: int = 0) -> None:
    """Ends the process and those of other ranks; vLLM's threads need not be waited for."""
    llm.llm_engine.engine_core.shutdown()
    os._exit(code)


def call(llm: Any, prompts: Iterable[list[int]], tokens: int) -> tuple[float, int]:
    """Seconds of a call with greedy answers of so many tokens, and tokens of prompts that were cached."""
    from vllm import SamplingParams

    given = SamplingParams(temperature=0.0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": ids} for ids in prompts]
    start = time.perf_counter()
    out = llm.generate(prompts, given, use_tqdm=False)
    seconds = time.perf_counter() - start
    assert all(len(each.outputs[0].token_ids) == tokens for each in out)
    return seconds, sum(each.num_cached_tokens or 0 for each in out)


class Bench:
    """An engine and random prompts for it."""

    def __init__(self, llm: Any, calls: int) -> None:
        self.llm, self.calls, self._draw = llm, max(1, calls - 2), random.Random(0)
        self._vocabulary = llm.llm_engine.model_config.get_vocab_size()

    def ids(self, count: int) -> list[int]:
        """Random tokens; special ones are mostly the first or last."""
        return [self._draw.randrange(self._vocabulary // 100, self._vocabulary // 3) for _ in range(count)]

    def _random(self, rows: int, context: int, tokens: int) -> float:
        return call(self.llm, [self.ids(context) for _ in range(rows)], tokens)[0]

    def whole(self, rows: int, context: int, tokens: int) -> Row:
        """Calls of so many tokens, and of one."""
        self._random(rows, context, min(3, tokens))
        times = [self._random(rows, context, tokens) for _ in range(self.calls)]
        ones = [self._random(rows, context, 1) for _ in times]
        ms = quantiles(times)
        row = {"calls_s": times, "ms": ms, "tokens_per_s": 1e3 * rows * tokens / ms["p50"]}
        return row | step_of(times, ones, tokens)

    def users(self, rows: int, context: int, tokens: int) -> Row:
        """One call."""
        self._random(min(rows, 8), context, 3)
        seconds = self._random(rows, context, tokens)
        return {"calls_s": [seconds], "tokens_per_s": rows * tokens / seconds}

    def prefixes(self, rows: int, tokens: int) -> Row:
        """Pairs of calls whose requests share a prefix, which is new in the first of them."""
        found: Row = {"cold_s": [], "cached_s": [], "cached_tokens": []}
        # The first pair compiles.
        for number in range(1 + self.calls):
            prefix = self.ids(PREFIX)
            for name in ("cold_s", "cached_s"):
                seconds, cached = call(self.llm, [prefix + self.ids(OWN) for _ in range(rows)], tokens)
                if number:
                    found[name].append(seconds)
                    found["cached_tokens"].append(cached)
        return found


def attempt(row: Row, work: Any, *given: int) -> Row:
    """The row with what the work finds, or with its error."""
    try:
        return row | work(*given)
    except Exception as error:
        return row | {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help=f"{', '.join(SHAPES)}, or a folder with a config.json")
    parser.add_argument("--layers", type=int, help="use only this many")
    parser.add_argument("--cases", default="", help="ROWSxTOKENS[:NEW], for example 1x1k,96x8k:128")
    parser.add_argument("--prefixes", default="", help="numbers of requests that share a prefix")
    parser.add_argument("--users", default="", help="as --cases, one call each")
    parser.add_argument("--tokens", type=int, default=256, help="new ones, where a size says nothing")
    parser.add_argument("--calls", type=int, default=5, help="of each size, with the first ones, which are not kept")
    parser.add_argument("--scheme", help="of hfkvq")
    parser.add_argument("--kv", default="auto", help="vLLM's --kv-cache-dtype, without --scheme")
    parser.add_argument("--backend", help="vLLM's --attention-backend, without --scheme")
    parser.add_argument("--tp", type=int, default=1, help="GPUs, by tensor parallelism")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=34000)
    parser.add_argument("--compiled", action="store_true", help="with vLLM's torch.compile")
    parser.add_argument("--json", type=Path, help="written again after each row")
    found = parser.parse_args()
    if found.scheme and (found.kv != "auto" or found.backend):
        parser.error("--scheme: hfkvq brings its own cache and attention; leave --kv and --backend out")
    if not (found.cases or found.prefixes or found.users):
        parser.error("--cases, --prefixes, --users: got none; give at least one")
    return found


def main() -> None:
    asked = arguments()
    cases, users = (parse_sizes(text, asked.tokens) for text in (asked.cases, asked.users))
    prefixes = [parse_count(x, "--prefixes") for x in filter(None, asked.prefixes.split(","))]
    # Batches that change have all of vLLM's sizes.
    sizes = None if users or prefixes else sorted({1, 2, 4, 8, *(rows for rows, _, _ in cases)})
    more: Row = {"attention_backend": asked.backend} if asked.backend else {}
    with tempfile.TemporaryDirectory() as folder:
        write_model(asked.model, asked.layers, folder)
        llm = engine(
            folder, asked.scheme, sizes, asked.compiled, kv_cache_dtype=asked.kv, load_format="dummy",
            skip_tokenizer_init=True, max_model_len=asked.max_model_len, enable_prefix_caching=bool(prefixes),
            max_num_seqs=max(asked.max_num_seqs, *(sizes or [1])), tensor_parallel_size=asked.tp, **more,
        )  # fmt: skip
    cache, bench = llm.llm_engine.vllm_config.cache_config, Bench(llm, asked.calls)
    settings = {**vars(asked), "json": None}
    record = header("vllm", settings=settings, tokens_that_fit=cache.num_gpu_blocks * cache.block_size)
    same = {"version": record["versions"]["vllm"], "tokens_that_fit": record["tokens_that_fit"]}
    same |= {name: getattr(asked, name) for name in ("scheme", "kv", "compiled", "tp", "max_num_seqs")}
    for kind, sizes_of_kind, work in (("whole", cases, bench.whole), ("users", users, bench.users)):
        for rows, context, tokens in sizes_of_kind:
            row = {"kind": kind, **same, "batch": rows, "context": context, "new_tokens": tokens}
            keep(record, attempt(row, work, rows, context, tokens), asked.json)
    for rows in prefixes:
        row = {"kind": "prefixes", **same, "batch": rows, "prefix": PREFIX, "own": OWN, "new_tokens": asked.tokens}
        keep(record, attempt(row, bench.prefixes, rows, asked.tokens), asked.json)
    leave(llm)


if __name__ == "__main__":
    main()
