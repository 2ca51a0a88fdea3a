"""A long run of one cache: steps with resets, then growth; whether memory and speed stay what they were.

    PYTHONPATH=. python evals/soak.py [--steps 100000] [--tokens 100000] [--scheme kitty-pro] [--json FILE]

On a GPU steps are captured; without one they run eagerly, which takes longer, so that small numbers show only that this
works. The first block of each part is a warm-up. Written are GPU, versions, commit, every block, and a verdict:

- resets: bytes allocated after a reset, and the median time of a step, in the last quarter of blocks against the first;
- growth: bytes allocated beyond what the cache says that it holds, as a share of that, and how far the time of a step
  is from a straight line over the tokens held, in the mean of the last quarter. Attention reads what is held, so this
  time itself must grow.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hfkvq import MixedKVCache
from hfkvq.measure.records import clock, commit, device_name, now, versions

TURN, PROMPT, BLOCKS, FLAT = 1000, 64, 40, 0.01


def tiny_model(device: torch.device) -> LlamaForCausalLM:
    """One layer: what is looked for is in the cache.

    On a GPU it is so wide that the host, whose speed changes, never makes it wait: a step is 1 GB of weights.
    """
    torch.manual_seed(0)
    wide = device.type == "cuda"
    config = LlamaConfig(
        vocab_size=256, hidden_size=8192 if wide else 128, intermediate_size=20480 if wide else 128,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=64,
        max_position_embeddings=1 << 18,
    )  # fmt: skip
    dtype = torch.bfloat16 if wide else torch.float32
    model: Any = LlamaForCausalLM(config).eval()
    return model.to(device, dtype)


class Soak:
    """A model, and what it has taken so far."""

    def __init__(self, scheme: str) -> None:
        self.device, self.scheme = torch.device("cuda" if torch.cuda.is_available() else "cpu"), scheme
        self.model = tiny_model(self.device)
        self.ids = torch.randint(3, 256, (1, PROMPT), device=self.device)

    def allocated(self) -> int:
        """Bytes that PyTorch has given out; of the process where it does not count them."""
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096

    @torch.no_grad()
    def step(self, cache: MixedKVCache, ids: torch.Tensor) -> None:
        self.model(ids, past_key_values=cache)

    def steps(self, cache: MixedKVCache, count: int) -> float:
        """Microseconds of a step."""
        token, start = self.ids[:, :1], clock(self.device)
        for _ in range(count):
            self.step(cache, token)
        return (clock(self.device) - start) / count * 1e6

    def block(self, at: int, us: float, **more: Any) -> dict[str, Any]:
        gc.collect()
        block = {"at": at, "us": us, "allocated": self.allocated(), "objects": len(gc.get_objects()), **more}
        print(" ".join(f"{key} {value:,.1f}" if key == "us" else f"{key} {value:,}" for key, value in block.items()))
        return block

    def resets(self, steps: int) -> list[dict[str, Any]]:
        """A prompt and a turn of steps, then a reset, again and again."""
        turn = min(TURN, max(steps // 4, 1))
        cache = MixedKVCache(self.model, self.scheme, max_cache_len=PROMPT + turn)
        turns, blocks, times = max(steps // turn, 1), [], []
        for i in range(turns):
            self.step(cache, self.ids)
            times.append(self.steps(cache, turn))
            cache.reset()
            if (i + 1) % max(turns // BLOCKS, 1) == 0:
                blocks.append(self.block((i + 1) * turn, statistics.median(times)))
                times.clear()
        return blocks

    def growth(self, tokens: int) -> list[dict[str, Any]]:
        """Steps without an end."""
        before = self.allocated()
        cache, count, blocks = MixedKVCache(self.model, self.scheme), max(tokens // BLOCKS, 1), []
        self.step(cache, self.ids)
        for i in range(0, tokens, count):
            us = self.steps(cache, min(count, tokens - i))
            held = cache.memory().total
            blocks.append(self.block(int(cache.get_seq_length()), us, held=held))
            blocks[-1]["beyond"] = blocks[-1]["allocated"] - before - held
        cache.integrity_check()
        return blocks


def drift(values: list[float]) -> float:
    """The last quarter against the first, of medians, without the warm-up."""
    values = values[1:] or values
    quarter = max(len(values) // 4, 1)
    return statistics.median(values[-quarter:]) / statistics.median(values[:quarter]) - 1


def off_line(blocks: list[dict[str, Any]]) -> float:
    """Distance of the last quarter's times from the line through all others."""
    blocks = blocks[1:]
    quarter = max(len(blocks) // 4, 1)
    if len(blocks) < 4:
        return 0.0
    known, last = blocks[:-quarter], blocks[-quarter:]
    slope, start = statistics.linear_regression([x["at"] for x in known], [x["us"] for x in known])
    return statistics.mean(x["us"] / (start + slope * x["at"]) for x in last) - 1


def soak(steps: int, tokens: int, scheme: str = "kitty-pro") -> dict[str, Any]:
    """Findings of both parts."""
    run = Soak(scheme)
    resets, growth = run.resets(steps), run.growth(tokens)
    verdict = {
        "resets_memory": drift([x["allocated"] for x in resets]),
        "resets_speed": drift([x["us"] for x in resets]),
        "growth_beyond": (growth[-1]["beyond"] - growth[0]["beyond"]) / growth[-1]["held"],
        "growth_off_line": off_line(growth),
    }
    return {
        "date": now(),
        "device": device_name(run.device),
        "versions": versions("torch", "transformers", "triton"),
        "commit": commit(),
        "scheme": scheme,
        "steps": steps,
        "tokens": tokens,
        "verdict": verdict,
        "flat": all(value <= FLAT for value in verdict.values()),
        "resets": resets,
        "growth": growth,
    }


def main() -> None:
    """Runs, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--scheme", default="kitty-pro")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = soak(given.steps, given.tokens, given.scheme)
    print(" ".join(f"{name} {value:+.2%}" for name, value in found["verdict"].items()))
    print("flat within 1 %" if found["flat"] else "not flat")
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
