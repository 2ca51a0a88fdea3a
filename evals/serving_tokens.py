"""Comparison of served tokens with those of plain `generate`: the same prompts all at once, and one by one.

    PYTHONPATH=. python evals/serving_tokens.py [--model reference] [--schemes none,saw-int4,kitty-pro,best-2.5]
        [--requests 32] [--new 64] [--json FILE]

Prompts are lists to recall from, of 20 to 160 entries, and calculations; answers are greedy, and never end early.
"none" is the engine as it is against `DynamicCache`: what rounding in batches of another size does alone. Counted are
answers that are equal to the end, and tokens before the first that differs: one token that rounds to another leads
elsewhere.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from pathlib import Path
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, DynamicCache, GenerationConfig

from hfkvq import MixedKVCache, serving
from hfkvq.measure.models import find_model, load_model, load_tokenizer
from hfkvq.measure.records import commit, device_name, now, versions
from hfkvq.measure.reference.tasks import evaluation_set


def prompts(tokenizer: Any, count: int) -> list[list[int]]:
    """Token ids of prompts of mixed lengths."""
    texts = []
    for i in range(count):
        task = f"recall-{20 + 140 * i // count}" if i % 2 else "arithmetic-12"
        texts.append(evaluation_set(task, i + 1)[i].prompt)
    return [tokenizer(text, add_special_tokens=False).input_ids for text in texts]


def row(model: Any, scheme: str, inputs: list[list[int]], new: int) -> dict[str, Any]:
    """Counts of a scheme."""
    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=new)
    settings = ContinuousBatchingConfig(
        num_blocks=2 * len(inputs) * (-(-(max(map(len, inputs)) + new) // 256) + 1), allow_block_sharing=False
    )
    stock = scheme == "none"
    with contextlib.nullcontext() if stock else serving.enable(model, scheme, requests=len(inputs)):
        answers = model.generate_batch(inputs=inputs, generation_config=config, continuous_batching_config=settings)
    served = [list(answer.generated_tokens) for answer in answers.values()]
    alone = []
    for ids in inputs:
        cache = DynamicCache(config=model.config) if stock else MixedKVCache(model, scheme)
        given = torch.tensor([ids], device=model.device)
        out = model.generate(
            given, attention_mask=torch.ones_like(given), past_key_values=cache, generation_config=config
        )
        alone.append(out[0, len(ids) :].tolist())
        if isinstance(cache, MixedKVCache):
            cache.detach()
    assert [len(x) for x in served] == [len(x) for x in alone] == [new] * len(inputs)
    pairs = [list(zip(*pair, strict=True)) for pair in zip(served, alone, strict=True)]
    same = [next((i for i, (a, b) in enumerate(pair) if a != b), new) for pair in pairs]
    return {
        "scheme": scheme,
        "requests": len(inputs),
        "tokens": new * len(inputs),
        "equal_to_the_end": sum(count == new for count in same),
        "tokens_before_a_difference": sum(same),
        "first_tokens_equal": sum(count > 0 for count in same),
    }


def main() -> None:
    """Runs, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="reference")
    parser.add_argument("--schemes", default="none,saw-int4,kitty-pro,best-2.5")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--commit")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    source = find_model(args.model)
    model, tokenizer = load_model(source, device, getattr(torch, args.dtype)), load_tokenizer(source)
    model.generation_config.eos_token_id = None
    inputs = prompts(tokenizer, args.requests)
    found: dict[str, Any] = {
        "kind": "evals/serving_tokens",
        "date": now(),
        "device": device_name(device),
        "versions": versions("torch", "transformers", "triton"),
        "commit": args.commit or commit(),
        "model": args.model,
        "dtype": args.dtype,
        "prompt_tokens": [len(ids) for ids in inputs],
        "rows": [],
    }
    for scheme in args.schemes.split(","):
        found["rows"].append(row(model, scheme, inputs, args.new))
        print(json.dumps(found["rows"][-1]), flush=True)
        if args.json:
            args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
