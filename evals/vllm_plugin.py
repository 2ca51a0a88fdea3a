"""Tests hfkvq's plug-in in vLLM's own engine on a GPU: a real model's answers, and a long run with cancellations.

    PYTHONPATH=. python -m evals.vllm_plugin smol FOLDER --scheme saw-int4 --json FILE
    PYTHONPATH=. python -m evals.vllm_plugin smol FOLDER --scheme kitty-pro:sink_length=128:local_length=0 --tp 2
    PYTHONPATH=. python -m evals.vllm_plugin soak qwen3-8b --layers 2 --scheme best-2.5 --json FILE

smol: a small model from a folder with weights and tokenizer answers 12 prompts of 3 to 1,500 tokens, 64 greedy tokens
each, through `generate` with the same scheme and through vLLM: all at a time, singly, twice with prefix caching, in
chunks, with few blocks, without graphs, and in vLLM's V1 runner; in bf16, too. Each run is a process. It fails where an
answer is not whole, a block is not free at the end, nothing was cached or preempted where that is looked for, or more
than three first tokens differ from those of `generate`. "until" is the mean share of an answer before the first token
that differs; batches of other sizes round otherwise, so it is less than 1 for bf16 as well.

soak: random weights answer 2,000 requests with shared prefixes, 80 at a time in 300 blocks, and a tenth of steps
cancels one. It fails where a request neither ends nor is cancelled, or a block is not free at the end.

The third part, batches over random block tables with vLLM's own classes, is `tests/vllm`:

    PYTHONPATH=. python -m pytest -m gpu tests/vllm
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evals.vllm_peer import Row, engine, free_blocks, header, keep, leave, write_model
from hfkvq.caches import get_scheme
from hfkvq.measure.texts import KINDS, read_text

LENGTHS = (3, 17, 64, 100, 127, 128, 129, 200, 400, 700, 1000, 1500)
TOKENS = 64

RUNS: dict[str, Row] = {
    "bf16": {},
    "main": {},
    "singly": {},
    "prefix": {"enable_prefix_caching": True},
    "chunks": {"max_num_batched_tokens": 256, "max_num_seqs": 16},
    "preempted": {"num_gpu_blocks_override": 30, "max_num_seqs": 16},
    "eager": {"enforce_eager": True},
    "v1 runner": {},
}
"""Options of vLLM, by the run that has them."""

AT_A_TIME, BLOCKS, PREFIXES = 80, 300, (128, 300, 768, 1000)


def agreement(found: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> Row:
    """Answers compared: how many are equal, how many begin alike, and the mean share before the first other token."""
    shares = []
    for own, other in zip(found, expected, strict=True):
        same = [x == y for x, y in zip(own, other, strict=False)]
        shares.append((same.index(False) if False in same else len(same)) / max(len(other), 1))
    first = sum(share > 0 for share in shares)
    return {"equal": shares.count(1.0), "of": len(shares), "until": round(sum(shares) / len(shares), 3), "first": first}


def prompts_of(folder: str) -> list[list[int]]:
    """Prompts of `LENGTHS` tokens from four texts, each from another place."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [tokenizer(read_text(kind)[:40_000])["input_ids"] for kind in KINDS]
    return [texts[i % len(texts)][97 * i : 97 * i + length] for i, length in enumerate(LENGTHS)]


