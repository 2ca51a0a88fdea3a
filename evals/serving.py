"""Many requests at once: Transformers' continuous batching, its own blocks beside compressed ones of as many bytes.

    PYTHONPATH=. python evals/serving.py [--shape qwen3-8b] [--layers N] [--blocks 512] [--requests 200]
        [--loads all,16,1] [--schemes none,saw-int4,kitty-pro] [--slots N] [--prompt 0] [--new 0] [--json FILE]

A model of a real architecture with random weights. Requests have random prompts of mixed lengths (log-normal, median
1,500, at most 8,192 tokens; answers median 150, at most 512), the same for all, or all of --prompt and --new tokens. A
load is how many users there are, each of whom asks again when answered; "all" asks everything at once. Written are, for
every scheme ("none" is the engine as it is) and load: seconds, new tokens a second, the time to a request's first token
(from its arrival), the most requests at a time, the most bits an element that they held, and the attention: the engine
takes FlashAttention where there is one. All of them hold blocks in the same number of bytes. Of schemes that keep
tokens in 16 bits, these include --slots windows, a request each.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import random
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from hfkvq import serving
from hfkvq.measure.bench.generate.models import build, get_config
from hfkvq.measure.records import commit, device_name, now, versions

MOST_PROMPT, MOST_NEW = 8192, 512


def lengths(count: int, prompt: int, new: int, seed: int = 0) -> list[tuple[int, int]]:
    """Tokens of each request's prompt and answer."""
    rng = random.Random(seed)

    def draw(median: int, spread: float, most: int) -> int:
        return min(most, max(16, int(median * rng.lognormvariate(0, spread))))

    return [(prompt or draw(1500, 1.0, MOST_PROMPT), new or draw(150, 0.8, MOST_NEW)) for _ in range(count)]


class Watch:
    """The most requests that an engine works on at a time, and what an element takes then."""

    def __init__(self, manager: Any, handle: serving.Serving | None) -> None:
        self.manager, self.handle, self.most, self.bits = manager, handle, 0, 16.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.wait(0.02):
            processor = self.manager.batch_processor
            if processor is None:
                continue
            now = len(processor.scheduler.active_requests)
            if now > self.most:
                self.most, self.bits = now, self.bits if self.handle is None else self.handle.usage().bits

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def run(
    model: Any,
    config: ContinuousBatchingConfig,
    requests: list[tuple[list[int], int]],
    users: int,
    handle: serving.Serving | None = None,
) -> dict[str, Any]:
    """Answers all requests, so many at a time."""
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=MOST_NEW)
    waiting, asked, done = list(enumerate(requests)), {}, []
    with (
        model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=config
        ) as manager,
        Watch(manager, handle) as watch,
    ):
        attention = model.config._attn_implementation

        def ask() -> None:
            number, (ids, new) = waiting.pop(0)
            asked[str(number)] = time.perf_counter()
            manager.add_request(ids, request_id=str(number), max_new_tokens=new, record_timestamps=True)

        start = time.perf_counter()
        for _ in range(min(users, len(waiting))):
            ask()
        while len(done) < len(requests):
            result = manager.get_result(timeout=1)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError("the engine has stopped")
                continue
            if result.error:
                raise RuntimeError(result.error)
            done.append(result)
            if waiting:
                ask()
        seconds = time.perf_counter() - start
    first = sorted(result.timestamps[0] - asked[result.request_id] for result in done)
    new = sum(len(result.generated_tokens) for result in done)
    return {
        "seconds": seconds,
        "tokens_per_s": new / seconds,
        "new_tokens": new,
        "first_token_s": {"p50": statistics.median(first), "p90": first[int(len(first) * 0.9)]},
        "most_at_a_time": watch.most,
        "attention": attention,
        "bits": watch.bits,
    }


@contextlib.contextmanager
def cache_of(model: Any, scheme: str, slots: int | None) -> Iterator[serving.Serving | None]:
    """The engine's own blocks, or those of a scheme."""
    with contextlib.nullcontext() if scheme == "none" else serving.enable(model, scheme, requests=slots) as handle:
        yield handle


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All schemes under all loads."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = get_config(args.shape, args.layers)
    faulthandler.dump_traceback_later(args.tell, repeat=True)
    model = build(config, device, torch.bfloat16 if device.type == "cuda" else torch.float32, seed=0)
    model.generation_config.eos_token_id = None
    rng = random.Random(1)
    asked = [
        ([rng.randrange(10, config.vocab_size) for _ in range(prompt)], new)
        for prompt, new in lengths(args.requests, args.prompt, args.new)
    ]
    rows, warm = [], set[str]()
    for load in args.loads.split(","):
        for scheme in args.schemes.split(","):
            settings = ContinuousBatchingConfig(
                num_blocks=args.blocks, max_batch_tokens=args.batch_tokens, allow_block_sharing=False
            )
            if scheme == "none":
                settings.max_blocks_per_request = -(-(MOST_PROMPT + MOST_NEW) // settings.page_size)
            with cache_of(model, scheme, args.slots) as handle:
                if scheme not in warm:
                    # Kernels are compiled or loaded, at sizes of prompts and of steps.
                    run(model, settings, [(ids, 8) for ids, _ in asked[:4]], 4, handle)
                    warm.add(scheme)
                found = run(model, settings, asked, len(asked) if load == "all" else int(load), handle)
            rows.append({"scheme": scheme, "load": load, **found})
            print(json.dumps(rows[-1]), flush=True)
    return {
        "kind": "evals/serving",
        "date": now(),
        "device": device_name(device),
        "versions": versions("torch", "transformers", "triton"),
        "commit": args.commit or commit(),
        "settings": {key: value for key, value in vars(args).items() if key not in ("json", "commit")},
        "rows": rows,
    }


def main() -> None:
    """Runs, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--blocks", type=int, default=512, help="the engine's own blocks of 256 tokens in 16 bits")
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--loads", default="all,16,1")
    parser.add_argument("--schemes", default="none,saw-int4,kitty-pro")
    parser.add_argument("--slots", type=int, help="most requests at a time; as many as there is memory for with 4,096")
    parser.add_argument("--prompt", type=int, default=0)
    parser.add_argument("--new", type=int, default=0)
    parser.add_argument("--tell", type=int, default=600, help="seconds after which all stacks are printed")
    parser.add_argument("--commit")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = measure(args)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