def by_generate(folder: str, scheme: str | None, smoothing: str) -> list[list[int]]:
    """Answers of `generate`, one prompt after another; writes the model's smoothing vectors where a scheme is given."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    from hfkvq import MixedKVCache
    from hfkvq.vllm.smoothing import save

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
    model.generation_config = GenerationConfig(pad_token_id=0)
    found = []
    for prompt in prompts_of(folder):
        cache = {} if scheme is None else {"past_key_values": MixedKVCache(model, scheme)}
        ids = torch.tensor([prompt], device=device)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False, **cache)
        found.append(out[0, len(prompt) :].tolist())
    if scheme is not None and get_scheme(scheme).smooths_keys:
        save(model, smoothing)
    return found


def count_preemptions(llm: Any) -> list[int]:
    """A list that grows with each preemption."""
    scheduler, found = llm.llm_engine.engine_core.engine_core.scheduler, []
    preempt = scheduler._preempt_request

    def counted(*given: Any, **more: Any) -> Any:
        found.append(1)
        return preempt(*given, **more)

    scheduler._preempt_request = counted
    return found


def by_vllm(run: str, asked: argparse.Namespace) -> tuple[Row, Any]:
    """Answers of vLLM's engine, and what it did."""
    from vllm import SamplingParams

    given = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    scheme = None if run == "bf16" else asked.scheme
    more = {"max_model_len": 2048, "tensor_parallel_size": asked.tp, "gpu_memory_utilization": 0.5}
    llm = engine(asked.model, scheme, **more | RUNS[run])
    preempted, prompts = count_preemptions(llm), [{"prompt_token_ids": ids} for ids in prompts_of(asked.model)]
    row: Row = {"answers": [], "cached": [], "seconds": []}
    for _ in range(2 if run == "prefix" else 1):
        start = time.perf_counter()
        parts = [[prompt] for prompt in prompts] if run == "singly" else [prompts]
        out = [each for part in parts for each in llm.generate(part, given, use_tqdm=False)]
        row["seconds"].append(round(time.perf_counter() - start, 2))
        row["answers"].append([list(each.outputs[0].token_ids) for each in out])
        row["cached"].append(sum(each.num_cached_tokens or 0 for each in out))
    free, blocks = free_blocks(llm)
    return row | {"preemptions": len(preempted), "free": free, "blocks": blocks}, llm


def in_a_process(run: str, asked: argparse.Namespace, environment: dict[str, str]) -> Row:
    """A run in a process of its own: its record, or its error."""
    command = [sys.executable, "-m", "evals.vllm_plugin", "smol", asked.model, "--run", run, "--tp", str(asked.tp)]
    command += ["--scheme", asked.scheme]
    # Several ranks write to one standard output, and the first of them ends with the record.
    done = subprocess.run(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, check=False)
    lines = [each for each in done.stdout.splitlines() if each.startswith("{")]
    return json.loads(lines[-1]) if lines else {"error": f"exit {done.returncode}"}


def smol(asked: argparse.Namespace) -> bool:
    """Runs of the small model; true if none fails."""
    record, passed = header("vllm plug-in, smol", settings=settings_of(asked)), True
    with tempfile.TemporaryDirectory() as folder:
        smoothing = {"HFKVQ_SMOOTHING": str(Path(folder) / "smoothing.safetensors")}
        expected = {name: in_a_process(f"generate {name}", asked, smoothing) for name in ("bf16", "scheme")}
        if error := next((each["error"] for each in expected.values() if "error" in each), None):
            raise SystemExit(f"generate: {error}")
        environment = smoothing if Path(smoothing["HFKVQ_SMOOTHING"]).is_file() else {}
        main: list[list[int]] | None = None
        for run in asked.runs.split(","):
            own = {"VLLM_USE_V2_MODEL_RUNNER": "0"} if run == "v1 runner" else {}
            found = in_a_process(run, asked, environment | own)
            answers = found.pop("answers", None)
            row = {"run": run, "scheme": None if run == "bf16" else asked.scheme, **found}
            if answers:
                main = answers[0] if run == "main" else main
                like = expected["bf16" if run == "bf16" else "scheme"]["answers"]
                row |= {"to_generate": agreement(answers[0], like)}
                row |= {"generate_bf16": agreement(answers[0], expected["bf16"]["answers"])}
                row |= {"to_main": agreement(answers[0], main)} if main and run not in ("bf16", "main") else {}
                row |= {"again": agreement(answers[1], answers[0])} if len(answers) > 1 else {}
            row["failed"] = failures(row, answers)
            passed = passed and not row["failed"]
            keep(record, row, asked.json)
    return passed


def failures(row: Row, answers: list[list[list[int]]] | None) -> list[str]:
    """Faults of a run of smol."""
    if answers is None:
        return [row.get("error", "no answers")]
    found = []
    if any(len(answer) != TOKENS for part in answers for answer in part):
        found.append("an answer is not whole")
    if row["free"] != row["blocks"] - 1:
        found.append("blocks are not free")
    if row["run"] == "prefix" and not row["cached"][-1]:
        found.append("nothing was cached")
    if row["run"] == "preempted" and not row["preemptions"]:
        found.append("nothing was preempted")
    if row["to_generate"]["first"] < len(LENGTHS) - 3:
        found.append("first tokens are not those of generate")
    return found


def soak(asked: argparse.Namespace) -> bool:
    """The long run; true if it does not fail."""
    from vllm import SamplingParams

    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        write_model(asked.model, asked.layers, folder)
        llm = engine(
            folder, asked.scheme, load_format="dummy", skip_tokenizer_init=True, max_model_len=4096,
            enable_prefix_caching=True, max_num_seqs=AT_A_TIME, num_gpu_blocks_override=BLOCKS,
            tensor_parallel_size=asked.tp, gpu_memory_utilization=0.5,
        )  # fmt: skip
    record = header("vllm plug-in, soak", settings=settings_of(asked))
    own, vocabulary = llm.llm_engine, llm.llm_engine.model_config.get_vocab_size()

    def ids(count: int) -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(count)]

    prefixes, preempted, before = [ids(count) for count in PREFIXES], count_preemptions(llm), free_blocks(llm)
    begun, live, cut = 0, {}, []
    row: Row = {"scheme": asked.scheme, "requests": asked.requests, "finished": 0, "cancelled": 0, "cached": 0}
    start = time.perf_counter()
    while begun < asked.requests or live or own.has_unfinished_requests():
        while begun < asked.requests and len(live) < AT_A_TIME:
            prompt = rng.choice([[], *prefixes]) + ids(rng.randrange(1, 300))
            live[str(begun)] = tokens = rng.randrange(1, 150)
            given = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
            own.add_request(str(begun), {"prompt_token_ids": prompt}, given)
            begun += 1
        for out in own.step():
            if out.finished and out.request_id in live:
                tokens = live.pop(out.request_id)
                row["finished"] += 1
                row["cached"] += out.num_cached_tokens or 0
                cut += [out.request_id] if len(out.outputs[0].token_ids) != tokens else []
        if live and rng.random() < 0.1:
            name = rng.choice(sorted(live))
            own.abort_request([name])
            live.pop(name)
            row["cancelled"] += 1
    row |= {"preemptions": len(preempted), "before": before, "after": free_blocks(llm), "cut": cut}
    row["seconds"] = round(time.perf_counter() - start, 1)
    ended = row["finished"] + row["cancelled"] == asked.requests and not cut
    passed = ended and row["before"] == row["after"] and row["cached"] > 0
    keep(record, row | {"ok": passed}, asked.json)
    leave(llm, int(not passed))
    return passed


def settings_of(asked: argparse.Namespace) -> Row:
    return {**vars(asked), "json": None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["smol", "soak"])
    parser.add_argument("model", help="smol: a folder; soak: a name of `evals.shapes`, or a folder with a config.json")
    parser.add_argument("--scheme", required=True, help="of hfkvq")
    parser.add_argument("--runs", default=",".join(RUNS), help="of smol")
    parser.add_argument("--requests", type=int, default=2000, help="of soak")
    parser.add_argument("--layers", type=int, help="of soak")
    parser.add_argument("--tp", type=int, default=1, help="GPUs, by tensor parallelism")
    parser.add_argument("--json", type=Path, help="written again after each row")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if unknown := set(asked.runs.split(",")) - set(RUNS):
        parser.error(f"--runs: got {', '.join(sorted(unknown))}, allowed {', '.join(RUNS)}")
    if asked.run and asked.run.startswith("generate "):
        scheme = None if asked.run == "generate bf16" else asked.scheme
        answers = by_generate(asked.model, scheme, os.environ.pop("HFKVQ_SMOOTHING"))
        print(json.dumps({"answers": answers}), flush=True)
    elif asked.run:
        row, llm = by_vllm(asked.run, asked)
        print(json.dumps(row), flush=True)
        leave(llm)
    else:
        raise SystemExit(int(not (smol if asked.part == "smol" else soak)(asked)))


if __name__ == "__main__":
    main()
